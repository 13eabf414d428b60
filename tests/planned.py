"""What tests of plans share: costs as if they had been counted, and how an answer looks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from rich.console import Console

from ronde.predict.costs import Costs, LinearCost


def shown(what: Any, width: int = 100) -> str:
    """As a terminal of so many columns shows it, without styles."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def counted(costs: Costs) -> Costs:
    """The costs of a model with what is weighed of its recomputed blocks and divided layers: full
    recomputation keeps a block's input, selective half of its activations.
    """
    units = []
    before = 0.0
    for block, members in itertools.groupby(costs.units, lambda u: u.block):
        several = list(members)
        saved = [u.saved_bytes.per_sample for u in several]
        full = [min(before, sum(saved)), *[0.0] * (len(saved) - 1)] if block else saved
        half = [s / 2 for s in saved] if block else saved
        before = several[-1].crossing_bytes.per_sample
        for unit, all_of_it, least, some in zip(several, saved, full, half, strict=True):
            own, share = unit.forward_transient_bytes, unit.tensor
            whole = 2 * unit.tensor_reduce_bytes.per_sample
            units.append(
                dataclasses.replace(
                    unit,
                    recomputed=bool(block),
                    tensor_time=share,
                    tensor_saved_bytes=LinearCost(
                        0, all_of_it - max(0.0, share * all_of_it - whole) / 2
                    ),
                    tensor_forward_bytes=own.times(1 - share / 2),
                    tensor_backward_bytes=unit.backward_transient_bytes.times(1 - share / 2),
                    full_saved_bytes=LinearCost(0, least),
                    full_forward_bytes=own,
                    full_backward_bytes=unit.backward_transient_bytes
                    + LinearCost(0, sum(saved) - sum(full)),
                    selective_saved_bytes=LinearCost(0, some),
                    selective_forward_bytes=own,
                    selective_backward_bytes=unit.backward_transient_bytes
                    + LinearCost(0, sum(saved) - sum(half)),
                )
            )
    return dataclasses.replace(costs, units=tuple(units), again=("selective", "full"))
