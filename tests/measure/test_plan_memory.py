"""Memory of plans: predicted against real workers, and by hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cost_models import PEAKS, tokens_loss, words
from planned import counted
from processes import TESTS
from ronde.measure.cost_lines import most
from ronde.measure.memory_account import weigh
from ronde.plan import Plan
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.predict import predict
from ronde.run.losses import LossCall
from sampling import long, some
from tiny_models import TiedGPT

LINUX = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="a process's peak is read from Linux's /proc"
)


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location(
        "plan_memory", TESTS.parent / "benchmarks" / "plan_memory.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_memory"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mlp(bench):
    return bench.weighed("mlp")


def need(costs, **plan):
    """Sum without the base, and kinds."""
    found = predict(Plan(**plan), costs, Cluster(device="some GPU"))
    return found.memory_bytes, found.memory


def units(*sizes, saved=0):
    return tuple(
        Unit(
            f"layers.{i}",
            parameter_bytes=n,
            trainable_bytes=n,
            optimizer_bytes=2 * n,
            saved_bytes=LinearCost(0, saved),
            block=f"layers.{i}",
        )
        for i, n in enumerate(sizes)
    )


def test_micro_batches_of_replicas_hold_gradients_twice_and_the_newest_once_more():
    costs = Costs(units(100, 300), 8)
    # buckets, and a gradient before it is copied into them
    assert need(costs, workers=2, batch_size=8)[0] == 400 * 4 + 300
    assert need(costs, workers=2, batch_size=8, micro_batch=1)[0] == 400 * 5 + 300
    assert need(costs, workers=1, batch_size=8)[0] == 400 * 4


def test_sharded_blocks_are_gathered_ahead_and_reduced_from_a_buffer():
    costs = Costs(units(100, 100, 100, 100), 8)
    # The first block's backward pass: its own, its gradients, the gradients of the next in a
    # buffer, and parts of three blocks' gradients. The second block's: two gathered, its gradients,
    # those of the next, and parts of two.
    total, kinds = need(costs, workers=2, batch_size=8, shard="parameters")
    assert total == 400 * 3 / 2 + (100 + 100 + 100 + 100) + 100 and kinds["optimizer"] == 400
    # Kept gathered: three blocks, the third one's gradients and those of the fourth in a buffer,
    # and its part of these.
    total, _ = need(costs, workers=2, batch_size=8, shard="gradients")
    assert total == 400 * 3 / 2 + 300 + 100 + 100 + 50


def test_what_two_stages_of_one_worker_share_is_held_once():
    tied = {"tied": ("a.weight",), "tied_bytes": 100}
    first = Unit("a", parameter_bytes=100, trainable_bytes=100, optimizer_bytes=200, **tied)
    rest = [
        Unit(name, parameter_bytes=10, trainable_bytes=10, optimizer_bytes=20) for name in "bcd"
    ]
    last = Unit("e", **tied)
    split = {
        "workers": 2,
        "batch_size": 8,
        "pipeline": 2,
        "virtual": 2,
        "micro_batch": 1,
        "schedule": "interleaved",
    }
    b, c, d = rest
    # the first and the third stage are one worker's, the second and the last the other's
    turns = need(Costs((first, b, last, c, d), 8), **split, split_at=("b", "e", "c"))[1]
    assert (turns["parameters"], turns["gradients"], turns["optimizer"]) == (100, 100, 200)
    around = need(Costs((first, b, c, d, last), 8), **split, split_at=("b", "c", "e"))[1]
    assert (around["parameters"], around["gradients"], around["optimizer"]) == (120, 120, 240)


def test_blocks_that_are_computed_again_are_counted_as_they_are(bench):
    costs = bench.weighed("unet")
    by_name = {u.name: u for u in costs.units}
    assert (
        costs.again == ("selective", "full")
        and by_name["down.0.1"].block == "down.0"
        and by_name["middle.2"].block == "middle"
    )
    assert not by_name["up.0"].recomputed  # one layer keeps nothing but its input
    # The skips are inputs of several blocks, and are held once.
    held = {
        level: need(costs, workers=1, batch_size=16, recompute=level)[1]["activations"]
        for level in ("none", "full")
    }
    skips = sum(by_name[f"down.{i}.3"].saved_bytes.at(16) for i in range(3))
    assert skips < held["full"] < held["none"]
    # No stage begins within a block that is computed again.
    assert "down.0.1" in {u.name for u in costs.units if u.cut_after}
    for stages in (2, 4):
        plan = Plan(workers=stages, batch_size=16, pipeline=stages, micro_batch=2, recompute="full")
        begin = predict(plan, costs, Cluster(devices_per_node=stages)).split_at
        assert not [
            name
            for name in begin
            if by_name[name].block
            and name != next(u.name for u in costs.units if u.block == by_name[name].block)
        ]


def test_a_divided_block_keeps_its_input_and_its_output_whole():
    unit = Unit(
        "layers.0",
        saved_bytes=LinearCost(0, 100),
        tensor=1.0,
        tensor_reduce_bytes=LinearCost(0, 10),
    )
    costs = counted(Costs((unit,), 4))
    assert need(costs, workers=2, batch_size=1, tensor=2)[1]["activations"] == 60


def test_the_chain_adds_up_to_the_whole_that_torchs_own_tracker_finds(bench):
    model = TiedGPT(width=64, layers=3)
    optimizer = torch.optim.AdamW(model.parameters())
    compute = LossCall(tokens_loss, None)
    costs = weigh(model, optimizer, compute, words, 32)
    for b in (8, 32):
        # it rounds up to 512 bytes
        assert bench.chain_peak(costs, b) == pytest.approx(
            bench.tracked_peak(model, optimizer, compute, words(b)), rel=0.05
        )
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@LINUX
@pytest.mark.parametrize("name", some(list(PEAKS), 2))
def test_predicted_peak_against_that_of_a_process(bench, name):
    build, shape, samples = PEAKS[name]
    model = build()

    def batches(b):
        return torch.randn(b, *shape), torch.randint(10, (b,))

    costs = weigh(
        model,
        torch.optim.AdamW(model.parameters()),
        LossCall(F.cross_entropy, None),
        batches,
        samples,
    )
    predicted = bench.chain_peak(costs, samples)
    target = f"{(TESTS / 'cost_models.py')}:train"
    measured = bench.measured_peak(target, name)
    assert measured > 140 << 20
    assert predicted == pytest.approx(measured, rel=0.08)


@long
@LINUX
@pytest.mark.parametrize(("name", "samples"), some([("repeated", 64), ("checkpointed", 32)], 2))
def test_one_device_takes_what_the_chain_says_of_own_checkpoints_and_of_repeated_blocks(
    bench, name, samples
):
    measured = bench.measured_peak(f"{bench.HERE}:one_device", name, samples, timeout=200)
    assert abs(bench.predict_one_device(name, samples)["chain"] / measured - 1) < 0.04


def test_what_is_needed_at_most_is_never_below_what_was_weighed():
    def needed(b):
        return float(max(100 + b, 4 * b, 20 * b - 640))  # three moments

    peak = most([(b, needed(b)) for b in (2, 16, 64)])
    assert [peak.at(b) for b in (2, 64)] == pytest.approx([needed(2), needed(64)])
    assert all(peak.at(b) >= needed(b) - 1e-9 for b in range(2, 65))
    rising = most([(8, 10.0), (64, 500.0)])  # gradients outweigh what little few samples need
    assert rising.at(8) >= 10 and rising.at(64) == pytest.approx(500)
    assert most([(8, 45.0), (64, 0.0)]) == LinearCost(45.0, 0.0)
    assert most([(4, 12.0)]) == LinearCost(0.0, 3.0)


def weighed_small(bench, name: str):
    model, data = bench.sized(name, 8, True)
    return weigh(
        model,
        torch.optim.SGD(model.parameters()),
        LossCall(F.cross_entropy, None),
        lambda n: data[:n],
        8,
        sizes=[2],
    )


def test_blocks_that_run_several_times_are_noted(bench):
    assert any("several times" in note for note in weighed_small(bench, "in turns").notes)
    assert not any("several times" in note for note in weighed_small(bench, "mlp").notes)
