"""What workers use and do is measured while a run trains, and missing tools change nothing."""

from __future__ import annotations

import json
import queue
import sys
import textwrap
import threading
import types

import psutil
import pytest

from ronde.launch import Job, run_here
from ronde.launch.mirror import folder_files
from ronde.launch.resources import ResourceWatch
from ronde.watch import RunDir
from ronde.watch.judge import Judge
from ronde.world.cores import usable_cores
from ronde.world.heartbeat import Heartbeat

WAIT = 30.0


@pytest.fixture
def measure(tmp_path):
    """``measure(count)``: so many lines about this process, which is busy meanwhile."""

    def call(count):
        Heartbeat(tmp_path, 0)
        lines, said = queue.Queue(), []
        over = threading.Event()
        busy = threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)])
        busy.start()
        try:
            with ResourceWatch(tmp_path, [0, 1], tmp_path, lines.put, said.append, 0.02, 0.2):
                found = []
                while len(found) < count:  # a busy machine may have no time for this process
                    line = lines.get(timeout=WAIT)
                    found += [line] if line["cpu"][-1] else []
        finally:
            over.set()
            busy.join()
        assert not said
        return found

    return call


def test_lines(measure, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # it is not installed
    for line in measure(2):
        low, middle, high = line["cpu"]
        assert 0 <= low <= middle <= high
        assert high > 0
        here = psutil.Process()  # what other tests started here may be there still
        memory = sum(p.memory_info().rss for p in [here, *here.children(recursive=True)])
        assert memory / 10 < line["memory"] < 2 * memory
        assert line["memory"] < line["memory_limit"] <= psutil.virtual_memory().total
        assert line["disk_free"] > 0
        assert line["gpu"] == line["gpu_memory"] == line["gpu_memory_limit"] == []
        assert line["throttled"] >= 0
        assert 0 <= line["idle"] < 100  # this process is busy
        assert line["cores"] == usable_cores()
        assert line["disk_free"] < line["disk_total"]


def test_devices(measure, monkeypatch):
    """There are none here: a module stands in for NVML."""
    busy, opened = iter(range(1, 10**6)), []
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = OSError
    nvml.nvmlInit = lambda: opened.append(1)
    nvml.nvmlShutdown = opened.clear
    nvml.nvmlDeviceGetCount = lambda: 4
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=next(busy))
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=handle, total=9)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    (line,) = measure(1)
    assert line["gpu_memory"] == [3, 1]  # of two workers
    assert line["gpu_memory_limit"] == [9, 9]
    for low, middle, high in line["gpu"]:
        assert 0 < low <= middle <= high
    assert not opened


def test_looking_that_fails_is_told(tmp_path, monkeypatch):
    Heartbeat(tmp_path, 0)
    said = queue.Queue()
    monkeypatch.setattr("ronde.launch.resources.usable_cores", lambda: 0)
    with ResourceWatch(tmp_path, [0], None, print, said.put, 0.01, 0.2):
        told = said.get(timeout=WAIT)
    assert told.startswith("ronde: resources are not watched any more (ZeroDivisionError")


def test_a_run_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(ResourceWatch.__init__, "__defaults__", (0.05, 0.3))
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import json, os, time
            from pathlib import Path
            import torch
            import ronde

            torch.set_num_threads(1)
            class Slow(torch.utils.data.Dataset):
                def __len__(self):
                    return 4000
                def __getitem__(self, i):
                    time.sleep(0.05)
                    return torch.full((2,), float(i)), torch.zeros(1)

            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
            run = ronde.distribute(
                model, optimizer, Slow(), loss=torch.nn.functional.mse_loss, batch_size=4
            )
            lines = Path(os.environ["RONDE_RUN_DIR"]) / "resources.jsonl"
            for epoch in run.epochs(1):
                for batch in run.batches():
                    run.step(batch)
                    told = lines.read_text().splitlines() if lines.is_file() else []
                    if sum(json.loads(line)["training"] for line in told[:-1]) > 2:
                        break
            """
        )
    )
    run = tmp_path / "run"
    run.mkdir()
    job = Job([str(tmp_path / "train.py")], 1, run)
    assert run_here(job, lambda data: None, lambda message: None).status == 0
    lines = [json.loads(line) for line in (run / "resources.jsonl").read_text().splitlines()]
    assert lines[0]["since_start"] < lines[-1]["since_start"]
    _, *trained = [line for line in lines if line["training"]]  # the first one begins before it
    line = trained[0]
    assert line["type"] == "resources"
    assert line["host"]
    assert line["memory"] > 0
    assert line["last_step"] == 1000
    assert line["step"] > 0
    loading = sum(line["ranks"][0]["loading"] for line in trained)
    # between two beats of a rank, which are not the moments of the lines: a beat's length apart
    assert 0.1 < loading < 2 * sum(line["seconds"] for line in trained)
    assert sum(line["ranks"][0]["steps"] for line in trained) > 0
    monkeypatch.setattr("ronde.watch.judge._LATE_SECONDS", -60.0)  # the run was shorter
    settings = {"input-bound.seconds": 0.4, "input-bound.share": 0.01}
    judge = Judge(RunDir(run), only=["input-bound"], settings=settings)
    (alert,) = judge.look()
    assert alert.rank == 0
    assert alert.text.startswith("rank 0 waited for batches for ")
    assert alert.remedy.startswith("ronde doctor ")
    assert "resources.jsonl" not in folder_files(run)  # the launcher's own
