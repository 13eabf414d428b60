"""Checkpoints that all workers write together: each its own pieces, each piece once."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from ronde.checkpoint import files
from ronde.checkpoint.pieces import Box, Piece, PieceEntry, from_main
from ronde.checkpoint.retention import KeepPolicy
from ronde.checkpoint.tensor_file import byte_view, tensor_header
from ronde.world import CheckpointError, World
from ronde.world.consensus import ask_main, broadcast_json, gather_json
from ronde.world.identity import ranks_text
from ronde.world.rendezvous import store_client
from ronde.world.whole_file import whole_file

__all__ = ["export_pieces", "gather_pieces", "gather_whole", "prepare_pieces"]

Parts = Mapping[str, Mapping[str, Piece]]
Tensors = Mapping[str, torch.Tensor]

_LOOK_SECONDS = 0.02  # between two looks at whether all ranks have written
_begun = 0  # checkpoints that this process has begun


class _Owners:
    """Who writes each piece: the lowest rank that holds it."""

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.boxes: dict[str, dict[Box, int]] = {}

    def take(self, rank: int, held: Mapping[str, Any]) -> None:
        """Record what a rank holds."""
        for name, (dtype, shape, text) in held.items():
            kind = (dtype, tuple(shape))
            if self.kinds.setdefault(name, kind) != kind:
                was = self.kinds[name]
                raise CheckpointError(
                    f"rank {rank} holds {name!r} as {dtype} {shape}, an earlier rank as "
                    f"{was[0]} {list(was[1])}: it cannot be written"
                )
            boxes = self.boxes.setdefault(name, {})
            box = Box.parse(text)
            # An empty shard is no piece, but somebody must write a tensor without elements.
            if box.numel or not Box.whole(shape).numel:
                boxes.setdefault(box, rank)

    def check(self) -> None:
        """Refuse pieces that do not make up whole tensors."""
        for name, boxes in self.boxes.items():
            _, shape = self.kinds[name]
            some = list(boxes)[:64]  # pairs grow with the square
            apart = all(a.overlap(b) is None for i, a in enumerate(some) for b in some[:i])
            if not apart or sum(b.numel for b in boxes) != Box.whole(shape).numel:
                held = "; ".join(f"rank {rank}: {box}" for box, rank in list(boxes.items())[:8])
                raise CheckpointError(
                    f"{name!r} of shape {list(shape)} is not whole among the workers "
                    f"({held}): it cannot be written"
                )


def gather_pieces(me: World, parts: Parts) -> dict[str, _Owners]:
    """Which rank holds what, part by part, on every rank. A collective."""
    mine = {
        part: {
            n: [str(p.tensor.dtype).removeprefix("torch."), list(p.shape), str(p.box)]
            for n, p in pieces.items()
        }
        for part, pieces in parts.items()
    }
    owners = {part: _Owners() for part in parts}
    for rank, held in enumerate(gather_json(me, mine)):
        for part, pieces in held.items():
            owners[part].take(rank, pieces)
    for each in owners.values():
        each.check()
    return owners


def _file(part: str, rank: int, size: int) -> str:
    return f"{part}-{rank:05d}-of-{size:05d}.safetensors"


class _Post:
    """Collects a JSON value of every rank on rank 0, over the store, so that threads can.

    Args:
        number: of this collection, the same on all ranks.
        stop: once it is set, rank 0 waits no longer for the others.
    """

    def __init__(self, me: World, number: int, stop: threading.Event) -> None:
        self._me, self._number, self._stop = me, number, stop
        if me.size > 1:
            self._store = store_client("ronde/save")

    def collect(self, value: Any) -> list[Any] | None:
        """All values in rank order on rank 0; None elsewhere."""
        if self._me.size == 1:
            return [value]
        keys = [f"{self._number}/{rank}" for rank in range(self._me.size)]
        self._store.set(keys[self._me.rank], json.dumps(value))
        if not self._me.is_main:
            return None
        while not self._store.check(keys):
            if self._stop.wait(_LOOK_SECONDS):
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                raise CheckpointError(f"{ranks_text(missing)} did not finish writing")
        values = [json.loads(text) for text in self._store.multi_get(keys)]
        for key in keys:  # the store lives as long as the run
            self._store.delete_key(key)
        return values


def _wait_for(folder: Path) -> None:
    limit = time.monotonic() + 10.0  # network file systems show a new folder late
    while not folder.is_dir():
        if time.monotonic() > limit:
            raise CheckpointError(
                f"this worker does not see {folder}, which rank 0 has made: the run "
                "directory must be on a file system that all workers share"
            )
        time.sleep(0.1)


def _is_shared() -> bool:
    """Whether all workers see the run directory; the launcher has tried it."""
    return os.environ.get("RONDE_RUN_DIR_SHARED") != "0"


def _to_main(
    me: World, rank: int, mine: torch.Tensor | None, dtype: torch.dtype, box: Box
) -> torch.Tensor | None:
    """A rank's part of a tensor on rank 0; None elsewhere. A collective of these two.

    Args:
        mine: the part, on that rank.
    """
    if rank == me.rank:
        assert mine is not None
        if not me.is_main and box.numel:
            dist.send(byte_view(mine).to(me.device), 0)
        return mine if me.is_main else None
    if not me.is_main:
        return None
    bits = torch.empty(box.numel * dtype.itemsize, dtype=torch.uint8, device=me.device)
    if box.numel:
        dist.recv(bits, rank)
    return bits.cpu().view(dtype).view(box.sizes)


def _write_all(
    me: World, path: Path, parts: Parts, owners: Mapping[str, _Owners]
) -> dict[str, Any]:
    """Rank 0 writes the files of all ranks, one after another, from what they send it."""
    entries: dict[str, Any] = {}
    error: Exception | None = None
    for part, pieces in parts.items():
        for rank in range(me.size):
            owner = owners[part]
            boxes = {n: b for n, by in owner.boxes.items() for b, r in by.items() if r == rank}
            tensors: dict[str, torch.Tensor] = {}
            for name, box in boxes.items():
                mine = pieces[name].tensor if rank == me.rank else None
                got = _to_main(me, rank, mine, getattr(torch, owner.kinds[name][0]), box)
                if got is not None:
                    tensors[name] = got
            if not me.is_main or not boxes or error is not None:
                continue
            file = _file(part, rank, me.size)
            try:
                entries[file] = files.add(path, file, tensors)
            except (OSError, SafetensorError, CheckpointError) as caught:
                error = caught  # the others still send
    if error is not None:
        raise error
    return entries


def prepare_pieces(
    me: World,
    folder: Path,
    step: int,
    parts: Parts,
    whole: Mapping[str, Tensors],
    state: Mapping[str, Any],
    keep: KeepPolicy | int | None = None,
    protected: int | None = None,
    copied: Callable[[Mapping[str, Tensors]], Mapping[str, Tensors]] = dict,
    stop: threading.Event | None = None,
) -> Callable[[], Path | None]:
    """Agree on who writes what of a checkpoint. A collective.

    Args:
        parts: ``"model"``, ``"optimizer"`` -> what this worker holds of it.
        whole: file name -> tensors that rank 0 writes as they are.
        state: plain JSON values; those of rank 0 count.
        keep: how many of the newest to keep, or which; None for all.
        protected: a step whose checkpoint stays besides the newest.
        copied: file name -> tensors that this worker writes, to copies of them, if the training
            goes on meanwhile.
        stop: once it is set, rank 0 waits no longer for the others.

    Returns:
        Callable: writes this worker's part, in any thread. On rank 0 it waits for the others,
        publishes the checkpoint, and returns its path, or raises CheckpointError with the first
        error of any rank.
    """
    global _begun
    owners = gather_pieces(me, parts)
    _begun += 1

    def begin() -> tuple[int, str]:
        try:
            return _begun, str(files.begin(folder, step))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(files.refused(folder, step, error)) from error

    number, place = ask_main(me, begin)
    path = Path(place)
    post = _Post(me, number, stop or threading.Event())
    mine: dict[str, Tensors] = {}
    sent: dict[str, Any] = {}
    failed: str | None = None
    if _is_shared():
        for part, pieces in parts.items():
            boxes = owners[part].boxes
            own = {n: p.tensor for n, p in pieces.items() if boxes[n].get(p.box) == me.rank}
            if own:
                mine[_file(part, me.rank, me.size)] = own
    else:
        try:
            sent = _write_all(me, path, parts, owners)
        except (OSError, SafetensorError, CheckpointError) as caught:
            failed = f"{caught}"
    if me.is_main:
        mine |= whole
    mine = dict(copied(mine))

    def write() -> Path | None:
        error, entries = failed, sent
        try:
            if error is None and mine:
                _wait_for(path)
                entries = sent | {name: files.add(path, name, t) for name, t in mine.items()}
        except Exception as caught:  # memory may be full, too
            error = f"{caught}" if me.is_main else f"rank {me.rank}: {caught}"
        try:  # an error is posted, too: rank 0 waits for every rank
            everyone = post.collect({"entries": entries, "error": error})
            if everyone is None:
                return None
            for each in everyone:
                if each["error"]:  # of the lowest rank that has one
                    shutil.rmtree(path, ignore_errors=True)
                    raise CheckpointError(files.refused(folder, step, each["error"]))
            written = {name: entry for each in everyone for name, entry in each["entries"].items()}
            tensors = {
                part: {
                    name: PieceEntry(
                        *owner.kinds[name],
                        {_file(part, rank, me.size): box for box, rank in boxes.items()},
                    )
                    for name, boxes in owner.boxes.items()
                }
                for part, owner in owners.items()
            }
            return files.finish(path, step, written, tensors, state, keep, protected)
        except OSError as caught:
            raise CheckpointError(files.refused(folder, step, caught)) from caught
        finally:
            if me.is_main and path.exists():  # it has another name once it is published
                shutil.rmtree(path, ignore_errors=True)

    return write


# -- one plain file --------------------------------------------------------------------


def _gather_one(me: World, name: str, owner: _Owners, piece: Piece | None) -> torch.Tensor | None:
    """One whole tensor in rank 0's host memory; None elsewhere. A collective of its holders and
    rank 0.
    """
    dtype, shape = getattr(torch, owner.kinds[name][0]), owner.kinds[name][1]
    whole = torch.empty(shape, dtype=dtype) if me.is_main else None
    for box, rank in owner.boxes[name].items():
        mine = piece.tensor if piece is not None and rank == me.rank else None
        got = _to_main(me, rank, mine, dtype, box) if box.numel else None
        if whole is not None and got is not None:
            whole[box.inside(Box.whole(shape))] = got.to("cpu")
    return whole


def gather_whole(
    me: World, pieces: Mapping[str, Piece], everywhere: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every whole tensor, one at a time, from all workers' pieces, in host memory. A collective.

    Args:
        everywhere: whether all ranks get them; otherwise rank 0 does, and the others get nothing.
    """
    owner = gather_pieces(me, {"model": pieces})["model"]
    for name in owner.boxes:
        tensor = _gather_one(me, name, owner, pieces.get(name))
        dtype, shape = getattr(torch, owner.kinds[name][0]), owner.kinds[name][1]
        if everywhere:
            tensor = from_main(me, tensor, dtype, shape)
        if tensor is not None:
            yield name, tensor


def export_pieces(
    me: World,
    pieces: Mapping[str, Piece],
    same: Mapping[str, str],
    path: Path,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write plain, whole safetensors from all workers' pieces. A collective; rank 0 writes, one
    tensor at a time.

    Args:
        same: further names of tensors: each is written under all of them.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write it.
    """
    owner = gather_pieces(me, {"model": pieces})["model"]
    names = {name: name for name in owner.boxes}
    names |= {name: origin for name, origin in same.items() if origin in owner.boxes}
    kinds = {n: (getattr(torch, owner.kinds[o][0]), owner.kinds[o][1]) for n, o in names.items()}
    try:
        header, order = tensor_header(kinds, metadata)
    except CheckpointError as caught:  # on every rank
        raise CheckpointError(f"{path} could not be written: {caught}") from None
    each = (_gather_one(me, names[n], owner, pieces.get(names[n])) for n in order)
    error: str | None = None
    if me.is_main:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, durable=True) as new, new.open("wb") as file:
                file.write(header)
                for tensor in each:
                    assert tensor is not None
                    file.write(byte_view(tensor).numpy().data)
                    del tensor  # before the next one comes
        except OSError as caught:
            error = f"{path} could not be written: {caught}"
    for _ in each:  # the others send, whatever became of the file
        pass
    error = broadcast_json(me, error)
    if error is not None:
        raise CheckpointError(error)
