"""Make some samples of a dataset, and note the files and images behind them."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ronde.introspect import stored_functions
from ronde.profile import monkeypatch, original_of, swap_attribute

_READING = frozenset(("r", "rt", "tr", "rb", "br"))


@dataclass
class Observation:
    """The files and images involved in making some samples.

    Attributes:
        files: path and size of each file read, sample by sample.
        images: format, width and height of each image decoded by Pillow or read by OpenCV.
        jpegs: the bytes of the JPEG images that Pillow decoded.
        samples: how many.
        imread: OpenCV read files by itself.
    """

    files: list[tuple[str, int]] = field(default_factory=list)
    images: list[tuple[str, int, int]] = field(default_factory=list)
    jpegs: list[bytes] = field(default_factory=list)
    samples: int = 0
    imread: bool = False

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

    def note_imread(self, image: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        """Note a file that OpenCV read."""
        if image is not None:
            self.imread = True
            self.note_open(None, filename)
            self.images.append(("OpenCV", image.shape[1], image.shape[0]))


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
def _watching(dataset: Any, seen: Observation, modules: Sequence[str]) -> Iterator[None]:
    """Note calls of these modules' functions, and of those that the dataset stores itself."""
    places: list[tuple[Any, str, Callable[..., None]]] = [
        (sys.modules["builtins"], "open", seen.note_open),
        (io, "open", seen.note_open),
    ]
    if "PIL.Image" in modules:
        places.append((sys.modules["PIL.Image"], "open", seen.note_image))
    if "cv2" in modules:
        places.append((sys.modules["cv2"], "imread", seen.note_imread))
    with contextlib.ExitStack() as undo:
        for owner, name, note in places:
            undo.callback(monkeypatch.put(owner, name, _noted(note), 1))
        patched = [getattr(owner, name) for owner, name, _ in places]
        for owner, name, value in list(stored_functions(dataset)):
            for function in patched:
                if value is original_of(function):
                    # an object that cannot be changed keeps its function
                    with contextlib.suppress(Exception):
                        undo.callback(swap_attribute(owner, name, function))
        yield


def observe(dataset: Any, ids: list[int]) -> tuple[Observation, list[Any]]:
    """Make some samples; return what was observed, and the samples."""
    seen, samples = Observation(), []
    modules = [name for name in ("PIL.Image", "cv2") if name in sys.modules]
    many = getattr(dataset, "__getitems__", None)
    with _watching(dataset, seen, modules):
        for i in ids:
            samples.append(dataset[i] if many is None else many([i])[0])
            seen.samples += 1
    if modules != [name for name in ("PIL.Image", "cv2") if name in sys.modules]:
        return observe(dataset, ids)  # the dataset imported its decoder meanwhile
    return seen, samples


def folder_of(files: list[str]) -> str:
    """The common folder of these files, or ''."""
    try:
        return os.path.commonpath([str(Path(f).parent) for f in files]) if files else ""
    except ValueError:
        return ""
