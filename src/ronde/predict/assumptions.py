"""How sure a prediction is: its error range, and the numbers that it assumes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ronde.predict import datasheets
from ronde.predict.accuracy import error_range
from ronde.predict.answer_tables import format_bytes, format_seconds
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs
from ronde.world import ArgumentError


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that was not measured.

    Attributes:
        name: what it is.
        value, unit: the number: in seconds, bytes per second, or a share from 0 to 1.
    """

    name: str
    value: float
    unit: str

    def sentence(self) -> str:
        """The assumption in words.

        Example:
            >>> Assumption("network, of one device", 5e10, "B/s").sentence()
            'network, of one device 50 GB/s'
        """
        shown = f"{self.value:g}"
        if self.unit == "s":
            shown = format_seconds(self.value)
        elif self.unit == "B/s":
            scale, unit = (1e12, "TB/s") if self.value >= 1e12 else (1e9, "GB/s")
            shown = f"{self.value / scale:.3g} {unit}"
        elif self.unit == "FLOP/s":
            shown = f"{self.value / 1e12:.3g} TFLOP/s"
        elif self.unit == "share":
            shown = f"{100 * self.value:.0f} %"
        return f"{self.name} {shown}"


@dataclass(frozen=True, slots=True)
class Precision:
    """How sure the predictions of an answer are.

    Attributes:
        estimate: whether the devices are not at hand, so that their speed or links are assumed.
        time, memory: mean relative error of predictions of this kind.
        spread: relative difference of step times below which two plans cannot be told apart.
        assumed: the numbers that were not measured.
    """

    estimate: bool = False
    time: float = 0.0
    memory: float = 0.0
    spread: float = 0.0
    assumed: tuple[Assumption, ...] = ()

    @classmethod
    def of(cls, costs: Costs, cluster: Cluster) -> Precision:
        """The precision of predictions for a model on a cluster."""
        assumed = any(fit.assumed for by in cluster.links.values() for fit in by.values())
        estimate = cluster.speed_is_estimate or assumed
        time = error_range("sheet time" if estimate else "measured time")
        memory = error_range("sheet memory" if estimate else "measured memory")
        spread = max(costs.noise, cluster.noise, time)
        return cls(estimate, time, memory, spread, assumptions(cluster) if estimate else ())

    @property
    def about(self) -> str:
        """What stands before a predicted number."""
        return "≈ " if self.estimate else ""

    def seconds(self, value: float) -> str:
        """A predicted time, in words."""
        return f"{self.about}{format_seconds(value)}"

    def step(self, value: float) -> str:
        """A step's predicted time with its error."""
        return f"{self.seconds(value)} a step (± {100 * self.time:.0f} %)"

    def size(self, count: float) -> str:
        """Predicted bytes, in words."""
        return f"{self.about}{format_bytes(count)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "estimate": self.estimate,
            "error_range": {"step_seconds": self.time, "memory_bytes": self.memory},
            "told_apart_from": self.spread,
            "assumed": [{**asdict(a), "sentence": a.sentence()} for a in self.assumed],
        }


def assumptions(cluster: Cluster) -> tuple[Assumption, ...]:
    """The numbers of a cluster that no measurement stands for."""
    found = []
    places = {"node": "inside a node", "cluster": "between nodes"}
    there = {"node": cluster.devices_per_node > 1, "cluster": cluster.nodes > 1}
    for scope, where in places.items():
        send = cluster.links.get("send", {}).get(scope)
        if there[scope] and send is not None and send.assumed:
            found.append(Assumption(f"links {where}, per device:", send.beta, "B/s"))
        fit = cluster.links.get("all_reduce", {}).get(scope)
        if there[scope] and fit is not None and fit.assumed:
            found.append(Assumption(f"start of a collective {where}:", fit.alpha, "s"))
    if not cluster.speed_is_estimate:
        return tuple(found)
    try:
        device = datasheets.device_named(cluster.device)
    except ArgumentError:
        return (*found, Assumption("speed against the measured device:", cluster.speed, "factor"))
    found.append(Assumption("16-bit peak:", device.flops_per_second, "FLOP/s"))
    found.append(Assumption("of it, matrix products reach", device.reached, "share"))
    if attention := getattr(device, "attention", 0.0):
        found.append(Assumption("and fused attention", attention, "share"))
    found.append(Assumption("device memory:", device.memory_bytes_per_second, "B/s"))
    if launch := getattr(cluster, "launch_seconds", 0.0):
        found.append(Assumption("launch of an operation:", launch, "s"))
    found.append(Assumption("exchange that can hide:", cluster.overlap, "share"))
    return tuple(found)
