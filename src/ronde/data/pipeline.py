"""An input pipeline: a source and named steps. It is a map-style Dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.utils.data import Dataset, default_collate

from ronde.data import named_stages
from ronde.data.contract import Bad, Source, Step
from ronde.data.named_stages import current_keys, stage
from ronde.data.order import Order
from ronde.world import ArgumentError, SampleError

make_cached: Callable[..., Any] | None = None
"""Carries :meth:`Pipeline.cache` out. ``ronde.cache`` stands above this room and puts it here."""


@dataclass(frozen=True)
class _Then:
    """Function composition that can be sent to another process, unlike a lambda."""

    first: Callable[[Any], Any]
    second: Callable[[Any], Any]

    def __call__(self, batch: Any) -> Any:
        return self.second(self.first(batch))


@dataclass(frozen=True)
class Pipeline(Dataset[Any]):
    """A source and the steps applied to its samples. Immutable: every method returns a new
    pipeline.

    Attributes:
        source: where samples come from.
        steps: done one after the other, each under its stage's name.
        collate: makes a batch of a list of samples.
        finish: done to each batch after it has reached the device, or None.
        on_error: of a sample that cannot be read, decoded or augmented, or has another shape than
            the others: ``"raise"`` ends the training with an error that names it; ``"skip"`` trains
                on another one in its place, counts it, and tells which.
        max_skipped: the largest share of an epoch's samples that may be skipped; more of them are
            an error.

    Raises:
        ArgumentError: ``on_error`` or ``max_skipped`` is not one of these.

    Example:
        >>> from ronde.feed import Pipeline, arrays
        >>> import numpy as np
        >>> pipeline = Pipeline(arrays({"x": np.arange(4.0)})).map(lambda row: row["x"] + 1,
        ...     "augment").skip_bad(0.001)
        >>> float(pipeline[3])
        4.0
    """

    source: Source
    steps: tuple[Step, ...] = ()
    collate: Callable[[list[Any]], Any] = default_collate
    finish: Callable[[Any], Any] | None = None
    on_error: Literal["raise", "skip"] = "raise"
    max_skipped: float = 0.01

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ArgumentError(
                f"on_error={self.on_error!r} is not known: choose 'raise' or 'skip'."
            )
        share = self.max_skipped
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ArgumentError(f"max_skipped={share!r} must be a share of all samples, 0 to 1.")

    def map(self, function: Callable[[Any], Any], name: str | None = None) -> Pipeline:
        """Add a step.

        Args:
            function: of one sample, giving one.
            name: of its stage; its own ``ronde_stage`` or ``augment`` where none is given.
        """
        stage_name = name or str(getattr(function, "ronde_stage", "augment"))
        return replace(self, steps=(*self.steps, Step(stage_name, function)))

    def on_device(self, function: Callable[[Any], Any]) -> Pipeline:
        """Add a function for each batch on the device, after those already there.

        Random functions should use :func:`ronde.feed.rngs`: one generator per sample of the batch.
        """
        return replace(
            self, finish=function if self.finish is None else _Then(self.finish, function)
        )

    def skip_bad(self, max_share: float = 0.01) -> Pipeline:
        """Skip samples that cannot be used, at most ``max_share`` of an epoch; see ``on_error``."""
        return replace(self, on_error="skip", max_skipped=max_share)

    def cache(
        self,
        after: str = "read",
        where: str | os.PathLike[str] = "memory",
        limit: int | float | str | None = None,
        **more: Any,
    ) -> Pipeline:
        """Cache what was read, or a step's result; see :func:`ronde.feed.cached` for the arguments.

        Example:
            >>> pipeline.cache("decode", where="/local/cache", limit="100GiB")  # doctest: +SKIP
        """
        if make_cached is None:
            raise RuntimeError("Pipeline.cache needs ronde.feed to be imported.")
        kept: Pipeline = make_cached(self, after, where, limit, **more)
        return kept

    @property
    def fingerprint(self) -> str:
        """The source's fingerprint."""
        return self.source.fingerprint

    @property
    def blocks(self) -> tuple[int, ...] | None:
        """The source's blocks, if it is best read in runs; see :class:`Order`."""
        sizes = getattr(self.source, "blocks", None)
        return sizes if isinstance(sizes, tuple) else None

    @property
    def window(self) -> int:
        """How many source blocks may be open at once."""
        return int(getattr(self.source, "window", Order.window))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, ids: Sequence[int]) -> Sequence[Any]:
        samples = self.attempt(ids)
        if type(samples) is list:
            for sample in samples:
                if type(sample) is Bad:
                    raise SampleError(sample.text) from sample.cause
        return samples

    def name(self, i: int) -> str | None:
        """A sample's name, such as its file name, or None."""
        try:
            named = getattr(self.source, "name", None)
            text = named(i) if callable(named) else getattr(self.source.read([i])[0], "name", None)
        except Exception:
            return None  # it is for an error's text: another error would hide it
        return text if isinstance(text, str) else None

    def _read(self, ids: Sequence[int]) -> Sequence[Any]:
        read = (
            self.source.read if named_stages.listener is None else stage("read")(self.source.read)
        )
        try:
            return read(ids)
        except ArgumentError:
            raise
        except Exception as error:
            # Which of them it was is found by reading them one by one.
            if len(ids) == 1:
                return [Bad.of(int(ids[0]), None, "read", error)]
            return [one for i in ids for one in self._read([i])]

    def attempt(self, ids: Sequence[int]) -> Sequence[Any]:
        """The samples of these ids, with a :class:`Bad` for each that fails."""
        keys = current_keys()
        # Where the samples are the very ones whose keys are set, each is made under its own.
        mine = keys if keys is not None and keys.at is None and keys.n == len(ids) else None
        samples = given = self._read(ids)
        for step in self.steps:
            call = step.call if named_stages.listener is None else stage(step.name)(step.call)
            made: list[Any] = []
            for j, sample in enumerate(samples):
                if type(sample) is Bad:
                    made.append(sample)
                    continue
                if mine is not None:
                    mine.at = j
                try:
                    made.append(call(sample))
                except ArgumentError:
                    raise
                except Exception as error:
                    made.append(Bad.of(int(ids[j]), _named(given[j]), step.name, error))
            if mine is not None:
                mine.at = None
            samples = made
        return samples


def _named(sample: Any) -> str | None:
    name = getattr(sample, "name", None)
    return name if isinstance(name, str) else None
