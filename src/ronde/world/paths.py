"""Local files that a user names, and packages that a feature needs."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from ronde.world.errors import ArgumentError

BUILT_LIST = "ronde-built.json"
"""Marks a folder made by ``build_once``."""


def state_folder() -> Path:
    """The folder for what is kept between runs: ``$RONDE_STATE``, ``$XDG_STATE_HOME/ronde``, or
    ``~/.local/state/ronde``.
    """
    if folder := os.environ.get("RONDE_STATE"):
        return Path(folder)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "ronde"


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL such as ``s3://bucket/shards``; ``file://`` is local."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def local_path(path: str | os.PathLike[str]) -> str:
    """A local path as text, without ``file://``."""
    text = os.fspath(path)
    return text.removeprefix("file://")


def _besides_built(files: list[Path]) -> list[Path]:
    made = {folder for folder in {f.parent for f in files} if (folder / BUILT_LIST).is_file()}
    return [f for f in files if f.parent not in made]


def files_of(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    what: str,
    suffixes: tuple[str, ...] = (),
) -> list[Path]:
    """The files of a path, a folder (recursive, not hidden, sorted), a glob, or a list of those.

    Folders made by :func:`build_once` are skipped.

    Args:
        path: as the user gave it.
        what: the function's name, for the error.
        suffixes: endings that are taken of a folder; empty for any.

    Raises:
        ArgumentError: there is none.
    """
    if isinstance(path, list | tuple):
        files = [file for one in path for file in files_of(one, what, suffixes)]
        if not files:
            raise ArgumentError(f"{what} was given an empty list.")
        return files
    given = os.fspath(path)  # type: ignore[arg-type]
    if is_remote(given):
        raise ArgumentError(f"{what} reads local files, not URLs: copy {given} here first.")
    place = Path(local_path(given)).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        files = sorted(
            f
            for f in place.rglob("*")
            if f.is_file()
            and not any(p.startswith(".") for p in f.relative_to(place).parts)
            and (not suffixes or f.suffix.lower() in suffixes)
        )
        files = _besides_built(files)
        if not files:
            raise ArgumentError(
                f"{what}: the folder {place} holds no "
                f"file{f' ending in {chr(44).join(suffixes)}' if suffixes else ''}."
            )
        return files
    text = str(place)
    if set("*?[") & set(text):
        base = Path(place.anchor) if place.is_absolute() else Path()
        files = _besides_built(
            sorted(f for f in base.glob(text[len(place.anchor) :]) if f.is_file())
        )
        if files:
            return files
        raise ArgumentError(f"{what}: no file matches {text}.")
    raise ArgumentError(f"{what}: no such file or folder: {text}.")


def need(package: str, extra: str, what: str) -> None:
    """Raise ArgumentError where an optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ArgumentError(f"{what} needs the package {package}: pip install 'ronde[{extra}]'.")


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for lack of space; numpy only reports how much it wrote."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, OSError) and (
        error.errno in full or (error.errno is None and str(error).endswith(" written"))
    )


def need_java(what: str) -> None:
    """Raise ArgumentError where Spark would find no Java."""
    home = os.environ.get("JAVA_HOME")
    if not (Path(home, "bin", "java").is_file() if home else shutil.which("java")):
        where = f"JAVA_HOME={home} has no bin/java" if home else "java is not on PATH"
        raise ArgumentError(
            f"{what} needs Java on this machine, and {where}. Install it (Debian: apt-get "
            "install default-jre-headless), or set JAVA_HOME."
        )


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_module(name: str) -> ModuleSpec | None:
    """The module that ``python -m NAME`` runs in this folder; None if there is none."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    finally:
        sys.path.pop(0)
