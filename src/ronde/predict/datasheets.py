"""Devices known from data sheets only, and the rules that put a model's work on them.

Everything derived from here is an estimate, and marked as one. Peaks are dense; bandwidths are per
device and direction. The rules are applied unit by unit, and to each micro-batch.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from ronde.predict.cluster import Cluster, LinkFit
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.world import ArgumentError

LINK_SHARE = 0.8
"""Part of a link's data-sheet bandwidth that a collective reaches, assumed."""
LAUNCH_SECONDS = 8e-6
"""Host time to dispatch and launch one operator from Python, assumed: no pass is faster."""
OVERLAP_SHARE = 0.9
"""Part of an exchange that can hide behind computation on an accelerator, assumed."""
INTERFERENCE_FACTOR = 1.15
"""How much longer computation takes there while an exchange runs, assumed."""
_MEMORY_SHARE = 0.8  # of the memory's bandwidth
_BACKWARD_FACTOR = 2.0  # times the forward pass: work, traffic, and operators


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
        attention: the same of fused attention.
        vector_flops_per_second: fp32 peak without tensor cores.
    """

    name: str
    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    per_node: int
    reached: float
    attention: float
    vector_flops_per_second: float


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("A100-40GB", 312e12, 40 * 2**30, 1.555e12, 300e9, 25e9, 8, 0.74, 0.5, 19.5e12),
        Device("A100-80GB", 312e12, 80 * 2**30, 2.039e12, 300e9, 25e9, 8, 0.74, 0.5, 19.5e12),
        Device("H100-80GB", 989e12, 80 * 2**30, 3.35e12, 450e9, 50e9, 8, 0.62, 0.28, 67e12),
        Device("H200", 989e12, 141e9, 4.8e12, 450e9, 50e9, 8, 0.62, 0.28, 67e12),
        Device("B200", 2250e12, 180e9, 8.0e12, 900e9, 50e9, 8, 0.57, 0.28, 80e12),
        Device("GB200", 2500e12, 186e9, 8.0e12, 900e9, 50e9, 72, 0.57, 0.28, 80e12),
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


def pass_seconds(
    device: Device,
    flops: float,
    moved_bytes: float = 0.0,
    attention_flops: float = 0.0,
    vector_flops: float = 0.0,
) -> float:
    """Estimate a forward pass's time on the device: products, attention and memory traffic, each at
    its own rate.

    They add up, because they mostly run in separate kernels. ``attention_flops`` and
    ``vector_flops`` are parts of ``flops``.

    Example:
        >>> round(pass_seconds(DEVICES["H100-80GB"], 1e12) * 1e3, 2)
        1.63
    """
    products = (flops - attention_flops - vector_flops) / device.reached
    return (
        (products + attention_flops / device.attention) / device.flops_per_second
        + vector_flops / (device.vector_flops_per_second * 0.5)
        + moved_bytes / (device.memory_bytes_per_second * _MEMORY_SHARE)
    )


def costs_on(costs: Costs, device: Device) -> Costs:
    """The costs of a model as the device would have them, from its counted work.

    Args:
        costs: counted or measured elsewhere.
        device: which.

    Raises:
        ArgumentError: no unit's operations are known.
    """
    if not any(unit.flops > 0 for unit in costs.units):
        raise ArgumentError(
            "the model's floating-point operations are not known, so its speed on another "
            "device cannot be estimated."
        )
    at = max(costs.measured_samples, default=1)
    here = sum(u.forward_seconds.at(at) for u in costs.units)
    units = tuple(_unit_on(unit, device) for unit in costs.units)
    there = sum(u.forward_seconds.at(at) for u in units)
    faster = there / here if here > 0 else 1.0

    def scaled(line: LinearCost) -> LinearCost:
        return LinearCost(line.fixed * faster, line.per_sample * faster)

    size = sum(u.trainable_bytes + 0.5 * u.optimizer_bytes for u in costs.units)
    rate = device.memory_bytes_per_second * _MEMORY_SHARE
    return dataclasses.replace(
        costs,
        units=units,
        optimizer_seconds=size / 2.0 * 7.0 / rate,
        clip_seconds=0.0,
        accumulate_seconds=3.0 * sum(u.trainable_bytes for u in costs.units) / rate,
        again_seconds={
            level: scaled(line) for level, line in costs.again_seconds.items() if level != "full"
        },
        noise=0.0,
        device=device.name,
    )


def _unit_on(unit: Unit, device: Device) -> Unit:
    """A unit with its passes' seconds on a device, and the share of them that tensor parallelism
    divides.
    """
    moved = unit.moved_bytes if unit.operations else unit.saved_bytes.times(2.0)
    work = pass_seconds(device, unit.flops, 0.0, unit.attention_flops, unit.vector_flops)
    traffic = pass_seconds(device, 0.0, 1.0)
    forward = LinearCost(moved.fixed * traffic, moved.per_sample * traffic + work)
    again = pass_seconds(device, unit.attention_flops, 0.0, unit.attention_flops)
    again *= 2.5 - _BACKWARD_FACTOR  # fused attention computes its scores again
    divided = unit.tensor * work
    halves = unit.tensor_moved_bytes.per_sample
    # What half a block less moves is what two workers share.
    shared = 2.0 * (moved.per_sample - halves) if halves else unit.tensor * moved.per_sample
    divided += min(moved.per_sample, max(0.0, shared)) * traffic
    return dataclasses.replace(
        unit,
        forward_seconds=forward,
        backward_seconds=forward.times(_BACKWARD_FACTOR) + LinearCost(0.0, again),
        tensor_time=divided / forward.per_sample if forward.per_sample else 0.0,
    )


def cluster_of(
    name: str,
    nodes: int = 1,
    per_node: int = 0,
    costs: Costs | None = None,
    network: float = 0.0,
) -> Cluster:
    """A cluster of devices known from a data sheet.

    Args:
        name: of the device.
        nodes: how many.
        per_node: devices of each; 0 for the maker's reference system.
        costs: of the model to plan, to be refused where its work is not known.
        network: bytes per second and device of the network between nodes; 0 for the maker's
            reference system.

    Raises:
        ArgumentError: the device is not known, or the model's work is not.

    Example:
        >>> made = cluster_of("H100", nodes=4)
        >>> made.devices, made.links["all_reduce"]["node"].assumed
        (32, True)
    """
    device = device_named(name)
    if costs is not None:
        costs_on(costs, device)
    per_node = per_node or device.per_node
    network = network or device.network_bytes_per_second
    near = device.link_bytes_per_second * LINK_SHARE
    wide = min(device.link_bytes_per_second, per_node * network) * LINK_SHARE
    links: dict[str, dict[str, LinkFit]] = {}
    for kind, passes in (
        ("all_reduce", 2.0),
        ("all_gather", 1.0),
        ("reduce_scatter", 1.0),
        ("broadcast", 1.0),
    ):
        links[kind] = {}
        for scope, ranks, rate, alpha, hop in (
            # launch and meet: 45-70 us for groups of 2 to 8; hops of a ring: NCCL's own figures
            ("node", max(2, per_node), near, 55e-6, 3.4e-6),
            ("cluster", 2 * per_node, wide, 60e-6, 14e-6),
        ):
            volume = passes * (ranks - 1) / ranks if kind != "broadcast" else 1.0
            links[kind][scope] = LinkFit(alpha, rate / volume, ranks, assumed=True, hop=hop)
    links["send"] = {
        "node": LinkFit(30e-6, near, 2, assumed=True),
        "cluster": LinkFit(50e-6, network * LINK_SHARE, 2, assumed=True),
    }
    return Cluster(
        name=f"{device.name} (data sheet)",
        nodes=nodes,
        devices_per_node=per_node,
        device=device.name,
        memory_bytes=device.memory_bytes,
        speed_is_estimate=True,
        links=links,
        overlap=OVERLAP_SHARE,
        interference=INTERFERENCE_FACTOR,
        action_seconds=50e-6,
        base_bytes=4e9,  # context, NCCL's buffers
        reserved=0.06,  # the allocator's fragments
        source="data sheet, links at 80 %",
        host_bytes_per_second=20e9,
        launch_seconds=LAUNCH_SECONDS,
    )
