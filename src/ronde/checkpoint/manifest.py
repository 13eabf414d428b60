"""A checkpoint's manifest, and whether its files are those that it lists; without torch."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ronde.world import CheckpointError
from ronde.world.paths import file_digest

__all__ = [
    "FILE",
    "FORMAT",
    "MANIFEST",
    "NAME",
    "SHARDED",
    "WHOLE",
    "check_files",
    "damaged",
    "folder_name",
    "list_checkpoints",
    "manifest_digest",
    "manifest_text",
    "load_manifest",
    "step_of",
]

FORMAT, WHOLE, SHARDED = "ronde.checkpoint", 1, 2
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{9,})")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


def manifest_digest(body: Mapping[str, Any]) -> str:
    """The digest of all that a manifest says."""
    text = json.dumps(
        {k: v for k, v in body.items() if k != "digest"}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()


def manifest_text(body: Mapping[str, Any]) -> str:
    """The canonical text of a manifest; any other spelling counts as changed."""
    return json.dumps(body, indent=1)


def folder_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:09d}"


def step_of(path: Path | str) -> int:
    """The optimizer steps that a checkpoint's name says."""
    return int(Path(path).name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, newest step first, unverified."""
    if not folder.is_dir():
        return []
    folders = [p for p in folder.iterdir() if NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def load_manifest(path: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest and check its digest."""
    file = path / MANIFEST
    try:
        if not stat.S_ISREG(file.lstat().st_mode):  # a FIFO would wait for its writer for ever
            raise damaged(path, "manifest.json is not a plain file")
        text = file.read_text(encoding="utf-8")
        body = json.loads(text)
    except FileNotFoundError:
        raise damaged(path, "manifest.json is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, f"manifest.json cannot be read ({error})") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise damaged(path, "manifest.json is not of a Ronde checkpoint")
    if body.get("version") not in (WHOLE, SHARDED):
        raise damaged(
            path,
            f"it has version {body.get('version')} of the format, this Ronde reads "
            f"{WHOLE} and {SHARDED}",
        )
    # The text, too: a flipped bit may spell the same value in another way (1e-08, 1E-08).
    if body.get("digest") != manifest_digest(body) or text != manifest_text(body):
        raise damaged(path, "manifest.json does not match its own digest")
    for name, kind in (("step", int), ("files", dict), ("state", dict), ("tensors", dict)):
        value = body.get(name, {} if name == "tensors" else None)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise damaged(path, f"its {name} in manifest.json is {value!r:.60}")
    if NAME.fullmatch(path.name) and body["step"] != step_of(path):
        raise damaged(path, f"manifest.json is of step {body['step']}")
    return body


def damaged(path: Path, why: str) -> CheckpointError:
    """The error of a checkpoint that is not whole."""
    return CheckpointError(f"{path} is not a whole checkpoint: {why}")


def check_files(path: Path, body: Mapping[str, Any], digests: bool = True) -> None:
    """Check that the files are there, with the manifest's sizes and ``digests``.

    Raises:
        CheckpointError: they are not.
    """
    for name, entry in body["files"].items():
        if not FILE.fullmatch(name):
            raise damaged(path, f"its manifest names {name!r}, which is not a file of a checkpoint")
        file = path / name
        if not file.is_file() or file.is_symlink():
            raise damaged(path, f"{name} is missing")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise damaged(path, f"{name} has {size} bytes, expected {entry['bytes']}")
        if digests and file_digest(file) != entry["sha256"]:
            raise damaged(
                path, f"{name} does not match its digest: a bit has changed since it was written"
            )
