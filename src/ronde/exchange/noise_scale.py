"""The gradient noise scale, from norms of each worker's gradient and of their mean.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training": B = tr(Σ) / |G|², where G is
the true gradient and Σ the covariance of one sample's. A mean over b samples has the expected
squared norm |G|² + tr(Σ)/b. Two batch sizes, a worker's share and the global batch, give both.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["NoiseScale", "squared_norm"]

_WINDOW = 200  # measurements that count fully
_LEAST = 8


def squared_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of all entries, 0-d, in float64."""
    norms = torch._foreach_norm(list(tensors))
    return torch.stack([n.double() for n in norms]).square().sum()


class NoiseScale:
    """Smoothed, unbiased estimates of |G|² and tr(Σ); the ratio is taken last.

    Attributes:
        steps: optimizer steps so far.
        count: measurements so far.
    """

    def __init__(self) -> None:
        self.steps = self.count = 0
        self._means: torch.Tensor | None = None  # |G|² and tr(Σ)

    def add(
        self,
        local: torch.Tensor,
        inverse: torch.Tensor,
        averaged: torch.Tensor,
        global_samples: int,
    ) -> None:
        """Add a step's measurement; nothing waits for the device.

        Args:
            local: the mean over workers of the squared norm of their own mean gradient.
            inverse: the mean over workers of 1 / samples.
            averaged: the squared norm of the global mean gradient.
            global_samples: samples behind it.
        """
        trace = (local - averaged) / (inverse - 1.0 / global_samples)
        now = torch.stack([averaged - trace / global_samples, trace])
        self.count += 1
        weight = 1.0 / min(self.count, _WINDOW)
        before = now if self._means is None else self._means.to(now.device)
        self._means = torch.lerp(before, now, weight)

    def read(self) -> tuple[float, float] | None:
        """``|G|²`` and ``tr(Σ)``; None while there are too few measurements. Waits for the
        device.
        """
        if self.count < _LEAST or self._means is None:
            return None
        square, trace = self._means.tolist()
        return square, trace

    def to_list(self) -> list[float]:
        """Its state as plain numbers. Waits for the device."""
        means = self._means.tolist() if self._means is not None else []
        return [self.steps, self.count, *means]

    def load(self, values: list[float]) -> None:
        """Take over :meth:`to_list`."""
        self.steps, self.count = int(values[0]), int(values[1])
        self._means = torch.tensor(values[2:], dtype=torch.float64) if self.count else None

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None while it cannot be told."""
        read = self.read()
        return read[1] / read[0] if read is not None and min(read) > 0 else None
