"""What workers use is measured while a watched run trains, and missing tools change nothing."""

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
from ronde.launch.frames import from_line, to_line
from ronde.launch.messages import Resources
from ronde.launch.mirror import folder_files
from ronde.launch.resources import ResourceWatch
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
                found = [lines.get(timeout=WAIT) for _ in range(count)]
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
        memory = psutil.Process().memory_info().rss
        assert memory / 10 < line["memory"] < 2 * memory
        assert line["memory"] < line["memory_limit"] <= psutil.virtual_memory().total
        assert line["disk_free"] > 0
        assert line["gpu"] == line["gpu_memory"] == line["gpu_memory_limit"] == []
        assert line["throttled"] in (True, False)


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
    monkeypatch.setattr(ResourceWatch.__init__, "__defaults__", (0.05, 0.1))
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import os, time
            from pathlib import Path
            from ronde.world.heartbeat import Heartbeat

            Heartbeat(Path(os.environ["RONDE_WATCH_DIR"]), 0)
            limit = time.monotonic() + 30
            lines = Path(os.environ["RONDE_RUN_DIR"]) / "resources.jsonl"
            while not lines.is_file() and time.monotonic() < limit:
                time.sleep(0.01)
            """
        )
    )
    run = tmp_path / "run"
    run.mkdir()
    job = Job([str(tmp_path / "train.py")], 1, run, {"RONDE_WATCH": "8"})
    assert run_here(job, lambda data: None, lambda message: None).status == 0
    line, *_ = map(json.loads, (run / "resources.jsonl").read_text().splitlines())
    assert line["type"] == "resources"
    assert line["host"]
    assert line["memory"] > 0
    assert "resources.jsonl" not in folder_files(run)  # the launcher's own


def test_message():
    message = Resources({"cpu": [1.0, 2.0, 3.0]})
    assert from_line(to_line(message)) == message
