"""Settings of how samples are fetched; never which samples, nor their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ronde.world import ArgumentError

Executor = Literal["auto", "none", "threads", "processes"]


@dataclass(frozen=True)
class FeedSettings:
    """Settings that ``ronde doctor --apply`` writes and ``ronde run`` reads. None keeps the
    script's.

    Args:
        executor: ``none`` reads in the training process; ``threads`` where the work lets go of
            Python's lock; ``processes`` where it does not; ``auto`` finds out.
        workers: threads or processes that load, for each worker.
        prefetch: batches that each of them may be ahead.
        threads: compute threads (OpenMP, BLAS, OpenCV) inside each of them.
        pin_memory: page-locked batches, for a GPU.
        decoder: of JPEG images: ``simplejpeg`` or ``pillow``.
        cache: ``read`` keeps files; ``decode`` keeps decoded samples, or finished ones of a plain
            Dataset that draws no random numbers.
            It stands in memory, shared by the workers of a node.
        cache_bytes: the most that it may hold.
    """

    executor: Executor | None = None
    workers: int | None = None
    prefetch: int | None = None
    threads: int | None = None
    pin_memory: bool | None = None
    decoder: str | None = None
    cache: Literal["read", "decode"] | None = None
    cache_bytes: int | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FeedSettings:
        """Build from :meth:`to_dict`.

        Raises:
            ArgumentError: a name or a value that is not known.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ArgumentError(
                    f"feed setting {name!r} is not known: choose among {', '.join(sorted(known))}."
                )
        settings = cls(**values)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ArgumentError for a value that cannot be used."""
        for name, allowed in (
            ("executor", ("auto", "none", "threads", "processes")),
            ("cache", ("read", "decode")),
        ):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ArgumentError(
                    f"feed setting {name}: {value!r} is not known: choose one of "
                    f"{', '.join(allowed)}."
                )
        for name, least in (
            ("workers", 0),
            ("prefetch", 1),
            ("threads", 1),
            ("cache_bytes", 1),
        ):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < least
            ):
                raise ArgumentError(
                    f"feed setting {name}: {value!r} must be a whole number, {least} or more."
                )
        if self.pin_memory is not None and not isinstance(self.pin_memory, bool):
            raise ArgumentError(
                f"feed setting pin_memory: {self.pin_memory!r} must be true or false."
            )

    def to_dict(self) -> dict[str, Any]:
        """The set values."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    def merged(self, other: FeedSettings) -> FeedSettings:
        """These settings, overridden by ``other``."""
        return FeedSettings.from_dict({**self.to_dict(), **other.to_dict()})

    def save(self, path: Path, comment: str = "") -> None:
        """Write them as YAML, atomically."""
        lines = "".join(f"# {line}\n" for line in comment.splitlines())
        import yaml

        from ronde.world.whole_file import write_whole

        write_whole(path, lines + yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def load(cls, path: Path) -> FeedSettings:
        """Read :meth:`save`'s file.

        Raises:
            ArgumentError: no such file, or not a settings file.
        """
        import yaml

        try:
            values = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ArgumentError(
                f"the feed settings {path} cannot be read: {error.strerror}."
            ) from None
        except UnicodeDecodeError:
            raise ArgumentError(f"the feed settings {path} are no text in UTF-8.") from None
        except yaml.YAMLError as error:
            raise ArgumentError(
                f"the feed settings {path} are not YAML: {str(error).splitlines()[0]}."
            ) from None
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise ArgumentError(
                f"the feed settings {path} must be names and values, found {type(values).__name__}."
            )
        try:
            return cls.from_dict(values)
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error}") from None


def settings_file(script: str) -> Path:
    """The settings file of a script: ``train.py`` -> ``train.feed.yaml`` next to it; a module's is
    in the working folder.

    Example:
        >>> settings_file("jobs/train.py").as_posix()
        'jobs/train.feed.yaml'
    """
    path = Path(script)
    return (
        path.with_name(f"{path.stem}.feed.yaml")
        if path.suffix == ".py"
        else Path(f"{script}.feed.yaml")
    )


def _default_collate() -> Callable[[list[Any]], Any]:
    from torch.utils.data import default_collate  # the command line must not wait for torch

    return default_collate


@dataclass(frozen=True)
class LoaderSettings:
    """How samples are fetched, from a user's DataLoader or pipeline and from feed settings.

    Attributes:
        collate: makes a batch of a list of samples.
        num_workers: threads or processes that load.
        options: further options of torch's DataLoader, for processes.
        init: the user's ``worker_init_fn``, for processes.
        executor: ``none``, ``threads``, ``processes`` or ``auto``; None: processes where there are
            workers.
        prefetch: batches that each worker may be ahead; None for 2.
        threads: compute threads inside each; None: 1 in loading threads, as torch has it in
            processes.
        finish: done to each batch after it has reached the device.
        on_error: of a bad sample, ``raise`` or ``skip``.
        max_skipped: largest share of an epoch's samples that may be skipped.
        probe: looks on wherever samples are read: ``attach(dataset, collate)``, ``install()`` and
            ``uninstall()``, and can be pickled.
    """

    collate: Callable[[list[Any]], Any] = field(default_factory=_default_collate)
    num_workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    init: Callable[[int], None] | None = None
    executor: Executor | None = None
    prefetch: int | None = None
    threads: int | None = None
    finish: Callable[[Any], Any] | None = None
    on_error: Literal["raise", "skip"] = "raise"
    max_skipped: float = 0.01
    probe: Any = None

    @property
    def chosen(self) -> Executor:
        """The requested executor."""
        if self.executor is None:
            return "processes" if self.num_workers else "none"
        return self.executor if self.num_workers else "none"
