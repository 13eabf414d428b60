"""``ronde run --restarts``: whatever ends workers, the training goes on, exact to the sample."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from test_hosts import equal

from lab import lab, missing
from processes import child, ronde, ronde_run
from sampling import long, some

TRAIN = textwrap.dedent(
    """
    import os, sys, time, torch, ronde

    OUT, EPOCHS = sys.argv[1], int(sys.argv[2])
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    class Noted(torch.utils.data.Dataset):
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
        def __len__(self):
            return 60
        def __getitem__(self, i):
            return i, self.x[i], self.x[i].sum()

    def damage():
        with open("runs/damaged/checkpoints/step-000000006/model.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"?")

    run = ronde.distribute(
        model, optimizer, Noted(), loss=lambda out, y: torch.nn.functional.mse_loss(out.sum(1), y),
        forward=lambda model, batch: (model(batch[1]), batch[2]), batch_size=6, save_every=3,
        async_save=False,  # the checkpoint before a fault is the one that is expected
    )
    with open(f"{OUT}.{run.rank}.pid", "w") as file:
        file.write(str(os.getpid()))
    fault = os.environ.get("FAULT", "")
    for epoch in run.epochs(EPOCHS):
        for batch in run.batches():
            run.step(batch)
            run.print("begun", flush=True)
            micros = batch if type(batch).__name__ == "MicroBatches" else [batch]
            ids = [i for micro in micros for i in micro[0].tolist()]
            with open(f"{OUT}.ids", "a") as file:
                print(run.state.step, run.rank, os.environ["RONDE_GENERATION"], *ids, file=file)
            if run.state.step == (8 if fault == "damage" else 5) and fault and not os.path.exists(f"{OUT}.fault"):
                if run.rank == run.world_size - 1:
                    open(f"{OUT}.fault", "x").close()
                    if fault == "raise":
                        raise ValueError("a wire is loose")
                    if fault == "agent":
                        os.kill(os.getppid(), signal.SIGKILL)
                        time.sleep(60)
                    if fault == "damage":
                        damage()
                        fault = "SIGKILL"
                    os.kill(os.getpid(), getattr(signal, fault))
            time.sleep(float(os.environ.get("ALONE" if run.world_size == 1 else "PAUSE") or 0))
    run.export(OUT)
    """
).replace("import os, sys,", "import os, signal, sys,")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder) -> dict[str, torch.Tensor]:
    done = ronde_run(["run", "-q", "-n", "2", "train.py", "undisturbed", "2"], folder)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "undisturbed")


def trained(path: Path, replicas: int = 1) -> None:
    """Each sample once in each epoch, counting the last generation that took a step."""
    steps: dict[int, tuple[str, list[int]]] = {}
    for line in path.read_text().splitlines():
        step, _, generation, *ids = line.split()
        if steps.get(int(step), ("",))[0] != generation:
            steps[int(step)] = generation, []
        steps[int(step)][1].extend(map(int, ids))
    for epoch in range(2):
        ids = [i for step in range(epoch * 10 + 1, epoch * 10 + 11) for i in steps[step][1]]
        assert sorted(ids) == sorted(list(range(60)) * replicas)


def events(folder: Path, name: str, kind: str) -> list[dict]:
    record = folder / "runs" / name / "record.jsonl"
    return [e for line in record.open() if (e := json.loads(line))["type"] == kind]


def workers_of(folder: Path, name: str) -> list[int]:
    """Process ids by rank, as the script wrote them."""
    return [int((folder / f"{name}.{rank}.pid").read_text()) for rank in range(2)]


FAULTS = [
    ("SIGKILL", "replicate", "--spares"),
    ("raise", "replicate", "--spares"),
    ("SIGSTOP", "replicate", "--no-spares"),
    ("SIGKILL", "shard=parameters", "--no-spares"),
    ("SIGKILL", "pipeline=2", "--spares"),
    ("SIGSEGV", "shard=optimizer", "--spares"),
    ("SIGKILL", "tensor=2", "--spares"),
]


@pytest.mark.parametrize("fault, plan, spares", some(FAULTS, 7))
def test_a_worker_that_ends(folder, undisturbed, fault, plan, spares):
    name = f"{fault}-{plan}".replace("=", "-")
    line = ["run", "-q", "-n", "2", "--name", name, "--restarts", "1", spares, "--plan", plan]
    done = ronde_run([*line, "train.py", name, "2"], folder, env={"FAULT": fault})
    assert done.returncode == 0, done.stderr
    why = {"raise": "ValueError: a wire is loose", "SIGSTOP": "SIGSTOP"}.get(fault, f"({fault})")
    (restart,) = events(folder, name, "restart")
    assert restart["rank"] == 1 and why in restart["reason"]
    assert "restart 1 of 1, from checkpoints/step-000000003: rank 1" in done.stderr
    assert [e["step"] for e in events(folder, name, "resume")] == [3]
    equal(folder / name, undisturbed)
    trained(folder / f"{name}.ids", 2 if "=2" in plan else 1)


def test_a_damaged_checkpoint(folder, undisturbed):
    """The line of the restart names the checkpoint that it goes on from."""
    line = ["run", "-q", "-n", "2", "--name", "damaged", "--restarts", "1", "train.py", "damaged"]
    given = {"FAULT": "damage", "RONDE_MEMORY_COPIES": "0"}
    done = ronde_run([*line, "2"], folder, env=given)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, from checkpoints/step-000000003: rank 1" in done.stderr
    equal(folder / "damaged", undisturbed)


def leave(how: str, started, folder: Path, name: str) -> None:
    """Ask a run to leave: its launcher, or one of its workers."""
    started.wait_for("begun", 60)
    pid = started.pid if how != "worker" else workers_of(folder, name)[1]
    os.kill(pid, signal.SIGUSR1 if how == "SIGUSR1" else signal.SIGTERM)


@pytest.mark.parametrize(
    "how, plan",
    some(
        [
            ("SIGTERM", "replicate"),
            ("worker", "pipeline=2"),
            ("limit", "shard=parameters"),
            ("SIGUSR1", "tensor=2"),
            ("worker", "replicate"),
        ],
        4,
    ),
)
def test_leaving(folder, undisturbed, how, plan):
    """All save at one step and leave with 75; a worker that alone was asked is a restart."""
    name = f"leaves-{how}-{plan}".replace("=", "-")
    line = ["run", "-q", "-n", "2", "--name", name, "--plan", plan]
    line += ["--restarts", "0"] if how == "SIGTERM" else ["--restarts", "2"]
    line += ["--time-limit", "1s"] if how == "limit" else []
    with child(ronde(*line, "train.py", name, "2"), folder, {"PAUSE": "0.1"}, fork=True) as began:
        if how != "limit":
            leave(how, began, folder, name)
        done = began.done(90)
    if how == "worker":
        assert done.returncode == 0, done.stderr
        (restart,) = events(folder, name, "restart")
        assert "asked to leave" in restart["reason"]
        step = events(folder, name, "resume")[0]["step"]
    else:
        assert done.returncode == 75, done.stderr
        told = {"limit": "the time limit is reached"}.get(how, f"asked to leave by {how}")
        step = events(folder, name, "end")[-1]["step"]
        assert f"{told}: it has left after step {step}. Go on with: ronde run" in done.stderr
        assert events(folder, name, "end")[-1]["status"] == "interrupted"
        again = ["run", "-q", "-n", "2", "--name", name, "--plan", plan, "--resume"]
        done = ronde_run([*again, "train.py", name, "2"], folder)
        assert done.returncode == 0, done.stderr
        assert [e["step"] for e in events(folder, name, "resume")] == [step]
    lines = (folder / f"{name}.ids").read_text().splitlines()
    assert len({tuple(x.split()[:2]) for x in lines}) == len(lines), "a step was trained twice"
    equal(folder / name, undisturbed)
    trained(folder / f"{name}.ids", 2 if "=2" in plan else 1)


@long
def test_a_second_signal_ends_at_once(folder):
    line = ["run", "-q", "-n", "2", "--name", "twice", "--restarts", "1", "train.py", "twice", "2"]
    with child(ronde(*line), folder, {"PAUSE": "30"}, fork=True) as began:
        leave("SIGTERM", began, folder, "twice")
        time.sleep(0.5)
        os.kill(began.pid, signal.SIGTERM)
        assert began.done(30).returncode == 143


def test_the_same_error_again_ends_the_run(folder):
    (folder / "wrong.py").write_text("import ronde\nraise ValueError('always')\n")
    line = ["run", "-q", "-n", "2", "--restarts", "5", "wrong.py"]
    done = ronde_run(line, folder)
    assert done.returncode == 1
    assert done.stderr.count("restart 1 of 5, from the beginning") == 1
    assert "restart 2" not in done.stderr and "a restart does not help" in done.stderr
    assert "ValueError: always" in done.stderr


def test_a_worker_of_an_old_generation_writes_nothing(folder):
    """A zombie: the workers of one launch live on, stopped, while another launch has the run."""
    name = "fenced"
    line = ["run", "-q", "-n", "1", "--name", name, "train.py", name, "2"]
    with child(ronde(*line), folder, {"ALONE": "0.1"}, fork=True) as began:
        began.wait_for("begun", 60)
        (folder / "runs" / name / ".generation").write_text("another-7")
        done = began.done(60)
    assert done.returncode == 1
    assert "the run has been restarted without it since: it may write nothing" in done.stderr
    written = [e["step"] for e in events(folder, name, "checkpoint")]
    assert max(written, default=0) < 20


def test_no_worker_outlives_the_launcher(folder):
    line = ["run", "-q", "-n", "2", "--name", "alone", "--restarts", "3", "train.py", "alone", "2"]
    with child(ronde(*line), folder, {"PAUSE": "1"}, fork=True) as began:
        began.wait_for("begun", 60)
        found = psutil.Process(began.pid).children(recursive=True)
        assert {p.pid for p in found} >= set(workers_of(folder, "alone"))
        os.kill(began.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(found, timeout=5)
        assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    done = ronde_run([*line[:-3], "--resume", "train.py", "alone", "1"], folder)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hosts(folder):
    if missing():
        pytest.skip(missing())
    with lab(folder / "lab", 2) as made:
        yield made


def on(hosts, *words: str) -> list[str]:
    named = ",".join(f"{name}:1" for name in hosts.names)
    reach = ["--ssh-config", str(hosts.ssh_config), "--hosts", named]
    return ["run", "-q", *reach, "--env", "FAULT", "--env", "PAUSE", "--env", "ALONE", *words]


HOST_FAULTS = [
    ("agent", "replicate"),
    ("SIGKILL", "shard=parameters"),
    ("SIGKILL", "replicate"),
    ("agent", "pipeline=2"),
]


@long
@pytest.mark.parametrize("fault, plan", HOST_FAULTS)
def test_a_worker_or_an_agent_of_a_host(hosts, folder, undisturbed, fault, plan):
    name = f"hosts-{fault}-{plan}".replace("=", "-")
    line = on(hosts, "--name", name, "--restarts", "1", "--plan", plan, "train.py", name, "2")
    first, second = hosts.names
    pauses = {"FAULT": fault, "PAUSE": "0.1", "ALONE": "1"}
    done = ronde_run(line, folder, 120, env=pauses)
    assert done.returncode == 0, done.stderr
    why = f"host {second} is lost" if fault == "agent" else "rank 1: killed by signal 9"
    assert f"restart 1 of 1, from checkpoints/step-000000003: {why}" in done.stderr
    assert f"going on with 2 workers on {first}:1, {second}:1" in done.stderr
    alone = fault == "agent" and "=2" not in plan  # until it is there again
    assert alone == (f"going on with 1 worker on {first}:1" in done.stderr)
    equal(folder / name, undisturbed, 1e-10 if alone else 1e-12)
    trained(folder / f"{name}.ids", 2 if "=2" in plan else 1)


def test_a_host_is_lost_and_comes_back(hosts, folder, undisturbed):
    """2 workers, then 1, then 2 again: each sample of an epoch once, the same weights."""
    first, second = hosts.names
    line = on(hosts, "--name", "lost", "--restarts", "1", "train.py", "lost", "2")
    pauses = {"FAULT": "", "PAUSE": "0.3", "ALONE": "1.5"}  # the host is back before the end
    with child(ronde(*line), folder, pauses, fork=True) as began:
        began.wait_for("begun", 60)
        hosts.lose(second)
        limit = time.monotonic() + 60
        while "going on with 1 worker" not in began.stderr and time.monotonic() < limit:
            time.sleep(0.1)
        assert f"going on with 1 worker on {first}:1" in began.stderr, began.stderr
        hosts.boot(second)
        done = began.done(120)
    assert done.returncode == 0, done.stderr
    lost, back = events(folder, "lost", "restart")
    assert f"host {second} is lost" in lost["reason"]
    assert back["reason"] == f"host {second} is there again" and back["rank"] is None
    again = back["time"]
    step = next(e["step"] for e in events(folder, "lost", "resume") if e["time"] > again)
    assert f"starting again from checkpoints/step-{step:09d}: {back['reason']}" in done.stderr
    assert f"going on with 2 workers on {first}:1, {second}:1" in done.stderr
    lines = (folder / "lost.ids").read_text().splitlines()
    assert sum(int(line.split()[0]) == step for line in lines) == 1, "a step was trained again"
    starts = [e["workers"] for e in events(folder, "lost", "start")]
    assert starts == [2, 1, 2]
    equal(folder / "lost", undisturbed, 1e-10)
    trained(folder / "lost.ids")
