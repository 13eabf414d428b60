"""What a run is made of, as tensors by name and plain values: weights, optimizer, scheduler, randomness."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ronde.checkpoint.encode import decode, encode
from ronde.world import CheckpointError

__all__ = [
    "load_model",
    "load_optimizer",
    "model_state",
    "optimizer_state",
    "random_state",
    "restore_random",
]

Tensors = dict[str, torch.Tensor]


def model_state(model: nn.Module) -> tuple[Tensors, dict[str, str]]:
    """A model's tensors, each once, and which further names share them: ``(tensors, {name: same as name})``."""
    tensors: Tensors = {}
    same: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name!r} in model.state_dict() is a {type(value).__name__}, not a tensor: it cannot be written without pickle. "
                "Return a tensor from get_extra_state()."
            )
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
        if value.numel() and place in seen:
            same[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = value.detach()
    return tensors, same


def load_model(model: nn.Module, tensors: Tensors, same: Mapping[str, str]) -> None:
    """Put a model's tensors back.

    Raises:
        CheckpointError: names or shapes are not the model's.
    """
    try:
        model.load_state_dict({**tensors, **{name: tensors[origin] for name, origin in same.items()}})
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(f"the checkpoint is of another model: {error}") from None


def _names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    by_id = {id(p): name for name, p in model.named_parameters()}
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """An optimizer's tensors as ``parameter/field``, and the rest as plain values."""
    names = _names(model, optimizer)
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for p, name in zip(group["params"], group_names, strict=True):
            for field, value in optimizer.state.get(p, {}).items():
                key = f"{name}/{field}"
                if isinstance(value, torch.Tensor):
                    tensors[key] = value
                else:
                    values[key] = encode(value, f"optimizer state {key}")
    groups = [
        {
            "params": group_names,
            "settings": {k: encode(v, f"optimizer group setting {k}") for k, v in group.items() if k != "params"},
        }
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
    ]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "values": values}


def load_optimizer(model: nn.Module, optimizer: Optimizer, tensors: Tensors, saved: Mapping[str, Any]) -> None:
    """Put an optimizer's state back, parameter by parameter, by name.

    Raises:
        CheckpointError: it is another optimizer, or over other parameters.
    """
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(f"the checkpoint is of {saved['kind']}, the script now builds {type(optimizer).__name__}")
    names = _names(model, optimizer)
    saved_names = [list(g["params"]) for g in saved["groups"]]
    if names != saved_names:
        raise CheckpointError(
            f"the optimizer's groups are not those of the checkpoint: {[len(n) for n in saved_names]} parameters then, "
            f"{[len(n) for n in names]} now, or in another order"
        )
    index = {name: i for i, name in enumerate(n for group in names for n in group)}
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *((k, decode(v)) for k, v in saved["values"].items())]:
        name, _, field = key.rpartition("/")
        state.setdefault(index[name], {})[field] = value
    groups = []
    for group_names, group in zip(names, saved["groups"], strict=True):
        groups.append({**{k: decode(v) for k, v in group["settings"].items()}, "params": [index[n] for n in group_names]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_state() -> tuple[Tensors, dict[str, Any]]:
    """The states of torch's, Python's and numpy's generators in this process."""
    tensors: Tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    tensors["numpy"] = torch.from_numpy(np.asarray(words).astype(np.int64))
    version, state, next_gauss = random.getstate()
    tensors["python"] = torch.tensor(state, dtype=torch.int64)
    return tensors, {
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
        "python": [version, next_gauss],
    }


def restore_random(tensors: Tensors, values: Mapping[str, Any]) -> None:
    """Put back what :func:`random_state` gave."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    kind, position, has_gauss, gauss = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, next_gauss = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
