"""Harm done to a checkpoint's files, as a disk or a person would."""

from __future__ import annotations

import json
from pathlib import Path


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def damage_manifest(path: Path, change) -> None:
    """Change the manifest and make its own digest right again, as someone with intent would."""
    from ronde.checkpoint.manifest import manifest_digest

    body = json.loads((path / "manifest.json").read_text())
    change(body)
    body["digest"] = manifest_digest(body)
    (path / "manifest.json").write_text(json.dumps(body, indent=1))
