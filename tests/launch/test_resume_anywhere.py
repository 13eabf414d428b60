"""One run over several engines: each leaves when asked to, and the next one resumes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_hosts import TRAIN, equal

from lab import lab, missing
from processes import child, ronde, ronde_run
from sampling import long

EPOCHS = "100"


@long
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_run_moves_between_engines(tmp_path):
    slow = TRAIN.replace("lr=0.2", "lr=0.02").replace("sleep(0.05)", "sleep(0.3)")
    (tmp_path / "train.py").write_text(slow)
    train = ["train.py", "moved.st", EPOCHS, "forever"]
    with lab(tmp_path / "lab", 2) as hosts, tempfile.TemporaryDirectory(dir="/tmp") as short:
        first, second = hosts.names
        over_ssh = ["--ssh-config", str(hosts.ssh_config), "--hosts", f"{first}:2,{second}:1"]
        engines = {"ssh": over_ssh, "this machine": ["--workers", "2"]}
        if mpirun := shutil.which("mpirun.openmpi"):
            (tmp_path / "bin").mkdir()
            (tmp_path / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec {mpirun} "$@"\n')
            (tmp_path / "bin" / "mpirun").chmod(0o755)
            engines["mpirun"] = ["--mpi", *over_ssh]
        if importlib.util.find_spec("ray"):
            engines["Ray"] = ["--ray", "local", "--workers", "3"]
        env = {"RAY_TMPDIR": short, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        resume: list[str] = []
        for name, where in engines.items():
            words = ["run", *where, "--restarts", "0", "--name", "moved", *resume, *train]
            with child(ronde(*words), tmp_path, env) as started:
                started.wait_for("resumed" if resume else "begun", 120)
                started.process.send_signal(signal.SIGUSR1)
                done = started.done(60)
            assert done.returncode == 75, (name, done.stdout, done.stderr)
            assert "it has left after step" in done.stderr
            resume = ["--resume"]
    words = ["run", "--workers", "1", "--name", "moved", "--resume", *train[:2], EPOCHS]
    done = ronde_run(words, tmp_path, 120.0)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = ronde_run(["run", "--workers", "1", "train.py", "whole.st", EPOCHS], tmp_path, 120.0)
    assert whole.returncode == 0, whole.stderr
    equal(Path(tmp_path) / "moved.st", load_file(tmp_path / "whole.st"))
