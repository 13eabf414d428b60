"""The gradient noise scale, from norms of each worker's gradient and of their mean.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training": B = tr(Σ) / |G|², where G is
the true gradient and Σ the covariance of one sample's. A mean over b samples has the expected
squared norm |G|² + tr(Σ)/b. Two batch sizes, a worker's share and the global batch, give both.
"""

from __future__ import annotations

import math
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
    """Smoothed, unbiased estimates of |G|² and tr(Σ), with their spread; the ratio is taken last.

    Attributes:
        steps: optimizer steps so far.
        count: measurements so far.
    """

    def __init__(self) -> None:
        self.steps = self.count = 0
        # |G|² and tr(Σ); then their squares and their product
        self._means: torch.Tensor | None = None

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
        square = averaged - trace / global_samples
        now = torch.stack([square, trace, square * square, trace * trace, square * trace])
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
        square, trace = self._means.tolist()[:2]
        return square, trace

    def interval(self) -> tuple[float, float | None] | None:
        """The 95 % interval of the noise scale, in samples. Waits for the device.

        By Fieller's theorem: |G|² is a small difference of large numbers, and a ratio whose
        denominator may be zero has no upper end (None). None as a whole without measurements.

        Example:
            >>> noise = NoiseScale()
            >>> for k in range(16):
            ...     local, averaged = torch.tensor([3.0 + k % 2, 2.0], dtype=torch.float64)
            ...     noise.add(local, torch.tensor(1 / 4), averaged, 8)
            >>> round(noise.value, 1), [round(end, 1) for end in noise.interval()]
            (24.0, [12.6, 63.1])
        """
        read = self.read()
        if read is None or self._means is None:
            return None
        square, trace = read
        squares, traces, products = self._means.tolist()[2:]
        # The variance of a mean: the weights' squares add up to 1 / n, later to those of a decay.
        w = 1.0 / min(self.count, _WINDOW)
        end = w / (2.0 - w)
        shrunk = end + (w - end) * (1.0 - w) ** (2 * max(0, self.count - _WINDOW))
        freedom = 1.0 / shrunk - 1.0
        quantile = 1.96 + 2.37 / freedom + 2.8 / freedom**2  # Student's t
        scale = quantile**2 / freedom
        a = square * square - scale * (squares - square * square)
        b = square * trace - scale * (products - square * trace)
        c = trace * trace - scale * (traces - trace * trace)
        root = math.sqrt(max(0.0, b * b - a * c))
        if square <= 0 or a <= 0:
            return max(0.0, c / (b + root)) if b + root > 0 else 0.0, None
        return max(0.0, (b - root) / a), (b + root) / a

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None while it cannot be told."""
        read = self.read()
        return read[1] / read[0] if read is not None and min(read) > 0 else None
