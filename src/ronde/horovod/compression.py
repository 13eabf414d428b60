"""What is sent in place of a tensor: itself, or a 16-bit copy."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Two functions, as a base for compressors of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is sent, and what :meth:`decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor, from what came back."""
        return tensor


class _Half(Compressor):
    """Floating-point tensors travel as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        small = tensor.to(torch.float16) if tensor.is_floating_point() else tensor
        return small, tensor.dtype  # whole numbers, such as counts, stay exact

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Horovod's choices: ``Compression.none`` and ``Compression.fp16``."""

    none = Compressor
    fp16 = _Half
