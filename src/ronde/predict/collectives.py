"""Collective times over a group of workers, and where each group of a layout sits.

A fit is scaled to another group size by the ring formula (Patarasu and Yuan 2009; Thakur et al.
2005): n − 1 hops, and (n − 1)/n of the tensor over each link (twice both for an all-reduce, which
cancels in the ratio). On GPUs, an all-reduce's hops grow as log2 n if that is less, because NCCL
uses trees for small messages; gathers and scatters have no trees. A broadcast's hops grow as log2
n. A data sheet's fit has its hops apart (``LinkFit.hop``): those inside nodes are cheaper.

Fits across nodes are for groups with every device of each node. Groups with fewer members per node
share the node's link with groups that exchange at the same time, so their bytes take proportionally
longer. A send between nodes gets one device's share while all devices of its node send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ronde.plan.plan import Layout
from ronde.predict.cluster import Cluster, Collective, LinkFit, Scope


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of a collective over a group: ``alpha + seconds_per_byte * bytes``."""

    alpha: float = 0.0
    seconds_per_byte: float = 0.0

    def __call__(self, size: float) -> float:
        """Seconds for so many bytes."""
        return self.alpha + self.seconds_per_byte * size if size > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that exchange with each other, and where they sit.

    Attributes:
        ranks: how many.
        scope: inside one node, or over several.
        per_node: members in each node.
        sisters: groups of the same kind that share a node's link.
    """

    ranks: int
    scope: Scope
    per_node: int
    sisters: int

    def sentence(self) -> str:
        """Where the group sits, in words."""
        if self.ranks == 1:
            return "alone"
        if self.scope == "node":
            return f"{self.ranks} inside a node"
        return f"{self.ranks} across nodes, {self.per_node} in each"


def scaled(
    fit: LinkFit, kind: Collective, ranks: int, device: str, sharing: float = 1.0
) -> CollectiveCost:
    """A fit at another group size."""
    if ranks <= 1:
        return CollectiveCost()
    measured = max(2, fit.ranks)
    per_byte = sharing / fit.beta if fit.beta else 0.0
    if kind == "send":
        return CollectiveCost(fit.alpha, per_byte)
    logarithmic = math.log2(ranks) / math.log2(measured)
    if kind == "broadcast":
        return CollectiveCost(fit.alpha * logarithmic, per_byte)
    hops = (ranks - 1) / (measured - 1)
    if device != "cpu" and ranks > measured and kind == "all_reduce":
        hops = min(hops, logarithmic)
    volume = ((ranks - 1) / ranks) / ((measured - 1) / measured)
    if fit.hop:  # its alpha holds for any size; the hops come on top
        hops = 1.0
    return CollectiveCost(fit.alpha * hops, per_byte * volume)


def collective(cluster: Cluster, kind: Collective, group: Group) -> CollectiveCost:
    """Cost of ``kind`` over ``group``.

    A missing scope uses the other scope's fit. Without any fit, the exchange is free.
    """
    by_scope = cluster.links.get(kind, {})
    fit = by_scope.get(group.scope) or next(iter(by_scope.values()), None)
    if group.ranks <= 1 or fit is None:
        return CollectiveCost()
    sharing = float(group.sisters) if group.scope == "cluster" else 1.0
    link = scaled(fit, kind, group.ranks, cluster.device, sharing)
    hops = _hop_seconds(by_scope, kind, group)
    return CollectiveCost(link.alpha + hops, link.seconds_per_byte)


def _hop_seconds(by_scope: dict[str, LinkFit], kind: Collective, group: Group) -> float:
    """Seconds of a ring's steps, where the fits have them apart.

    Between nodes an all-reduce goes up and down a tree, whose depth is logarithmic.
    """
    near, far = (by_scope[s].hop if s in by_scope else 0.0 for s in ("node", "cluster"))
    nodes = math.ceil(group.ranks / group.per_node) if group.scope == "cluster" else 1
    if kind == "all_reduce":
        return 2.0 * math.ceil(math.log2(nodes)) * far
    if kind in ("all_gather", "reduce_scatter"):
        return (nodes - 1) * far + (group.ranks - nodes) * near
    return 0.0


def groups(layout: Layout, cluster: Cluster, shard_within: int | None = None) -> dict[str, Group]:
    """The groups of a layout: ``"tensor"``, ``"replicas"``, ``"shard"`` and ``"copies"`` (hybrid
    sharding), ``"stages"``.

    ``"stages"`` is two neighboring stages, with a node boundary between them if any pair has one.

    Example:
        >>> at = groups(Layout(pipeline=2, replicas=4, tensor=2), Cluster(nodes=2,
        ...     devices_per_node=8))
        >>> at["tensor"].sentence(), at["replicas"].sentence(), at["stages"].sentence()
        ('2 inside a node', '4 inside a node', '2 across nodes, 1 in each')
    """
    node = _node(layout, cluster)
    within = min(shard_within or layout.replicas, layout.replicas)
    crossing = [_boundary_crosses(layout, node, p) for p in range(layout.pipeline - 1)]
    if any(crossing):
        stages = Group(2, "cluster", 1, 1)
    else:
        stages = Group(min(2, layout.pipeline), "node", min(2, layout.pipeline), 1)
    return {
        "tensor": _group(layout.tensor, 1, node),
        "replicas": _group(layout.replicas, layout.tensor, node),
        "shard": _group(within, layout.tensor, node),
        "copies": _group(layout.replicas // within, layout.tensor * within, node),
        "stages": stages,
    }


def _group(ranks: int, stride: int, node: int) -> Group:
    """``ranks`` workers at distance ``stride``."""
    if ranks <= 1:
        return Group(1, "node", 1, 1)
    span = ranks * stride
    if span <= node and node % span == 0:
        return Group(ranks, "node", ranks, 1)
    per_node = max(1, min(ranks, node // stride))
    return Group(ranks, "cluster", per_node, max(1, node // per_node))


def _node(layout: Layout, cluster: Cluster) -> int:
    """Workers per node; all of them if they fit into one."""
    return min(max(1, cluster.devices_per_node), layout.size)


def _boundary_crosses(layout: Layout, node: int, place: int, after: int | None = None) -> bool:
    block = layout.replicas * layout.tensor
    to = place + 1 if after is None else after
    if layout.size <= node:
        return False
    return block >= node or node % block != 0 or (place * block) // node != (to * block) // node


def boundary_crosses(layout: Layout, cluster: Cluster, place: int, after: int) -> bool:
    """Whether a send from pipeline place ``place`` to ``after`` leaves the node."""
    return place != after and _boundary_crosses(layout, _node(layout, cluster), place, after)
