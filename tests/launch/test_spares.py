"""Workers that are forks of one process run a script as an interpreter of their own would."""

from __future__ import annotations

import json

from processes import ronde_run

SCRIPT = """
import json, os, sys

said = {"torch": "torch" in sys.modules, "argv": sys.argv, "words": sys.orig_argv[2:]}
os.environ["OMP_NUM_THREADS"] = "1"
from torch import nn
import torch
import wave

said |= {
    "threads": torch.get_num_threads(),
    "name": __name__,
    "seed": torch.initial_seed(),
    "spec": torch.__spec__.origin == torch.__file__,
    "beside": wave.BESIDE,
    "parent": os.getppid() == int(os.environ["RONDE_LAUNCHER_PID"]),
}
with open(f"said-{os.environ['RANK']}", "w") as file:
    json.dump(said, file)
"""


def test_a_script_is_run_as_by_an_interpreter(tmp_path):
    """Before its own import, it finds no torch and may set threads; modules beside it come first."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wave.py").write_text("BESIDE = True")
    line = ["run", "-q", "-n", "2", "script.py", "a b"]
    done = ronde_run(line, tmp_path, env={"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    seeds = set()
    for rank in range(2):
        said = json.loads((tmp_path / f"said-{rank}").read_text())
        seeds.add(said.pop("seed"))
        words = said.pop("words")
        assert words[0].endswith("worker.py") and words[1:] == ["script.py", "a b"]
        assert said == {
            "torch": False,
            "argv": ["script.py", "a b"],
            "threads": 1,
            "name": "__main__",
            "spec": True,
            "beside": True,
            "parent": True,
        }
    assert len(seeds) == 2, "workers draw alike, so data that nobody seeded go unnoticed"


def test_a_variable_that_torch_has_read_already_is_named(tmp_path):
    (tmp_path / "script.py").write_text("import os; os.environ['OMP_DYNAMIC'] = '1'; import torch")
    done = ronde_run(["run", "-n", "2", "--name", "a", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        log = (tmp_path / "runs" / "a" / "logs" / f"rank-{rank}.log").read_text()
        assert "the script sets OMP_DYNAMIC before it imports torch" in log
