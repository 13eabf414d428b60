"""Makes lines of ``health.jsonl`` of measured numbers. See :mod:`ronde.watch.health_record`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ronde.run.callbacks.layer_outputs import LayerOutputs
from ronde.watch.health_record import rounded

__all__ = ["health_lines", "inputs_line", "targets_line"]


def health_lines(
    about: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    ranks: int,
    layers: LayerOutputs | None,
    values: Sequence[float],
) -> list[dict[str, Any]]:
    """The lines of a measured step.

    Args:
        about: what the line has besides numbers.
        tensors: all parameters by name.
        layers: None where they were not measured.
        values: of all ranks together: how many cannot measure, for each rank whether its loss and
            its layers are not finite; squares of gradients, weights, and updates, and
            equal elements, of all tensors; sums of layers; dead units.

    Raises:
        RuntimeError: a rank could not measure.
    """
    if values[0]:
        raise RuntimeError(f"{values[0]:.0f} of {ranks} ranks cannot measure this training")
    count, at = len(tensors), 1 + 2 * ranks
    gradients, weights, updates, equal = (
        values[at + i * count : at + (i + 1) * count] for i in range(4)
    )
    at += 4 * count
    frozen = [not p.requires_grad for p in tensors.values()]

    def norms(squares: Sequence[float]) -> list[float | None]:
        each = zip(squares, frozen, strict=True)
        return [None if none or square < 0 else math.sqrt(square) for square, none in each]

    found = {"gradient": norms(gradients), "weight": norms(weights), "update": norms(updates)}
    parts = zip(equal, tensors.values(), frozen, strict=True)
    found["same"] = [None if none or not p.numel() else n / p.numel() for n, p, none in parts]
    bad = [r for r in range(ranks) if values[1 + r] or values[1 + ranks + r]]
    if not bad and any(g is not None and not math.isfinite(g) for g in found["gradient"]):
        bad = list(range(ranks))  # they were averaged: whose it was is not known
    lines = [{**about, **_rounded(found), "bad_ranks": bad, "first_bad": None}]
    if layers is not None:
        end = at + 3 * len(layers.names)
        columns, lines[0]["first_bad"] = layers.describe(values[at:end], values[end:])
        lines.append({"type": "activations", "step": about["step"], **_rounded(columns)})
    return lines


def _rounded(columns: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    return {name: [rounded(x) for x in column] for name, column in columns.items()}


def inputs_line(step: int, facts: Sequence[float]) -> list[dict[str, Any]]:
    """The line of a batch's mean, standard deviation, and fraction of constant features."""
    found = dict(zip(("mean", "std", "constant"), map(rounded, facts), strict=True))
    return [{"type": "inputs", "step": step, **found}]


def targets_line(step: int, counts: Sequence[float]) -> list[dict[str, Any]]:
    """The line of samples per class."""
    most = max((i for i, n in enumerate(counts) if n), default=-1)
    return [{"type": "targets", "step": step, "counts": [int(n) for n in counts[: most + 1]]}]
