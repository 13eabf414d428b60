"""Refuses ``state_dict()`` where each worker holds a part of the model or of the optimizer's state:
a file of it would lack the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.world import PlanError
from ronde.world.tensors import is_sharded

__all__ = ["refuse_state_dict"]


def refuse_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    owns: Callable[[str], bool],
    plan: str,
) -> None:
    """Let the script's calls of ``state_dict`` and ``load_state_dict`` end with an error.

    Args:
        owns: whether this worker holds a tensor of the model, by its name.
        plan: its name, for the error.
    """
    # Functions and not methods: a deep copy of the model must not copy the run with it.
    part = f"This worker holds a part of it only: plan={plan!r} divides it over the workers."

    def refuse_save(_: Any, prefix: str = "", keep_vars: bool = False) -> None:
        if not prefix and not keep_vars:  # the script's own call, and not Ronde's
            raise PlanError(
                f"state_dict(): {part} run.export(path), called on every worker, writes the whole "
                "model, 'with run.whole_model() as model:' gives it, and run.save() writes a "
                "checkpoint for any plan."
            )

    def refuse_load(_: Any, __: Any, prefix: str, ___: Any, strict: bool, *____: Any) -> None:
        if not prefix and strict:
            raise PlanError(
                f"load_state_dict(): {part} Load the whole state before ronde.distribute, or give "
                "its file as init= for a model on meta. To go back to earlier weights, resume."
            )

    named = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    divided = any(is_sharded(value) or not owns(name) for name, value in tensors.items())
    if divided:
        for path, module in list(model.named_modules()):
            module.register_state_dict_pre_hook(refuse_save)  # type: ignore[no-untyped-call]
            left_out = _other_workers(f"{path}." if path else "", owns)
            module.register_state_dict_post_hook(left_out)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(refuse_load)  # type: ignore[no-untyped-call]
            if "__deepcopy__" in vars(type(module)) and _is_fsdp(module):
                # torch's own refusal, an AssertionError, names no cure
                type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
    optimizer.register_state_dict_pre_hook(refuse_save)


def _other_workers(path: str, owns: Callable[[str], bool]) -> Callable[..., None]:
    """A hook that leaves other workers' parameters out: ``keep_vars=True`` has this worker's."""

    def leave_out(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        if not prefix:  # else a module around this one was asked
            for name in [name for name in state if not owns(path + name)]:
                del state[name]

    return leave_out


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _refuse_copy(module: nn.Module, _: dict[int, Any]) -> nn.Module:
    raise PlanError(
        f"{type(module).__name__.removeprefix('FSDP')} cannot be copied: the plan divides its "
        "weights over the workers. For a moving average (AveragedModel), use "
        "run.average(decay=…), which works under every plan; for a copy of the initial weights, "
        "copy the model before ronde.distribute."
    )
