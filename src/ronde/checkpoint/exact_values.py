"""Values as JSON without pickle. Floats keep every bit; tuples, counters, and tensors their type.

:func:`encode_exact` is for a script's own values, with a file of tensors beside: every type comes
back as it was, or is refused. :func:`encode` is for the state of torch's own objects, and lets
small changes of type pass (a named tuple becomes a tuple).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from ronde.checkpoint.tensor_file import DTYPES
from ronde.world import CheckpointError

__all__ = ["decode_exact", "encode", "encode_exact"]

_KIND = "__ronde__"
_PAIRS: dict[str, Any] = {"map": dict, "ordered": OrderedDict, "counter": Counter}
_HELD = "numbers, strings, None, lists, tuples, dicts, deques, tensors, and NumPy arrays"


def encode_exact(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Plain JSON values for ``value``; its tensors and arrays are added to ``tensors``, not copied.

    Args:
        where: its name, for errors and as the first part of the tensors' names.
        tensors: name -> tensor, for one safetensors file.

    Raises:
        CheckpointError: something in it would not come back exactly.

    Example:
        >>> tensors = {}
        >>> value = {"seen": (3, np.float32(0.5)), "queue": torch.ones(2)}
        >>> encoded = encode_exact(value, "kept", tensors)
        >>> list(tensors), decode_exact(encoded, tensors)["seen"]
        (['kept/queue'], (3, np.float32(0.5)))
    """
    kind = type(value)
    if value is None or kind in (bool, str, int, float):
        return value
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, where, tensors)
    # a longdouble is no number of Python's that JSON could hold
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        return {_KIND: "scalar", "dtype": value.dtype.str, "value": value.item()}
    if kind is np.ndarray:
        try:
            _add(tensors, where, torch.from_numpy(np.array(value, order="C")))
        except (TypeError, ValueError):
            raise _refuse(where, f"an array of type {value.dtype}") from None
        return {_KIND: "array", "name": where}
    if kind in (list, tuple, deque):
        items = [encode_exact(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]
        if kind is list:
            return items
        more = {"maxlen": value.maxlen} if kind is deque else {}
        return {_KIND: kind.__name__, "items": items, **more}
    if kind is dict and all(type(k) is str and k != _KIND for k in value):
        return {k: encode_exact(v, f"{where}/{k}", tensors) for k, v in value.items()}
    for name, each in _PAIRS.items():
        if kind is each:
            pairs = [
                [
                    encode_exact(k, f"{where}.key{i}", tensors),
                    encode_exact(v, f"{where}/{k}", tensors),
                ]
                for i, (k, v) in enumerate(value.items())
            ]
            return {_KIND: name, "items": pairs}
    raise _refuse(where, f"of type {kind.__name__}")


def encode(value: Any, where: str = "state") -> Any:
    """Plain JSON values for ``value``, its small tensors among them; for :func:`decode_exact`.

    Args:
        where: what it is, for the error.

    Raises:
        CheckpointError: something in it is neither a number, a text, a container of such, nor a
            small tensor.

    Example:
        >>> decode_exact(encode({"betas": (0.9, 0.999), "milestones": Counter([3, 3])}))
        {'betas': (0.9, 0.999), 'milestones': Counter({3: 2})}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, torch.Tensor):
        return _inlined(value, where)
    if isinstance(value, list | tuple | deque):
        items = [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, list):
            return items
        deep = isinstance(value, deque)
        more = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
        return {_KIND: "deque" if deep else "tuple", "items": items, **more}
    if type(value) is dict and all(isinstance(k, str) and k != _KIND for k in value):
        return {k: encode(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, Mapping):
        kinds = (name for name, each in _PAIRS.items() if name != "map" and isinstance(value, each))
        pairs = [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_KIND: next(kinds, "map"), "items": pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which cannot be written to a checkpoint without "
        "pickle. Keep numbers, texts, lists, dictionaries and tensors in state_dict()."
    )


def _inlined(value: torch.Tensor, where: str) -> dict[str, Any]:
    # As text, a number takes 20 bytes: large tensors belong into a file of tensors.
    if value.numel() > 4096:
        raise CheckpointError(
            f"{where} is a tensor of {value.numel()} elements: too large to be written beside the "
            "numbers"
        )
    if value.is_complex() or value.is_sparse or value.is_quantized:
        raise CheckpointError(
            f"{where} is a tensor of type {value.dtype} ({value.layout}), which JSON does not hold"
        )
    return {
        _KIND: "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "values": value.detach().cpu().reshape(-1).tolist(),
    }


def _refuse(where: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{where!r} is {kind}, which a checkpoint cannot hold without pickle. It can hold {_HELD}."
    )


def _add(tensors: dict[str, torch.Tensor], where: str, tensor: torch.Tensor) -> None:
    if where in tensors:
        raise CheckpointError(f"two tensors would have the name {where!r} in the checkpoint.")
    tensors[where] = tensor


def _pack_tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.is_meta:
        raise CheckpointError(
            f"{where!r} is a {type(value).__name__} without all of its values on this worker: the "
            "plan divides it, and only whole tensors can be registered. run.average(decay=…) keeps "
            "an average of the weights under every plan."
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_quantized or dtype not in DTYPES.values():
        raise _refuse(where, f"a tensor of type {value.dtype} ({value.layout})")
    if value.grad_fn is not None:
        raise CheckpointError(
            f"{where!r} is a tensor that remembers how it was computed: register value.detach()."
        )
    _add(tensors, where, value.detach())
    return {
        _KIND: "parameter" if isinstance(value, nn.Parameter) else "tensor",
        "name": where,
        "requires_grad": value.requires_grad,
        "on_cpu": value.device.type == "cpu",
    }


def decode_exact(
    value: Any,
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
    device: torch.device | str = "cpu",
) -> Any:
    """Decode :func:`encode_exact`, or :func:`encode`.

    Args:
        tensors: of the file beside.
        device: where tensors go that were not on the CPU.

    Raises:
        CheckpointError: a tensor is missing, or the values are not of this format.
    """
    if isinstance(value, list):
        return [decode_exact(v, tensors, device) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {k: decode_exact(v, tensors, device) for k, v in value.items()}
    if kind == "tensor" and "values" in value:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"unknown tensor type {value['dtype']!r} in a checkpoint")
        return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
    if kind in ("tensor", "parameter", "array"):
        if (tensor := tensors.get(value["name"])) is None:
            raise CheckpointError(f"the checkpoint lacks the tensor {value['name']!r}.")
        if kind == "array":
            return tensor.numpy()
        tensor = tensor if value["on_cpu"] else tensor.to(device)
        if kind == "parameter":
            return nn.Parameter(tensor, value["requires_grad"])
        return tensor.requires_grad_(value["requires_grad"])
    if kind == "scalar":
        return np.dtype(value["dtype"]).type(value["value"])
    if kind in _PAIRS:
        pairs = (
            (decode_exact(k, tensors, device), decode_exact(v, tensors, device))
            for k, v in value["items"]
        )
        return _PAIRS[kind](dict(pairs))
    items = [decode_exact(v, tensors, device) for v in value.get("items", ())]
    if kind == "tuple":
        return tuple(items)
    if kind == "deque":
        return deque(items, maxlen=value["maxlen"])
    raise CheckpointError(f"unknown kind {kind!r} in a checkpoint")
