"""How sure a prediction is: its error range, and the numbers that it assumes."""

from __future__ import annotations

import math
import socket
from dataclasses import asdict, dataclass
from typing import Any

from ronde.plan.plan import Plan
from ronde.predict import datasheets
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs
from ronde.world import usable_cores
from ronde.world.units import format_bytes, format_seconds

MEAN_ERROR = {
    "sheet time": 0.08,
    "sheet memory": 0.10,
    "measured time": 0.064,
    "sharded time": 0.087,
    "measured memory": 0.018,
}
"""Mean relative error of predictions. ``sheet``: for a device known from its data sheet only, of
published runs (``benchmarks/plan_offline.py``). ``measured``: costs and links measured on the
machine itself, of real runs (``benchmarks/plan_truth.py`` and ``plan_memory.py``).
"""


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that was not measured.

    Attributes:
        name: what it is, with its unit.
        value: the number, in ``unit``.
        unit: ``"s"``, ``"B/s"``, ``"FLOP/s"``, or ``"share"`` from 0 to 1.
        text: what it is, in words, with ``{}`` for the number.
    """

    name: str
    value: float
    unit: str
    text: str

    def sentence(self) -> str:
        """The assumption in words.

        Example:
            >>> Assumption("node_link", 5e10, "B/s", "{} per device inside a node").sentence()
            '50 GB/s per device inside a node'
        """
        scale, shown = {
            "s": (0.0, ""),
            "B/s": (1e-9, " GB/s"),
            "FLOP/s": (1e-12, " TFLOP/s"),
            "share": (100.0, " %"),
        }.get(self.unit, (1.0, ""))
        number = f"{self.value * scale:.4g}{shown}" if scale else format_seconds(self.value)
        return self.text.format(number)


@dataclass(frozen=True, slots=True)
class Precision:
    """How sure the predictions of an answer are.

    Attributes:
        estimate: whether the devices are not at hand, so that their speed or links are assumed.
        time, memory: mean relative error of predictions of this kind; ``time`` is None where
            nothing tells it, and ``why`` says why.
        spread: relative difference of step times below which two plans cannot be told apart.
        assumed: the numbers that were not measured.
    """

    estimate: bool = False
    time: float | None = 0.0
    memory: float = 0.0
    spread: float = 0.0
    assumed: tuple[Assumption, ...] = ()
    why: str = ""

    @classmethod
    def of(cls, costs: Costs, cluster: Cluster, plan: Plan) -> Precision:
        """The precision of predictions for a model on a cluster, and of this plan's step."""
        assumed = any(fit.assumed for by in cluster.links.values() for fit in by.values())
        estimate = cluster.speed_is_estimate or assumed
        usual = MEAN_ERROR["sheet time" if estimate else "measured time"]
        memory = MEAN_ERROR["sheet memory" if estimate else "measured memory"]
        spread = max(costs.noise, cluster.noise, usual)
        time, why = (usual, "") if estimate else _step_error(costs, cluster, plan)
        assumed_ones = assumptions(cluster) if estimate else ()
        return cls(estimate, time, memory, spread, assumed_ones, why)

    @property
    def about(self) -> str:
        """What stands before a predicted number."""
        return "≈ " if self.estimate else ""

    def seconds(self, value: float) -> str:
        """A predicted time, in words."""
        return f"{self.about}{format_seconds(value)}"

    def step(self, value: float) -> str:
        """A step's predicted time with its error."""
        error = "error unknown" if self.time is None else f"± {100 * self.time:.0f} %"
        return f"{self.seconds(value)} a step ({error})"

    def size(self, count: float) -> str:
        """Predicted bytes, in words."""
        return f"{self.about}{format_bytes(count)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "estimate": self.estimate,
            "error_unknown": self.why or None,
            "error_range": {"step_seconds": self.time, "memory_bytes": self.memory},
            "told_apart_from": self.spread,
            "assumed": [{**asdict(a), "sentence": a.sentence()} for a in self.assumed],
        }


def _step_error(costs: Costs, cluster: Cluster, plan: Plan) -> tuple[float | None, str]:
    """The relative error of a measured plan's step time, or None and why nothing tells it."""
    here = cluster.device == "cpu" and cluster.name == socket.gethostname()
    if here and cluster.devices_per_node > (cores := usable_cores()):
        return None, f"{cluster.devices_per_node} workers on {cores} cores were not measured"
    # plan_truth.json has no run with tensor parallelism.
    if plan.tensor > 1:
        return None, "no run of this family was compared with its prediction"
    usual = MEAN_ERROR["sharded time" if plan.shard != "none" else "measured time"]
    # Disturbed or badly fitted measurements cannot predict better than they agree.
    shaken = max(costs.noise, cluster.noise)
    return math.hypot(usual, shaken, costs.fit_error), ""


def assumptions(cluster: Cluster) -> tuple[Assumption, ...]:
    """The numbers of a cluster that no measurement stands for."""
    assumed = []
    for scope, where, there in (
        ("node", "inside a node", cluster.devices_per_node > 1),
        ("cluster", "between nodes", cluster.nodes > 1),
    ):
        send, reduce = (cluster.links.get(kind, {}).get(scope) for kind in ("send", "all_reduce"))
        if there and send is not None and send.assumed:
            text = f"{{}} per device {where}"
            assumed.append(Assumption(f"{scope}_bytes_per_second", send.beta, "B/s", text))
        if there and reduce is not None and reduce.assumed:
            text = f"{{}} until an all-reduce {where} starts"
            assumed.append(Assumption(f"{scope}_alpha_seconds", reduce.alpha, "s", text))
    if not cluster.speed_is_estimate:
        return tuple(assumed)
    device = datasheets.DEVICES.get(cluster.device)
    if device is None:
        text = "{} × the speed of the measured device"
        return (*assumed, Assumption("speed", cluster.speed, "factor", text))
    peak, memory = device.flops_per_second, device.memory_bytes_per_second
    return (
        *assumed,
        Assumption("peak_flops_per_second", peak, "FLOP/s", "{} at 16 bits at most"),
        Assumption("products_share", device.reached, "share", "{} of it in matrix products"),
        Assumption("attention_share", device.attention, "share", "{} in fused attention"),
        Assumption("memory_bytes_per_second", memory, "B/s", "{} of device memory"),
        Assumption("launch_seconds", cluster.launch_seconds, "s", "{} to launch an operation"),
        Assumption("overlap", cluster.overlap, "share", "{} of an exchange can hide"),
    )
