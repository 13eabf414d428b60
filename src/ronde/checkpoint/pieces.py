"""Pieces of tensors: which box of a tensor a worker holds, and reading any box from safetensors
files.

torch's ``distributed.checkpoint`` also reshards safetensors, but exchanges its plans as pickles,
and silently keeps old values for what no file holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from ronde.checkpoint.tensor_file import DTYPES, byte_view
from ronde.world import CheckpointError, World
from ronde.world.consensus import broadcast_json
from ronde.world.tensors import is_sharded, local_part

__all__ = [
    "Box",
    "PieceEntry",
    "Piece",
    "PieceSource",
    "Want",
    "box_of",
    "from_main",
    "shard_like",
    "piece_of",
    "pull",
    "replicated",
]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: start and size in each dimension.

    Example:
        >>> Box.parse("2:4,0:3"), str(Box((2, 0), (2, 3)))
        (Box(offset=(2, 0), sizes=(2, 3)), '2:4,0:3')
    """

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def parse(cls, text: str) -> Box:
        """Parse a box's ``str``."""
        pairs = [part.split(":") for part in text.split(",")] if text else []
        return cls(tuple(int(a) for a, _ in pairs), tuple(int(b) - int(a) for a, b in pairs))

    def __str__(self) -> str:
        return ",".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The intersection, or None."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = [
            (a + n, b + m)
            for a, n, b, m in zip(self.offset, self.sizes, other.offset, other.sizes, strict=True)
        ]
        sizes = tuple(min(pair) - start for start, pair in zip(low, ends, strict=True))
        return Box(low, sizes) if all(n > 0 for n in sizes) else None

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """The slices that cut it out of ``outer``."""
        return tuple(
            slice(a - b, a - b + n)
            for a, b, n in zip(self.offset, outer.offset, self.sizes, strict=True)
        )

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it lies within a tensor of that shape."""
        return len(shape) == len(self.sizes) and all(
            o >= 0 <= n and o + n <= s
            for o, n, s in zip(self.offset, self.sizes, shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """What one worker holds of a tensor.

    Attributes:
        tensor: its values here.
        shape: of the whole tensor.
        box: where in it they belong.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box


def box_of(tensor: torch.Tensor, name: str) -> Box:
    """The box of this worker's part within the whole tensor, also on meta."""
    if not is_sharded(tensor):
        return Box.whole(tensor.shape)
    mine = tuple(tensor.to_local().shape)
    if not math.prod(mine):  # torch lists no chunk for a shard without elements
        return Box((0,) * len(mine), mine)
    chunks: Any = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch's own protocol for checkpoints
    boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in chunks]
    if len(boxes) != 1 or boxes[0].sizes != mine or not boxes[0].fits(tensor.shape):
        raise CheckpointError(
            f"{name!r} is sharded as {tensor.placements}, of which this worker holds no "
            "single box: it cannot be written."
        )
    return boxes[0]


def piece_of(tensor: torch.Tensor, name: str = "tensor") -> Piece:
    """What this worker holds of ``tensor``: its shard of a DTensor, else all of it."""
    mine = local_part(tensor)
    if mine.is_meta:
        raise CheckpointError(f"{name!r} is on the meta device: it has no values to write.")
    return Piece(mine, tuple(tensor.shape), box_of(tensor, name))


def shard_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Wrap a worker's own part as a DTensor, sharded like ``target``, where it is."""
    if not is_sharded(target):
        return tensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # DTensor.from_local would move a part that waits in the host's memory to the mesh's device.
    meta = TensorMeta(target.shape, target.stride(), tensor.dtype)
    spec = DTensorSpec(target.device_mesh, target.placements, tensor_meta=meta)
    return type(target)(tensor.detach(), spec, requires_grad=False)  # type: ignore[call-arg]


def replicated(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``tensor``, held by every worker, as a DTensor on ``target``'s mesh: torch does not mix the
    two.
    """
    if not is_sharded(target):
        return tensor
    from torch.distributed.tensor import Replicate

    mesh = target.device_mesh
    return type(target).from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


# -- reading ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """A tensor in files.

    Attributes:
        dtype: torch's name of its type.
        shape: of the whole.
        pieces: file name -> the box that it holds, under the tensor's own name.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: Mapping[str, Box]

    def to_json(self) -> dict[str, Any]:
        """Its form in a manifest."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "pieces": {f: str(b) for f, b in self.pieces.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PieceEntry:
        """Parse :meth:`to_json`."""
        return cls(
            values["dtype"],
            tuple(values["shape"]),
            {f: Box.parse(b) for f, b in values["pieces"].items()},
        )


class PieceSource:
    """Tensors in safetensors files, read box by box; a context manager that closes the files.

    Args:
        folder: where the files are.
        entries: name -> where its pieces are.
    """

    def __init__(self, folder: Path, entries: Mapping[str, PieceEntry]) -> None:
        self.folder = folder
        self.entries = entries
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()

    @classmethod
    def of_files(cls, folder: Path, files: Iterable[str]) -> PieceSource:
        """Plain safetensors files, with whole tensors."""
        entries: dict[str, PieceEntry] = {}
        source = cls(folder, entries)
        for file in files:
            opened = source._file(file)
            for name in opened.keys():  # noqa: SIM118  (it is no dictionary)
                part = opened.get_slice(name)
                shape = tuple(part.get_shape())
                entries[name] = PieceEntry(
                    DTYPES.get(part.get_dtype(), part.get_dtype()), shape, {file: Box.whole(shape)}
                )
        return source

    def __enter__(self) -> PieceSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def _file(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(
                    safe_open(self.folder / file, framework="pt")
                )  # type: ignore[no-untyped-call]
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from None
        return self._open[file]

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's type."""
        dtype = getattr(torch, self.entries[name].dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"{name!r} in {self.folder} is of type {self.entries[name].dtype!r}, which "
                "this torch does not have"
            )
        return dtype

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A box of a tensor, on the CPU; None reads all of it.

        Raises:
            CheckpointError: it is not in the files, or not all of it.
        """
        entry = self.entries[name]
        box = Box.whole(entry.shape) if box is None else box
        if not box.fits(entry.shape):
            raise CheckpointError(
                f"{name!r} in {self.folder} has shape {list(entry.shape)}: {box} is not within it"
            )
        result, done = torch.empty(box.sizes, dtype=self.dtype(name)), 0
        for file, held in entry.pieces.items():
            common = held.overlap(box)
            if common is None:
                continue
            opened = self._file(file)
            try:
                if tuple(opened.get_slice(name).get_shape()) != held.sizes:
                    raise CheckpointError(
                        f"{self.folder / file} holds {name!r} in another shape than "
                        f"{list(held.sizes)}"
                    )
                read = (
                    opened.get_slice(name)[common.inside(held)]
                    if held.sizes
                    else opened.get_tensor(name)
                )
            except SafetensorError as error:
                raise CheckpointError(
                    f"{self.folder / file} does not hold {name!r}: {error}"
                ) from None
            if common == box:  # one file has all of it, as under the plan that wrote it: no copy
                return read  # type: ignore[no-any-return]
            result[common.inside(box)] = read
            done += common.numel
        # Pieces do not overlap (the writer checked), so counting elements finds a gap.
        if done != box.numel:
            raise CheckpointError(
                f"{name!r} is not whole in {self.folder}: of {box.numel} elements {done} are there"
            )
        return result


@dataclass(frozen=True, slots=True)
class Want:
    """A box that a worker needs, and what to do with it.

    Attributes:
        part: ``"model"`` or ``"optimizer"``.
        name: of the tensor in that part.
        box: what of it.
        give: called with the values, on the CPU.
    """

    part: str
    name: str
    box: Box
    give: Callable[[torch.Tensor], None]


def from_main(
    me: World, tensor: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Rank 0's tensor, which it has on the CPU, on every rank. A collective."""
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype)
    if me.size == 1 or not tensor.numel():
        return tensor
    bits = byte_view(tensor).to(me.device)  # gloo and NCCL do not carry every type
    dist.broadcast(bits, 0)
    return tensor if me.is_main else bits.cpu().view(dtype).view(shape)


def pull(
    me: World, sources: Mapping[str, PieceSource], wants: Iterable[Want], everyone_sees: bool
) -> None:
    """Fetch the boxes this worker wants, from the files or, if not every worker sees them, from
    rank 0.

    A collective if ``everyone_sees`` is false: one tensor at a time, so that no worker ever holds
    all.

    Args:
        sources: what can be read; on a worker that does not see the files, it is not used.
    """
    if everyone_sees or me.size == 1:
        for want in wants:
            want.give(sources[want.part].read(want.name, want.box))
        return
    asked: dict[tuple[str, str], list[Want]] = {}
    for want in wants:
        asked.setdefault((want.part, want.name), []).append(want)
    # All ranks must go through the same tensors: those that rank 0 sees.
    index = (
        [
            [part, name, e.dtype, list(e.shape)]
            for part, s in sources.items()
            for name, e in s.entries.items()
        ]
        if me.is_main
        else None
    )
    for part, name, dtype, shape in broadcast_json(me, index):
        read = sources[part].read(name) if me.is_main else None
        tensor = from_main(me, read, getattr(torch, dtype), shape)
        for want in asked.pop((part, name), ()):
            want.give(tensor[want.box.inside(Box.whole(shape))] if shape else tensor)
    for part, name in asked:
        raise CheckpointError(f"{name!r} is not in the {part} of the checkpoint")
