"""Checkpoint files: written atomically, verified before use.

A checkpoint is a folder ``step-000000120`` of safetensors files and ``manifest.json``, which lists
each file's size and SHA-256, and a digest of itself. It is written under a temporary name, flushed
to disk, and renamed, so readers see all of it or nothing. Nothing is unpickled.

If one worker holds everything, each file is a part of the state: ``model.safetensors``. If the plan
splits the model (format version 2), each worker writes its own file, and the manifest says which
box of which tensor it holds.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ronde.checkpoint.manifest import (
    FILE,
    FORMAT,
    MANIFEST,
    SHARDED,
    WHOLE,
    check_files,
    damaged,
    folder_name,
    list_checkpoints,
    load_manifest,
    manifest_digest,
    manifest_text,
    step_of,
)
from ronde.checkpoint.pieces import PieceEntry, PieceSource
from ronde.checkpoint.retention import KeepPolicy
from ronde.checkpoint.tensor_file import write_tensors
from ronde.world import CheckpointError
from ronde.world.whole_file import refuse_fenced, sync, whole_file, write_whole

__all__ = ["Checkpoint", "export", "find_valid", "list_checkpoints", "trust", "verify", "write"]

_TEMPORARY = ".writing-"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps done when it was written.
        state: plain values (see :mod:`ronde.checkpoint.exact_values`).
        files: names of its safetensors files.
        digest: of its manifest, which has those of the files.
        tensors: part (``"model"``) -> name -> where its pieces are, where several workers wrote it.
    """

    path: Path
    step: int
    state: dict[str, Any]
    files: tuple[str, ...]
    digest: str = ""
    tensors: Mapping[str, Mapping[str, PieceEntry]] = field(default_factory=dict)

    def load(self, file: str) -> dict[str, torch.Tensor]:
        """One file's tensors by name, on the CPU; empty if the file does not exist."""
        return load_file(self.path / file) if file in self.files else {}

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors, whole, under all names that they have.

        Raises:
            CheckpointError: it holds several models.
        """
        if parts := self.state.get("parts"):
            raise CheckpointError(
                f"{self.path.name} holds several models ({', '.join(map(repr, parts))} besides the "
                "first). In Python, ronde.checkpoint.verify(path).whole('model') and "
                f".whole({next(iter(parts)) + '.model'!r}) are their weights."
            )
        own = self.whole("model")
        return {**own, **{n: own[origin] for n, origin in self.state["same_tensors"].items()}}

    def source(self, part: str) -> PieceSource:
        """A part's tensors (``"model"``), readable box by box, whoever wrote them."""
        if part in self.tensors:
            return PieceSource(self.path, self.tensors[part])
        file = f"{part}.safetensors"
        return PieceSource.of_files(self.path, [file] if file in self.files else [])

    def whole(self, part: str) -> dict[str, torch.Tensor]:
        """All tensors of a part, assembled on the CPU."""
        if part not in self.tensors:
            return self.load(f"{part}.safetensors")
        with self.source(part) as source:
            return {name: source.read(name) for name in source.entries}


def begin(folder: Path, step: int) -> Path:
    """The folder to write the checkpoint of ``step`` to."""
    refuse_fenced()
    target = folder / folder_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    # Of writers that were killed: only one process at a time writes to a run.
    for stale in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)
    if target.exists():
        try:
            verify(target)  # it stays until the new one takes its place
        except CheckpointError:  # put aside, not removed: somebody may want to look at it
            target.rename(folder / f"broken-{target.name}-{time.time_ns()}")
    temporary = folder / f"{_TEMPORARY}{step:09d}-{os.getpid()}"
    temporary.mkdir()
    return temporary


def _exchange(new: Path, old: Path) -> bool:
    """Let two folders change names, at one moment. Only Linux can, and not on every disk."""
    libc, here = ctypes.CDLL(None), -100  # AT_FDCWD
    change = getattr(libc, "renameat2", None)
    return change is not None and not change(here, os.fsencode(new), here, os.fsencode(old), 2)


def add(temporary: Path, name: str, tensors: Tensors) -> dict[str, Any]:
    """Write one file of tensors, flushed to disk; return its manifest entry."""
    if not FILE.fullmatch(name):
        raise CheckpointError(f"{name!r} is not a name for a file of tensors")
    return write_tensors(temporary / name, tensors)


def finish(
    temporary: Path,
    step: int,
    entries: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, PieceEntry]],
    state: Mapping[str, Any],
    keep: KeepPolicy | int | None,
    protected: int | None = None,
) -> Path:
    """Write the manifest, publish the checkpoint, and remove old ones. Returns its path."""
    folder = temporary.parent
    target = folder / folder_name(step)
    version = SHARDED if tensors else WHOLE
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": version,
        "step": step,
        "written": time.time(),
        "files": dict(entries),
    }
    if tensors:
        body["tensors"] = {
            part: {name: e.to_json() for name, e in named.items()}
            for part, named in tensors.items()
        }
    policy = KeepPolicy.parse(keep) if isinstance(keep, int) else keep
    if policy is not None:
        body["keep"] = {**dataclasses.asdict(policy), "protected": protected}
    body["state"] = dict(state)
    body["digest"] = manifest_digest(body)
    write_whole(temporary / MANIFEST, manifest_text(body), durable=True)
    refuse_fenced()  # again: writing takes long, and the run may have gone on meanwhile
    before = folder / f"{_TEMPORARY}old-{target.name}"
    if not target.exists():
        temporary.rename(target)
    elif not _exchange(temporary, target):
        target.rename(before)  # deleted once the new one is in its place
        temporary.rename(target)
    sync(folder)
    for old in (before, temporary):
        shutil.rmtree(old, ignore_errors=True)
    # Last: while an old one goes, the new one is on disk.
    if policy is not None:
        stay = [step] if protected is None else [step, protected]
        steps = [step_of(path) for path in list_checkpoints(folder)]
        for gone in policy.doomed(steps, stay):
            remove(folder / folder_name(gone))
    return target


def remove(path: Path) -> bool:
    """Remove a checkpoint. Returns whether it is gone."""
    doomed = path.with_name(f"{_TEMPORARY}old-{path.name}")
    try:
        path.rename(doomed)  # first out of sight, so that a half-deleted one is never found
    except OSError:
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def refused(folder: Path, step: int, error: object) -> str:
    """The error text for a checkpoint that could not be written."""
    return (
        f"the checkpoint of step {step} could not be written to {folder}: {error}. Earlier "
        "ones are untouched."
    )


def write(
    folder: Path,
    step: int,
    files: Mapping[str, Tensors],
    state: Mapping[str, Any],
    keep: KeepPolicy | int | None = None,
    protected: int | None = None,
) -> Path:
    """Write a checkpoint of ``step`` into ``folder`` and return its path.

    Args:
        folder: where checkpoints live; made if missing.
        files: file name (``model.safetensors``) -> its tensors.
        state: plain JSON values.
        keep: how many of the newest to keep, or which; None for all. Others go only after this one
            is safe on disk.
        protected: a step whose checkpoint stays besides the newest.

    Raises:
        CheckpointError: the disk refuses it; what was there before is untouched.
    """
    temporary = None
    try:
        temporary = begin(folder, step)
        return finish(
            temporary,
            step,
            {name: add(temporary, name, t) for name, t in files.items()},
            {},
            state,
            keep,
            protected,
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(refused(folder, step, error)) from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _checkpoint(path: Path, body: Mapping[str, Any]) -> Checkpoint:
    tensors = {
        part: {n: PieceEntry.from_json(e) for n, e in named.items()}
        for part, named in body.get("tensors", {}).items()
    }
    return Checkpoint(
        path, int(body["step"]), body["state"], tuple(body["files"]), body["digest"], tensors
    )


def verify(path: Path) -> Checkpoint:
    """Check every file of a checkpoint by its digest.

    Raises:
        CheckpointError: something is missing, has another size or digest, or is not of this format.
    """
    try:
        return _verified(path, load_manifest(path))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"manifest.json cannot be understood ({type(error).__name__}: {error})"
    except (OSError, RecursionError, SafetensorError) as error:
        why = f"it cannot be read ({error})"
    raise damaged(path, why)


def _verified(path: Path, body: Mapping[str, Any]) -> Checkpoint:
    check_files(path, body)
    checkpoint = _checkpoint(path, body)
    entries = [entry for named in checkpoint.tensors.values() for entry in named.values()]
    # The digest covers what the manifest says, not whether it makes sense.
    for file in {file for entry in entries for file in entry.pieces} - set(checkpoint.files):
        raise damaged(path, f"its manifest says that {file} holds pieces, and does not list it")
    return checkpoint


def trust(path: Path, digest: str | None = None) -> Checkpoint | None:
    """Use a checkpoint another worker verified (with that digest), if visible here, without reading
    its files again.
    """
    try:
        body = load_manifest(path)
    except CheckpointError:
        return None
    same = digest in (None, body["digest"]) and all(
        (path / name).is_file() for name in body["files"]
    )
    return _checkpoint(path, body) if same else None


def find_valid(
    folder: Path, check: Callable[[Checkpoint], None] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint, and why newer ones were skipped.

    Args:
        check: raises CheckpointError, with a reason, for one that cannot be of this run.
    """
    passed: list[str] = []
    for path in list_checkpoints(folder):
        try:
            checkpoint = verify(path)
        except CheckpointError as error:
            passed.append(str(error))
            continue
        try:
            if check is not None:
                check(checkpoint)
            return checkpoint, passed
        except CheckpointError as error:
            passed.append(str(damaged(path, str(error))))
    return None, passed


def export(tensors: Tensors, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write plain safetensors atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as new:
            write_tensors(new, tensors, metadata)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
