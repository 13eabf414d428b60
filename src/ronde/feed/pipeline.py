"""An input pipeline: a source, and named steps from what it gives to what the model takes. It is a map-style Dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset, default_collate

from ronde.feed.stages import stage

__all__ = ["Pipeline", "Source", "Step"]


@runtime_checkable
class Source(Protocol):
    """Random access by batch of ids. Any map-style Dataset with ``__getitems__`` is nearly one."""

    def __len__(self) -> int: ...

    def read(self, ids: Sequence[int]) -> list[Any]:
        """The samples of these ids, in this order; ids may repeat.

        Raises:
            SampleError: one of them cannot be read; it names the file.
        """

    @property
    def fingerprint(self) -> str:
        """Changes when the samples, their number or their order does; cheap (names and sizes, not contents)."""


@dataclass(frozen=True)
class Step:
    """One step of a pipeline.

    Attributes:
        name: the stage it belongs to.
        call: of one sample, or of the list of them where ``batched``.
    """

    name: str
    call: Callable[[Any], Any]
    batched: bool = False


@dataclass(frozen=True)
class Pipeline(Dataset[Any]):
    """A source and what is done to its samples, step by step. Immutable: every method gives another pipeline.

    Attributes:
        source: where samples come from.
        steps: done one after the other, each under its stage's name.
        collate: makes a batch of a list of samples.
        finish: done to each batch after it has reached the device, or None.
    """

    source: Source
    steps: tuple[Step, ...] = ()
    collate: Callable[[list[Any]], Any] = default_collate
    finish: Callable[[Any], Any] | None = None

    def map(self, function: Callable[[Any], Any], name: str | None = None, batched: bool = False) -> Pipeline:
        """One more step.

        Args:
            function: of one sample (of the list of them, where ``batched``), giving one (as many).
            name: of its stage; its own ``ronde_stage`` or ``augment`` where none is given.
        """
        stage_name = name or str(getattr(function, "ronde_stage", "augment"))
        return replace(self, steps=(*self.steps, Step(stage_name, function, batched)))

    def on_device(self, function: Callable[[Any], Any]) -> Pipeline:
        """Something to do to each batch after it has reached the device; after what is already done there."""
        before = self.finish
        return replace(self, finish=function if before is None else lambda batch: function(before(batch)))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        samples = stage("read")(self.source.read)(ids)
        for step in self.steps:
            call = stage(step.name)(step.call)
            samples = call(samples) if step.batched else [call(s) for s in samples]
        return samples
