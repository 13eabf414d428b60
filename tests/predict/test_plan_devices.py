"""Devices known from data sheets: what a model's work would take there, unit by unit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ronde import ArgumentError
from ronde.measure.memory_account import weigh
from ronde.plan import Plan
from ronde.predict.collectives import Group
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.datasheets import DEVICES, cluster_of, device_named
from ronde.predict.predict import Predictor, predict
from ronde.run.losses import LossCall

H100 = DEVICES["H100-80GB"]


def block(name, flops, operations=100, moved=0.0, **more):
    return Unit(
        name,
        flops=flops,
        operations=operations,
        moved_bytes=LinearCost(0, moved),
        tensor=1.0,
        **more,
    )


def passes(costs, workers=1, **more):
    """Forward seconds of each unit on H100s, without messages."""
    cluster = cluster_of("H100")
    plan = Plan(workers, costs.batch_size, tensor=workers, **more)
    found = Predictor(costs, cluster).chain_of(plan, 1, Group(workers, "node", workers, 1))
    return found.forward - found.reduce / 2


def test_devices_are_found_by_name_and_unknown_work_is_refused():
    assert device_named("NVIDIA A100-SXM4-40GB").name == "A100-40GB"
    assert device_named("NVIDIA H100 80GB HBM3").name == "H100-80GB"
    with pytest.raises(ArgumentError, match="is not known"):
        device_named("abacus")
    with pytest.raises(ArgumentError, match="operations are not known"):
        cluster_of("H100", costs=Costs((Unit("a", LinearCost(0, 1.0)),), 8))


def test_a_pass_is_never_shorter_than_the_launch_of_its_operators():
    small, large = block("small", 1e6), block("large", 1e13)
    costs = Costs((small, large), 8)
    one, eight = passes(costs), passes(costs, 8)
    # 100 operators of 8 µs, whatever the number of tensor-parallel workers.
    assert one[0] == pytest.approx(100 * 8e-6) and eight[0] == one[0]
    assert eight[1] == pytest.approx(one[1] / 8)
    # Unit by unit: three small ones take three times as long as one.
    assert passes(Costs((small,) * 3, 8)).sum() == pytest.approx(3 * one[0])
    # Micro-batch by micro-batch: four take four times as long, where launches decide.
    cluster = cluster_of("H100")
    whole = predict(Plan(1, 8), Costs((small,), 8), cluster).terms["compute"]
    parts = predict(Plan(1, 8, micro_batch=2), Costs((small,), 8), cluster).terms["compute"]
    assert parts == pytest.approx(4 * whole)


def test_three_dimensions_are_predicted_with_interleaved_stages():
    message = LinearCost(0, 1e7)
    more = {"crossing_bytes": message, "crossing_grad_bytes": message}
    more |= {"tensor_reduce_bytes": message, "parameter_bytes": 10**8, "trainable_bytes": 10**8}
    units = tuple(block(f"layers.{i}", 1e12, 50, 1e8, **more) for i in range(16))
    costs, cluster = Costs(units, 256), cluster_of("H100", nodes=8)
    common = {"pipeline": 4, "tensor": 4, "micro_batch": 1}
    plain, interleaved, sharded = (
        predict(Plan(64, 256, **common, **kinds), costs, cluster)
        for kinds in (
            {"schedule": "1f1b"},
            {"schedule": "interleaved", "virtual": 2},
            {"schedule": "1f1b", "shard": "optimizer"},
        )
    )
    assert plain.terms["tensor"] > 0 and plain.terms["exchange"] > 0
    assert interleaved.bubble < plain.bubble
    assert sharded.placement["replicas"] == "4 across nodes, 2 in each"
    # A quarter of a quarter of the weights, and the optimizer's part of a replica.
    assert plain.memory["parameters"] == pytest.approx(16 * 1e8 / 16)


class Attention(nn.Module):
    def __init__(self, hidden=64, heads=8, causal=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm, self.heads, self.causal = nn.LayerNorm(hidden), heads, causal

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (p.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for p in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(found.transpose(1, 2).reshape(x.shape))


def counted(model, precision=torch.bfloat16, sequence=32, hidden=64):
    def batches(count):
        return torch.randn(count, sequence, hidden), torch.randn(count, sequence, hidden)

    def autocast():
        return torch.autocast("cpu", precision, enabled=precision != torch.float32)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return weigh(model, optimizer, LossCall(F.mse_loss, None), batches, 4, autocast=autocast)


def test_work_is_counted_by_its_kinds():
    hidden, sequence = 64, 32
    model = nn.Sequential(Attention(), Attention())
    unit = counted(model).units[0]
    scores = 4 * sequence * sequence * hidden
    dense = 8 * sequence * hidden * hidden
    assert unit.attention_flops == scores / 2 and unit.flops == dense + scores / 2
    assert unit.vector_flops == 0 and 10 <= unit.operations <= 60
    # Norm, residual and casts of 2 to 4 bytes: some tens of bytes per value.
    assert 15 <= unit.moved_bytes.per_sample / (sequence * hidden) <= 120
    whole = counted(nn.Sequential(Attention(causal=False), Attention(causal=False))).units[0]
    assert whole.attention_flops == scores and whole.flops == dense + scores
    # Without tensor cores: all products in fp32, and those of odd sizes in 16 bits.
    single = counted(model, torch.float32).units[0]
    assert single.vector_flops == single.flops and single.attention_flops == 0
    odd = counted(nn.Sequential(nn.Linear(64, 60), nn.Linear(60, 64))).units[0]
    assert odd.vector_flops == odd.flops == 2 * sequence * 64 * 60
    again = Costs.from_dict(counted(model).to_dict()).units[0]
    assert again == unit
