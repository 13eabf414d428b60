"""What is made once of data files and then only read: token arrays, matrices of tables. Made whole or not at all, by one process a node."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ronde.world import ArgumentError

__all__ = ["built", "cache_root", "files_of", "identity"]


def cache_root(given: str | os.PathLike[str] | None) -> Path:
    """The folder asked for, or ``$XDG_CACHE_HOME/ronde``, or ``~/.cache/ronde``."""
    if given is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ronde"


def built(root: Path, key: str, make: Callable[[Path], None]) -> Path:
    """The folder ``root/key``, made by ``make(folder)`` where it is not there yet.

    Other processes of this machine that want the same wait for it. If ``make`` fails, nothing is left of it.

    Raises:
        ArgumentError: nothing can be written below ``root``.
    """
    final = root / key
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f".{key}.lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ArgumentError(f"{root} cannot be written to ({error.strerror}): give another folder with cache=.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():  # another process was faster
            return final
        temporary = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".writing", dir=root))
        try:
            make(temporary)
            temporary.chmod(0o755)
            temporary.rename(final)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not (isinstance(error, OSError) and final.is_dir()):
                raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(root / f".{key}.lock")  # noqa: PTH108 - who still waits for it finds the folder, or makes it once more
    return final


def files_of(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], what: str, suffixes: tuple[str, ...] = ()) -> list[Path]:
    """The files that a path means: a file, those below a folder (not hidden, sorted), those of a glob, or of a list of such.

    Args:
        path: as the user gave it.
        what: the function's name, for the error.
        suffixes: endings that are taken of a folder; empty for any.

    Raises:
        ArgumentError: there is none.
    """
    if isinstance(path, list | tuple):
        found = [file for one in path for file in files_of(one, what, suffixes)]
        if not found:
            raise ArgumentError(f"{what} was given an empty list.")
        return found
    place = Path(os.fspath(path)).expanduser()  # type: ignore[arg-type]
    if place.is_file():
        return [place]
    if place.is_dir():
        found = sorted(
            f
            for f in place.rglob("*")
            if f.is_file()
            and not any(p.startswith(".") for p in f.relative_to(place).parts)
            and (not suffixes or f.suffix.lower() in suffixes)
        )
        if not found:
            raise ArgumentError(f"{what}: the folder {place} holds no file{f' ending in {chr(44).join(suffixes)}' if suffixes else ''}.")
        return found
    text = str(place)
    if set("*?[") & set(text):
        base = Path(place.anchor) if place.is_absolute() else Path()
        found = sorted(f for f in base.glob(text[len(place.anchor) :]) if f.is_file())
        if found:
            return found
        raise ArgumentError(f"{what}: no file matches {text}.")
    raise ArgumentError(f"{what}: there is no file or folder {text}.")


def identity(files: Sequence[Path]) -> str:
    """Letters that change when one of the files does: its path, size or time."""
    found = hashlib.sha256()
    for file in files:
        info = file.stat()
        found.update(f"{file.resolve()}\0{info.st_size}\0{info.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return found.hexdigest()
