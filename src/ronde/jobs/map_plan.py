"""A map's plan: its items in chunks, what is done with each, and how outputs are joined. Kept in
``OUT/.map``.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.jobs.items import Items, load_items
from ronde.jobs.ledger import JobLedger
from ronde.world import ArgumentError, RondeError
from ronde.world.whole_file import whole_folder, write_whole

__all__ = [
    "FAILED",
    "MODEL",
    "MapPlan",
    "MapResult",
    "bounds",
    "chunk_cuts",
    "chunk_key",
    "join_outputs",
    "load_map",
    "plan_map",
    "host_parts",
    "result_of",
    "without_output",
    "write_failed",
]

FAILED = "failed.jsonl"

MODEL = "model.safetensors"
"""File of the weights that ``--model`` gives to the workers."""


@dataclass(frozen=True)
class MapPlan:
    """What a map does.

    Attributes:
        command: the script and its arguments, or a command with ``{}`` for the item.
        each: whether the command is started once an item.
        retries: how often an item is tried again.
        limit: seconds that an item may take; None: any.
        tolerate: how many items may be set aside; None: any.
    """

    command: Sequence[str]
    each: bool
    retries: int
    limit: float | None
    tolerate: int | None


def bounds(key: str) -> tuple[int, int]:
    """Which items a chunk holds, by its name."""
    low, high = key.split("-")
    return int(low), int(high)


def chunk_key(low: int, high: int) -> str:
    """The name of the chunk of items ``low`` to ``high``."""
    return f"{low:09d}-{high:09d}"


def chunk_cuts(items: Items, chunk: str, workers: int) -> list[int]:
    """Where chunks begin, and the end: neighbours, of about the same number of bytes.

    Args:
        items: all items.
        chunk: ``auto``, so many items, or so many bytes, as ``64MB``.
        workers: how many there are.

    Raises:
        ArgumentError: ``chunk`` says none of these.
    """
    from ronde.world.units import parse_bytes

    count, total = len(items), items.bytes_of(0, len(items))
    if chunk.isdecimal() and int(chunk) > 0:
        return [*range(0, count, int(chunk)), count]
    if chunk == "auto":
        # few enough to list in a moment, enough for the last ones to end together
        pieces = min(count, 4096, max(16 * workers, 64))
    elif size := parse_bytes(chunk):
        pieces = min(count, math.ceil(total / size))
    else:
        raise ArgumentError(f"--chunk {chunk}: expected auto, a number of items, or bytes as 64MB.")
    # a set: one large item may pass several goals
    cuts = sorted({int(c) for c in _goals(items, pieces)})
    return [0, *(c for c in cuts if 0 < c < count), count]


def host_parts(items: Items, count: int) -> list[tuple[int, int]]:
    """Neighbours for each of so many hosts, of about the same number of bytes."""
    cuts = [0, *(int(c) for c in _goals(items, count).clip(0, len(items))), len(items)]
    return list(itertools.pairwise(cuts))


def _goals(items: Items, pieces: int) -> Any:
    """Where items must be cut into pieces of the same number of bytes."""
    import numpy

    goals = numpy.arange(1, pieces) * (items.bytes_of(0, len(items)) / pieces)
    return numpy.searchsorted(items.starts[1:] - items.starts[0], goals) + 1


def plan_map(
    root: Path,
    items: Items,
    plan: MapPlan,
    cuts: Sequence[int],
    write: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write a new plan, whole or not at all. ``write`` adds files to its folder.

    Raises:
        ArgumentError: there is another one.
    """
    there = ArgumentError(
        f"{root.parent} holds a map already: go on with ronde map --resume {root.parent}, or "
        "give another --out."
    )
    if root.exists():
        raise there
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_folder(root) as made:
            items.save(made)
            (made / "job.json").write_text(json.dumps(dataclasses.asdict(plan), indent=1))
            write(made)
            JobLedger(made).add(chunk_key(low, high) for low, high in itertools.pairwise(cuts))
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise there from None  # another command was faster


def load_map(root: Path) -> tuple[MapPlan, Items]:
    """The plan, and the items.

    Raises:
        ArgumentError: there is none.
    """
    try:
        values = json.loads((root / "job.json").read_text())
        values.pop("digest", None)  # of maps that an older version planned
        plan = MapPlan(**values)
    except FileNotFoundError:
        raise ArgumentError(f"{root.parent} holds no map of this machine's.") from None
    return plan, load_items(root)


def halves(key: str) -> list[str]:
    """A chunk of several items, as two."""
    low, high = bounds(key)
    middle = (low + high) // 2
    return [chunk_key(low, middle), chunk_key(middle, high)]


def is_too_long(ledger: JobLedger, items: Items, key: str) -> bool:
    """Whether a chunk is expected, by what was measured, to take more than a minute."""
    low, high = bounds(key)
    if high - low < 2 or not (seconds := ledger.seconds()):
        return False
    measured = sum(items.bytes_of(*bounds(k)) for k in seconds)
    # longer ones leave other workers without work at the end of a map
    return items.bytes_of(low, high) * sum(seconds.values()) / measured > 60.0


def without_output(ledger: JobLedger, count: int) -> list[str]:
    """Chunks of items that no committed chunk holds."""
    missing, at = [], 0
    ranges = [bounds(key) for key, _ in ledger.committed()]
    for low, high in [*ranges, (count, count)]:
        if low > at:
            missing.append(chunk_key(at, low))
        at = high
    return missing


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
        return dataclasses.asdict(self)


def result_of(ledger: JobLedger, items: Items) -> MapResult:
    """Count what is committed."""
    done = failed = chunks = done_bytes = 0
    hosts: dict[str, dict[str, Any]] = {}
    for key, info in ledger.committed():
        low, high = bounds(key)
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
    """Write the items that were set aside into ``failed.jsonl``; no such file if there are none."""
    lines = []
    for key, info in ledger.committed():
        if "error" in info:
            low, high = bounds(key)
            item = next(iter(items.read(low, high)))[0]
            facts = {"item": item, "place": items.first + low, "attempts": info["attempts"]}
            lines.append(json.dumps(facts | {"error": info["error"]}) + "\n")
    if lines:
        write_whole(out / FAILED, "".join(lines))
    else:  # of items that have been done since
        (out / FAILED).unlink(missing_ok=True)


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
        for path in _files(made):
            target = out / path.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    finally:
        shutil.rmtree(made)


def _join(ledger: JobLedger, made: Path) -> None:
    for key, info in ledger.committed():
        if "error" in info:
            continue
        folder = ledger.output(key)
        for path in (p for p in _files(folder) if p.name[0] != "."):
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
                _link(path, target)  # no second copy of what may be large


def _files(folder: Path) -> list[Path]:
    """All files below, and links, to whatever they lead."""
    return sorted(p for p in folder.rglob("*") if p.is_symlink() or p.is_file())


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:  # a file system without
        shutil.copyfile(path, target, follow_symlinks=False)
