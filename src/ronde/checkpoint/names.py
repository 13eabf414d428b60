"""Names of what a checkpoint holds: parameters by group, and tensors that share memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.world import CheckpointError

__all__ = ["group_names", "tied_names"]


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
