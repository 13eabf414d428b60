"""A new run that begins with a checkpoint of another one (``ronde run --from``): what counts of the
checkpoint, and what of the script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ronde import checkpoint
from ronde.world import CheckpointError

__all__ = ["changed_settings", "forked"]


def _changes(
    saved: Mapping[str, Any], given: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
    """For each group in a checkpoint: what its script gave, and what this one gives otherwise."""
    found = []
    for then, now in zip(saved.get("given", ()), given, strict=False):
        found.append((then, {k: v for k, v in now.items() if k in then and v != then[k]}))
    return found


def changed_settings(saved: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that this script gives otherwise than that of the checkpoint, as phrases."""
    return [
        f"{name} {_shown(then[name])} → {_shown(value)}"
        + (f" (group {i})" if len(given) > 1 else "")
        for i, (then, changed) in enumerate(_changes(saved, given))
        for name, value in changed.items()
    ]


def forked(saved: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A checkpoint's plain values for a new run.

    A setting of the optimizer that the script gives otherwise than the script of the checkpoint
    did is the new script's. A learning rate multiplies the whole schedule.

    Args:
        given: the script's :func:`~ronde.run.options.given_settings`.

    Raises:
        CheckpointError: the groups' learning rates change by several factors.
    """
    state = {**saved, "best": None, "ending": {}}
    ratios: list[float] = []
    groups = [*saved["optimizer"]["groups"]]
    for i, (then, changed) in enumerate(_changes(saved, given)):
        rate = changed.pop("lr", then["lr"])
        if then["lr"]:
            ratios.append(rate / then["lr"])
        elif rate:
            raise CheckpointError(
                f"the learning rate of the optimizer's group {i} was 0 then and is {rate:g} now, "
                "and a fork multiplies the schedule. Leave it at 0."
            )
        groups[i] = {**groups[i], "settings": {**groups[i]["settings"], **changed}}
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
    return state


def _shown(value: Any) -> str:
    value = checkpoint.decode_exact(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
