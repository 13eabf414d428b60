"""Carry out a plan: a strategy turns plan and model into forward, backward and exchange.

Offers :func:`carry_out` and the registry ``STRATEGIES`` (:mod:`ronde.parallel.registry`), one
entry per plan family; :class:`Single` is one device, :class:`Replicate` data parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.parallel.batchnorm import batchnorms, converted, spectral_norms
    from ronde.parallel.ddp import Replicate
    from ronde.parallel.registry import STRATEGIES, carry_out
    from ronde.parallel.strategy import Compute, Part, Single, Strategy, Work

__all__ = [
    "STRATEGIES",
    "Compute",
    "Part",
    "Replicate",
    "Single",
    "Strategy",
    "Work",
    "batchnorms",
    "carry_out",
    "converted",
    "spectral_norms",
]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.parallel.batchnorm": "batchnorms converted spectral_norms",
            "ronde.parallel.registry": "STRATEGIES carry_out",
            "ronde.parallel.ddp": "Replicate",
            "ronde.parallel.strategy": "Compute Part Single Strategy Work",
        },
    )
