"""Batch normalization over the batches of all ranks, on any device."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ronde.horovod.collectives_api import allreduce
from ronde.horovod.lifecycle import ProcessSet, global_process_set
from ronde.horovod.transfers import Reduction
from ronde.parallel.batchnorm import normalize_over

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Normalizes over the samples of all ranks while training.

    All ranks must run the same number of forward passes; the exchange has a gradient.

    Args:
        num_features: channels, the input's second dimension.
        eps: added to the variance.
        momentum: of the running statistics; None for a plain mean.
        affine: whether it has weights.
        track_running_stats: whether evaluation uses running statistics.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:  # any shape (N, C, …), unlike torch's three classes
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; a collective while training."""

        def total(x: torch.Tensor) -> torch.Tensor:
            whole: torch.Tensor = allreduce(x, op=Reduction.Sum, process_set=self.process_set)
            return whole

        return normalize_over(self, input, total)
