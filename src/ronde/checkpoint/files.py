"""Checkpoints on disk: written whole or not at all, verified before use.

A checkpoint is a folder ``step-000000120`` with safetensors files and ``manifest.json``: for every file its size and
SHA-256, and a digest of the manifest itself. It is written beside the others under another name, flushed to disk, and
renamed: a reader sees all of it or none. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ronde.world import CheckpointError

__all__ = ["Checkpoint", "export", "find_valid", "list_checkpoints", "verify", "write"]

_FORMAT, _VERSION = "ronde.checkpoint", 1
_NAME = re.compile(r"step-(\d{9,})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_TEMPORARY = ".writing-"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps done when it was written.
        state: plain values (see :mod:`ronde.checkpoint.encode`).
        files: names of its safetensors files.
    """

    path: Path
    step: int
    state: dict[str, Any]
    files: tuple[str, ...]

    def load(self, file: str) -> dict[str, torch.Tensor]:
        """Tensors of one file, by name, on the CPU; empty if there is no such file."""
        return load_file(self.path / file) if file in self.files else {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_digest(body: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in body.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest_text(body: Mapping[str, Any]) -> str:
    """The one way in which a manifest is written: another spelling of the same values has been changed."""
    return json.dumps(body, indent=1)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dense(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Contiguous copies on the CPU, none sharing memory with another (safetensors refuses that)."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def write(folder: Path, step: int, files: Mapping[str, Tensors], state: Mapping[str, Any], keep: int | None = None) -> Path:
    """Write a checkpoint of ``step`` into ``folder`` and return its path.

    Args:
        folder: where checkpoints live; made if missing.
        files: file name (``model.safetensors``) -> its tensors.
        state: plain JSON values.
        keep: how many of the newest to keep, None for all. Older ones go only after this one is safe on disk.

    Raises:
        CheckpointError: the disk refuses it; what was there before is untouched.
    """
    target = folder / f"step-{step:09d}"
    temporary = folder / f"{_TEMPORARY}{step:09d}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(stale, ignore_errors=True)
        if target.exists():
            try:
                verify(target)
                return target  # the same step is already there, whole
            except CheckpointError:
                target.rename(folder / f"broken-{target.name}-{time.time_ns()}")
        temporary.mkdir()
        entries: dict[str, Any] = {}
        for name, tensors in files.items():
            if not _FILE.fullmatch(name):
                raise CheckpointError(f"{name!r} is not a name for a file of tensors")
            path = temporary / name
            save_file(_dense(tensors), path, metadata={"format": "pt"})
            _sync(path)
            entries[name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
        body: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "step": step, "written": time.time(), "files": entries}
        body["state"] = dict(state)
        body["digest"] = _manifest_digest(body)
        manifest = temporary / "manifest.json"
        manifest.write_text(_manifest_text(body), encoding="utf-8")
        _sync(manifest)
        _sync(temporary)
        temporary.rename(target)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {error}. Earlier ones are untouched."
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if keep is not None:
        for old in list_checkpoints(folder)[keep:]:
            doomed = folder / f"{_TEMPORARY}old-{old.name}"
            try:
                old.rename(doomed)  # first out of sight, so that a half-deleted one is never found
            except OSError:
                continue
            shutil.rmtree(doomed, ignore_errors=True)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, newest step first, not verified."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def verify(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and compare every file with it, byte for byte by digest.

    Raises:
        CheckpointError: something is missing, has another size or digest, or is not of this format.
    """

    def broken(why: str) -> CheckpointError:
        return CheckpointError(f"{path} is not a whole checkpoint: {why}")

    try:
        text = (path / "manifest.json").read_text(encoding="utf-8")
        body = json.loads(text)
    except FileNotFoundError:
        raise broken("manifest.json is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise broken(f"manifest.json cannot be read ({error})") from None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise broken("manifest.json is not of a Ronde checkpoint")
    if body.get("version") != _VERSION:
        raise broken(f"it has version {body.get('version')} of the format, this Ronde reads {_VERSION}")
    if body.get("digest") != _manifest_digest(body) or text != _manifest_text(body):
        raise broken("manifest.json does not match its own digest")
    for name, entry in body["files"].items():
        if not _FILE.fullmatch(name):
            raise broken(f"its manifest names {name!r}, which is not a file of a checkpoint")
        file = path / name
        if not file.is_file() or file.is_symlink():
            raise broken(f"{name} is missing")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise broken(f"{name} has {size} bytes, expected {entry['bytes']}")
        if _digest(file) != entry["sha256"]:
            raise broken(f"{name} does not match its digest: a bit has changed since it was written")
    return Checkpoint(path, int(body["step"]), body["state"], tuple(body["files"]))


def find_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and why newer ones were passed over."""
    refused: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return verify(path), refused
        except CheckpointError as error:
            refused.append(str(error))
    return None, refused


def export(tensors: Tensors, path: Path) -> None:
    """Write plain safetensors, whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_dense(tensors), temporary, metadata={"format": "pt"})
        _sync(temporary)
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
