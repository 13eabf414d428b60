"""How many devices are worth it? Speed-up and efficiency for 1, 2, 4 ... workers, extrapolated.

Offers :func:`~ronde.scale.scale.scale` (measures) and :mod:`~ronde.scale.laws` (fits and
extrapolates).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world.lazy import lazily

if TYPE_CHECKING:
    from ronde.scale.scale import (
        Scaling,
        Start,
        load_scale,
        measure_sizes,
        start_options,
        summarise_scale,
    )

__all__ = ["Scaling", "Start", "load_scale", "measure_sizes", "start_options", "summarise_scale"]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.scale.scale": "Scaling Start load_scale measure_sizes start_options "
            "summarise_scale"
        },
    )
