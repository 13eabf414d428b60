"""Reducers: exact ones are one process, lossy ones train, servers that die are named."""

from __future__ import annotations

import signal
import textwrap
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from processes import TESTS, child, forked, marked, python, ronde, ronde_run
from ronde.exchange import KINDS
from ronde.plan import REDUCERS, Plan, parse_reducer
from ronde.predict import Cluster, Costs, LinearCost, LinkFit, Unit
from ronde.predict.search import search
from ronde.world import ArgumentError
from sampling import ALL, long, some

WORKER = TESTS / "exchange_worker.py"


@pytest.mark.parametrize(
    ("workers", "parts"),
    [
        (2, ["exact", "types", "lossy", *(["feedback"] if ALL else [])]),
        (4, ["exact", "types", "lossy"] if ALL else ["types"]),
    ],
)
def test_reducers_against_one_process(tmp_path, workers, parts):
    env = {"RONDE_STATE": str(tmp_path / "state")}
    done = python(forked(WORKER, workers, *parts)[1:], tmp_path, timeout=170, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DONE" in done.stdout


@pytest.mark.parametrize("part", some(["lost", "leave"], 2))
def test_workers_that_are_servers_and_end(tmp_path, part):
    done = python(forked(WORKER, 4, part)[1:], tmp_path, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr


# 12 steps in 2 epochs; a run that stops at STOP has its last checkpoint at step 3 or 6
SCRIPT = textwrap.dedent(
    """
    import os, sys, time, torch
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset
    import ronde

    stop, pause = int(sys.argv[1]), float(sys.argv[2])
    g = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(48, 6, generator=g), torch.randint(3, (48,), generator=g)
    data = TensorDataset(inputs, target, torch.arange(48))
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = ronde.distribute(
        model, optimizer, data, loss=F.cross_entropy, batch_size=8,
        forward=lambda model, batch: (model(batch[0]), batch[1]),
        save_every=3, async_save=False,
    )
    for epoch in run.epochs(2):
        for batch in run.batches():
            run.step(batch)
            if run.state.step == 2:
                print("TRAINING", flush=True)
            time.sleep(pause)
            if run.state.step == stop:
                os._exit(9)
    run.export(run.dir.path / "final.safetensors")
    """
)


def launch(folder, *arguments, fails=False, **env):
    done = ronde_run(["run", "--runs", "runs", *arguments], folder, 100, env or None)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(folder, name):
    return load_file(folder / "runs" / name / "final.safetensors")


def same_bits(a, b):
    return a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)


@pytest.mark.parametrize(
    "reducer", ["topk:0.1", "powersgd:1", "diloco:3"] if ALL else ["powersgd:1"]
)
def test_error_feedback_survives_a_resume_bit_for_bit(tmp_path, reducer):
    (tmp_path / "train.py").write_text(SCRIPT)
    common = ["-q", "-n", "2", "--reducer", reducer]
    launch(tmp_path, *common, "--name", "whole", "train.py", "-1", "0")
    launch(tmp_path, *common, "--name", "cut", "train.py", "4", "0", fails=True)
    said = launch(
        tmp_path, *common[:3], "--resume", "--name", "cut", "train.py", "-1", "0", fails=True
    )
    assert f"it holds what reducer '{parse_reducer(reducer)}' has not sent yet" in said
    launch(tmp_path, *common, "--resume", "--name", "cut", "train.py", "-1", "0")
    assert same_bits(weights(tmp_path, "whole"), weights(tmp_path, "cut"))
    if not ALL:
        return
    # on another number of workers it goes on too, with the mean of all
    launch(tmp_path, *common, "--name", "more", "train.py", "4", "0", fails=True)
    common[2] = "3"
    launch(tmp_path, *common, "--resume", "--name", "more", "train.py", "-1", "0")
    assert weights(tmp_path, "more").keys() == weights(tmp_path, "whole").keys()


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory):
    """The weights of a run with two servers that nobody disturbs."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "train.py").write_text(SCRIPT)
    options = ["-q", "-n", "2", "--servers", "2", "--name", "two"]
    launch(folder, *options, "train.py", "-1", "0")
    return weights(folder, "two")


@long
@pytest.mark.parametrize(
    ("victim", "named"),
    some([("reduction_server", "reduction server"), ("launch/worker", "rank 1")], 2),
)
def test_a_server_or_worker_that_is_killed_is_started_again(tmp_path, two_servers, victim, named):
    """It is named, and the weights are those of the run that was not disturbed."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["-n", "2", "--servers", "2", "--restarts", "2", "--no-spares"]
    options += ["--name", victim[:6]]
    command = ["run", "--runs", "runs", *options, "train.py", "-1", "0.3"]
    with child(ronde(*command), tmp_path) as running:
        running.wait_for("TRAINING", 90)
        victims = [p for p in marked(running.mark) if _is(p, victim)]
        victims[0].send_signal(signal.SIGKILL)
        done = running.done(120)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "restart 1 of 2" in said, said
    assert named in said and "restart 2" not in said, said
    if victim == "launch/worker":
        assert "killed" in said and "is gone: it closed" not in said, said
    assert same_bits(weights(tmp_path, victim[:6]), two_servers)


def _is(process, victim):
    """A reduction server, or the worker of rank 1."""
    if victim == "reduction_server":
        return victim in " ".join(process.cmdline())
    return process.environ().get("RANK") == "1"


def test_refusals_by_name():
    cases = {
        "reducer=rnig": "Did you mean ring?",
        "reducer=topk:2": "fraction must be a number from 1e-06 to 1, found '2'",
        "reducer=local:1.5": "steps must be a whole number",
        "reducer=auto:3": "auto takes nothing after its name",
        "pipeline=2,reducer=bf16": "averages whole gradients, and this plan divides them",
        "shard=parameters,reducer=servers": "Use it with replicate or shard=optimizer",
        "shard=optimizer,reducer=diloco": "workers cannot train alone as diloco does",
    }
    for plan, message in cases.items():
        with pytest.raises(ArgumentError) as caught:
            Plan.parse(plan)
        assert message in str(caught.value), caught.value
    with pytest.raises(ArgumentError, match="does not follow"):
        Plan(reducer="topk", precision="fp16").check()
    assert set(KINDS) == set(REDUCERS) - {"auto"}


def test_the_planner_chooses_among_measured_reducers():
    """As fast as measured, if for as many workers; lossy ones only if the script asks."""
    size = 100 << 20
    unit = Unit("u", LinearCost(0, 1e-3), LinearCost(0, 2e-3), size, size, cut_after=False)
    costs = Costs((unit,) * 4, 64)
    slow, fast = LinkFit(0.001, 1e9, 4), LinkFit(0.001, 4e9, 4)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")
    links = {kind: {"node": slow} for kind in kinds}
    known = Cluster(devices_per_node=4, links=links)
    fits = {"servers": fast, "bf16": LinkFit(0.001, 9e9, 4), "hierarchical": slow}
    measured = replace(known, reducers=fits)
    assert Cluster.from_dict(measured.to_dict()) == measured

    def best(cluster, like=None):
        answer = search(costs, cluster, 4, like=like)
        assert answer.best.plan.pipeline == 1
        return answer.best.plan.reducer

    assert best(known) == "ring" and best(measured) == "servers"
    assert best(replace(measured, reducers={"servers": replace(fast, ranks=8)})) == "ring"
    assert best(measured, Plan(reducer="bf16")) == "bf16"
    unmeasured = search(costs, known, 4, like=Plan(reducer="bf16")).best
    assert any("reducer=bf16 was not measured" in note for note in unmeasured.notes)
    with pytest.raises(ArgumentError, match="'torus' is not known"):
        Cluster.from_dict({"reducers": {"torus": {"alpha": 0, "beta": 1}}})
