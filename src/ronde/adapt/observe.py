"""Make some samples of a dataset, and note the files and images behind them."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ronde.profile import monkeypatch

_READING = frozenset(("r", "rt", "tr", "rb", "br"))


@dataclass
class Observation:
    """The files and images involved in making some samples.

    Attributes:
        files: path and size of each file read, sample by sample.
        images: format, width and height of each image that Pillow opened.
        jpegs: the bytes of the JPEG images that Pillow decoded.
        samples: how many.
    """

    files: list[tuple[str, int]] = field(default_factory=list)
    images: list[tuple[str, int, int]] = field(default_factory=list)
    jpegs: list[bytes] = field(default_factory=list)
    samples: int = 0

    def note_open(self, _: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        """Note a file that ``open`` opened for reading."""
        if mode in _READING and isinstance(file, str | bytes | os.PathLike):
            path = os.path.abspath(os.fsdecode(file))  # noqa: PTH100
            with contextlib.suppress(OSError):
                self.files.append((path, os.stat(path).st_size))  # noqa: PTH116

    def note_image(self, image: Any, *args: Any, **kwargs: Any) -> None:
        """Note an image that Pillow opened."""
        self.images.append((str(image.format), image.width, image.height))
        if image.format == "JPEG" and image.tile:
            at = image.fp.tell()
            image.fp.seek(0)
            self.jpegs.append(bytes(image.fp.read()))
            image.fp.seek(at)


def _noted(note: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A layer for :func:`monkeypatch.put` that notes this thread's calls."""
    thread = threading.get_ident()

    def layer(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if threading.get_ident() == thread:
                note(value, *args, **kwargs)
            return value

        return function

    return layer


@contextlib.contextmanager
def _watching(seen: Observation) -> Iterator[None]:
    """Note what opens files and images."""
    places: list[tuple[Any, str, Callable[..., None]]] = [
        (sys.modules["builtins"], "open", seen.note_open),
        (io, "open", seen.note_open),
    ]
    if "PIL.Image" in sys.modules:
        places.append((sys.modules["PIL.Image"], "open", seen.note_image))
    with contextlib.ExitStack() as undo:
        for owner, name, note in places:
            undo.callback(monkeypatch.put(owner, name, _noted(note), 1))
        yield


def observe(dataset: Any, ids: list[int]) -> tuple[Observation, list[Any]]:
    """Make some samples; return what was observed, and the samples."""
    seen, samples = Observation(), []
    knew_pillow = "PIL.Image" in sys.modules
    many = getattr(dataset, "__getitems__", None)
    with _watching(seen):
        for i in ids:
            samples.append(dataset[i] if many is None else many([i])[0])
            seen.samples += 1
    # Pillow's functions were not there yet to be listened to
    if not knew_pillow and "PIL.Image" in sys.modules:
        return observe(dataset, ids)  # the dataset imported its decoder meanwhile
    return seen, samples
