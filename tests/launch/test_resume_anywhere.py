"""One run over all engines: each leaves when asked to, and the next one resumes."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from test_hosts import TRAIN, equal

from engines import ENGINES, absent, started_by
from lab import lab, missing, no_slurm, slurm
from processes import child, ronde, ronde_run
from sampling import long

EPOCHS = "100"
WORKERS = {"ssh": 3, "here": 2, "mpirun.openmpi": 3, "mpirun.mpich": 2, "slurm": 4, "ray": 3}


@long
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_run_moves_between_engines(tmp_path):
    slow = TRAIN.replace("lr=0.2", "lr=0.02").replace("sleep(0.05)", "sleep(0.3)")
    (tmp_path / "train.py").write_text(slow)
    train = ["train.py", "moved.st", EPOCHS, "forever"]
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(lab(tmp_path / "lab", 2))
        cluster = None if no_slurm() else stack.enter_context(slurm(hosts))
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        resume: list[str] = []
        for engine in ("here", *(each for each in ENGINES if not absent(each))):
            words = ["--restarts", "0", "--name", "moved", *resume, *train]
            workers = WORKERS.get(engine, 2)
            line, variables = ronde("run", "--workers", str(workers), *words), {}
            if engine != "here":
                line, variables = started_by(engine, hosts, cluster, short, workers, words)
            with child(line, tmp_path, variables) as started:
                started.wait_for("resumed" if resume else "begun", 120)
                launcher = psutil.Process(started.pid)
                if engine == "slurm":  # below salloc
                    (launcher,) = launcher.children()
                launcher.send_signal(signal.SIGUSR1)
                done = started.done(60)
            assert done.returncode == 75, (engine, done.stdout, done.stderr)
            assert "it has left after step" in done.stderr
            resume = ["--resume"]
    words = ["run", "--workers", "1", "--name", "moved", "--resume", *train[:2], EPOCHS]
    done = ronde_run(words, tmp_path, 120.0)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = ronde_run(["run", "--workers", "1", "train.py", "whole.st", EPOCHS], tmp_path, 120.0)
    assert whole.returncode == 0, whole.stderr
    equal(Path(tmp_path) / "moved.st", load_file(tmp_path / "whole.st"))
