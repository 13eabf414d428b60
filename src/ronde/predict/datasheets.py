"""Devices known from data sheets only, and the rule that scales computation to them.

Everything derived from here is an estimate, and marked as one. Peaks are dense bf16; bandwidths are
per device and direction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ronde.predict.cluster import Cluster, LinkFit
from ronde.predict.costs import Costs
from ronde.world import ArgumentError

LINK_SHARE = 0.8
"""Part of a link's data-sheet bandwidth that a collective reaches, assumed."""
_MEMORY_SHARE = 0.8  # the same of its memory's bandwidth
_WARM_SECONDS = 20e-6  # of each unit, whatever its size: launches, small matrices
_ALPHA_NODE, _ALPHA_WIDE = 15e-6, 40e-6


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device, from its data sheet.

    Attributes:
        name: as people say it.
        flops_per_second: dense bf16 peak.
        memory_bytes: of it.
        memory_bytes_per_second: its bandwidth.
        link_bytes_per_second: to the other devices of its node.
        network_bytes_per_second: its share of what leaves the node, in the maker's reference
            system.
        per_node: devices of a node, in that system.
        reached: part of the peak that large matrix products reach inside of a training step:
            assumed, per generation.
    """

    name: str
    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    per_node: int
    reached: float


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("A100-40GB", 312e12, 40 * 2**30, 1.555e12, 300e9, 25e9, 8, 0.70),
        Device("A100-80GB", 312e12, 80 * 2**30, 2.039e12, 300e9, 25e9, 8, 0.70),
        Device("H100-80GB", 989e12, 80 * 2**30, 3.35e12, 450e9, 50e9, 8, 0.60),
        Device("H200", 989e12, 141e9, 4.8e12, 450e9, 50e9, 8, 0.60),
        Device("B200", 2250e12, 180e9, 8.0e12, 900e9, 50e9, 8, 0.55),
        Device("GB200", 2500e12, 186e9, 8.0e12, 900e9, 50e9, 72, 0.55),
    )
}
"""By name. Sources: NVIDIA's data sheets of A100, H100, H200, B200 and GB200 NVL72, and of DGX
systems for the network.
"""


def device_named(name: str) -> Device:
    """Find a device by name: ``"H100"``, ``"NVIDIA H100 80GB HBM3"``, ``"a100-40gb"``.

    Raises:
        ArgumentError: none is meant.

    Example:
        >>> device_named("NVIDIA A100-SXM4-40GB").name, device_named("gb200").name
        ('A100-40GB', 'GB200')
    """
    plain = name.upper().replace(" ", "").replace("-", "")
    for family in ("GB200", "B200", "H200", "H100", "A100"):
        if re.search(rf"(?<![A-Z0-9]){family}(?!\d)", name.upper()):
            kinds = [d for d in DEVICES.values() if d.name.startswith(family)]
            return next((d for d in kinds if "40" in plain and "40" in d.name), kinds[-1])
    raise ArgumentError(
        f"device {name!r} is not known: choose one of {', '.join(DEVICES)}, or measure the "
        "cluster with 'ronde bench cluster'."
    )


def unit_seconds(device: Device, flops: float, moved_bytes: float = 0.0) -> float:
    """Estimate a unit's forward time: products at ``reached`` of peak, memory traffic at 80 %, and
    20 µs.

    The two add up, because elementwise work mostly runs in separate kernels.
    """
    products = flops / (device.flops_per_second * device.reached)
    return products + moved_bytes / (device.memory_bytes_per_second * _MEMORY_SHARE) + _WARM_SECONDS


def efficiency(device: Device, flops: float, moved_bytes: float = 0.0) -> float:
    """Fraction of peak that a unit reaches under :func:`unit_seconds`.

    Example:
        >>> round(efficiency(DEVICES["H100-80GB"], 1e13),
        ...     2), round(efficiency(DEVICES["H100-80GB"], 1e9), 2)
        (0.6, 0.05)
    """
    return flops / device.flops_per_second / unit_seconds(device, flops, moved_bytes)


def speed_of(device: Device, costs: Costs, samples: int = 0) -> float:
    """Estimate how much faster ``device`` runs a measured model than the measured device:
    :attr:`Cluster.speed`.

    Args:
        device: which.
        costs: measured, with ``flops`` in their units.
        samples: micro-batch to compare at; 0 for the largest one measured.

    Raises:
        ArgumentError: no unit's operations are known.
    """
    at = samples or max(costs.measured_samples, default=1)
    seconds = there = 0.0
    for unit in costs.units:
        work = unit.flops * at
        if work > 0:
            seconds += unit.forward_seconds.at(at)
            # what is kept was written, and read by the next
            there += unit_seconds(device, work, 2.0 * unit.saved_bytes.at(at))
    if seconds <= 0 or there <= 0:
        raise ArgumentError(
            "the model's floating-point operations are not known, so its speed on another "
            "device cannot be estimated."
        )
    return seconds / there


def cluster_of(name: str, nodes: int = 1, per_node: int = 0, costs: Costs | None = None) -> Cluster:
    """A cluster of devices known from a data sheet.

    Args:
        name: of the device.
        nodes: how many.
        per_node: devices of each; 0 for the maker's reference system.
        costs: measured elsewhere, to be scaled; None where they are of this device already.

    Raises:
        ArgumentError: the device is not known.

    Example:
        >>> made = cluster_of("H100", nodes=4)
        >>> made.devices, made.links["all_reduce"]["node"].assumed
        (32, True)
    """
    device = device_named(name)
    per_node = per_node or device.per_node
    near = device.link_bytes_per_second * LINK_SHARE
    wide = (
        min(device.link_bytes_per_second, per_node * device.network_bytes_per_second) * LINK_SHARE
    )
    links: dict[str, dict[str, LinkFit]] = {}
    for kind, passes in (
        ("all_reduce", 2.0),
        ("all_gather", 1.0),
        ("reduce_scatter", 1.0),
        ("broadcast", 1.0),
    ):
        links[kind] = {}
        for scope, ranks, rate, alpha in (
            ("node", max(2, per_node), near, _ALPHA_NODE),
            ("cluster", 2 * per_node, wide, _ALPHA_WIDE),
        ):
            volume = passes * (ranks - 1) / ranks if kind != "broadcast" else 1.0
            links[kind][scope] = LinkFit(alpha, rate / volume, ranks, assumed=True)
    links["send"] = {
        "node": LinkFit(_ALPHA_NODE, near, 2, assumed=True),
        "cluster": LinkFit(
            _ALPHA_WIDE, device.network_bytes_per_second * LINK_SHARE, 2, assumed=True
        ),
    }
    return Cluster(
        name=f"{device.name} (data sheet)",
        nodes=nodes,
        devices_per_node=per_node,
        device=device.name,
        memory_bytes=device.memory_bytes,
        speed=speed_of(device, costs) if costs is not None else 1.0,
        speed_is_estimate=True,
        links=links,
        overlap=0.9,
        interference=1.15,
        action_seconds=50e-6,
        base_bytes=2e9,
        source="data sheet, links at 80 %",
        host_bytes_per_second=20e9,
    )
