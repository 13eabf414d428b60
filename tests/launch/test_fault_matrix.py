"""A sample of ``benchmarks/faults.py``: a fault under a plan, and the weights of the undisturbed
training all the same.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from processes import TESTS, child
from sampling import long, some

FILE = TESTS.parent / "benchmarks" / "faults.py"


def _loaded():
    sys.path.insert(0, str(FILE.parent))
    try:
        spec = importlib.util.spec_from_file_location("faults", FILE)
        module = importlib.util.module_from_spec(spec)
        sys.modules["faults"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FILE.parent))


faults = _loaded()
GRID = [(kind, plan) for kind in faults.HERE for plan in faults.PLANS]
GRID = [(kind, plan) for kind, plan in GRID if kind != "bit" or plan == "replicate"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The training and its weights."""
    training = faults.Training(tmp_path_factory.mktemp("faults"), "undisturbed", "replicate")
    with child(training.line(pause=0.0), training.folder, fork=True) as began:
        done = began.done(90)
    assert done.returncode == 0, done.stderr
    return training, load_file(training.out)


@long
@pytest.mark.skipif(not Path("/proc").exists(), reason="workers are forks on Linux only")
@pytest.mark.parametrize(("kind", "plan"), some(GRID[9:] + GRID[:9], 60))
def test_the_training_ends_with_the_same_weights(undisturbed, kind, plan):
    plain, weights = undisturbed
    case = faults.HERE[kind]
    wanted = faults.without(plain.taken(), case.bad) if case.bad else weights
    name = f"{kind}-{plan}".replace("=", "-")
    told = faults.disturbed(faults.Training(plain.folder, name, plan), case, wanted)
    assert told["ok"], told
