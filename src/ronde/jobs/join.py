"""Join what a map's chunks wrote, in the order of the items."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ronde.jobs.items import Items
from ronde.jobs.ledger import JobLedger
from ronde.jobs.map_plan import committed_chunks
from ronde.world import RondeError

__all__ = ["FAILED", "MapResult", "join_outputs", "result_of", "write_failed"]

FAILED = "failed.jsonl"


@dataclass(frozen=True)
class MapResult:
    """What a map has done so far.

    Attributes:
        items: how many there are.
        done: how many are committed.
        failed: how many are set aside.
        chunks: how many are committed.
        bytes: of all items.
        done_bytes: of those that are committed or set aside.
        seconds: of work, over all workers.
        hosts: chunks and seconds of each host.
    """

    items: int
    done: int
    failed: int
    chunks: int
    bytes: int
    done_bytes: int
    seconds: float
    hosts: Sequence[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def result_of(ledger: JobLedger, items: Items) -> MapResult:
    """Count what is committed."""
    done = failed = chunks = done_bytes = 0
    hosts: dict[str, dict[str, Any]] = {}
    for low, high, _, info in committed_chunks(ledger):
        done_bytes += items.bytes_of(low, high)
        if "error" in info:
            failed += 1
            continue
        done, chunks = done + high - low, chunks + 1
        host = hosts.setdefault(info["host"], {"host": info["host"], "chunks": 0, "seconds": 0.0})
        host["chunks"] += 1
        host["seconds"] = round(host["seconds"] + info["seconds"], 3)
    seconds = round(sum(host["seconds"] for host in hosts.values()), 3)
    total = items.bytes_of(0, len(items))
    return MapResult(
        len(items), done, failed, chunks, total, done_bytes, seconds, list(hosts.values())
    )


def write_failed(ledger: JobLedger, items: Items, out: Path) -> None:
    """Write the items that were set aside into ``failed.jsonl``, if there are any."""
    lines = []
    for low, high, _, info in committed_chunks(ledger):
        if "error" in info:
            key = next(iter(items.read(low, high)))[0]
            told = {"item": key, "place": items.first + low, "attempts": info["attempts"]}
            lines.append(json.dumps(told | {"error": info["error"]}) + "\n")
    if lines:
        (out / FAILED).write_text("".join(lines))


def join_outputs(ledger: JobLedger, out: Path) -> None:
    """Write the outputs of all chunks into ``out``, each whole or not at all: those of
    ``chunk.output`` one after the other, other files by their names.

    Raises:
        RondeError: two chunks wrote a file of one name.
    """
    made = ledger.root / f"joined-{ledger.owner}"  # others may join at the same time
    made.mkdir()
    try:
        _join(ledger, made)
        for path in sorted(p for p in made.rglob("*") if p.is_file()):
            target = out / path.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    finally:
        shutil.rmtree(made)


def _join(ledger: JobLedger, made: Path) -> None:
    for _, _, folder, info in committed_chunks(ledger):
        if "error" in info:
            continue
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name[0] != "."):
            name = path.relative_to(folder)
            target = made / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if str(name) in info["outputs"]:
                with open(target, "ab") as joined, open(path, "rb") as part:
                    shutil.copyfileobj(part, joined)
            elif target.exists():
                raise RondeError(
                    f"two chunks wrote {name}: name files by their item, or use chunk.output."
                )
            else:
                _link(path, target)


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without
        shutil.copyfile(path, target)
