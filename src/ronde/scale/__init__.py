"""How many devices are worth it? Speed-up and efficiency for 1, 2, 4 … workers, extrapolated.

Offers the measurement inside a script (:mod:`~ronde.scale.meter`), the laws that are fitted
(:mod:`~ronde.scale.laws`), and the answer (:mod:`~ronde.scale.scaling`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.scale.meter import Start, load_scale, measure_sizes
    from ronde.scale.rows import Scaling
    from ronde.scale.scaling import summarize_scale

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.scale.meter": "Start load_scale measure_sizes",
            "ronde.scale.rows": "Scaling",
            "ronde.scale.scaling": "summarize_scale",
        },
    )
