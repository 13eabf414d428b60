"""How a model treats groups of people.

Offers :class:`Bias` for ``run.evaluate``, :func:`count_table` for tables, and the metrics of both.
"""

from __future__ import annotations

from ronde.clarify.bias import Bias, BiasError
from ronde.clarify.counts import BiasTable, GroupVersusRest, attention
from ronde.clarify.metrics import METRICS, Measure, flip_test, newcombe, wilson
from ronde.clarify.tables import count_table

__all__ = [
    "METRICS",
    "Bias",
    "BiasError",
    "GroupVersusRest",
    "BiasTable",
    "Measure",
    "attention",
    "count_table",
    "flip_test",
    "newcombe",
    "wilson",
]
