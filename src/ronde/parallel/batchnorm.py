"""Batch normalization over the whole global batch, on any device.

torch's SyncBatchNorm refuses CPU tensors. This computes the same statistics (Ioffe and Szegedy
2015, over all workers' samples) with sums over workers, in two passes so that a large mean costs no
precision.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "absent",
    "batchnorms",
    "converted",
    "normalize_over",
    "normalizes_batch",
    "set_present",
    "spectral_norms",
    "synchronize_batchnorms",
]

_present = [True]


class _AllReduce(torch.autograd.Function):
    """A differentiable sum over workers: each gradient is the sum of all workers' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllReduce.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


_all_reduce: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor] = _AllReduce.apply  # type: ignore[assignment]


@contextmanager
def absent() -> Iterator[None]:
    """Within the block this worker's share is empty: it only takes part in the exchange."""
    _present[0] = False
    try:
        yield
    finally:
        _present[0] = True


def set_present(present: bool) -> None:
    """Set whether the samples of the script's next forward passes count."""
    _present[0] = present


def batchnorms(model: nn.Module) -> list[str]:
    """Names of the modules that normalize over the batch."""
    return [name for name, m in model.named_modules() if _is_batchnorm(m)]


def normalizes_batch(module: nn.Module) -> bool:
    """Whether it is a batch normalization, torch's or Keras's."""
    return isinstance(module, _BatchNorm) or "normalize_over" in vars(module)


def _is_batchnorm(module: nn.Module) -> bool:
    """Whether Ronde must synchronize it: torch's SyncBatchNorm does so itself, but not on a CPU."""
    if not isinstance(module, nn.SyncBatchNorm):
        return normalizes_batch(module)
    tensor = next(iter((*module.parameters(), *module.buffers())), None)
    return tensor is not None and tensor.device.type == "cpu"


class _Converted(_BatchNorm):
    """A former SyncBatchNorm of torch's: any number of dimensions."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def converted(model: nn.Module) -> bool:
    """Whether all batch normalizations are torch's SyncBatchNorm, which this device cannot run."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return bool(norms) and all(isinstance(m, nn.SyncBatchNorm) and _is_batchnorm(m) for m in norms)


def spectral_norms(model: nn.Module) -> list[str]:
    """Names of modules with spectral norm, which iterates once per training forward."""
    names = []
    for name, m in model.named_modules():
        kinds = [type(hook).__name__ for hook in m._forward_pre_hooks.values()]
        parametrizations = getattr(m, "parametrizations", {})
        kinds += [type(p).__name__ for chain in parametrizations.values() for p in chain]
        if {"SpectralNorm", "_SpectralNorm"} & set(kinds):
            names.append(name)
    return names


def normalize_over(
    self: Any, x: torch.Tensor, total_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run a batch normalization's forward pass with statistics over all workers.

    Args:
        self: the module.
        x: its input.
        total_of: a differentiable sum of a tensor over the workers.
    """
    # evaluation exchanges nothing: a worker whose share is empty does not take part
    if not self.training:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    self._check_input_dim(x)
    axes = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    weight = 1.0 if _present[0] else 0.0
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = torch.full((1,), weight * x.numel() / x.size(1), dtype=wide.dtype, device=x.device)
    total = total_of(torch.cat([wide.sum(axes) * weight, count]))
    n = total[-1].detach()
    mean = total[:-1] / n
    centred = wide - mean.view(shape)
    var = total_of((centred * centred).sum(axes) * weight) / n
    if self.training and self.track_running_stats and self.running_mean is not None:
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            unbiased = var * (n / (n - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)
    out = centred * torch.rsqrt(var + self.eps).view(shape)
    if self.affine:
        out = out * self.weight.view(shape) + self.bias.view(shape)
    result: torch.Tensor = out.to(x.dtype)
    return result


def synchronize_batchnorms(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make every batch normalization of ``model`` use all workers' statistics, in place.

    Every worker must then run the same number of forward passes.
    """
    for module in model.modules():
        if normalize := vars(module).get("normalize_over"):  # Keras's
            normalize(lambda part: _all_reduce(part, group), lambda: float(_present[0]))
        elif _is_batchnorm(module):
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = _Converted  # type: ignore[assignment]  # DistributedDataParallel refuses the other one

            def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
                return normalize_over(self, x, lambda part: _all_reduce(part, group))

            module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
