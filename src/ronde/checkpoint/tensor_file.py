"""Tensors of a checkpoint: their names, and a safetensors file that is written tensor by tensor,
digested on the way, without holding the GIL.

safetensors' own ``save_file`` wants all tensors copied to the host first, holds the GIL while it
writes, and leaves the digest to a second reading of the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.world import CheckpointError

__all__ = [
    "DTYPES",
    "byte_view",
    "group_names",
    "tensor_header",
    "tied_names",
    "write_tensors",
]

_CHUNK_BYTES = 2**23  # hashed and written while it is in the cache; both release the GIL
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Name of a type in safetensors -> torch's."""
_NAMES = {getattr(torch, name): key for key, name in DTYPES.items()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names in the model's state that share a tensor: ``{name: its first name}``; also for models
    on meta.
    """
    tied: dict[str, str] = {}
    by_id: dict[int, str] = {}
    by_place: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue
        origin = by_id.setdefault(id(value), name)
        # State under a model that hooks wrap may be a new object each time: then its memory tells.
        if not value.is_meta and not nn.parameter.is_lazy(value) and value.numel():
            place = (
                value.data_ptr(),
                value.dtype,
                tuple(value.shape),
                value.stride(),
                value.device,
            )
            origin = by_place.setdefault(place, origin)
        if origin != name:
            tied[name] = origin
    return tied


def group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Parameter names of the optimizer's groups, in the script's order."""
    by_id = {id(p): name for name, p in model.named_parameters()}
    for k, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in by_id:
                raise CheckpointError(
                    f"the optimizer's group {k} holds a parameter of shape "
                    f"{tuple(p.shape)} that the model does not have (any more), so its "
                    "state has no "
                    "name in a checkpoint. Where a layer is replaced, take its old "
                    "parameters out of the optimizer's groups as well."
                )
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, 1-d; a copy only if it has strides."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def tensor_header(
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, list[str]]:
    """A safetensors file up to its first tensor, and the order of the tensors after it: the widest
    types first, so that each begins at a multiple of its size.
    """
    order = sorted(kinds, key=lambda n: (-kinds[n][0].itemsize, n))
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    start = 0
    for name in order:
        dtype, shape = kinds[name]
        if dtype not in _NAMES:
            raise CheckpointError(f"{name!r} is of type {dtype}, which safetensors does not hold")
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text, order


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write tensors as one safetensors file, flushed to disk; returns its ``bytes`` and ``sha256``.

    The digest is that of the values in memory, so a disk that changes them is found out.

    Raises:
        OSError: the disk refuses it.
        CheckpointError: safetensors does not hold a tensor's type.
    """
    kinds = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    first, order = tensor_header(kinds, metadata)
    digest, size = hashlib.sha256(first), len(first)
    with path.open("wb") as file:
        file.write(first)
        for name in order:
            if not tensors[name].numel():
                continue
            data = byte_view(tensors[name].detach().to("cpu")).numpy().data
            size += len(data)
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}
