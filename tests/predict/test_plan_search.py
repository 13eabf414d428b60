"""What a plan would take: the cut, the schedules, the simulation, prediction, search, explanation,
corrections.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import subprocess
import sys

import pytest

from planned import counted, shown
from ronde import ArgumentError
from ronde.plan import Plan
from ronde.plan.schedules import (
    Action,
    actions,
    allowed,
    bubble,
    in_flight,
    worker_of,
)
from ronde.predict.answer import explain, find_flip, flips, render_answer
from ronde.predict.candidates import candidates, supported
from ronde.predict.cluster import Cluster, LinkFit
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.partition import ALPHA, HeldShare, cut, cut_at
from ronde.predict.predict import Predictor, predict
from ronde.predict.prediction import KINDS, TERMS
from ronde.predict.search import search
from ronde.predict.simulate import Times, run_step
from ronde.predict.unit_arrays import chain, stage_arrays
from ronde.world.units import format_bytes
from sampling import ALL, long

SHAPES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("looped", 2),
    ("interleaved", 2),
    ("interleaved", 3),
]


def unit(name, forward=1.0, backward=2.0, parameters=0, saved=0.0, **more):
    """Everything trains, Adam's state is twice the parameters."""
    more.setdefault("trainable_bytes", parameters)
    more.setdefault("optimizer_bytes", 2 * parameters)
    more.setdefault("block", name)
    return Unit(
        name,
        LinearCost(0, forward),
        LinearCost(0, backward),
        parameters,
        saved_bytes=LinearCost(0, saved),
        **more,
    )


def even(count, batch=64, **more):
    return Costs(tuple(unit(f"u{i}", **more) for i in range(count)), batch, optimizer="AdamW")


def wires(alpha=0.0, beta=1e9, **more):
    fit = LinkFit(alpha, beta, 2)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    return Cluster(links={k: {"node": fit, "cluster": fit} for k in kinds}, **more)


def transformer(layers=24, batch=512, hidden=2048, sequence=2048, heads=16):
    """A GPT by formula: two units a block, so that blocks and units differ."""
    flops = 4e14
    tokens, square = sequence, hidden * hidden

    def block(i):
        attention = 8 * square * tokens + 4 * tokens * tokens * hidden
        mlp = 16 * square * tokens
        parts = (("attention", 4 * square, attention, 14), ("mlp", 8 * square, mlp, 20))
        return [
            Unit(
                f"layers.{i}.{name}",
                LinearCost(2e-5, work / flops),
                LinearCost(4e-5, 2 * work / flops),
                4 * size,
                4 * size,
                8 * size,
                0,
                LinearCost(0, tokens * hidden * saved),
                LinearCost(0, 2 * tokens * hidden * (2 if name == "attention" else 1)),
                LinearCost(0, 2 * tokens * hidden),
                tensor=1.0,
                tensor_reduce_bytes=LinearCost(0, 2 * tokens * hidden),
                alike=name,
                block=f"layers.{i}",
                forward_transient_bytes=LinearCost(0, 4 * tokens * hidden),
                backward_transient_bytes=LinearCost(0, 4 * tokens * hidden),
            )
            for name, size, work, saved in parts
        ]

    vocabulary = 50_304 * hidden
    first = Unit(
        "embed",
        LinearCost(1e-5, 1e-5),
        LinearCost(1e-5, 1e-5),
        4 * vocabulary,
        4 * vocabulary,
        8 * vocabulary,
        0,
        LinearCost(0, 2 * tokens * hidden),
        LinearCost(0, 2 * tokens * hidden),
        LinearCost(0, 2 * tokens * hidden),
        tied=("embed.weight",),
    )
    work = 2 * vocabulary * tokens / flops
    last = Unit(
        "head",
        LinearCost(2e-5, work),
        LinearCost(2e-5, 2 * work),
        saved_bytes=LinearCost(0, 6 * tokens * 50_304),
        tied=("embed.weight",),
    )
    units = (first, *(u for i in range(layers) for u in block(i)), last)
    costs = Costs(
        units,
        batch,
        input_bytes=16 * tokens,
        optimizer_seconds=0.01,
        optimizer="AdamW",
        sequence=sequence,
        measured_samples=(1, 2),
        tensor_divides=heads,
    )
    return counted(costs)


def machines(nodes=8, per_node=8, memory=80e9):
    node, wide = LinkFit(2e-5, 2.5e11, 8, assumed=True), LinkFit(6e-5, 1.5e11, 16, assumed=True)
    links = {
        k: {"node": node, "cluster": wide}
        for k in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    }
    links["send"] = {
        "node": LinkFit(1e-5, 2e11, 2, assumed=True),
        "cluster": LinkFit(2e-5, 4e10, 2, assumed=True),
    }
    return Cluster(
        "machines",
        nodes,
        per_node,
        "some GPU",
        memory,
        links=links,
        overlap=0.9,
        interference=1.1,
        base_bytes=2e9,
        action_seconds=5e-5,
    )


# -- the cut ---------------------------------------------------------------------------


def weigh(costs, bounds, workers, micro_batches, alpha, held, wire=0.0, schedule="1f1b"):
    """The objective, written a second time, one stage after the other."""
    flights = in_flight(schedule, workers, 1, micro_batches)
    units = costs.units
    total_time = sum(u.forward_seconds.at(1) + u.backward_seconds.at(1) for u in units)

    def states(u):
        return (
            u.parameter_bytes * held.parameters
            + u.trainable_bytes * held.gradients
            + u.optimizer_bytes * held.optimizer
            + u.buffer_bytes
        )

    total_states, total_saved = sum(map(states, units)), sum(u.saved_bytes.at(1) for u in units)
    worst = 0.0
    for s, (i, j) in enumerate(itertools.pairwise(bounds)):
        time = sum(u.forward_seconds.at(1) + u.backward_seconds.at(1) for u in units[i:j])
        time += wire * units[j - 1].crossing_bytes.at(1) if j < len(units) else 0.0
        time += wire * units[i - 1].crossing_grad_bytes.at(1) if i else 0.0
        memory = sum(map(states, units[i:j])) + flights[s] * sum(
            u.saved_bytes.at(1) for u in units[i:j]
        )
        worst = max(
            worst,
            (1 - alpha) * time / total_time
            + alpha * memory / (total_states + flights[s] * total_saved),
        )
    return worst


def test_the_cut_is_as_good_as_the_best_of_all():
    dice = random.Random(3)
    found = impossible = 0
    for _ in range(260):
        length, workers = dice.randint(3, 10), dice.randint(2, 5)
        workers = min(workers, length)
        units = tuple(
            unit(
                f"u{i}",
                dice.uniform(0.1, 3),
                dice.uniform(0.1, 5),
                dice.randint(1, 50),
                dice.uniform(0, 80),
                optimizer_bytes=dice.randint(0, 90),
                buffer_bytes=dice.randint(0, 5),
                crossing_bytes=LinearCost(0, dice.uniform(0, 2)),
                crossing_grad_bytes=LinearCost(0, dice.uniform(0, 2)),
                cut_after=dice.random() < 0.8,
            )
            for i in range(length)
        )
        costs = Costs(units, 8)
        micro, optimize = dice.randint(1, 8), dice.choice(["speed", "memory"])
        held = HeldShare(1.0, 1.0, dice.choice([1.0, 0.25]))
        wire = dice.choice([0.0, 0.3])
        schedule = dice.choice(["1f1b", "gpipe"])
        places = [i + 1 for i in range(length - 1) if units[i].cut_after]
        every = ((0, *inner, length) for inner in itertools.combinations(places, workers - 1))
        best = min(
            (weigh(costs, b, workers, micro, ALPHA[optimize], held, wire, schedule) for b in every),
            default=math.inf,
        )
        arguments = {
            "optimize": optimize,
            "micro_batches": micro,
            "held": held,
            "schedule": schedule,
        }
        arguments["send_seconds"] = (lambda size, wire=wire: wire * size) if wire else None
        if best == math.inf:
            impossible += 1
            with pytest.raises(ArgumentError, match="pipeline"):
                cut(costs, workers, **arguments)
            continue
        made = cut(costs, workers, **arguments)
        found += 1
        assert all(b in places for b in made.bounds[1:-1])
        assert made.cost == pytest.approx(best)
        assert weigh(
            costs, made.bounds, workers, micro, ALPHA[optimize], held, wire, schedule
        ) == pytest.approx(best)
    assert found >= 150 and impossible >= 10


def test_tied_weights_count_on_each_stage_that_has_them():
    units = (
        unit("embed", 1, 1, 1000, tied=("w",)),
        unit("a", 1, 1, 10),
        unit("b", 1, 1, 10),
        unit("head", 1, 1, 0, tied=("w",)),
    )

    def stages_of(units):
        costs = Costs(units, 4)
        return stage_arrays(chain(costs, 1), cut(costs, 2).bounds, Plan(2, 4, pipeline=2))

    made = stages_of(units)
    own = units[made.bounds[1] :]
    assert made.tied_bytes.tolist() == [1000, 1000]
    assert made.parameters[1] - sum(u.parameter_bytes for u in own) == 1000
    assert made.optimizer[1] - sum(u.optimizer_bytes for u in own) == 2000
    some = (dataclasses.replace(units[0], tied_bytes=400), *units[1:])
    assert stages_of(some).tied_bytes[1] == 400


def test_a_model_that_cannot_be_cut_says_why():
    units = (
        unit("a", cut_after=False, why_not="a skip connection begins in it"),
        unit("b"),
        unit("c"),
    )
    with pytest.raises(
        ArgumentError,
        match=r"3 stages were asked for, and the model can be cut into 2 at most \(a: a skip",
    ):
        cut(Costs(units, 4), 3)
    with pytest.raises(ArgumentError, match="no unit"):
        cut(Costs((), 4), 2)


def test_named_places_are_cut_at():
    costs = Costs(
        (unit("a"), unit("b.first", cut_after=False, why_not="glue"), unit("b.second"), unit("c")),
        4,
    )
    assert cut_at(costs, ["b", "c"], 3) == (0, 1, 3, 4)
    for names, match in (
        (["c"], "2, each"),
        (["x", "c"], "no 'x'"),
        (["c", "b"], "does not come after"),
        (["b", "b.second"], "glue"),
    ):
        with pytest.raises(ArgumentError, match=match):
            cut_at(costs, names, 3)


# -- the schedules ---------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "virtual"), SHAPES)
def test_every_micro_batch_passes_every_stage_once_and_nobody_waits_for_ever(schedule, virtual):
    for workers, micro in itertools.product((1, 2, 3, 4, 6), range(1, 14)):
        if allowed(schedule, workers, virtual, micro):
            with pytest.raises(ArgumentError):
                actions(schedule, workers, virtual, micro)
            continue
        lists = actions(schedule, workers, virtual, micro)
        stages = workers * virtual
        for worker, row in enumerate(lists):
            assert len(set(row)) == len(row)
            done = set()
            for action in row:
                assert worker_of(action.stage, workers) == worker
                if action.kind == "B":
                    assert Action(action.stage, "F", action.micro) in done
                done.add(action)
            for stage in range(worker, workers * virtual, workers):
                for m in range(micro):
                    assert Action(stage, "F", m) in done
                    assert Action(stage, "B", m) in done
        ones = (1.0,) * stages
        times = Times(ones, ones, (0.1,) * stages, (0.1,) * stages)
        timeline = run_step(schedule, workers, virtual, micro, times)
        assert timeline.in_flight == in_flight(schedule, workers, virtual, micro)


@pytest.mark.parametrize(("schedule", "virtual"), SHAPES)
def test_sends_and_receives_pair_and_never_deadlock(schedule, virtual):
    """Carried out with sends that do not wait and receives that do, as the runtime does; and each
    link's order is the same at both ends.
    """
    for workers, micro in itertools.product((2, 3, 4), (2, 4, 6, 8)):
        if allowed(schedule, workers, virtual, micro):
            continue
        lists = actions(schedule, workers, virtual, micro, communications=True)
        assert [[a for a in row if "_" not in a.kind] for row in lists] == actions(
            schedule, workers, virtual, micro
        )
        sent, received = {}, {}
        for worker, row in enumerate(lists):
            for stage, kind, m in row:
                step = 1 if kind.endswith("_F") else -1
                if kind.startswith("SEND"):
                    other = worker_of(stage + step, workers)
                    assert other != worker
                    sent.setdefault((worker, other), []).append((kind[-1], stage + step, m))
                elif kind.startswith("RECV"):
                    other = worker_of(stage - step, workers)
                    received.setdefault((other, worker), []).append((kind[-1], stage, m))
        assert sent == received
        there, at = set(), [0] * workers
        moved = True
        while moved:
            moved = False
            for worker, row in enumerate(lists):
                while at[worker] < len(row):
                    stage, kind, m = row[at[worker]]
                    need = None
                    if kind in ("F", "B"):
                        source = stage - 1 if kind == "F" else stage + 1
                        if 0 <= source < workers * virtual and worker_of(source, workers) != worker:
                            need = (kind == "F", stage, m)
                            assert (
                                Action(stage, "RECV_F" if kind == "F" else "RECV_B", m)
                                in row[: at[worker]]
                            )
                    if need is not None and need not in there:
                        break
                    if kind.startswith("SEND"):
                        there.add((kind == "SEND_F", stage + (1 if kind == "SEND_F" else -1), m))
                    at[worker] += 1
                    moved = True
        assert at == [len(row) for row in lists]


def test_what_a_schedule_does_not_allow_is_said():
    assert "choose interleaved" in allowed("1f1b", 4, 2, 8)
    assert "choose 1f1b" in allowed("interleaved", 4, 1, 8)
    assert "take 8 or 10" in allowed("interleaved", 4, 2, 9)
    assert "not known" in allowed("1f2b", 4, 1, 8)
    assert "micro-batches of 1 or more" in allowed("gpipe", 4, 1, 0)


# -- the simulation --------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "virtual"), SHAPES)
@pytest.mark.parametrize(("workers", "micro"), [(2, 4), (4, 4), (4, 8), (4, 16), (6, 12)])
def test_equal_stages_wait_as_theory_says(schedule, virtual, workers, micro):
    stages = workers * virtual
    times = Times(
        (1.0 / virtual,) * stages, (2.0 / virtual,) * stages, (0.0,) * stages, (0.0,) * stages
    )
    timeline = run_step(schedule, workers, virtual, micro, times)
    assert timeline.mean_bubble == pytest.approx(bubble(schedule, workers, virtual, micro))
    if schedule in ("gpipe", "1f1b"):
        assert timeline.mean_bubble == pytest.approx((workers - 1) / (micro + workers - 1))
        assert timeline.seconds == pytest.approx(3.0 * (micro + workers - 1))


# -- prediction ------------------------------------------------------------------------


def memory(plan, costs, cluster=None):
    found = predict(plan, costs, cluster or wires(memory_bytes=1e9, base_bytes=7.0))
    return {k: round(v) for k, v in found.memory.items() if v}


def test_memory_by_hand():
    """Three units of 100 bytes of parameters, 10 bytes a sample saved; Adam; 8 samples; by hand
    from the table in the docstring.
    """
    units = tuple(unit(f"u{i}", 1, 2, 100, 10, buffer_bytes=1) for i in range(3))
    costs = Costs(units, 8, optimizer="AdamW")
    # One device, at the end of the forward pass: the first gradient meets all activations (240 +
    # 100), not the last (80 + 300).
    assert memory(Plan(1, 8), costs) == {
        "parameters": 300,
        "optimizer": 600,
        "activations": 80,
        "gradients": 300,
        "buffers": 3,
        "base": 7,
    }
    big = Costs(tuple(unit(f"u{i}", 1, 2, 100, 100) for i in range(3)), 8, optimizer="AdamW")
    assert (
        memory(Plan(1, 8), big)["activations"] == 2400
        and memory(Plan(1, 8), big)["gradients"] == 100
    )
    # Accumulation keeps all gradients and a part of the activations.
    assert (
        memory(Plan(1, 8, micro_batch=2), big)["activations"] == 600
        and memory(Plan(1, 8, micro_batch=2), big)["gradients"] == 300
    )
    # Two replicas: half of the samples, all gradients all the time.
    two = memory(Plan(2, 8), big)
    assert (two["parameters"], two["gradients"], two["optimizer"], two["activations"]) == (
        300,
        300,
        600,
        1200,
    )
    one = memory(Plan(2, 8, shard="optimizer"), big)
    assert (one["parameters"], one["gradients"], one["optimizer"]) == (300, 300, 300)
    # Sharded: fullest when the first block's backward pass ends, with its gradients before they are
    # reduced; none is divided yet.
    # its part of the parameters, and the whole
    gradients = memory(Plan(2, 8, shard="gradients"), big)
    assert (gradients["parameters"], gradients["optimizer"], gradients["communication"]) == (
        450,
        300,
        100,
    )
    assert gradients.get("gradients", 0) == 0
    # its part, and the block at work; the next one, and what is reduced
    full = memory(Plan(2, 8, shard="parameters"), big)
    assert (full["parameters"], full["optimizer"], full["communication"]) == (250, 300, 200)
    within = memory(Plan(4, 8, shard="parameters", shard_within=2), big)
    assert (within["parameters"], within["optimizer"], within["activations"]) == (250, 300, 600)
    # A pipeline of three, 8 micro-batches of one sample: the first worker holds three of them.
    pipe = memory(Plan(3, 8, pipeline=3, micro_batch=1), big)
    assert (pipe["parameters"], pipe["gradients"], pipe["optimizer"], pipe["activations"]) == (
        100,
        100,
        200,
        300,
    )
    assert (
        memory(Plan(3, 8, pipeline=3, micro_batch=1, schedule="gpipe"), big)["activations"] == 800
    )


def test_a_pipeline_by_hand():
    costs = dataclasses.replace(even(4, batch=8, parameters=10**9), optimizer_seconds=1.0)
    pipe = predict(Plan(4, 8, pipeline=4, micro_batch=1), costs, wires(action_seconds=0.0))
    assert pipe.step_seconds == pytest.approx(3 * (8 + 3) + 0.25) and pipe.bubble == pytest.approx(
        3 / 11
    )
    assert pipe.terms["bubble"] == pytest.approx(9.0) and pipe.terms["compute"] == pytest.approx(
        24.0
    )
    assert [s.in_flight for s in pipe.stages] == [4, 3, 2, 1] and pipe.split_at == (
        "u1",
        "u2",
        "u3",
    )
    both = predict(Plan(4, 8, pipeline=2, micro_batch=1), costs, wires(action_seconds=0.0))
    # two units' gradients over two replicas, after the pipeline
    assert both.terms["exchange"] == pytest.approx(2.0)
    assert predict(Plan(4, 8, pipeline=4, micro_batch=1), costs, wires(action_seconds=0.01)).terms[
        "overhead"
    ] == pytest.approx(0.16)


@pytest.mark.parametrize(
    "spec",
    [
        "replicate",
        "zero1",
        "zero2",
        "zero3,recompute=full",
        "pipeline=4",
        "tensor=2,shard=gradients",
        "pipeline=2,virtual=2,schedule=interleaved,shard=parameters",
    ],
)
def test_the_terms_sum_to_the_step_and_the_kinds_to_the_memory(spec):
    plan = dataclasses.replace(Plan.parse(spec), workers=16, batch_size=512)
    found = predict(plan, transformer(), machines())
    assert set(found.terms) == set(TERMS) and set(found.memory) == set(KINDS)
    assert sum(found.terms.values()) == pytest.approx(found.step_seconds)
    assert all(v >= 0 for v in (*found.terms.values(), *found.memory.values()))
    assert found.placement and found.verdict in ("fits", "risky", "does not fit")
    assert json.loads(json.dumps(found.to_dict()))["plan"]["workers"] == 16
    quick = Predictor(transformer(), machines())(plan, quick=True)
    assert quick.step_seconds == pytest.approx(found.step_seconds, rel=0.25)
    assert quick.memory_bytes == pytest.approx(found.memory_bytes, rel=0.25)


def test_verdicts_follow_the_memory():
    costs = even(2, parameters=1000)
    need = predict(Plan(1, 64), costs, Cluster()).memory_bytes
    for share, verdict in ((0.79, "fits"), (0.81, "risky"), (0.96, "does not fit")):
        assert predict(Plan(1, 64), costs, Cluster(memory_bytes=need / share)).verdict == verdict
    assert predict(Plan(1, 64), costs, Cluster()).verdict == "unknown"


def test_plans_that_cannot_be_predicted_are_refused():
    costs = even(4)
    for plan, match in (
        (Plan(6, 64, pipeline=4), "do not divide"),
        (Plan(8, 64, pipeline=8), "cut into 4 at most"),
        (Plan(4, 64, shard="parameters", shard_within=3), "shard_within=3"),
    ):
        with pytest.raises(ArgumentError, match=match):
            predict(plan, costs, Cluster())


# -- the search ------------------------------------------------------------------------


def test_the_search_offers_only_what_is_carried_out():
    dice = random.Random(5)
    for _ in range(12):
        costs = transformer(layers=dice.choice([2, 5, 12]), batch=dice.choice([3, 16, 96]))
        cluster = machines(nodes=dice.choice([1, 4]), memory=dice.choice([4e9, 80e9]))
        if dice.random() < 0.3:
            cluster = dataclasses.replace(cluster, device="cpu")
        workers = dice.choice([1, 2, 3, 6, 8, 12])
        try:
            found = search(costs, cluster, workers, simulate=12)
        except ArgumentError:
            assert workers > costs.batch_size
            continue
        for made in found.plans:
            assert supported(made.plan, costs, cluster)
            assert made.plan.batch_size == costs.batch_size and made.plan.workers == workers
            assert made.plan.replicas <= costs.batch_size
            assert made.micro_batches * made.micro_samples >= math.ceil(
                costs.batch_size / made.plan.replicas
            )
            assert cluster.device != "cpu" or made.plan.offload == "none"
        order = ["fits", "risky", "does not fit"]
        ranks = [order.index(p.verdict) for p in found.plans]
        assert ranks == sorted(ranks)


def test_small_models_are_replicated_and_big_ones_are_not():
    small = search(transformer(layers=2, hidden=256, sequence=128, batch=256), machines(nodes=1), 8)
    assert (
        small.best.plan.shard in ("none", "gradients")
        and small.best.plan.pipeline == small.best.plan.tensor == 1
    )
    big = search(transformer(layers=24, hidden=8192, batch=64), machines(nodes=4), 32)
    assert big.best.verdict == "fits" and big.best.plan.family != "replicate"
    assert big.families["replicate"].verdict == "does not fit"
    assert {"shard", "pipeline × shard", "tensor × shard"} <= set(big.families)
    assert big.left_out["memory"] > 0


def test_a_slow_network_prefers_a_pipeline_and_a_fast_one_replicas():
    costs = dataclasses.replace(
        even(16, batch=64, parameters=10**8, crossing_bytes=LinearCost(0, 1e3)),
        optimizer_seconds=0.0,
    )
    costs = dataclasses.replace(
        costs,
        units=tuple(
            dataclasses.replace(
                u, forward_seconds=LinearCost(0, 0.01), backward_seconds=LinearCost(0, 0.02)
            )
            for u in costs.units
        ),
    )
    slow = search(costs, wires(beta=5e7, devices_per_node=4, action_seconds=0.0), 4)
    fast = search(costs, wires(beta=1e12, devices_per_node=4, action_seconds=0.0), 4)
    assert slow.best.plan.pipeline == 4 and fast.best.plan.family == "replicate"


def test_least_memory_can_be_asked_for():
    costs, cluster = transformer(layers=4), machines(nodes=1)
    speed, least = search(costs, cluster, 8), search(costs, cluster, 8, optimize="memory")
    assert least.best.memory_bytes < speed.best.memory_bytes


def test_more_workers_than_samples_are_refused():
    costs = Costs((unit("a"),), 4)
    with pytest.raises(ArgumentError, match="use fewer workers or a larger batch"):
        search(costs, wires(), 8)
    for bad in (0, -1, True, 2.0):
        with pytest.raises(ArgumentError, match="workers="):
            search(costs, wires(), bad)


@long
def test_four_thousand_devices_are_searched():
    costs, cluster = (
        transformer(layers=96, batch=16_384, hidden=4096, heads=32),
        machines(nodes=512),
    )
    found = search(costs, cluster, 4096, simulate=20)
    assert found.considered > 1000 and found.simulated <= 60
    assert found.best.verdict == "fits"
    assert len(found.families) >= 5
    pruned = search(costs, cluster, 4096, simulate=0, prune=True)
    assert pruned.best.plan.family == search(costs, cluster, 4096, simulate=0).best.plan.family


# -- the explanation -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "holds", "at"), [(1.3, 1.0, 2.0), (7.7, 4.0, 8.0), (60.0, 32.0, 64.0)]
)
def test_a_planted_flip_is_found_upwards(planted, holds, at):
    flip = find_flip(
        "link speed", 1.0, lambda v: ("shard", "zero3") if v >= planted else ("replicate", ""), "up"
    )
    assert (flip.to, flip.spec, flip.holds, flip.at) == ("shard", "zero3", holds, at)
    assert (
        flip.sentence()
        == f"link speed: flips to shard between × {holds:.0f} and × {at:.0f} (now × 1)"
    )


def test_the_flip_in_the_batch_is_where_workers_get_no_sample():
    costs = even(8, batch=64, parameters=10**6)
    cluster = wires(beta=1e15, devices_per_node=8, action_seconds=0.0)
    found = search(costs, cluster, 8)
    flip = next(
        f
        for f in explain(found, costs, cluster).flips
        if f.variable == "global batch" and f.direction == "down"
    )
    assert (flip.holds, flip.at) == (8.0, 4.0) and flip.to == "pipeline × replicate"


@long
def test_flips_are_what_a_whole_search_gives_there():
    """Costs a step and a pass that do not grow with the batch: at a large batch, replicas win,
    which no factor of today's times tells.
    """
    units = tuple(
        unit(
            f"u{i}",
            2e-5,
            4e-5,
            parameters=5 * 10**5,
            crossing_bytes=LinearCost(0, 1e3),
            crossing_grad_bytes=LinearCost(0, 1e3),
        )
        for i in range(8)
    )
    costs = Costs(units, 32, optimizer="AdamW")
    cluster = wires(
        alpha=1e-4, beta=1e9, devices_per_node=2, action_seconds=1e-4, bucket_overlap=0.0
    )
    found = search(costs, cluster, 2)
    every = explain(found, costs, cluster).flips
    assert every == flips(found, costs, cluster)
    told = {(f.variable, f.direction): f for f in every}

    def family(batch):
        return search(dataclasses.replace(costs, batch_size=batch), cluster, 2).best.plan.family

    assert any(f.at is not None for (name, _), f in told.items() if name == "global batch")
    for direction in ("down", "up"):
        flip = told["global batch", direction]
        assert flip.at is None or family(round(flip.at)) == flip.to != found.best.plan.family
        assert family(round(flip.holds)) == found.best.plan.family
        assert flip.limit == (1.0 if direction == "down" else 2048.0)


@pytest.mark.parametrize("seed", range(3 if ALL else 1))
def test_a_pruned_search_has_the_same_winner(seed):
    draw = random.Random(seed)
    for _ in range(6):
        units = tuple(
            unit(
                f"u{i}",
                10 ** draw.uniform(-5, -2),
                10 ** draw.uniform(-5, -2),
                int(10 ** draw.uniform(3, 8)),
                10 ** draw.uniform(3, 7),
                crossing_bytes=LinearCost(0, 1e5),
                crossing_grad_bytes=LinearCost(0, 1e5),
            )
            for i in range(draw.choice([3, 6, 12]))
        )
        costs = Costs(
            units,
            draw.choice([8, 64, 256]),
            noise=draw.choice([0.0, 0.1]),
            optimizer_seconds=10 ** draw.uniform(-4, -1),
        )
        memory = draw.choice([0.0, 10 ** draw.uniform(8, 9.5)])
        cluster = wires(
            10 ** draw.uniform(-6, -3),
            10 ** draw.uniform(8, 11),
            devices_per_node=4,
            memory_bytes=memory,
        )
        workers = draw.choice([2, 4])
        whole, pruned = (
            search(costs, cluster, workers, prune=prune).best for prune in (False, True)
        )
        assert pruned.plan.family == whole.plan.family and pruned.step_seconds == pytest.approx(
            whole.step_seconds
        )


def test_bounds_that_leave_plans_out_are_never_above_what_is_predicted():
    costs, cluster = transformer(layers=12, batch=96), machines(nodes=2)
    predictor = Predictor(costs, cluster)
    ladders = list(candidates(Plan(16, 96), costs, cluster))
    plans = [
        p for ladder in ladders for p in ladder if p.pipeline > 1 and p.pipeline * p.virtual <= 12
    ]
    shapes = [
        dataclasses.replace(p, tensor=2) for p in plans if p.replicas > 1 and p.replicas % 2 == 0
    ]
    for plan in random.Random(3).sample([*plans, *shapes], 150):
        for quick in (True, False):
            made = predictor(plan, quick=quick, split_waits=False)
            assert predictor.floor_seconds(plan) <= made.step_seconds * 1.0001, plan.spec
            assert predictor.floor_bytes(plan) <= made.memory_bytes * 1.0001, plan.spec


def test_one_device_is_advised_where_several_are_slower():
    costs = even(4, batch=8, forward=1e-4, backward=2e-4, parameters=10**8)
    slow = wires(
        beta=1e8, devices_per_node=2, memory_bytes=80e9, bucket_overlap=0.0, action_seconds=1.0
    )
    found = search(costs, slow, 2)
    assert found.best.speedup < 0.9
    told = explain(found, costs, slow, with_flips=False).sentence
    assert told.startswith(f"Use one device: 2 reach {found.best.speedup:.2g}× of its speed. For 2")
    assert "For 2: split " in told and "memory only" not in told
    # Where one has no room for it, several are worth it for the memory.
    small = dataclasses.replace(
        slow, memory_bytes=predict(Plan(1, 8), costs, slow).memory_bytes * 0.9, device="cpu"
    )
    found = search(costs, small, 2)
    assert found.best.verdict == "fits" and found.best.speedup < 0.9
    told = explain(found, costs, small, with_flips=False).sentence
    assert told.startswith("Split") and told.endswith(
        "(does not fit): 2 are worth it for the memory only."
    )
    assert "One device alone needs " in told


@pytest.mark.parametrize(
    ("costs", "workers", "memory_bytes", "begins"),
    [
        (transformer(layers=2, hidden=256, sequence=128, batch=256), 8, 80e9, "Split the data"),
        (transformer(layers=48, hidden=8192, batch=64), 64, 80e9, "Split"),
        (transformer(layers=4, batch=8), 1, 80e9, "One device"),
        (transformer(layers=48, hidden=8192, batch=64), 8, 4e9, "Nothing fits"),
        (
            even(8, batch=2, parameters=10**6),
            4,
            0.0,
            "Split the model: time decides",
        ),
    ],
)
def test_the_answer_is_said_and_fits_the_terminal(costs, workers, memory_bytes, begins):
    cluster = dataclasses.replace(machines(nodes=max(1, workers // 8)), memory_bytes=memory_bytes)
    found = search(costs, cluster, workers, simulate=20)
    told = explain(found, costs, cluster, with_flips=False)
    assert told.sentence.startswith(begins)
    assert told.decided and told.runner_up
    for width in (100, 80, 40):
        text = shown(render_answer(told), width)
        assert max(map(len, text.splitlines())) <= width and not {"\x1b", "…"} & set(text)
    text = shown(render_answer(told), 80)
    for made in told.result.families.values():  # long ones take several lines
        assert all(part in text for part in made.plan.spec.split(","))
    lines = shown(render_answer(told, verbose=True), 400).splitlines()
    for made in told.result.families.values():
        (line,) = (x for x in lines if x.startswith(f"{made.plan.family}  ") and " samples/s" in x)
        for kind, size in made.memory.items():
            assert (f"{kind} {format_bytes(size)}" in line) == bool(size)
        sent = f"sends {format_bytes(made.exchanged_bytes)} a step"
        assert (sent in line) == bool(made.exchanged_bytes)
    values = json.loads(json.dumps(told.to_dict()))
    assert (
        values["sentence"] == told.sentence
        and values["plans"][0]["spec"] == told.result.best.plan.spec
    )


# -- imports ---------------------------------------------------------------------------


def test_predicting_does_not_import_torch():
    code = (
        "import sys, ronde.plan; assert not {'numpy', 'rich', 'torch'} & set(sys.modules);"
        "import ronde.predict.search, ronde.predict.answer; assert 'torch' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
