"""A cluster as data: its devices, and collective times within and between nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from ronde.plan import fields, parse_reducer
from ronde.world import ArgumentError

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
Scope = Literal["node", "cluster"]
"""Inside one node, or over a group with workers on several."""


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A collective's fit ``seconds = alpha + bytes

    beta`` (Hockney 1994) at its measured group size.

    Attributes:
        alpha: seconds before the first byte.
        beta: bytes per second, of the whole tensor that each rank holds (all-reduce, broadcast,
            send), or that each rank ends with (all-gather) or begins with (reduce-scatter).
        ranks: group size it was measured at. Other sizes are scaled by the ring's formula.
        residual: relative error of the fit over its own points.
        assumed: whether it comes from a data sheet or a formula instead of a measurement.
        hop: seconds of a ring's step, where ``alpha`` has none in it and holds for groups of any
            size; 0 where ``alpha`` was measured and grows with the group.
    """

    alpha: float
    beta: float
    ranks: int = 2
    residual: float = 0.0
    assumed: bool = False
    hop: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        name: of the machine, or of its first node.
        nodes: how many.
        devices_per_node: workers that fit on one.
        device: kind, for example ``"cpu"``, ``"NVIDIA H100 80GB"``.
        memory_bytes: of one device.
        speed: how much faster a device runs this than the one the costs were measured on; 1 where
            it is the same.
        speed_is_estimate: whether ``speed`` comes from efficiency curves instead of a measurement.
        links: collective -> scope -> fit.
        overlap: share of an exchange that can hide behind computation, 0 to 1 (CPU and gloo: 0 for
            sharded parameters).
        interference: factor on computation while an exchange runs (1 = none).
        action_seconds: what the runtime adds to each forward or backward of a micro-batch in a
            pipeline.
        base_bytes: what a worker holds before any model.
        source: where the numbers come from.
        bucket_overlap: as ``overlap``, for the buckets of whole gradients that replicas exchange
            during the backward pass.
        host_bytes_per_second: between a device and the host's memory, for offload; 0 where not
            measured (then 12e9 is assumed).
        noise: relative disturbance seen while the links were measured, 0 to 1.
        launch_seconds: host time per operator, below which no pass can be; 0 where the costs were
            measured on this device.
        reserved: memory that the allocator holds beside a step's tensors, as a share of them.
        reducers: reducers other than the ring -> fit of averaging a bucket over all workers, from
            ``ronde bench exchange --cluster``.
    """

    name: str = "this machine"
    nodes: int = 1
    devices_per_node: int = 1
    device: str = "cpu"
    memory_bytes: float = 0.0
    speed: float = 1.0
    speed_is_estimate: bool = False
    links: dict[str, dict[str, LinkFit]] = field(default_factory=dict)
    overlap: float = 0.0
    interference: float = 1.0
    action_seconds: float = 0.0004  # on 2 cores, with gloo: benchmarks/plan_truth.py
    base_bytes: float = 0.0
    source: str = ""
    bucket_overlap: float = 1.0
    host_bytes_per_second: float = 0.0
    noise: float = 0.0
    launch_seconds: float = 0.0
    reserved: float = 0.0
    reducers: dict[str, LinkFit] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    def notes(self) -> list[str]:
        """Scopes whose links were not given: the other scope's are taken."""
        wanted = (
            ("node", self.devices_per_node, "inside a node"),
            ("cluster", self.nodes, "between nodes"),
        )
        return [
            f"no links {where} are given (scope {scope!r}): those of the other scope are taken"
            for scope, count, where in wanted
            if count > 1 and any(scope not in by for by in self.links.values())
        ]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "a cluster") -> Cluster:
        """Build from plain values.

        Args:
            values: as :meth:`to_dict` gives them, or as people write them.
            source: whose they are, for errors.

        Raises:
            ArgumentError: a name is not known, or a value cannot be meant: it names ``source``, the
                field, and what is expected.
        """
        fields.choose(source, "the field", values, _FIELDS)
        made: dict[str, Any] = {}
        for name, value in values.items():
            made[name] = _FIELDS[name](f"{source}: {name}", value)
        return cls(**made)

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read YAML."""
        return cls.from_dict(fields.read_file(path, "cluster", "'ronde bench cluster'"), str(path))


# What each field may be. A fit that cannot be meant, as one with a beta of 0, would make its
# exchange seem free.


def _links(where: str, value: Any) -> dict[str, dict[str, LinkFit]]:
    if value is None:  # "links:" with nothing below it
        return {}
    links: dict[str, dict[str, LinkFit]] = {}
    by_kind = fields.read_mapping(
        where, value, f"collectives with their fits: {', '.join(_COLLECTIVES)}"
    )
    fields.choose(where, "the collective", by_kind, _COLLECTIVES)
    for kind, scopes in by_kind.items():
        at = f"{where}.{kind}"
        by_scope = fields.read_mapping(at, scopes, "a fit under node, under cluster, or under both")
        if not by_scope:
            raise ArgumentError(
                f"{at} is empty: expected a fit under node, under cluster, or under both."
            )
        fields.choose(at, "the scope", by_scope, get_args(Scope))
        links[kind] = {scope: _fit(f"{at}.{scope}", fit) for scope, fit in by_scope.items()}
    if links and (absent := [kind for kind in _COLLECTIVES if kind not in links]):
        raise ArgumentError(
            f"{where} lacks {', '.join(absent)}: give a fit of every collective, as 'ronde bench "
            "cluster' writes, or no links at all."
        )
    return links


def _reducers(where: str, value: Any) -> dict[str, LinkFit]:
    if value is None:
        return {}
    by_name = fields.read_mapping(where, value, "reducers with their fits")
    for name in by_name:
        try:
            parse_reducer(str(name))
        except ArgumentError as error:
            raise ArgumentError(f"{where}: {error}") from None
    return {str(name): _fit(f"{where}.{name}", fit) for name, fit in by_name.items()}


def _fit(where: str, value: Any) -> LinkFit:
    given = fields.read_mapping(
        where, value, "a fit: alpha in seconds, beta in bytes a second, and the ranks it holds for"
    )
    fields.choose(where, "the field", given, _FIT)
    for name in ("alpha", "beta"):
        if name not in given:
            meaning = "seconds before the first byte" if name == "alpha" else "bytes per second"
            raise ArgumentError(f"{where} has no {name}. Expected {meaning}.")
    return LinkFit(**{name: _FIT[name](f"{where}.{name}", each) for name, each in given.items()})


_COLLECTIVES = get_args(Collective)
_SECONDS = fields.read_number("a number of seconds, 0 or more")
_SHARE = fields.read_number("a number from 0 to 1", most=1.0)
_FACTOR = fields.read_number("a number above 0", above=True)
_RATIO = fields.read_number("a number, 0 or more")
_FIT: dict[str, fields.Reader] = {
    "alpha": _SECONDS,
    "beta": fields.read_number("a number of bytes a second, above 0", above=True),
    "ranks": fields.read_whole(2),
    "residual": _RATIO,
    "assumed": fields.read_flag,
    "hop": _SECONDS,
}
_FIELDS: dict[str, fields.Reader] = {
    "name": fields.read_text,
    "nodes": fields.read_whole(),
    "devices_per_node": fields.read_whole(),
    "device": fields.read_text,
    "memory_bytes": fields.read_bytes,
    "speed": _FACTOR,
    "speed_is_estimate": fields.read_flag,
    "links": _links,
    "overlap": _SHARE,
    "interference": fields.read_number("a number, 1 or more", least=1.0),
    "action_seconds": _SECONDS,
    "base_bytes": fields.read_bytes,
    "source": fields.read_text,
    "bucket_overlap": _SHARE,
    "host_bytes_per_second": fields.read_number("a number of bytes a second, 0 or more"),
    "noise": _RATIO,
    "launch_seconds": _SECONDS,
    "reserved": _SHARE,
    "reducers": _reducers,
}
