"""Reducers: exact ones are one process, lossy ones train, servers that die are named."""

from __future__ import annotations

import signal
import textwrap

import pytest
from safetensors.torch import load_file

from processes import TESTS, child, forked, marked, python, ronde, ronde_run
from ronde.exchange import KINDS
from ronde.plan import REDUCERS, Plan, parse_reducer
from ronde.predict import Cluster
from ronde.predict.collectives import CollectiveCost, Group
from ronde.predict.reducer_costs import reducer_cost
from ronde.world import ArgumentError
from sampling import ALL

WORKER = TESTS / "exchange_worker.py"


@pytest.mark.parametrize(
    ("workers", "parts"),
    [(2, ["exact", "lossy", "feedback", "noise"]), (4, ["exact", "lossy"] if ALL else ["exact"])],
)
def test_reducers_against_one_process(tmp_path, workers, parts):
    env = {"RONDE_STATE": str(tmp_path / "state")}
    done = python(forked(WORKER, workers, *parts)[1:], tmp_path, timeout=170, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DONE" in done.stdout


# 12 steps in 2 epochs; a run that stops at STOP has its last checkpoint at step 3 or 6
SCRIPT = textwrap.dedent(
    """
    import os, sys, time, torch
    import torch.nn.functional as F
    from torch.utils.data import TensorDataset
    import ronde

    stop, grow, pause = int(sys.argv[1]), sys.argv[2] == "grow", float(sys.argv[3])
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 6, generator=g), torch.randint(3, (48,), generator=g))
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = ronde.distribute(model, optimizer, data, loss=F.cross_entropy, batch_size=8, save_every=3)
    if grow:
        run.grow_batch({4: 12, 8: 16}, lr_rule="linear")
    sizes = []
    for epoch in run.epochs(2):
        for batch in run.batches():
            before = run.state.samples
            run.step(batch)
            sizes.append(run.state.samples - before)
            if run.state.step == 2:
                print("TRAINING", flush=True)
            time.sleep(pause)
            if run.state.step == stop:
                os._exit(9)
    run.print("SIZES", sizes, round(optimizer.param_groups[0]["lr"], 9))
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
    "reducer", ["topk:0.1", "int8", "powersgd:1", "diloco:3"] if ALL else ["int8"]
)
def test_error_feedback_survives_a_resume_bit_for_bit(tmp_path, reducer):
    (tmp_path / "train.py").write_text(SCRIPT)
    common = ["-q", "-n", "2", "--reducer", reducer]
    launch(tmp_path, *common, "--name", "whole", "train.py", "-1", "no", "0")
    launch(tmp_path, *common, "--name", "cut", "train.py", "4", "no", "0", fails=True)
    said = launch(
        tmp_path, *common[:3], "--resume", "--name", "cut", "train.py", "-1", "no", "0", fails=True
    )
    assert f"it holds what reducer '{parse_reducer(reducer)}' has not sent yet" in said
    launch(tmp_path, *common, "--resume", "--name", "cut", "train.py", "-1", "no", "0")
    assert same_bits(weights(tmp_path, "whole"), weights(tmp_path, "cut"))
    # on another number of workers it goes on too, with the mean of all
    launch(tmp_path, *common, "--name", "more", "train.py", "4", "no", "0", fails=True)
    common[2] = "3"
    launch(tmp_path, *common, "--resume", "--name", "more", "train.py", "-1", "no", "0")
    assert weights(tmp_path, "more").keys() == weights(tmp_path, "whole").keys()


def test_a_batch_that_grows_survives_a_resume(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ["-n", "2", "--reducer", "servers"]
    said = launch(tmp_path, *arguments, "--name", "whole", "train.py", "-1", "grow", "0")
    # 4 × 8, then 12s up to the epoch's end at 48; the second epoch begins with step 7
    assert "SIZES [8, 8, 8, 8, 12, 4, 12, 12, 16, 8] 0.02" in said, said
    assert "global batch 8 -> 12 from step 4 on, learning rate × 1.5 (linear)" in said
    launch(tmp_path, *arguments, "--name", "cut", "train.py", "8", "grow", "0", fails=True)
    launch(tmp_path, *arguments, "--name", "cut", "--resume", "train.py", "-1", "grow", "0")
    assert same_bits(weights(tmp_path, "whole"), weights(tmp_path, "cut"))
    launch(tmp_path, *arguments, "--name", "no", "train.py", "8", "grow", "0", fails=True)
    said = launch(
        tmp_path, *arguments, "--name", "no", "--resume", "train.py", "-1", "no", "0", fails=True
    )
    assert "the checkpoint's run has called run.grow_batch()" in said


def test_servers_of_their_own(tmp_path):
    """Two servers beside two workers: the ring's weights; a killed one is named; nothing hangs."""
    (tmp_path / "train.py").write_text(SCRIPT)
    launch(tmp_path, "-q", "-n", "2", "--name", "ring", "train.py", "-1", "no", "0")
    launch(
        tmp_path, "-q", "-n", "2", "--servers", "2", "--name", "two", "train.py", "-1", "no", "0"
    )
    ring, two = weights(tmp_path, "ring"), weights(tmp_path, "two")
    assert all((ring[k] - two[k]).abs().max() <= 1e-6 for k in ring)
    for victim, named in (("reduction_server", "reduction server"), ("launch/worker", "rank 1")):
        command = [
            "run",
            "--runs",
            "none",
            "-n",
            "2",
            "--servers",
            "2",
            "train.py",
            "-1",
            "no",
            "0.5",
        ]
        with child(ronde(*command), tmp_path) as running:
            running.wait_for("TRAINING", 90)
            found = [p for p in marked(running.mark) if victim in " ".join(p.cmdline())]
            if victim == "launch/worker":
                found = [p for p in found if p.environ().get("RANK") == "1"]
            found[0].send_signal(signal.SIGKILL)
            done = running.done(60)
        assert done.returncode != 0
        said = done.stdout + done.stderr
        assert named in said, said
        if victim == "launch/worker":
            assert "killed" in said and "is gone: it closed" not in said, said


def test_refusals_by_name():
    cases = {
        "reducer=rnig": "Did you mean 'ring'?",
        "reducer=topk:2": "fraction must be a number from 1e-06 to 1, found '2'",
        "reducer=local:1.5": "steps must be a whole number",
        "reducer=int8:3": "int8 takes nothing after its name",
        "pipeline=2,reducer=bf16": "averages whole gradients, and this plan divides them",
        "shard=parameters,reducer=servers": "Use it with replicate or shard=optimizer",
        "shard=optimizer,reducer=diloco": "workers cannot train alone as diloco does",
    }
    for plan, told in cases.items():
        with pytest.raises(ArgumentError) as caught:
            Plan.parse(plan)
        assert told in str(caught.value), caught.value
    with pytest.raises(ArgumentError, match="does not follow"):
        Plan(reducer="topk", precision="fp16").check()
    assert set(KINDS) == set(REDUCERS) - {"auto"}


def test_the_planner_knows_reducers():
    ring, group = CollectiveCost(0.003, 1e-9), Group(4, "node", 4, 1)
    cluster = Cluster(devices_per_node=4)
    size = 25 << 20
    for text, share in (("bf16", 0.5), ("int8", 0.375), ("randomk:0.01", 0.01), ("local:8", 1 / 8)):
        cost = reducer_cost(text, ring, cluster, group)
        assert cost.seconds_per_byte == pytest.approx(share * 1e-9), text
    assert reducer_cost("servers", ring, cluster, group)(size) < ring(size)
    assert reducer_cost("auto", ring, cluster, group)(size) <= ring(size)
