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
    StageCapacity,
    predict,
)


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
def test_prediction_agrees_with_queues_simulated_batch_by_batch(shared, devices):
    for ratio in (0.5, 0.7, 1.4, 2.0):
        truth = simulated(devices, ratio, 5, 0.25, shared)
        base = Capacities(1.0, devices_per_node=64)
        limits = (
            {"storage_samples_per_second": ratio * devices}
            if shared
            else {"stages": (StageCapacity("input", samples_per_second=ratio),)}
        )
        found = predict(replace(base, **limits), devices)
        error = abs(found.rate / found.ceiling - truth)
        assert error < 0.03, (ratio, truth, found)
        assert found.gap >= max(0.0, 1 - ratio) - 1e-9  # never more hopeful than the scarcest thing


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
            step_cpu_seconds=float(rng.uniform(0, 0.002)),
            exchange=float(rng.uniform(0, 0.5)),
            overhead=float(rng.uniform(0, 0.2)),
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
            "step_rate",
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


def test_samples_made_between_the_steps_cost_their_time_beside_any_other_limit():
    # 10 ms for a sample and 10 ms for its step: 50 a second of each device, until 150 are read
    slow = Capacities(
        100.0,
        (StageCapacity("decode", samples_per_second=100.0),),
        storage_samples_per_second=150.0,
        serial=True,
    )
    found = [predict(slow, n) for n in (1, 2, 4)]
    assert [round(p.rate) for p in found] == [50, 100, 150]
    assert [p.wall for p in found] == [None, None, "read"], "loaders as fast as the steps"
