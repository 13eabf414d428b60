"""Rates and gaps at N devices from measured capacities: against queues that are simulated batch by
batch, and published figures.
"""

from __future__ import annotations

import doctest
import math
from dataclasses import replace

import numpy as np
import pytest

import ronde.predict.input_capacity as module
from ronde.predict.input_capacity import (
    Capacities,
    Measured,
    StageCapacity,
    expected_max,
    from_runs,
    plateau,
    predict,
    walls,
)
from ronde.world import ArgumentError


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(module).failed == 0


def simulated(
    devices: int, ratio: float, buffered: int, cv: float, shared: bool, steps: int = 2000
) -> float:
    """Steps per unit of time of devices that take 1 for a step, all in step, each behind a queue of
    ``buffered`` batches.

    Supply gives ``ratio`` times what the devices want: one server for all, or one for each.
    """
    rng = np.random.default_rng(0)
    s2 = math.log1p(cv * cv)
    mean = 1 / ratio / (devices if shared else 1)
    service = mean * np.exp(rng.normal(-s2 / 2, math.sqrt(s2), (steps, devices)))
    begin = np.zeros(steps)
    ready = np.zeros(devices)
    server = 0.0
    for k in range(steps):
        # a place is free once the batch before was taken
        room = begin[k - buffered] if k >= buffered else 0.0
        if shared:
            for i in range(devices):
                server = max(server, room) + service[k, i]
                ready[i] = server
        else:
            ready = np.maximum(ready, room) + service[k]
        begin[k] = max(begin[k - 1] + 1 if k else 0.0, ready.max())
    quarter = steps // 4
    return (steps - 1 - quarter) / (begin[-1] - begin[quarter])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("devices", [1, 4, 16])
@pytest.mark.parametrize("cv", [0.25, 0.5])
def test_prediction_agrees_with_queues_simulated_batch_by_batch(shared, devices, cv):
    for ratio in (0.5, 0.7, 0.9, 1.0, 1.1, 1.5):
        truth = simulated(devices, ratio, 5, cv, shared)
        base = Capacities(1.0, buffer_batches=4, variation=cv, devices_per_node=64)
        limits = (
            {"storage_samples_per_second": ratio * devices}
            if shared
            else {"stages": (StageCapacity("input", samples_per_second=ratio),)}
        )
        found = predict(replace(base, **limits), devices)
        error = abs(found.rate / found.ceiling - truth)
        assert error < (0.05 if 0.85 < ratio < 1.15 else 0.03), (ratio, truth, found)
        assert found.gap >= max(0.0, 1 - ratio) - 1e-9  # never more hopeful than the scarcest thing


def test_the_published_gap_of_42_percent_on_32_devices_is_a_wall_at_19():
    found = from_runs(
        [Measured(1, 250.0, 237.5), Measured(2, 500.0, 475.0)],
        sweep=[(1, 300.0), (32, 4630.0), (64, 4640.0)],
    )
    gaps = {n: predict(found, n).gap for n in (1, 8, 16, 32)}
    assert gaps[1] == pytest.approx(0.05, abs=0.01)
    assert gaps[16] == pytest.approx(0.05, abs=0.01)
    assert gaps[32] == pytest.approx(0.42, abs=0.01)
    wall = walls(found, 64)[0]
    assert (wall.stage, wall.limit, wall.devices) == ("read", "storage", 20)


def test_more_of_anything_is_never_slower():
    rng = np.random.default_rng(1)
    for _ in range(60):
        c = Capacities(
            step_rate=float(rng.uniform(50, 500)),
            stages=(
                StageCapacity("decode", float(rng.uniform(0, 0.004)), float(rng.uniform(40, 2000))),
                StageCapacity("augment", 0.0003),
            ),
            cores_per_node=float(rng.integers(1, 64)),
            devices_per_node=int(rng.integers(1, 9)),
            storage_samples_per_second=float(rng.uniform(100, 5000)),
            storage_shared=bool(rng.integers(0, 2)),
            copy_samples_per_second=float(rng.uniform(100, 5000)),
            step_cpu_seconds=float(rng.uniform(0, 0.002)),
            exchange=float(rng.uniform(0, 0.5)),
            overhead=float(rng.uniform(0, 0.2)),
            overruns=tuple(rng.uniform(0, 0.3, 5)),
            variation=float(rng.uniform(0, 1)),
            dataset_bytes=100.0,
            cache_bytes_per_node=float(rng.uniform(0, 90)),
        )
        before = 0.0
        for n in range(1, 40):
            found = predict(c, n, 1)
            assert 0 <= found.low <= found.gap <= found.high <= 1
            assert 0 < found.rate <= found.ceiling * (1 + 1e-12)
            assert found.rate >= before * (1 - 1e-9), (n, c)
            before = found.rate
        n = int(rng.integers(1, 64))
        here = predict(c, n).rate
        for name in (
            "cores_per_node",
            "storage_samples_per_second",
            "copy_samples_per_second",
            "step_rate",
            "cache_bytes_per_node",
        ):
            assert predict(replace(c, **{name: getattr(c, name) * 1.1}), n).rate >= here * (
                1 - 1e-9
            ), name
        for name in ("step_cpu_seconds", "overhead", "exchange"):
            assert predict(replace(c, **{name: getattr(c, name) * 1.1}), n).rate <= here * (
                1 + 1e-9
            ), name
        nodes = predict(c, n).nodes
        if nodes < n:
            assert predict(c, n, nodes + 1).rate >= here * (1 - 1e-9)


def test_cores_grow_with_nodes_and_a_shared_storage_does_not():
    c = Capacities(
        250.0,
        (StageCapacity("decode", 0.004),),
        cores_per_node=8,
        devices_per_node=8,
        variation=0.0,
    )
    assert predict(c, 8).gap == 0 and predict(c, 32).gap == 0
    assert predict(c, 32, 1).gap == pytest.approx(0.75)
    assert predict(c, 32, 1).wall == "decode" and predict(c, 32, 1).limit == "cores"
    shared = replace(c, storage_samples_per_second=4000.0)
    assert predict(shared, 32).gap == pytest.approx(0.5) and predict(shared, 32).limit == "storage"
    assert predict(replace(shared, storage_shared=False), 32).gap == 0
    assert [(w.stage, w.devices) for w in walls(shared, 64, nodes=1)] == [
        ("decode", 9),
        ("read", 17),
    ]
    assert [(w.stage, w.devices) for w in walls(shared, 64)] == [("read", 17)]
    half = replace(shared, dataset_bytes=100.0, cache_bytes_per_node=50.0)
    assert predict(half, 32).gap == pytest.approx(0.0)
    assert predict(half, 64).gap == pytest.approx(0.5)
    whole = replace(shared, dataset_bytes=100.0, cache_bytes_per_node=200.0)
    assert predict(whole, 64).gap == 0


def test_a_step_that_computes_on_the_same_cores_lowers_the_ceiling_too():
    c = Capacities(
        100.0,
        (StageCapacity("decode", 0.005),),
        cores_per_node=2,
        devices_per_node=2,
        step_cpu_seconds=0.01,
        variation=0.0,
    )
    found = predict(c, 4, 1)
    assert found.ceiling == pytest.approx(200) and found.rate == pytest.approx(2 / 0.015)


def test_expected_max_is_that_of_every_choice():
    values = [0.0, 0.1, 0.5]
    for n in (1, 2, 3):
        grid = np.stack(np.meshgrid(*[values] * n), axis=-1).reshape(-1, n)
        assert expected_max(values, n) == pytest.approx(grid.max(axis=1).mean())
    assert expected_max([], 8) == 0.0
    late = Capacities(100.0, overruns=(0.0, 0.0, 0.0, 0.4), devices_per_node=99)
    assert predict(late, 1).rate == pytest.approx(100 / 1.1)
    assert predict(late, 2).rate == pytest.approx(200 / (1 + 0.4 * (1 - 0.75**2)))


def test_what_runs_at_1_and_2_say():
    loaders = from_runs([Measured(1, 250.0, 187.5), Measured(2, 500.0, 375.0)])
    assert (
        predict(loaders, 16).gap == pytest.approx(0.25, abs=0.03)
        and predict(loaders, 16).limit == "loaders"
    )
    met = from_runs([Measured(1, 250.0, 250.0), Measured(2, 500.0, 350.0)], devices_per_node=8)
    assert (
        predict(met, 8).gap == pytest.approx(1 - 350 / 2000, abs=0.02)
        and predict(met, 8).limit == "shared"
    )
    cores = from_runs(
        [
            Measured(1, 250.0, 250.0, cpu_seconds=0.002, busy=0.25),
            Measured(2, 500.0, 500.0, cpu_seconds=0.0025, busy=0.6),
        ],
        stages=(StageCapacity("decode", 0.001), StageCapacity("augment", 0.0005)),
        cores_per_node=4,
        devices_per_node=8,
    )
    # Dearer on a fuller machine: 2 and 2.5 ms at 25 and 60 % of it are 3.07 ms when it is full.
    assert cores.input_cpu_seconds == pytest.approx(0.0025 + 0.0005 / 0.35 * 0.4)
    assert cores.stages[0].cpu_seconds == pytest.approx(2 * cores.stages[1].cpu_seconds)
    assert predict(cores, 8, 1).wall == "decode"
    serial = from_runs(
        [Measured(1, 250.0, 225.0, loading=900.0), Measured(2, 500.0, 450.0, loading=1800.0)]
    )
    assert (
        predict(serial, 64).gap == pytest.approx(0.1, abs=0.005)
        and predict(serial, 64).limit is None
    )
    exchange = from_runs([Measured(1, 100.0, 100.0), Measured(2, 160.0, 160.0)])
    assert predict(exchange, 1).ceiling == pytest.approx(100) and predict(
        exchange, 2
    ).ceiling == pytest.approx(160)
    assert predict(exchange, 64).ceiling == pytest.approx(64 * 100 / (1 + 0.5 * 63 / 64))
    alone = from_runs([Measured(1, 250.0, 249.0)])
    assert predict(alone, 8).gap < 0.01
    # Asked for all that they can give, two make hardly more than one: what they share ends there.
    shared = from_runs(
        [Measured(1, 250.0, 250.0, loading=600.0), Measured(2, 500.0, 500.0, loading=620.0)],
        devices_per_node=8,
    )
    assert predict(shared, 8).rate == pytest.approx(620, rel=0.02)


def test_plateau_says_whether_the_sweep_came_to_its_end():
    assert plateau([(1, 154.0), (4, 449.0), (16, 459.0)]) == (459.0, True)
    assert plateau([(4, 449.0), (1, 154.0)]) == (449.0, False)
    assert plateau([(1, 10.0)]) == (10.0, False)
    assert plateau([(1, 100.0), (2, 95.0)]) == (100.0, True)
    with pytest.raises(ArgumentError, match="no reading"):
        plateau([])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"step_rate": 0.0}, "step_rate"),
        ({"step_rate": math.nan}, "step_rate"),
        ({"step_rate": 1.0, "cores_per_node": 0.0}, "cores_per_node"),
        ({"step_rate": 1.0, "overhead": 1.0}, "overhead"),
        ({"step_rate": 1.0, "uncertainty": -0.1}, "uncertainty"),
        ({"step_rate": 1.0, "variation": math.inf}, "variation"),
        ({"step_rate": 1.0, "buffer_batches": 0}, "buffer_batches"),
        ({"step_rate": 1.0, "devices_per_node": 0}, "devices_per_node"),
        ({"step_rate": 1.0, "overruns": (-0.1,)}, "overruns"),
        ({"step_rate": 1.0, "stages": (StageCapacity("decode", -1.0),)}, "decode"),
        ({"step_rate": 1.0, "stages": (StageCapacity("decode", 0.1, 0.0),)}, "decode"),
    ],
)
def test_capacities_that_cannot_be_are_refused_by_name(values, named):
    with pytest.raises(ArgumentError, match=named):
        Capacities(**values)


def test_sizes_that_cannot_be_are_refused():
    c = Capacities(1.0)
    for devices, nodes in ((0, None), (True, None), (2, 3), (2, 0), (1.5, None)):
        with pytest.raises(ArgumentError):
            predict(c, devices, nodes)
    with pytest.raises(ArgumentError, match="no run"):
        from_runs([])
    with pytest.raises(ArgumentError, match="above 0"):
        from_runs([Measured(1, 0.0, 1.0)])


def test_no_capacity_is_below_a_rate_that_was_measured():
    # CPU seconds that were measured with a timer say 2 cores give 800; 950 were seen
    stages = (StageCapacity("decode", 0.0025),)
    run = Measured(1, 1000.0, 950.0, cpu_seconds=0.0025)
    found = from_runs([run], stages=stages, sweep=[(1, 700.0), (2, 710.0)], cores_per_node=2.0)
    here = predict(found, 1)
    assert here.gap == pytest.approx(0.05, abs=0.06) and here.low <= 0.05 + 1e-9
    assert found.cores_per_node / found.input_cpu_seconds >= 950 - 1e-6
    assert found.storage_samples_per_second >= 950
    # one that lost nothing met no limit
    run = Measured(1, 1000.0, 990.0, cpu_seconds=0.0025)
    found = from_runs([run], stages=stages, cores_per_node=2.0)
    assert [w.devices for w in walls(found, 8, 1)] == [2]


@pytest.mark.parametrize("loading", [(178.0, 350.0), (178.0, 300.0), (None, None)])
def test_a_limit_of_each_process_multiplies_with_workers(loading):
    """A lock of each process: one gives 175, two gave 300 on a busy machine, four give 700."""
    one, two = (
        Measured(n, 400.0 * n, real, most, 0.0005, 0.001)
        for n, real, most in zip((1, 2), (175.0, 300.0), loading, strict=True)
    )
    found = from_runs([one, two], cores_per_node=2, devices_per_node=2)
    four = predict(found, 4, 2)
    assert found.shared_samples_per_second == math.inf and four.limit == "loaders"
    assert four.rate == pytest.approx(700, rel=0.05)
    assert four.ceiling * (1 - four.high) < 700 < four.ceiling * (1 - four.low)
    wide = four.high - four.low
    assert wide > 0.25 if loading[1] != 350.0 else wide < 0.25  # where the loaders do not tell

    # What all share gives two no more than one.
    shared = from_runs([one, replace(two, real=176.0, loading=178.0)], cores_per_node=2)
    assert predict(shared, 4, 1).rate == pytest.approx(176, rel=0.05)
    late = [replace(one, real=390.0, loading=600.0), replace(two, real=610.0, loading=620.0)]
    assert predict(from_runs(late, cores_per_node=2), 4, 1).rate == pytest.approx(610, rel=0.05)
