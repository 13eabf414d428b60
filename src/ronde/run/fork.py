"""A new run that begins with a checkpoint of another one (``ronde run --from``): what counts of the
checkpoint, and what of the script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ronde import checkpoint
from ronde.world import CheckpointError

__all__ = ["forked", "given_settings"]

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def given_settings(optimizer: Optimizer, lr_factor: float) -> list[dict[str, Any]]:
    """The settings of each group as the script gave them, for a checkpoint.

    Args:
        lr_factor: what ``batch="grow"`` has multiplied the rates by.
    """
    found = []
    for group in optimizer.param_groups:
        own = {k: v for k, v in group.items() if k not in ("params", *_RATES)}
        plain = {k: checkpoint.encode(v) for k, v in own.items() if not isinstance(v, torch.Tensor)}
        # a scheduler may have changed the rate already
        rate = float(group.get("initial_lr", group["lr"]))
        found.append({**plain, "lr": rate / lr_factor})
    return found


def forked(
    saved: Mapping[str, Any], given: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint's plain values for a new run, and what of them the script changes.

    A setting of the optimizer that the script gives otherwise than the script of the checkpoint
    did is the new script's. A learning rate multiplies the whole schedule.

    Args:
        given: the script's :func:`given_settings`.

    Raises:
        CheckpointError: the groups' learning rates change by several factors.
    """
    state = {**saved, "best": None, "ending": {}}
    notes: list[str] = []
    ratios: list[float] = []
    groups = []
    for i, group in enumerate(saved["optimizer"]["groups"]):
        then = saved["given"][i] if i < len(saved.get("given", ())) else {}
        now = given[i] if i < len(given) else {}
        changed = {k: v for k, v in now.items() if k in then and v != then[k]}
        if rate := then.get("lr"):
            ratios.append(now.get("lr", rate) / rate)
        elif "lr" in changed:
            raise CheckpointError(
                f"the learning rate of the optimizer's group {i} was 0 then and is {now['lr']:g} "
                "now, and a fork multiplies the schedule. Leave it at 0."
            )
        notes += [
            f"{name} {_shown(then[name])} → {_shown(value)}"
            + (f" (group {i})" if len(given) > 1 else "")
            for name, value in changed.items()
        ]
        changed.pop("lr", None)
        groups.append({**group, "settings": {**group["settings"], **changed}})
    if ratios:
        if not all(math.isclose(ratio, ratios[0], rel_tol=1e-9) for ratio in ratios):
            told = ", ".join(f"× {ratio:g}" for ratio in ratios)
            raise CheckpointError(
                f"the learning rates of the optimizer's groups change by several factors ({told}), "
                "and a fork multiplies the whole schedule. Change all of them by one factor."
            )
        # as a batch that grows scales the rates, with all copies that schedulers have of them
        plan = saved["plan"]
        state["plan"] = {**plan, "lr_factor": plan["lr_factor"] / ratios[0]}
    state["optimizer"] = {**saved["optimizer"], "groups": groups}
    return state, notes


def _shown(value: Any) -> str:
    value = checkpoint.decode(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
