"""State as exact JSON without pickle: floats keep every bit; tuples, counters and tensors keep
their type.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ronde.world import CheckpointError

__all__ = ["decode", "encode"]

_KIND = "__ronde__"


def encode(value: Any, where: str = "state") -> Any:
    """Plain JSON values for ``value``.

    Args:
        where: what it is, for the error.

    Raises:
        CheckpointError: something in it is neither a number, a text, a container of such, nor a
            small tensor.

    Example:
        >>> decode(encode({"betas": (0.9, 0.999), "milestones": Counter([3, 3])}))
        {'betas': (0.9, 0.999), 'milestones': Counter({3: 2})}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    if isinstance(value, int | float):
        return value
    if isinstance(value, list):
        return [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, deque):
        return {_KIND: "deque", "items": [encode(v, where) for v in value], "maxlen": value.maxlen}
    if isinstance(value, torch.Tensor):
        if value.numel() > 4096:
            raise CheckpointError(
                f"{where} is a tensor of {value.numel()} elements: too large to be written "
                "beside the numbers"
            )
        if value.is_complex() or value.is_sparse or value.is_quantized:
            raise CheckpointError(
                f"{where} is a tensor of type {value.dtype} ({value.layout}), which JSON "
                "does not hold"
            )
        flat = value.detach().cpu().reshape(-1).tolist()
        return {
            _KIND: "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "values": flat,
        }
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and k != _KIND for k in value) and type(value) is dict:
            return {k: encode(v, f"{where}.{k}") for k, v in value.items()}
        kind = (
            "counter"
            if isinstance(value, Counter)
            else "ordered"
            if isinstance(value, OrderedDict)
            else "map"
        )
        return {
            _KIND: kind,
            "items": [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()],
        }
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which cannot be written to a checkpoint "
        "without pickle. Keep numbers, texts, "
        "lists, dictionaries and tensors in state_dict()."
    )


def decode(value: Any) -> Any:
    """Decode :func:`encode`."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {k: decode(v) for k, v in value.items()}
    if kind == "tensor":
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"unknown tensor type {value['dtype']!r} in a checkpoint")
        return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
    items = value["items"]
    if kind == "tuple":
        return tuple(decode(v) for v in items)
    if kind == "deque":
        return deque((decode(v) for v in items), maxlen=value["maxlen"])
    pairs = [(decode(k), decode(v)) for k, v in items]
    if kind == "counter":
        return Counter(dict(pairs))
    if kind == "ordered":
        return OrderedDict(pairs)
    if kind == "map":
        return dict(pairs)
    raise CheckpointError(f"unknown kind {kind!r} in a checkpoint")
