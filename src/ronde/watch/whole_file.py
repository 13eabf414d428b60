"""Write answers and reports whole, to a file, pipe or device; check the target before measuring."""

from __future__ import annotations

import fcntl
import os
import re
import sys
from pathlib import Path

from ronde.world import ArgumentError, RondeError


def _descriptor(path: Path) -> int | None:
    """The descriptor that a path such as ``/dev/stdout`` or ``/dev/fd/63`` names, or None."""
    text = str(path)
    if text in ("/dev/stdout", "/dev/stderr"):
        return 1 if text == "/dev/stdout" else 2
    found = re.fullmatch(r"/dev/fd/(\d+)|/proc/(?:self|thread-self)/fd/(\d+)", text)
    return int(found[1] or found[2]) if found else None


def _is_taken_directly(path: Path) -> bool:
    """Whether the path is a pipe or a device, which a rename would replace with a file."""
    return path.exists() and not path.is_file()


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.writing")


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
            os.close(os.open(_temporary_name(real), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            _temporary_name(real).unlink()
        except OSError as error:
            raise ArgumentError(
                f"{path}: nothing can be written to {real.parent}: {error.strerror}."
            ) from None
    except OSError as error:
        raise ArgumentError(f"{path}: it cannot be written to: {error.strerror}.") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically; write to a pipe, device or open descriptor directly.

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
            real = path.resolve()  # a symbolic link stays one
            temporary = _temporary_name(real)
            try:
                temporary.write_text(text, encoding="utf-8")
                temporary.rename(real)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise RondeError(f"{path} cannot be written: {error.strerror}.") from None
