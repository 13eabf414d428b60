"""Measure a script's model, its throughput, and a machine's links.

Offers :func:`~ronde.measure.planner.choose_plan` (``plan="auto"``), the costs of a model unit by
unit (:mod:`~ronde.measure.time_units`), the links (:mod:`~ronde.measure.bench_links`) and
:class:`~ronde.measure.throughput.Bench` (synthetic and real rates).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.measure.bench_links import default_cluster, has_cuda
    from ronde.measure.planner import answer, load_costs, threads_on, with_predicted_cut
    from ronde.measure.throughput import Arm, ArmResult, Bench, Timed

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.measure.bench_links": "default_cluster has_cuda",
            "ronde.measure.planner": "answer load_costs threads_on with_predicted_cut",
            "ronde.measure.throughput": "Arm ArmResult Bench Timed",
        },
    )
