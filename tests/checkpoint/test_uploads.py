"""Checkpoints in a store: whole or not there, kept by the same policy, and enough to go on from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lab import lab, missing
from processes import child, ronde_run
from ronde.checkpoint import KeepPolicy, RemoteCheckpoints, Uploads, verify, write
from ronde.world import ArgumentError
from sampling import long, some

TRAIN = """
import sys, time, torch, ronde
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(40, 6, generator=g).double(), torch.randint(3, (40,), generator=g)
)
run = ronde.distribute(
    model, optimizer, data, loss=torch.nn.functional.cross_entropy, batch_size=8, save_every=2,
    keep=sys.argv[3], seed=5,
)
for epoch in run.epochs(int(sys.argv[2])):  # of five steps
    for batch in run.batches():
        run.step(batch)
        time.sleep(float(sys.argv[4]))
run.export(sys.argv[1])
"""

# A store that breaks in the middle of files, or takes its time; ``ronde`` with it is launcher.py.
FLAKY = textwrap.dedent(
    """
    import os, time
    from pathlib import Path
    from fsspec import register_implementation
    from fsspec.implementations.local import LocalFileSystem

    class Flaky(LocalFileSystem):
        protocol = "flaky"

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).removeprefix("flaky://"))

        def put_file(self, path1, path2, **_):
            data, plan = Path(path1).read_bytes(), Path(os.environ["FLAKY_PLAN"])
            part, file, times = os.path.basename(path2), *plan.read_text().split()
            breaks = part.startswith(file) and int(times) > 0
            half = len(data) // 2
            with open(path2, "wb") as out:
                out.write(data[:half])
                out.flush()
                time.sleep(float(os.environ.get("FLAKY_SLOW", 0)))
                if breaks:
                    plan.write_text(f"{file} {int(times) - 1}")
                    raise OSError("the store is gone")
                out.write(data[half:])

    register_implementation("flaky", Flaky)
    """
)


def script(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "launcher.py").write_text(f"{FLAKY}\nfrom ronde.cli import main\nmain()\n")
    return folder


def launched(folder: Path, url: str, out: str, epochs: int, *words: str, keep="last=2", slow=0.0):
    line = ["-n", "2", "--name", "it", "--upload", url, *words]
    return ronde_run(["run", *line, "train.py", out, str(epochs), keep, str(slow)], folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing interrupts."""
    folder = script(tmp_path_factory.mktemp("whole"))
    done = ronde_run(["run", "-n", "2", "train.py", "whole.st", "3", "3", "0"], folder)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "whole.st")


def equal(path: Path, whole) -> None:
    found = load_file(path)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def there(store: Path) -> list[int]:
    """Steps of the checkpoints in a store; each is whole."""
    steps = []
    for path in sorted((store / "it").glob("step-*")):
        verify(path)
        steps.append(int(path.name[5:]))
    return steps


def test_a_fresh_machine_goes_on(tmp_path, whole):
    """Under another plan, too; then the store has what the policy keeps of both machines' runs."""
    first, second, store = script(tmp_path / "1"), script(tmp_path / "2"), tmp_path / "store"
    url, keep = f"file://{store}", "last=2,every=8"
    plan = ["--plan", "shard=parameters"]
    done = launched(first, url, "half.st", 2, *plan, keep=keep)
    assert done.returncode == 0, done.stderr
    assert there(store) == [8, 10]
    assert "warning" not in done.stdout + done.stderr
    assert sorted(p.name for p in (first / "runs/it/checkpoints").iterdir()) == [
        "step-000000008",
        "step-000000010",
    ]
    assert not (first / "runs/it/.uploading").exists()
    done = launched(second, url, "all.st", 3, "--resume", keep=keep)
    assert done.returncode == 0, done.stderr
    assert f"fetched step-000000010 from {url}/it" in done.stderr
    equal_nearly = load_file(second / "all.st")
    for name, value in whole.items():  # of another plan: sums in another order
        torch.testing.assert_close(equal_nearly[name], value, rtol=0, atol=1e-12)
    assert there(store) == [8, 14, 15]  # 8 was never on the second machine
    refused = launched(script(tmp_path / "3"), url, "x.st", 1)
    assert refused.returncode != 0
    said = " ".join((refused.stdout + refused.stderr).split())
    assert "has checkpoints of a run already. Continue it with --resume --name it" in said
    assert not (tmp_path / "3/runs/it").exists()


def flaky(tmp_path: Path, plan: str, slow: float = 0.0) -> dict[str, str]:
    (tmp_path / "plan").write_text(plan)
    return {"FLAKY_PLAN": str(tmp_path / "plan"), "FLAKY_SLOW": str(slow)}


def line(store: Path, *words: str, keep="last=2", epochs=3, slow=0.1) -> list[str]:
    start = [sys.executable, "-m", "launcher", "run", "-n", "2", "--name", "it"]
    train = ["train.py", "out.st", str(epochs), keep, str(slow)]
    return [*start, "--upload", f"flaky://{store}", *words, *train]


@pytest.mark.parametrize("broken", some(["model.safetensors", "manifest.json"], 2))
def test_a_store_that_breaks_in_the_middle_of_files(tmp_path, whole, broken):
    """Told at once; the training goes on, and the next checkpoint is there, with the one before."""
    folder, store = script(tmp_path / "1"), tmp_path / "store"
    with child(line(store), folder, flaky(tmp_path, f"{broken} 2"), fork=True) as run:
        limit = time.monotonic() + 60
        while "the store is gone" not in run.stderr:  # while the training goes on
            assert time.monotonic() < limit and not (folder / "out.st").exists()
            time.sleep(0.02)
        done = run.done(60)
    assert done.returncode == 0, done.stderr
    warned = [w for w in done.stderr.splitlines() if "the store is gone" in w]
    assert len(warned) == 2 and "; the next checkpoint tries again" in warned[0], done.stderr
    events = map(json.loads, (folder / "runs/it/record.jsonl").read_text().splitlines())
    noted = [e["text"] for e in events if e["type"] == "warning" and "is gone" in e["text"]]
    assert noted == [w.partition("warning: ")[2] for w in warned]
    equal(folder / "out.st", whole)
    assert there(store) == [14, 15]


@long
def test_killed_in_the_middle_of_an_upload(tmp_path, whole):
    folder, other, store = script(tmp_path / "1"), script(tmp_path / "2"), tmp_path / "store"
    slow = flaky(tmp_path, "none 0", slow=0.3)
    with child(line(store, slow=0.5, keep="last=3"), folder, slow, fork=True) as run:
        limit = time.monotonic() + 60

        def parts() -> list[Path]:
            return [p for p in store.glob("it/step-*") if not (p / "manifest.json").exists()]

        while not (list(store.rglob("manifest.json")) and parts()):
            assert time.monotonic() < limit
            time.sleep(0.01)
        os.kill(run.pid, signal.SIGKILL)
        half = parts()
    assert len(half) == 1
    newest = max(RemoteCheckpoints(f"file://{store}", "it").steps().items())
    assert newest == (int(half[0].name[5:]), False)
    done = launched(other, f"file://{store}", "all.st", 3, "--resume", keep="last=2")
    assert done.returncode == 0, done.stderr
    assert f"{half[0].name} is not whole" in done.stderr and "fetched step-" in done.stderr
    equal(other / "all.st", whole)
    assert there(store) == [14, 15]


def test_a_pod_that_is_started_again_elsewhere(tmp_path, whole):
    """The same command, without --resume: it goes on where the store has a whole checkpoint."""
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "1"}
    half = tmp_path / "store/it/step-000000001"  # of a pod that was lost at once
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("x")
    for pod, epochs in (("1", 2), ("2", 3)):
        line = ["run", "-n", "2", "--name", "it", "--upload", f"file://{tmp_path}/store"]
        done = ronde_run(
            [*line, "train.py", "out.st", str(epochs), "2", "0"], script(tmp_path / pod), env=env
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "fetched step-000000010" in done.stderr and not half.exists()
    equal(tmp_path / "2/out.st", whole)


@long
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_hosts_that_do_not_share_the_run_directory(tmp_path, whole):
    """Every rank's files are there, and enough to go on from here."""
    own = script(tmp_path / "private")
    with lab(tmp_path / "lab", 2, own) as hosts:
        for name in hosts.names:
            shutil.copy(own / "train.py", tmp_path)
            hosts.ssh(name, f"cp {tmp_path}/train.py {own}/")
        at = ["--ssh-config", str(hosts.ssh_config)]
        at += ["--hosts", ",".join(f"{name}:1" for name in hosts.names)]
        at += ["--name", "it", "--plan", "shard=parameters", "--upload", f"file://{tmp_path}/store"]
        done = ronde_run(["run", *at, "train.py", "half.st", "2", "2", "0.2"], own, 90)
        assert done.returncode == 0, done.stdout + done.stderr
    assert there(tmp_path / "store") == [8, 10]
    newest = tmp_path / "store/it/step-000000010"
    assert len(list(newest.glob("model-*-of-00002.safetensors"))) == 2
    fresh = script(tmp_path / "fresh")
    done = launched(fresh, f"file://{tmp_path}/store", "all.st", 3, "--resume")
    assert done.returncode == 0 and "fetched step-000000010" in done.stderr, done.stderr
    found = load_file(fresh / "all.st")
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@long
def test_two_machines_start_runs_of_one_name(tmp_path):
    """The one that started last writes; the other one says so, and its checkpoints stay at home."""
    first, second, store = script(tmp_path / "1"), script(tmp_path / "2"), tmp_path / "store"
    with child(line(store, slow=0.6), first, flaky(tmp_path, "none 0")) as run:
        limit = time.monotonic() + 60
        while not list(store.rglob("writer")):
            assert time.monotonic() < limit
            time.sleep(0.02)
        done = launched(second, f"file://{store}", "out.st", 2)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
        late = run.done(60)
    assert late.returncode == 0 and "a run of the same name was started since" in late.stderr
    assert there(store)
    for step in there(store):
        manifest = f"step-{step:09d}/manifest.json"
        mine = second / "runs/it/checkpoints" / manifest
        assert mine.read_bytes() == (store / "it" / manifest).read_bytes()


def test_one_that_is_written_again_is_uploaded_again(tmp_path):
    store = RemoteCheckpoints(f"file://{tmp_path}/store", "it")
    store.claim()
    place, there = tmp_path / "run/checkpoints", tmp_path / "store/it/step-000000005/manifest.json"
    with Uploads(store, tmp_path / "run", print):
        for state in ({}, {"ending": {"stopped": "good enough"}}):
            write(place, 5, {"model.safetensors": {"x": torch.ones(2)}}, state)
            limit = time.monotonic() + 20
            while not there.exists() or json.loads(there.read_text())["state"] != state:
                assert time.monotonic() < limit
                time.sleep(0.02)


def test_what_is_refused(tmp_path):
    folder = script(tmp_path / "1")
    cases = {
        ("--upload", "store"): "expected a URL that outlives this machine",
        ("--upload", "memory://x"): "expected a URL that outlives this machine",
        ("--upload", "nosuch://x/y"): "fsspec needs the package of that protocol",
        ("--upload", f"file://{tmp_path}/s", "--runs", "none"): "--runs none keeps nothing",
        ("--upload", "file:///proc/s"): "file:///proc/s/train-1 cannot be written",
        ("--upload", f"file://{tmp_path}/s", "--resume", "--name", "it"): "has no whole checkpoint",
    }
    for words, told in cases.items():
        done = ronde_run(["run", "-n", "1", *words, "train.py", "x.st", "1", "2", "0"], folder)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode != 0 and told in said, said
        assert "Traceback" not in said and not (folder / "runs/it").exists()
    stub = tmp_path / "stub"
    (stub / "fsspec").mkdir(parents=True)
    (stub / "fsspec/__init__.py").write_text("raise ImportError('no fsspec')")
    words = [sys.executable, "-m", "ronde", "run", "--upload", "file:///x", "train.py"]
    with child(words, folder, {"PYTHONPATH": str(stub)}) as run:
        done = run.done(30)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "pip install 'ronde[remote]'" in said, said
    with pytest.raises(ArgumentError):
        RemoteCheckpoints("s4://bucket", "it")


def test_half_and_damaged_ones_are_passed_over(tmp_path):
    for step in (2, 4, 6):
        write(tmp_path / "it", step, {"model.safetensors": {"x": torch.ones(3)}}, {})
    (tmp_path / "it" / "step-000000004" / "manifest.json").unlink()
    weights = tmp_path / "it" / "step-000000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    found, passed = RemoteCheckpoints(f"file://{tmp_path}", "it").fetch(tmp_path / "here", -1)
    assert found.name == "step-000000002" and "does not match its digest" in passed[0]
    assert "is missing" in passed[1]


def test_the_policy_and_names_in_a_store(tmp_path):
    """Foreign files stay; names that lead out of the folder are not fetched."""
    root = tmp_path / "it"
    for step in (2, 4, 6, 8, 10):
        folder = root / f"step-{step:09d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("x")
        if step != 8:
            (folder / "manifest.json").write_text(json.dumps({"step": step}))
    (root / "notes.txt").write_text("mine")
    store = RemoteCheckpoints(f"file://{tmp_path}", "it")
    store.prune(KeepPolicy(1, (6,)), [2])
    assert store.steps() == {2: True, 6: True, 10: True}
    assert (root / "notes.txt").exists()
    found, passed = store.fetch(tmp_path / "here", -1)
    assert found is None and len(passed) == 3 and "step-000000010" in passed[0]
    assert list((tmp_path / "here").iterdir()) == []
