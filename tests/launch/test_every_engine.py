"""The same script over every engine, on 2 and on 4 workers: the weights of one process, complete
logs, record, and checkpoint, and arguments and variables that nothing has read on the way.
"""

from __future__ import annotations

import json
import sys

import pytest
from test_hosts import TRAIN, equal

from engines import ENGINES, started_by
from lab import missing
from processes import child, ronde, ronde_batch
from sampling import ALL, long

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

ODD = "-x $(touch caught) `touch caught` 'q' \"r\"; touch caught\n--hosts=b \\ ü"
GRID = [(engine, workers) for engine in ENGINES for workers in (2, 4)]
# each of the others has a test of its own
SAMPLE = GRID if ALL else [("spark", 2)]


@pytest.mark.parametrize(("engine", "workers"), SAMPLE)
def test_the_same_training(hosts, place, one, short, request, engine, workers):
    cluster = request.getfixturevalue("cluster") if engine == "slurm" else None
    (place / "odd.py").write_text(f"{TRAIN}print('ODD', [os.environ['ODD']] == sys.argv[3:])\n")
    name = f"{engine}-{workers}"
    train = ["--name", name, "--env", "ODD", "odd.py", f"{name}.st", "4", ODD]
    words, variables = started_by(engine, hosts, cluster, short, workers, train)
    with child(words, place, {**variables, "ODD": ODD}) as started:
        done = started.done(120)
    assert done.returncode == 0, done.stdout + done.stderr
    equal(place / f"{name}.st", one)
    assert "ODD True" in done.stdout and "completed" in done.stdout, done.stdout
    assert not (place / "caught").exists()
    run = place / "runs" / name
    logs = sorted((run / "logs").iterdir())
    assert [p.name for p in logs] == [f"rank-{r}.log" for r in range(workers)]
    assert all(f"I am {r} {workers} " in p.read_text() for r, p in enumerate(logs))
    events = [json.loads(line) for line in (run / "record.jsonl").open()]
    assert (events[0]["type"], events[-1]["type"]) == ("start", "end")
    assert events[0]["workers"] == workers and events[-1]["status"] == "completed"
    (saved,) = (run / "checkpoints").iterdir()
    assert saved.name == "step-000000012"


def test_names_that_are_no_hosts(place):
    odd = ("-oProxyCommand=touch caught", "$(touch caught)", "a b", "a;touch caught", "a\nb")
    options = [[*mpi, "--hosts", f"{name}:1"] for name in odd for mpi in ([], ["--mpi"])]
    for done in ronde_batch([["run", *o, "train.py", "x.st", "1"] for o in options], place):
        assert done.returncode == 2 and "is not a host" in done.stderr, done.stderr
    assert not (place / "caught").exists()


TREES = """
import sys
import numpy as np
import ronde
from ronde import algorithms

draw = np.random.default_rng(0)
x = draw.normal(size=(900, 5))
y = x[:, 0] * x[:, 1] > 0
model = algorithms.trees((x, y), objective="binary", library=sys.argv[1], rounds=8, depth=3,
                         validate=(x[::3], y[::3]))
if ronde.world().is_main:
    model.save(sys.argv[2])
"""


@long
@pytest.mark.parametrize("engine", [*ENGINES, "torchrun"])
@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
def test_trees_are_the_same_file(hosts, place, short, request, engine, library):
    cluster = request.getfixturevalue("cluster") if engine == "slurm" else None
    (place / "trees.py").write_text(TREES)
    files = []
    for name, how in ((f"{library}-one", "one"), (f"{library}-{engine}", engine)):
        train, variables = ["trees.py", library, name], {}
        words = ronde("run", "--workers", "1", *train)
        if how == "torchrun":
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            words += ["--nproc-per-node", "3", *train]
            variables = {"TMPDIR": str(short)}  # it leaves a folder there
        elif how != "one":
            words, variables = started_by(engine, hosts, cluster, short, 3, train)
        with child(words, place, variables) as started:
            done = started.done(120)
        assert done.returncode == 0, done.stdout + done.stderr
        files.append((place / name).read_bytes())
    assert files[0] == files[1]
