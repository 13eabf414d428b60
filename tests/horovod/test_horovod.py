"""Horovod scripts under the bridge: every operation on three ranks, trainings on two."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

import ronde.horovod.torch as hvd
from processes import TESTS, ronde_run
from ronde.cli.horovodrun import translate
from ronde.world import ArgumentError

NO_FILES = {"RONDE_RUNS": "none"}


def test_every_operation_and_every_refusal_on_three_ranks(tmp_path):
    command = ["run", "--horovod", "--workers", "3", "--output", "all", "-m", "pytest"]
    checks = ["-q", "-p", "no:cacheprovider", "--noconftest", str(TESTS / "horovod_checks.py")]
    done = ronde_run([*command, *checks], tmp_path, 150, NO_FILES)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_trainings_are_those_of_one_process(tmp_path):
    command = ["horovodrun", "-np", "2", "--cycle-time-ms", "3", "python", "-u"]
    done = ronde_run([*command, str(TESTS / "horovod_training.py")], tmp_path, 150, NO_FILES)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "note: no meaning here, ignored: --cycle-time-ms" in done.stderr
    assert {f"rank {r}: training is the same" in done.stdout for r in range(2)} == {True}
    assert ": Horovod " in done.stdout and "without calling" not in done.stdout


def test_its_status_is_that_of_the_script(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    done = ronde_run(["horovodrun", "-np", "1", "python", "fails.py"], tmp_path, 60, NO_FILES)
    assert done.returncode == 3, done.stdout + done.stderr


def test_one_process_needs_no_launcher(tmp_path):
    script = tmp_path / "one.py"
    script.write_text(
        "import torch, ronde.horovod.torch as hvd\n"
        "hvd.init()\n"
        "p = torch.nn.Parameter(torch.ones(2))\n"
        "opt = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))\n"
        "hvd.broadcast_parameters({'p': p}, 0)\n"
        "hvd.broadcast_optimizer_state(opt, 0)\n"
        "p.sum().backward(); opt.step()\n"
        "x = torch.ones(3, dtype=torch.bfloat16)\n"
        "for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):\n"
        "    assert torch.equal(call(x), x)\n"
        "assert hvd.broadcast_object('x') == 'x' and hvd.join() == 0 and hvd.size() == 1\n"
        "hvd.barrier(); hvd.shutdown(); print(p.tolist())\n"
    )
    done = ronde_run(["run", "--workers", "1", str(script)], tmp_path, 60, NO_FILES)
    assert done.returncode == 0 and "[0.0, 0.0]" in done.stdout, done.stdout + done.stderr


ELASTIC = """
import os, signal, sys, torch, horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset
hvd.init()
torch.manual_seed(0)
x = torch.randn(32, 4)
data = TensorDataset(x, torch.arange(32))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, seen=[])

@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        for inputs, ids in loader:
            if (state.epoch, state.batch) == (1, 2) and os.environ["RONDE_RESUME"] == "0":
                if hvd.rank() == 1 and sys.argv[2] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            state.seen = state.seen + [hvd.allgather(ids).tolist()]
            sampler.record_batch(state.batch, len(ids))
            state.batch += 1
            state.commit()
        state.epoch, state.batch = state.epoch + 1, 0
        sampler.set_epoch(state.epoch)
        state.commit()

train(state)
if hvd.rank() == 0:
    torch.save({"weight": model.weight.detach(), "seen": state.seen}, sys.argv[1])
"""


def test_elastic_state_survives_a_worker_that_is_killed(tmp_path):
    """It goes on after the last commit: the same weights, no sample lost or trained twice."""
    (tmp_path / "train.py").write_text(ELASTIC)
    for how in ("run", "kill"):
        line = ["horovodrun", "-np", "2", "--reset-limit", "1", "python", "train.py"]
        done = ronde_run([*line, f"{how}.pt", how], tmp_path, 150)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("restart 1 of 1" in done.stderr) == (how == "kill"), done.stderr
    assert "rank 1: killed by signal 9" in done.stderr
    whole, again = (torch.load(tmp_path / f"{how}.pt") for how in ("run", "kill"))
    assert torch.equal(whole["weight"], again["weight"]) and whole["seen"] == again["seen"]
    for epoch in (again["seen"][:4], again["seen"][4:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(32))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-np 4 python -u train.py --lr 1", "--workers 4 train.py --lr 1"),
        ("-H localhost:2,127.0.0.1 python3 train.py", "--workers 3 train.py"),
        ("-np 4 -H a:2,b:2 -m", None),
        ("--hostfile hosts python -m pkg.train x", "--hostfile hosts -m pkg.train x"),
        ("-np 2 pytest -v tests", "--workers 2 -m pytest -v tests"),
        ("--min-np 2 --max-np 4 ./train.py", "--workers 2 ./train.py"),
        ("-np 2 --reset-limit 4 python t.py", "--workers 2 --restarts 4 t.py"),
        ("-np 2 --gloo --verbose -- python t.py", "--workers 2 t.py"),
    ],
)
def test_horovodrun_words(words, expected):
    if expected is None:
        with pytest.raises(ArgumentError, match="horovodrun"):
            translate(words.split())
    else:
        assert translate(words.split())[0] == f"--horovod --output all {expected}".split()


def test_horovodrun_settings():
    words = "-np 2 -H a:1,b:1 --timeline-filename /t.json --timeline-mark-cycles -x SEED=3 "
    words += "--stall-check-shutdown-time-seconds 9 --fusion-threshold-mb 2 --autotune python t.py"
    arguments, variables, ignored = translate(words.split())
    assert variables == {
        "HOROVOD_TIMELINE": "/t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
        "HOROVOD_FUSION_THRESHOLD": "2097152",
        "SEED": "3",
    }
    assert ignored == ["--autotune"] and arguments[:6] == (
        ["--horovod", "--output", "all", "--workers", "2", "--hosts"]
    )
    assert arguments.count("--env") == len(variables)
    for wrong in ("--config-file x python t.py", "-np 2 ./a.out", "--nonsense 1 python t.py", ""):
        with pytest.raises(ArgumentError, match="horovodrun"):
            translate(wrong.split())


def test_every_form_shows_its_arguments():
    shown = {name: str(signature(getattr(hvd, name))) for name in ("allreduce", "broadcast_async_")}
    assert (
        "(tensor: 'Tensor', average" in shown["allreduce"] and "compression" in shown["allreduce"]
    )
    assert shown["broadcast_async_"].startswith("(tensor: 'Tensor', root_rank: 'int', name:")
    with pytest.raises(TypeError, match="outputs"):
        hvd.allreduce_(torch.ones(1), outputs=[torch.ones(1)])
