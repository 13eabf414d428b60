"""Several models in one loop: the plain loop's numbers, one checkpoint for all, or an error."""

from __future__ import annotations

import io
import json
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from processes import TESTS, forked, python, ronde_run
from ronde.checkpoint import find_valid
from ronde.cli.summary import print_summary
from ronde.watch import RunDir, StepRecorded, read, summarise
from sampling import ALL

WORKER = TESTS / "several_worker.py"
KINDS = ("dcgan", "wgan", "zip", "twice", "norm")
NO_FILES = {"RONDE_RUNS": "none"}


def flat(values):
    return [x for v in values for x in flat(v)] if isinstance(values, list) else [values]


def differences(one: Path, other: Path) -> dict[str, float]:
    """Of all losses that ``one`` has, and of the weights."""
    a, b = (json.loads(file.read_text()) for file in (one, other))
    found = {}
    for name in "DG":
        mine, theirs = a["losses"][name], b["losses"][name]
        assert mine and mine.keys() <= theirs.keys()
        found[f"{name} losses"] = max(abs(mine[s] - theirs[s]) for s in mine)
        weights = (flat(each["weights"][name]) for each in (a, b))
        found[f"{name} weights"] = max(abs(x - y) for x, y in zip(*weights, strict=True))
    return found


def is_same(one: Path, other: Path) -> bool:
    found = differences(one, other)
    assert max(found.values()) <= 1e-12, found
    return True


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What plain PyTorch makes of each loop."""
    folder = tmp_path_factory.mktemp("several")
    cases = "/".join(f"{kind}@plain" for kind in KINDS)
    done = python([str(WORKER), cases, str(folder)], folder)
    assert done.returncode == 0, done.stderr
    return {kind: folder / f"{kind}@plain" for kind in KINDS}


# Discriminator and generator step in turns on one batch, in unequal numbers, on batches of their
# own with epochs of unequal lengths, and with batch normalization over all workers.
@pytest.mark.parametrize("workers", [1, 2, 3] if ALL else [3])
def test_the_loop_is_the_plain_one_on_any_number_of_workers(plain, tmp_path, workers):
    command = forked(WORKER, workers, "/".join(KINDS), tmp_path)
    done = python(command[1:], tmp_path, timeout=120, env=NO_FILES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(is_same(tmp_path / kind, plain[kind]) for kind in KINDS)


PLANS = [
    *(f"dcgan@{plan}" for plan in ("shard=optimizer", "shard=gradients", "shard=parameters")),
    "wgan@tensor=2",
    "wgan@shard=optimizer",
    "norm@shard=parameters",
    *(["dcgan@tensor=2", "zip@shard=parameters", "twice@shard=gradients"] if ALL else []),
]


def test_every_plan_gives_the_same_numbers(plain, tmp_path):
    command = forked(WORKER, 2, "/".join(PLANS), tmp_path)
    done = python(command[1:], tmp_path, timeout=120, env=NO_FILES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(is_same(tmp_path / case, plain[case.partition("@")[0]]) for case in PLANS)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("dcgan@pipeline=2", "Let run.step() and run.evaluate() call the model"),
        ("wgan@shard=parameters", "the script differentiates by itself"),
    ],
)
def test_a_plan_that_cannot_says_so(tmp_path, case, text):
    kind, _, plan = case.partition("@")
    command = ["run", "-q", "-n", "2", "--plan", plan, str(WORKER), kind, str(tmp_path)]
    done = ronde_run(command, tmp_path)
    assert done.returncode == 1
    assert text in done.stdout + done.stderr
    assert not (tmp_path / kind).exists()


# kind, kill, workers and plan until then and afterwards, steps of both runs in the checkpoint
KILLED = [
    ("wgan", "step:9", 2, "replicate", 1, "replicate", (6, 2)),
    ("zip", "save:3", 2, "shard=parameters", 1, "replicate", (4, 4)),
    ("twice", "step:22", 1, "replicate", 2, "shard=optimizer", (6, 12)),
    ("norm", "step:11", 2, "replicate", 3, "replicate", (4, 4)),
    ("zip", "step:15", 3, "replicate", 2, "replicate", (6, 6)),
    ("dcgan", "save:2", 2, "shard=parameters", 2, "shard=optimizer", (2, 2)),
]


@pytest.mark.parametrize(
    ("kind", "kill", "n", "plan", "m", "other", "steps"), KILLED if ALL else KILLED[1:2]
)
def test_a_killed_loop_brings_all_back_to_one_point(
    plain, tmp_path, kind, kill, n, plan, m, other, steps
):
    name = ["--name", "k"]
    begin = ["run", "-q", "-n", str(n), "--plan", plan, *name, str(WORKER), kind, str(tmp_path)]
    assert ronde_run([*begin, kill], tmp_path).returncode == 1
    folder = RunDir(tmp_path / "runs" / "k")
    newest, refused = find_valid(folder.checkpoints)
    assert newest is not None and refused == []
    saved = (newest.state["step"], newest.state["parts"]["generator"]["step"])
    assert saved == steps and newest.step == sum(steps)
    go_on = ["run", "-n", str(m), "--plan", other, *name, "--resume", str(WORKER), kind]
    done = ronde_run([*go_on, str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed k at step {steps[0]}" in done.stdout
    assert f"resumed k (generator) at step {steps[1]}" in done.stdout
    assert is_same(tmp_path / kind, plain[kind])

    # both are in the record, without a step that was trained twice, and in the summary
    expected = json.loads(plain[kind].read_text())["losses"]
    for part, losses in ((None, expected["D"]), ("generator", expected["G"])):
        recorded = [
            e for e in read(folder.record) if isinstance(e, StepRecorded) and e.part == part
        ]
        assert [e.step for e in recorded] == [int(s) for s in losses]
        assert all(abs(e.loss - losses[str(e.step)]) <= 1e-12 for e in recorded)
    summary = summarise(folder)
    assert summary.status == summary.parts["generator"].status == "completed"
    assert summary.to_dict()["parts"]["generator"]["step"] == len(expected["G"])
    shown = io.StringIO()
    print_summary(folder, Console(file=shown, width=120), 1.0)
    assert f"generator  Sequential, {113 if kind != 'norm' else 137} parameters" in shown.getvalue()


ERRORS = textwrap.dedent(
    """
    import itertools, os, sys, torch
    import torch.nn.functional as F
    import ronde

    said = []

    def model():
        torch.manual_seed(0)
        return torch.nn.Linear(3, 1)

    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))

    def start(data=data, **options):
        m = model()
        if not isinstance(data, ronde.Run):
            options.setdefault("batch_size", 4)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        return ronde.distribute(m, optimizer, data, loss=F.mse_loss, **options)

    def refused(call):
        try:
            call()
        except ronde.RondeError as error:
            return said.append(str(error))
        said.append("nothing")

    D = start(name="both")
    G = start(D, name="generator")
    assert G.dir.path == D.dir.path
    refused(lambda: start(D, batch_size=4))
    refused(lambda: start(D, name="generator"))
    refused(lambda: start(name="../x"))
    refused(lambda: start(keep_best="loss"))
    refused(lambda: G.epochs(1).__next__())
    refused(G.batches)
    refused(lambda: G.step(1))
    batch = next(reading := D.batches())
    G.backward(F.mse_loss(G.model(batch[0]), batch[1]))
    refused(G.save)
    refused(D.save)
    D.step(batch)
    refused(lambda: next(reading))
    reading.close()
    G.update()
    grads = [p.grad.clone() for p in G.model.parameters()]
    batch = next(reading := D.batches())
    D.backward(F.mse_loss(D.model(batch[0]) + G.model(batch[0]), batch[1]))
    assert all(torch.equal(p.grad, g) for p, g in zip(G.model.parameters(), grads))
    D.update()
    path = D.save()
    assert path.name == "step-000000003" and (path / "generator.model.safetensors").exists()
    late = start(name="late")  # after the first step: a training of its own
    assert late.dir.name == "late"
    refused(lambda: start(D))
    late.fit(epochs=1)
    for batch in D.batches():
        D.step(batch)
    print("SAID", said)
    """
)

EXPECTED = [
    "batch_size=4 cannot be given with data=run: the batches are those of the other run.",
    "name='generator': another run of this loop has this name already.",
    "'../x' is not a name for a run",
    "keep_best cannot be used by runs that train in one loop, as '3' does with another",
    "run.epochs(1): this run shares the batches of another (data=run). Loop over that run's",
    "run.batches(): this run shares the batches of another",
    "run.step(batch) was called without a batch: this run shares the batches of another",
    "run.save() was called between run.backward() and run.update()",
    "run.save() was called between run.backward() and run.update()",
    "run.backward() of 'generator' was called without run.update(), and the next batch is taken",
    "data=run: the run has trained or ended already.",
]


def test_wrong_uses_are_refused_by_name(tmp_path):
    (tmp_path / "wrong.py").write_text(ERRORS)
    done = python(["wrong.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = eval(done.stdout.partition("SAID ")[2].splitlines()[0])
    for text, expected in zip(said, EXPECTED, strict=True):
        assert text.startswith(expected), (text, expected)
    assert "this run goes on after a later one has trained" in done.stdout

    # A script that makes fewer runs than the checkpoint has, or the second under another name.
    (tmp_path / "alone.py").write_text(ERRORS.partition("G = start")[0] + "next(D.batches())")
    done = python(["alone.py"], tmp_path, env={"RONDE_RESUME": "1"})
    assert done.returncode == 1
    assert (
        "it holds 1 more run of this loop ('generator') than ronde.distribute has made"
        in done.stderr
    )
