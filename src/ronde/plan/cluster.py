"""What a cluster gives, as data: its devices, and how long each collective takes, inside a node and across nodes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ronde.world import ArgumentError

__all__ = ["Added", "Cluster", "Collective", "Fit", "Scope"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
Scope = Literal["node", "cluster"]
"""Inside one node, or over a group with workers on several."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One collective by its own fit: ``seconds = alpha + bytes / beta`` (Hockney 1994), at the group size it was measured at.

    Attributes:
        alpha: seconds before the first byte.
        beta: bytes per second, of the whole tensor that each rank holds (all-reduce, broadcast, send), or that each rank ends
            with (all-gather) or begins with (reduce-scatter).
        ranks: group size it was measured at. Other sizes are scaled by the ring's formula.
        residual: relative error of the fit over its own points.
        assumed: whether it comes from a data sheet or a formula instead of a measurement.
    """

    alpha: float
    beta: float
    ranks: int = 2
    residual: float = 0.0
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class Added:
    """What the runtime adds to a collective: hooks, and copies into and out of flat buffers.

    Attributes:
        call: seconds each time.
        tensor: seconds for each tensor that is exchanged with others.
        byte: seconds for each byte.
    """

    call: float = 0.0
    tensor: float = 0.0
    byte: float = 0.0

    def __call__(self, size: float, tensors: float, calls: float = 1.0) -> float:
        """Seconds for so much; nothing for no bytes."""
        return self.call * calls + self.tensor * tensors + self.byte * size if size > 0 else 0.0

    def times(self, factor: float) -> Added:
        """All of it so many times as long."""
        return Added(self.call * factor, self.tensor * factor, self.byte * factor)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        name: under which corrections are kept.
        nodes: how many.
        devices_per_node: workers that fit on one.
        device: kind, for example ``"cpu"``, ``"NVIDIA H100 80GB"``.
        memory_bytes: of one device.
        speed: how much faster a device runs this than the one the costs were measured on; 1 where it is the same.
        speed_is_estimate: whether ``speed`` comes from efficiency curves instead of a measurement.
        links: collective -> scope -> fit.
        overlap: share of an exchange that can hide behind computation, 0 to 1 (CPU and gloo: 0 for sharded parameters).
        interference: factor on computation while an exchange runs (1 = none).
        action_seconds: what the runtime adds to each forward or backward of a micro-batch in a pipeline.
        base_bytes: what a worker holds before any model.
        source: where the numbers come from.
        corrections: family of plans -> measured / predicted step time, from runs on this cluster.
        bucket_overlap: as ``overlap``, for the buckets of whole gradients that replicas exchange during the backward pass.
        host_bytes_per_second: between a device and the host's memory, for offload; 0 where not measured (then 12e9 is assumed).
        noise: relative disturbance seen while the links were measured, 0 to 1.
        added: what the runtime adds: to gathering a block's parameters (``"gather"``) and reducing its gradients (``"reduce"``, both FSDP2),
            to a bucket of gradients (``"bucket"``, DDP), to sending parameters that were updated (``"update"``, ZeRO-1), to a pass
            of a micro-batch in a pipeline (``"action"``), and a step of one (``"pipeline"``), to an all-reduce within a divided block
            (``"tensor"``). Empty where it runs beside the device's work.
    """

    name: str = "this machine"
    nodes: int = 1
    devices_per_node: int = 1
    device: str = "cpu"
    memory_bytes: float = 0.0
    speed: float = 1.0
    speed_is_estimate: bool = False
    links: dict[str, dict[str, Fit]] = field(default_factory=dict)
    overlap: float = 0.0
    interference: float = 1.0
    action_seconds: float = 0.001
    base_bytes: float = 0.0
    source: str = ""
    corrections: dict[str, float] = field(default_factory=dict)
    bucket_overlap: float = 1.0
    host_bytes_per_second: float = 0.0
    noise: float = 0.0
    added: dict[str, Added] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """How many in all."""
        return self.nodes * self.devices_per_node

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cluster:
        """The cluster of plain values; unknown names are refused."""
        unknown = sorted(set(values) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ArgumentError(f"a cluster has no {', '.join(unknown)}; it has {', '.join(f.name for f in dataclasses.fields(cls))}")
        links = {k: {scope: Fit(**fit) for scope, fit in by.items()} for k, by in (values.get("links") or {}).items()}
        added = {name: Added(**each) for name, each in (values.get("added") or {}).items()}
        return cls(**{**values, "links": links, "added": added})

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read YAML."""
        try:
            values = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise ArgumentError(f"cluster file {path} cannot be read: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise ArgumentError(f"{path} is not YAML: {error}") from None
        if not isinstance(values, dict):
            raise ArgumentError(f"{path} holds no cluster: expected YAML with names and values, as 'ronde bench cluster' writes")
        return cls.from_dict(values)
