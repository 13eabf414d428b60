"""A run directory that the launcher does not share: the node of rank 0 sends what changes."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from ronde.launch.messages import File, Gone, Message, Settled
from ronde.watch.health_record import RESOURCES
from ronde.world import CheckpointError

__all__ = ["Mirror", "Mirrored", "folder_files", "send_file", "unpack"]

_PART_BYTES = 1 << 22
_EVERY_SECONDS = 1.0
_APART = ("logs", ".lock", RESOURCES)  # the launcher writes these itself


def _inside(folder: Path, name: str) -> Path:
    """A path in a folder, refused if it leads out of it."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{name!r} is not a file of the run directory: nothing was written")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def unpack(folder: Path, name: str, data: bytes, first: bool) -> None:
    """Write data to a file of a folder, over what was there or after the part before."""
    with _inside(folder, name).open("wb" if first else "ab") as file:
        file.write(data)


def forget_others(folder: Path, names: list[str]) -> None:
    """Remove checkpoints that the launcher does not have: no run goes on from them."""
    known = {Path(name).parts[1] for name in names if Path(name).parts[0] == "checkpoints"}
    for path in (folder / "checkpoints").glob("*"):
        if path.name not in known:
            shutil.rmtree(path, ignore_errors=True)


def folder_files(folder: Path) -> list[str]:
    """Names of the files of a run directory that travel with it."""
    names = [
        str(p.relative_to(folder))
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.relative_to(folder).parts[0] not in _APART
    ]
    # what is being written has a dot before its name
    return [n for n in names if not any(part.startswith(".") for part in Path(n).parts)]


def send_file(folder: Path, name: str, send: Callable[[Message], object]) -> None:
    """Send a file of a folder whole, in parts."""
    with (folder / name).open("rb") as file:
        first = True
        while (data := file.read(_PART_BYTES)) or first:
            send(File(name, first, data))
            first = False


class Mirror:
    """Sends what appears in a folder: grown files by what was added, others whole."""

    def __init__(self, folder: Path, send: Callable[[Message], object]) -> None:
        self._folder, self._send = folder, send
        self._known = {name: self._state(name) for name in folder_files(folder)}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _state(self, name: str) -> tuple[int, int]:
        try:
            stat = (self._folder / name).stat()
        except OSError:
            return 0, 0
        return stat.st_size, stat.st_mtime_ns

    def _loop(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self._look()

    def _look(self) -> None:
        # Health is written before the record: its size is read after, and it is sent before.
        now = {name: self._state(name) for name in reversed(folder_files(self._folder))}
        for name, state in sorted(now.items()):
            before = self._known.get(name)
            if state == before:
                continue
            if name.endswith(".jsonl"):
                start = before[0] if before and state[0] >= before[0] else 0
                self._known[name] = self._send_lines(name, start, state[0]), state[1]
            else:
                with contextlib.suppress(OSError):
                    send_file(self._folder, name, self._send)
                self._known[name] = state
        self._send(Settled())  # before older checkpoints go: the link may break in between
        for name in self._known.keys() - now.keys():
            self._send(Gone(name))
            del self._known[name]

    def _send_lines(self, name: str, start: int, end: int) -> int:
        """Send whole lines, between which the launcher may write its own, and return where the rest
        begins.
        """
        with contextlib.suppress(OSError), (self._folder / name).open("rb") as file:
            first = start == 0
            while first or start < end:
                file.seek(start)
                data = file.read(min(_PART_BYTES, end - start))
                if len(data) < _PART_BYTES or b"\n" in data:
                    data = data[: data.rfind(b"\n") + 1]
                if data or first:
                    self._send(File(name, first, data))
                if not data:
                    break
                first, start = False, start + len(data)
        return start

    def close(self) -> None:
        """Send what is left."""
        self._stop.set()
        self._thread.join()
        self._look()


class Mirrored:
    """Writes what a mirror sends. Checkpoints appear, or change, when they are whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: set[Path] = set()
        for left in (folder / "checkpoints").glob(".*.arriving"):  # by a launcher that was killed
            shutil.rmtree(left, ignore_errors=True)

    def _place(self, name: str) -> Path:
        parts = Path(name).parts
        if parts[0] != "checkpoints" or len(parts) < 3 or ".." in parts:
            return _inside(self._folder, name)
        part = self._folder / parts[0] / f".{parts[1]}.arriving"
        self._parts.add(part)
        return _inside(part, str(Path(*parts[2:])))

    def take(self, message: Message) -> None:
        """Take what a mirror has sent; other messages are none of its matter."""
        if isinstance(message, File):
            with self._place(message.name).open("wb" if message.first else "ab") as file:
                file.write(message.data)
        elif isinstance(message, Gone):
            path = _inside(self._folder, message.name)
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        elif isinstance(message, Settled):  # new checkpoints are whole
            for part in self._parts:
                whole = part.with_name(part.name.removeprefix(".").removesuffix(".arriving"))
                if not whole.exists():
                    part.rename(whole)
                    continue
                for piece in part.iterdir():  # it was written again
                    piece.replace(whole / piece.name)
                part.rmdir()
            self._parts.clear()

    def close(self) -> None:
        """Remove what came in part only."""
        for part in self._parts:
            shutil.rmtree(part, ignore_errors=True)
