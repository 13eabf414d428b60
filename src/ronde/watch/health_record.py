"""``health.jsonl``: what a watched training measures of itself, one JSON object a line. Rank 0
writes it.

==============  ===================================================================================
type            what it has, besides ``step``
==============  ===================================================================================
``tensors``     what the numbers of the lines that follow belong to: ``every`` (steps from one
                measurement to the next), ``start`` (the ``time`` of the
                record's ``start`` or ``resume`` before it), ``names``, ``places`` (``FILE:LINE`` or
                ""), ``elements``, ``frozen`` of the parameters; ``layers``, ``layer_kinds``
                ("relu", "tanh", "sigmoid", "other"), ``layer_places`` in forward order;
                ``left_out`` (why layers' outputs are not measured, or "")
``health``      ``epoch``, ``samples`` (first and one past the last of the run), and per parameter
                ``gradient``, ``weight``, ``update`` (norms), ``same`` (fraction of sampled elements
                that the update left as they were); ``bad_ranks`` whose loss, layers, or, if that is
                not known, gradients were not finite; ``first_bad``: the first such layer, or None
``activations`` per layer ``rms``, ``dead`` (fraction of units without a positive output in this
                measurement and the seven before; of "relu" layers), ``saturated`` (fraction of
                outputs within 1e-4 of the bounds; of "tanh" and "sigmoid" layers)
``inputs``      of rank 0's part of the batch, the first tensor of floats: ``mean``, ``std``,
                ``constant`` (fraction of the features that do not vary over the samples)
``targets``     of rank 0's measured batches since the start or resume: ``counts`` of each class
==============  ===================================================================================

Numbers have four significant digits; None: there is none. "nan", "inf", and "-inf" are strings. A
``resume`` of the record at step k makes lines of steps above k void.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ronde.watch.record import JsonLines

if TYPE_CHECKING:
    import torch

__all__ = ["HEALTH", "IDLE_ROWS", "RESOURCES", "HealthFile", "rounded"]

HEALTH, RESOURCES = "health.jsonl", "resources.jsonl"
"""Names of files in a run directory."""
IDLE_ROWS = 8
"""Measurements without a positive output that make a unit dead: it may be silent for one batch."""


def rounded(value: float | None) -> float | str | None:
    """A number as the file has it.

    Example:
        >>> [rounded(x) for x in (1 / 3, 120_000.0, math.inf, None)]
        [0.3333, 120000.0, 'inf', None]
    """
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.4g}")
    return str(float(value))


class HealthFile:
    """Holds measurements as tensors until the watcher reads losses: nothing waits for a device.

    Args:
        path: ``health.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._held: list[
            tuple[torch.Tensor | None, Callable[[Sequence[float]], list[dict[str, Any]]]]
        ] = []

    def hold(
        self,
        values: torch.Tensor | None,
        describe: Callable[[Sequence[float]], list[dict[str, Any]]],
    ) -> None:
        """Keep a vector, and what makes lines of its numbers."""
        self._held.append((values, describe))

    def flush(self) -> None:
        """Write what is held."""
        held, self._held = self._held, []
        lines = [line for v, tell in held for line in tell([] if v is None else v.tolist())]
        if lines:
            self._lines.write(lines)
