"""Copy the script's optimizer, and count the memory it takes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.measure.stand_in import tensor_maker, untouched
from ronde.measure.storage_ledger import Ledger, storages
from ronde.world import RondeError
from ronde.world.tensors import tensors_in


def copied_optimizer(
    optimizer: Optimizer,
    copies: dict[int, torch.Tensor],
    make: Callable[[torch.Tensor], torch.Tensor],
) -> Optimizer:
    """The script's optimizer, with its settings and its state, over copies of its parameters.

    Args:
        copies: id of a parameter -> its copy; missing parameters are added.
        make: copies a tensor of the state.
    """
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in copies:
                copies[id(p)] = nn.Parameter(make(p), p.requires_grad)
    memo.update(copies)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    for value in tensors_in([list(optimizer.state.values()), settings], attributes=True):
        if id(value) not in memo:
            memo[id(value)] = make(value)
    new: Optimizer
    if (over := getattr(optimizer, "over", None)) is not None:  # Keras's
        new = over(copies)
    else:
        new = object.__new__(type(optimizer))
        for key, value in vars(optimizer).items():
            if key == "step" or "hook" in key or key == "state":
                continue  # a scheduler's wrapper around step() would step the script's own
            vars(new)[key] = copy.deepcopy(value, memo)
    new.__setstate__({"state": defaultdict(dict, copy.deepcopy(dict(optimizer.state), memo))})
    if "defaults" not in vars(new):
        new.defaults = {}
    return new


def optimizer_bytes(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, int], int]:
    """Bytes of optimizer state for each parameter, by name, and the most it needs during a step.

    Takes steps on stand-ins, so it works for any torch optimizer.

    Raises:
        RondeError: the optimizer cannot step on stand-ins, fake or copied.
    """
    errors = []
    for fake in (True, False):
        try:
            return _optimizer_bytes(model, optimizer, fake)
        except Exception as error:
            errors.append(error)
    raise RondeError(
        f"optimizer {type(optimizer).__name__} cannot step on copies of the parameters, so its "
        f"memory is unknown: {type(errors[-1]).__name__}: {errors[-1]}"
    ) from errors[-1]


def _optimizer_bytes(
    model: nn.Module, optimizer: Optimizer, fake: bool
) -> tuple[dict[str, int], int]:
    with untouched(model):
        make = tensor_maker(fake)
        copies: dict[int, torch.Tensor] = {
            id(p): nn.Parameter(make(p), p.requires_grad) for p in model.parameters()
        }
        names = {id(copies[id(p)]): name for name, p in model.named_parameters()}
        stand_in = copied_optimizer(optimizer, copies, make)
        parameters = [p for group in stand_in.param_groups for p in group["params"]]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None

        def step() -> None:
            try:
                stand_in.step()
            except TypeError:  # it needs a closure
                stand_in.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]

        step()
        sizes: dict[str, int] = defaultdict(int)
        seen: set[int] = set()
        for p, state in stand_in.state.items():
            new = {s._cdata: s.nbytes() for s, _ in storages(state) if s._cdata not in seen}
            seen.update(new)
            sizes[names.get(id(p), "")] += sum(new.values())
        known = tensors_in([list(stand_in.state.values())], attributes=True)
        known += [t for p in parameters for t in (p, p.grad) if t is not None]
        ledger = Ledger(iter(known))
        with ledger:
            step()
        return dict(sizes), max(ledger.peaks.values(), default=0)
