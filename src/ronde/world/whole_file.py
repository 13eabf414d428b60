"""Write files and folders whole: readers see what was there before, or all that is new.

And keep workers of an old generation from writing to a run that has gone on without them. A run's
workers are started again after a failure. Each such generation has a name, which is in the
workers' environment and in ``.generation`` of the run directory. A worker that finds another name
there, because its host was out of reach for a while, writes nothing any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ronde.world.errors import ArgumentError, RondeError, WorldError

__all__ = [
    "AGAIN",
    "check_target",
    "is_fenced",
    "is_generation",
    "name_generation",
    "refuse_fenced",
    "sync",
    "whole_file",
    "whole_folder",
    "write_answer",
    "write_whole",
]


def _descriptor(path: Path) -> int | None:
    """The descriptor that a path such as ``/dev/stdout`` or ``/dev/fd/63`` names, or None."""
    text = str(path)
    if text in ("/dev/stdout", "/dev/stderr"):
        return 1 if text == "/dev/stdout" else 2
    match = re.fullmatch(r"/dev/fd/(\d+)|/proc/(?:self|thread-self)/fd/(\d+)", text)
    return int(match[1] or match[2]) if match else None


def _is_taken_directly(path: Path) -> bool:
    """Whether the path is a pipe or a device, which a rename would replace with a file."""
    return path.exists() and not path.is_file()


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_file(path: Path, durable: bool = False) -> Iterator[Path]:
    """A new file beside ``path`` that takes its place once the block has ended, and goes if the
    block fails. ``durable``: it is on disk then.

    Example:
        >>> with whole_file(Path("model.safetensors")) as new:
        ...     new.write_bytes(weights)
    """
    # hosts may share the folder, and their processes have the same numbers
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.writing")
    try:
        yield new
        if durable:
            sync(new)
        new.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder beside ``path`` that gets its name once the block has ended, and goes if the
    block fails. There must be no folder of that name.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
    try:
        new.mkdir()
        yield new
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def write_whole(path: Path, data: str | bytes, durable: bool = False) -> None:
    """Write a file whole. ``durable``: it is on disk when this returns.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    with whole_file(path, durable) as new:
        new.write_bytes(data.encode() if isinstance(data, str) else data)


def check_target(path: Path) -> None:
    """Check that a file can be written, without leaving anything behind.

    Raises:
        ArgumentError: it is a folder, there is no such folder, or nothing may be written to it;
            starts with the path.
    """
    descriptor = _descriptor(path)
    try:
        if descriptor is not None:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise ArgumentError(f"{path}: it is open for reading only. Name a writable file.")
            return
        if path.is_dir():
            raise ArgumentError(f"{path}: this is a folder. Name a file.")
        if _is_taken_directly(path):
            if not os.access(path, os.W_OK):
                raise ArgumentError(f"{path}: permission denied. Name a file that you may write.")
            return
        real = path.resolve()
        if not real.parent.is_dir():
            raise ArgumentError(f"{path}: there is no folder {real.parent}.")
        try:
            # os.access is not enough: root may write anywhere, and still cannot in /proc.
            tempfile.TemporaryFile(dir=real.parent).close()
        except OSError as error:
            raise ArgumentError(
                f"{path}: nothing can be written to {real.parent}: {error.strerror}."
            ) from None
    except OSError as error:
        raise ArgumentError(f"{path}: it cannot be written to: {error.strerror}.") from None


def write_answer(path: Path, text: str) -> None:
    """Write a file that the user has named whole, and a pipe, device, or open descriptor directly.

    Raises:
        RondeError: it cannot be written.
    """
    descriptor = _descriptor(path)
    try:
        if descriptor is not None:
            # Not reopened by name: that would overwrite a file that the shell has redirected to.
            sys.stdout.flush()
            with open(os.dup(descriptor), "w", encoding="utf-8") as out:
                out.write(text)
        elif _is_taken_directly(path):
            with open(path, "w", encoding="utf-8") as out:
                out.write(text)
        else:
            write_whole(path.resolve(), text)  # a symbolic link stays one
    except OSError as error:
        raise RondeError(f"{path} cannot be written: {error.strerror}.") from None


# -- generations of a run's workers ----------------------------------------------------

AGAIN = 75
"""Exit status of a training that was asked to leave and can be resumed: ``EX_TEMPFAIL``."""

_GENERATION = ".generation"


def name_generation(directory: Path, name: str) -> None:
    """Write which generation may write to a run directory: all at once, over what was there.

    Raises:
        WorldError: it cannot be written.
    """
    try:
        write_whole(directory / _GENERATION, name)
    except OSError as error:
        raise WorldError(
            f"{directory} cannot be written to: {error.strerror}. Free some space there, or name "
            "another folder with --runs."
        ) from error


def is_fenced() -> bool:
    """Whether the run has gone on without this worker."""
    own, directory = os.environ.get("RONDE_GENERATION"), os.environ.get("RONDE_RUN_DIR")
    if not own or not directory:
        return False
    return not is_generation(Path(directory), own)


def is_generation(directory: Path, name: str) -> bool:
    """Whether it is this one that may write to a run directory, as far as anything says."""
    try:
        return (directory / _GENERATION).read_text() == name
    except OSError:
        return True  # it cannot be read: nothing says that there is another


def refuse_fenced() -> None:
    """Refuse to write for a run that has gone on without this worker.

    Raises:
        WorldError: it has.
    """
    if is_fenced():
        raise WorldError(
            f"this worker is of generation {os.environ['RONDE_GENERATION']}, and the run has been "
            "restarted without it since: it may write nothing. Its host was out of reach."
        )
