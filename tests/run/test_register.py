"""What a script owns besides its model comes back after a resume, or is refused by name."""

from __future__ import annotations

import io
import json
from collections import Counter, OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.optim import lr_scheduler as schedule

from processes import TESTS, python
from ronde import CheckpointError
from ronde.checkpoint import decode_exact, encode_exact
from ronde.cli.summary import print_summary
from ronde.watch import RunDir, summarise

WORKER = TESTS / "register_worker.py"


def worker(what: str, folder: Path) -> dict:
    done = python([str(WORKER), what, str(folder)], WORKER.parent, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def furthest(a: object, b: object) -> float:
    """The largest difference of two nested values of one shape."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        return max((furthest(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b)
        return max((furthest(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b)
    assert a == b
    return 0.0


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Trainings that were killed and resumed under another plan, and one that was not."""
    folder = tmp_path_factory.mktemp("register")
    return {**worker("killed", folder), "folder": folder}


def test_registered_state_comes_back_under_another_plan_and_size(ended):
    whole = ended["whole/ended"]
    assert len(whole["losses"]) == 15 and len(set(whole["lr"].values())) == 3
    assert whole["smooth"][1] == "float32" and len(whole["recent"]) == 4
    kept = ("losses", "lr", "best", "smooth", "recent", "queue", "counts", "seen", "critic")
    resumed = {n: one for n, one in ended.items() if n not in ("whole/ended", "folder")}
    assert len(resumed) >= 5
    for name, one in resumed.items():
        assert {key: furthest(one[key], whole[key]) <= 1e-12 for key in kept} == dict.fromkeys(
            kept, True
        ), name
        assert one["same objects"], name  # restored in place


def test_the_library_s_average_comes_back_where_workers_hold_the_whole_model(ended):
    whole = ended["whole/ended"]["ema"]
    for name in ("replicate-single/ended", "single-zero1/ended"):
        assert furthest(ended[name]["ema"], whole) <= 1e-12
        assert ended[name]["warnings"] == []


def test_state_that_only_the_checkpoint_or_only_the_script_has_is_said(ended):
    (lost,) = ended["zero1-zero3/ended"]["warnings"]
    assert "has registered state that the script does not register: 'ema'" in lost
    (new,) = ended["tensor-replicate/ended"]["warnings"]
    assert "has no registered 'ema': it begins anew" in new


def test_averages_follow_their_definition_under_every_plan_and_come_back(ended):
    whole = ended["whole/ended"]["files"]
    for name in ("average", "mean"):
        by_hand = whole[f"{name}-by-hand"]
        found = {n: whole[name][n] for n in by_hand}  # a file also has buffers and tied names
        assert furthest(found, by_hand) <= 1e-12
        assert furthest({n: whole["final"][n] for n in by_hand}, by_hand) > 1e-3
    for name, one in ended.items():
        if name == "folder":
            continue
        files = one["files"]
        assert furthest(one["averaged"], ended["whole/ended"]["averaged"]) <= 1e-12
        assert all(furthest(files[n], whole[n]) <= 1e-12 for n in ("final", "average", "mean"))
        assert files["again"] == files["final"]  # bit for bit, after an exception too


def test_the_best_checkpoint_stays_beside_the_newest(ended):
    whole = ended["whole/ended"]
    metric, value, step, epoch = whole["best checkpoint"]
    assert (metric, step, epoch) == ("score", 5, 0)
    for name in ("whole", "replicate-single", "zero3-pipeline"):
        one = ended[f"{name}/ended"]
        assert furthest(one["best checkpoint"], whole["best checkpoint"]) <= 1e-12
        # keep=2, and of each step but the last, the run went on from the newest
        assert one["checkpoints"] == ["step-000000005", "step-000000012", "step-000000015"]
        assert one["best path"] == "step-000000005"
        run = RunDir(ended["folder"] / name)
        best = summarise(run).best
        assert best is not None and (best.step, best.path) == (5, "checkpoints/step-000000005")
        assert abs(best.value - value) <= 1e-12
    shown = io.StringIO()
    print_summary(run, Console(file=shown, width=150), 1.0)
    assert f"score {value:.4f} at step 5, in checkpoints/step-000000005" in shown.getvalue()


SCHEDULERS = {
    "LambdaLR": lambda o: schedule.LambdaLR(o, lambda n: 0.9**n),
    "MultiStepLR": lambda o: schedule.MultiStepLR(o, [2, 2, 5]),
    "CosineAnnealingWarmRestarts": lambda o: schedule.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedule.OneCycleLR(o, 1.0, 20),
    "CyclicLR": lambda o: schedule.CyclicLR(o, 0.1, 1.0),
    "ReduceLROnPlateau": lambda o: schedule.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: schedule.ChainedScheduler(
        [schedule.StepLR(o, 2), schedule.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: schedule.SequentialLR(
        o, [schedule.LinearLR(o, 0.1, 1.0, 3), schedule.StepLR(o, 2)], [3]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def through(state: object) -> object:
    tensors: dict = {}
    return decode_exact(json.loads(json.dumps(encode_exact(state, "x", tensors))), tensors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_a_scheduler_is_written_exactly(name):
    def built():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)
        return SCHEDULERS[name](optimizer)

    scheduler = built()
    for _ in range(4):
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    again = built()
    again.load_state_dict(through(scheduler.state_dict()))
    assert again.state_dict() == scheduler.state_dict()


def test_values_keep_their_types():
    values = {
        "numbers": [1, -0.0, 10**30, True, None, 1e-320, float("inf")],
        "nested": (1, ({2: "x"}, OrderedDict(a=1), Counter("aab"), deque([1], maxlen=2))),
        "numpy": [np.float32(0.1), np.int8(3), np.bool_(True)],
        "__ronde__": "a key of the format",
    }
    again = through(values)
    assert again == values and repr(again) == repr(values)
    arrays = [np.arange(6, dtype=np.uint16).reshape(2, 3).T, np.array(2.5), np.zeros((0, 2))]
    for array, found in zip(arrays, through(arrays), strict=True):
        assert found.dtype == array.dtype and found.shape == array.shape
        assert np.array_equal(found, array) and found.flags.writeable
    tensors = [torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), torch.eye(3)[:, 1]]
    tensors += [torch.nn.Parameter(torch.ones(2)), torch.ones(1, requires_grad=True)]
    for tensor, found in zip(tensors, through(tensors), strict=True):
        assert type(found) is type(tensor) and found.requires_grad == tensor.requires_grad
        assert found.dtype == tensor.dtype
        assert torch.equal(found.nan_to_num(7), tensor.nan_to_num(7))
    with pytest.raises(CheckpointError, match="'x/0' is an array of type <U1"):
        through([np.array(["a"])])


REFUSED = {
    "twice": "'a' is registered already",
    "underscore": "'_a' is not a name",
    "no name": "'a b' is not a name",
    "model": "this is the model given to ronde.distribute",
    "object": "'thing' is of type object, which a checkpoint cannot hold without pickle",
    "deep": "'things/x/0' is of type object",
    "named tuple": "'pairs/0' is of type Pair",
    "set": "'names' is of type set",
    "graph": "register value.detach()",
    "objects": "'array' is an array of type object",
    "sparse": "torch.sparse_coo",
    "itself": "contains itself",
    "attribute": "'c' is not registered: call run.register(c=…)",
    "read": "'c' is not registered",
    "replaced": "cannot be replaced by assignment",
    "ranks": "The ranks disagree on the registered 'mine' in run.save(): rank 0: 0; rank 1: 1",
    "ranks' tensors": "The ranks disagree on the registered 'noise'",
    "ranks' order": "on the registered 'names' in run.save(): rank 0: 'f', 'g'; rank 1: 'g', 'f'",
    "one rank's": "'only0' in run.save(): rank 0: 1; rank 1: nothing",
    "later": "rank 0: run.register(a=…): 'a' is of type object",
    "best": "keep_best='mim:loss': expected the name of a metric",
    "decay": "run.average(decay=1.5): expected a number from 0.0 to below 1.0",
    "every": "every=0): expected whole numbers",
    "decays": "disagree on decay in run.average: rank 0: 0.5; rank 1: 0.6",
    "average twice": "there is an average 'one' already",
    "inside": "run.save() was called inside average.applied()",
    "step inside": "run.step(batch) was called inside average.applied()",
    "nested": "the model has the weights of 'one' already",
    "saved": "accepted",
}
RESUMED = {
    "value": "accepted",
    "shape": "torch.float32 [2] in the checkpoint, and the script now registers torch.float32 [3]",
    "class": "'steps' is of StepLR in the checkpoint, and the script now registers ExponentialLR",
    "kind": "'table' is a list in the checkpoint, and the script now registers a dict",
    "longer": "maxlen 3 in the checkpoint, and 4 now",
}


def test_what_cannot_come_back_is_refused_by_name(tmp_path):
    told = worker("refused", tmp_path)
    for rank in (0, 1):
        for name, expected in (("told", REFUSED), ("whole/told", RESUMED)):
            found = told[f"{name}.{rank}"]
            assert found.keys() == expected.keys()
            wrong = {case: found[case] for case in found if expected[case] not in found[case]}
            assert not wrong
        sharded = told[f"shard/told.{rank}"]
        assert "cannot be copied" in sharded["average"]
        assert "run.average(decay=…)" in sharded["average"]
        for plan in ("shard", "pipeline"):
            for case in ("optimizer", "early"):  # built after ronde.distribute, and before it
                assert "divides over the workers" in told[f"{plan}/told.{rank}"][case]
    assert "run.average(decay=…)" in told["pipeline/told.0"]["average"]
