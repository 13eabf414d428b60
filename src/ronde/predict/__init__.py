"""Predict a plan's step time and memory from a model's costs and a cluster's links.

Offers :class:`~ronde.predict.predict.Predictor`, :func:`~ronde.predict.search.search` over all
plans, and :func:`~ronde.predict.answer.explain`, which says why. Pure arithmetic: no torch, no
processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.predict.answer import Explanation, explain, render_answer
    from ronde.predict.cluster import Cluster, LinkFit
    from ronde.predict.costs import Costs, LinearCost, Unit
    from ronde.predict.datasheets import cluster_of, device_named
    from ronde.predict.input_capacity import (
        Capacities,
        Measured,
        StageCapacity,
        Wall,
        from_runs,
        gap,
        nodes_of,
        plateau,
        walls,
    )
    from ronde.predict.partition import Cut, cut, cut_at
    from ronde.predict.predict import Predictor
    from ronde.predict.prediction import Prediction

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.predict.answer": "Explanation explain render_answer",
            "ronde.predict.cluster": "Cluster LinkFit",
            "ronde.predict.costs": "Costs LinearCost Unit",
            "ronde.predict.datasheets": "cluster_of device_named",
            "ronde.predict.input_capacity": "Capacities Measured StageCapacity Wall from_runs gap "
            "nodes_of plateau walls",
            "ronde.predict.partition": "Cut cut cut_at",
            "ronde.predict.predict": "Predictor",
            "ronde.predict.prediction": "Prediction",
        },
    )
