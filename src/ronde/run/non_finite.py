"""A NaN or infinite loss: which samples and which ranks it came from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ronde.plan import Share
from ronde.world import LossError
from ronde.world.consensus import gather_json

if TYPE_CHECKING:
    from ronde.run.step_port import RunParts

__all__ = ["NAN_EVERY", "refuse_loss"]

NAN_EVERY = 50  # steps between checks on an accelerator, where reading a loss waits for the device


def refuse_loss(run: RunParts, value: float, share: Share) -> None:
    """Raise LossError. A collective: the global loss is the same on all ranks, so all are here."""
    ids = run._taken.order.ids(share.epoch, share.start, share.stop)
    shown = ", ".join(map(str, ids[:8].tolist())) + (", …" if len(ids) > 8 else "")
    effect = "The weights were not updated."
    if run.device.type != "cpu":
        effect = f"One step in {NAN_EVERY} is checked here: an earlier one may have caused it."
    raise LossError(
        f"the loss is {value} in step {run.state.step + 1} (epoch {share.epoch}, samples "
        f"{share.start}–{share.stop - 1} of its order: indices {shown}){_bad_ranks(run)}. {effect} "
        "Look at these samples, lower the learning rate, or clip (clip_norm=1.0); "
        "on_nan='ignore' trains on."
    )


def _bad_ranks(run: RunParts) -> str:
    if run.world_size == 1:
        return ""
    local = run._strategy.local_loss
    finite = gather_json(run._me, local is None or math.isfinite(local))
    bad = [str(rank) for rank, good in enumerate(finite) if not good]
    return f", from the samples of rank {', '.join(bad)}" if bad else ""
