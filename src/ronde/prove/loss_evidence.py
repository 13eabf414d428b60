"""Evidence about the loss: its kind, and its gradient at the model's output."""

from __future__ import annotations

from typing import Any

import numpy as np

from ronde.prove.evidence import Case
from ronde.prove.experiment import Experiment
from ronde.prove.run_trace import Values

__all__ = ["LOSS_ANSWERS", "LOSS_CAUSES", "ask_gradients"]

LOSS_CAUSES = {
    "sum": "loss-is-a-sum",
    "weighted": "loss-is-a-weighted-mean",
    "over-batch": "loss-over-the-batch",
    "state": "state-outside-the-model",
    "pair-mean": "loss-pair",
    "pair-weight": "loss-pair",
    "pair-other": "loss-pair",
}
LOSS_ANSWERS = {
    "sum": "asked about parts of a batch, the loss answers like a sum",
    "weighted": "asked about parts of a batch, the loss answers like a mean with weights",
    "over-batch": "asked about parts of a batch, the loss or its gradient answers like neither a "
    "mean nor a sum",
    "pair-mean": "asked about parts of a batch, the first of the pair answers like a mean, not a "
    "sum",
    "pair-weight": "asked about parts of a batch, the weights of the parts do not add up to that "
    "of all",
    "pair-other": "asked about parts of a batch, the first of the pair answers like neither a sum "
    "nor a mean",
    "state": "asked about the same samples again, the loss gives another value: it keeps state "
    "from earlier calls",
}
_OVER_BATCH = "loss-over-the-batch"


def ask_gradients(case: Case) -> tuple[str, str] | None:
    """The kind of loss by its gradient at the model's output, and why; with the whole batch in one
    process, and with parts of it.

    A part's gradient among all samples is ``r`` times its gradient alone. ``r`` is 1 for a sum, the
    part of the samples for a mean, and the part of the weights for a weighted mean: then all parts
    add up to 1, and the parts' losses, so weighted, to the whole. Otherwise the loss relates
    samples to each other.
    """
    split, k = case.run(Experiment.SPLIT), case.k
    if split is None or k >= len(split.steps()):
        return None
    step = split.steps()[k]
    if any(weight is not None for _, weight, _ in step["local"]):
        return None
    whole, parts = case.one.outputs(k, "back"), split.outputs(k, "back")
    name = next((n for n in whole if n in parts), None)
    if name is None:
        return None
    samples = len(whole[name][0])
    shares = [(high - low) / samples for low, high in step["micro"]]
    ratios = _ratios(whole[name][0], parts[name][0], step)
    if ratios is None:
        return None
    if not ratios:
        return (
            _OVER_BATCH,
            "the loss's gradient at a sample's output depends on which samples are with it",
        )
    if np.allclose(ratios, 1.0, rtol=1e-6):
        return (
            "loss-is-a-sum",
            "the loss's gradient at a sample's output is the same for any number of samples",
        )
    if np.allclose(ratios, shares, rtol=1e-6):
        return (
            _OVER_BATCH,
            "the loss's gradient at the model's output is that of a mean: something else is added "
            "to it",
        )
    values = [value for value, _, _ in step["local"]]
    loss = case.one.steps()[k]["loss"]
    add_up = abs(sum(ratios) - 1.0) < 1e-6 and min(ratios) > 1e-9 and len(values) == len(ratios)
    if add_up:
        total = sum(r * v for r, v in zip(ratios, values, strict=True))
        if abs(total - loss) <= 1e-6 * abs(loss):
            weights = ", ".join(f"{r:.3f}" for r in ratios)
            return (
                "loss-is-a-weighted-mean",
                f"by its gradient at the model's output, the workers' parts weigh {weights}",
            )
    return (
        _OVER_BATCH,
        "its gradient at the model's output is that of neither a sum nor a mean, weighted or not",
    )


def _ratios(whole: Values, parts: Values, step: dict[str, Any]) -> list[float] | None:
    """Each part's gradient among all over its gradient alone. Empty if that is no one number; None
    if a part has no gradient.
    """
    n, start = len(whole), step["start"]
    ratios = []
    for low, high in step["micro"]:
        among = whole[low - start : high - start]
        alone = parts[low - start : high - start] * (n / (high - low))
        kept = np.abs(alone) > 1e-9 * (np.abs(alone).max(initial=0.0) or 1.0)
        if not kept.any():
            return None
        ratio = among[kept] / alone[kept]
        if np.ptp(ratio) > 1e-6 * np.abs(ratio).max():
            return []
        ratios.append(float(ratio[0]))
    return ratios
