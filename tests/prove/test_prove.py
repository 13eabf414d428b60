"""``ronde prove``: planted faults are found and named, sound models are not blamed. The full grid:
benchmarks/prove_truth.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from processes import TESTS, child, ronde, ronde_run
from sampling import ALL, long, some

SCRIPTS = TESTS.parent / "benchmarks" / "prove_scripts"
sys.path.insert(0, str(SCRIPTS))

import cases as planted  # noqa: E402
from cases import BEHIND, EVERY, FAULTS, HEALTHY, HIDDEN, LATER, LOOP, NEWER, NOISY, judge  # noqa: E402

from ronde.prove.causes import CAUSES, disagreement  # noqa: E402
from ronde.prove.compare import Comparison, Rounding  # noqa: E402
from ronde.prove.plan_list import chosen_plans  # noqa: E402
from ronde.prove.process_pool import Pool  # noqa: E402
from ronde.prove.proof import Study as AnyStudy  # noqa: E402
from ronde.prove.proof import prove  # noqa: E402
from ronde.prove.recorded_data import cut_epoch  # noqa: E402
from ronde.prove.values import probe  # noqa: E402
from ronde.world import ArgumentError  # noqa: E402

Study = functools.partial(AnyStudy, workers=[2])
CASES = {f.fault: f for f in EVERY}


@pytest.fixture(scope="module")
def pool():
    with Pool(3) as made:
        yield made


@pytest.mark.parametrize(
    "name",
    [
        *some([f.fault for f in [*FAULTS, *LATER, *NEWER]], 60),
        *some([f.fault for f in HIDDEN], 56),
        *some([f.fault for f in BEHIND], 8),
        *some([f.fault for f in LOOP], 26),
    ],
)
def test_a_planted_fault_is_found_and_named(pool: Pool, name: str) -> None:
    case = CASES[name]
    verdict = Study(pool, case.command, 6, 120).verdict(case.plans)
    found, named, said = judge(case, verdict)
    assert found and named, said


def test_what_is_equal_on_two_workers_is_found_on_three(pool: Pool) -> None:
    verdict = AnyStudy(pool, planted.THREE.command, 6, 120, workers=[2, 3]).verdict(["replicate"])
    found, named, said = judge(planted.THREE, verdict)
    assert found and named and verdict.workers == 3 and verdict.holds is None, said
    assert "on 2 workers it is equal" in verdict.cause.evidence


@long
def test_a_script_that_refuses_three_workers_is_proved_on_two(pool: Pool, tmp_path: Path) -> None:
    refuses = "assert ronde.world().size != 3, 'an even number'\n"
    (tmp_path / "train.py").write_text(TRAIN.replace("run =", f"{refuses}run ="))
    command = [str(tmp_path / "train.py"), "sync"]
    verdict = AnyStudy(pool, command, 3, 60, workers=[2, 3]).verdict(["replicate"])
    assert verdict.status == "equal" and verdict.holds.workers == (2,), verdict
    assert any("On 3 workers it was not compared" in note for note in verdict.notes)


@pytest.mark.parametrize("name", some(HEALTHY[2:], 6))
def test_a_sound_model_is_not_blamed(pool: Pool, name: str) -> None:
    verdict = Study(pool, planted.healthy_command(name), 6, 120).verdict(["replicate"])
    assert verdict.status == "equal" and verdict.exit_status == 0, verdict
    [plan] = verdict.plans
    assert plan.steps == 6 and plan.evaluations and plan.largest < 1e-7
    if name == "residual":
        assert plan.aside == ("b.bias",)  # a bias before a normalisation
    if name == "gpt":
        assert not any("Dropout was switched off" in note for note in verdict.notes)


@pytest.mark.parametrize(("script", "name"), NOISY if ALL else [("noisy.py", "vae")])
def test_where_only_random_numbers_differ_it_is_equal(pool: Pool, script: str, name: str) -> None:
    plans = ["replicate", "pipeline=2"] if ALL and name == "vae" else ["replicate"]
    verdict = Study(pool, [str(SCRIPTS / script), name], 6, 120).verdict(plans)
    assert verdict.status == "equal" and verdict.exit_status == 0, verdict
    notes = [n for n in verdict.notes if n.startswith("Only random numbers differ (drawn from ")]
    assert notes or script != "noisy.py"  # the others draw the same on any number of workers
    assert all("the same in distribution" in note for note in notes)
    assert name != "vae" or "randn_like at noisy.py" in notes[0]
    assert all(p.steps == 6 and p.evaluations == 2 for p in verdict.plans)


@pytest.mark.parametrize(
    ("script", "name", "plan"),
    [
        ("noisy.py", "full", "replicate"),  # batches have the sizes that the training has
        ("newer_faults.py", "uneven", "pipeline=2"),  # whose last batch is smaller
    ],
)
def test_batches_of_other_sizes_are_not_blamed(
    pool: Pool, script: str, name: str, plan: str
) -> None:
    verdict = Study(pool, [str(SCRIPTS / script), name], 6, 120).verdict([plan])
    assert verdict.status == "equal" and verdict.plans[0].steps == 6, verdict


def test_what_rounding_decides_is_not_called_different(pool: Pool) -> None:
    verdict = Study(pool, [str(SCRIPTS / "newer_faults.py"), "chaos"], 6, 120).verdict(
        ["replicate"]
    )
    assert verdict.status == "cannot" and verdict.exit_status == 2 and verdict.difference is None
    assert "rounding cannot be told from error" in verdict.error
    assert verdict.plans[0].status == "cannot"


@pytest.mark.parametrize(
    ("name", "step", "before"), [("nothing_but_nan", 1, False), ("nan_later", 3, True)]
)
def test_what_is_not_finite_on_both_sides_is_not_called_equal(
    pool: Pool, name: str, step: int, before: bool
) -> None:
    verdict = Study(pool, [str(SCRIPTS / "hidden_faults.py"), name], 6, 120).verdict(["replicate"])
    assert verdict.status == "cannot" and verdict.exit_status == 2 and verdict.difference is None, (
        verdict
    )
    assert f"from step {step} on the loss or every weight is not finite" in verdict.error
    assert ("What comes before" in verdict.error) == before


SPLIT = "shard=gradients"
CARRIED = [
    (
        "early",
        ["replicate", "pipeline=2"],
        {
            "pipeline=2": "forward or loss uses a name without a value: name 'run' is not defined. "
            "plan='pipeline=2"
        },
    ),
    ("lists", ["replicate", SPLIT, "shard=parameters", "pipeline=2", "recompute=full"], {}),
    ("heads", ["replicate", SPLIT, "pipeline=2"], {}),
    ("checked", ["pipeline=2"], {}),
    ("mapped", ["replicate", SPLIT], {}),
    (
        "called",
        ["replicate", SPLIT, "pipeline=2"],
        {"pipeline=2": "itself, and under plan='pipeline=2"},
    ),
    ("slope", ["replicate", SPLIT], {SPLIT: "a gathered parameter was read after it was freed"}),
    ("hooked", ["replicate", SPLIT], {SPLIT: "'4.weight' has a hook on its gradient"}),
    (
        "clipped",
        ["replicate", SPLIT, "pipeline=2"],
        {"pipeline=2": "The script reads or writes"},
    ),
    ("average", ["replicate", SPLIT], {SPLIT: "keep one of the values of model.state_dict()"}),
]


@pytest.mark.parametrize(
    ("name", "plans", "cannot"), some(CARRIED, 5), ids=[name for name, *_ in some(CARRIED, 5)]
)
def test_what_a_plan_cannot_carry_out_is_refused_and_the_rest_is_equal(
    pool: Pool, name: str, plans: list[str], cannot: dict[str, str]
) -> None:
    verdict = Study(pool, [str(SCRIPTS / "plans.py"), name], 6, 120).verdict(plans)
    for plan in verdict.plans:
        if plan.plan in cannot:
            assert plan.status == "refused" and cannot[plan.plan] in (plan.error or ""), plan
        else:
            assert plan.status == "equal" and plan.steps >= 4, plan


@pytest.mark.parametrize(
    ("name", "plan", "cause"),
    some(
        [
            ("counts", "pipeline=2", "batch-dependent-layer"),
            ("pairs", "replicate", "loss-over-the-batch"),
            ("pairs", "pipeline=2", "loss-over-the-batch"),
        ],
        3,
    ),
)
def test_a_cause_that_a_plan_brings_out(pool: Pool, name: str, plan: str, cause: str) -> None:
    verdict = Study(pool, [str(SCRIPTS / "plans.py"), name], 6, 120).verdict([plan])
    assert verdict.status == "differs" and verdict.cause.id == cause, verdict


def test_the_grid_is_as_large_as_is_said() -> None:
    assert len({f.fault for f in FAULTS}) >= 40 and len(LATER) >= 20 and len(HEALTHY) >= 12
    assert {f.cause for f in EVERY} <= set(CAUSES) and len({f.cause for f in FAULTS}) >= 20


# -- the command -----------------------------------------------------------------------

TRAIN = """
class Config:
    rate: float = 0.1

assert Config.__annotations__["rate"] is float
import torch, ronde
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
data = torch.utils.data.TensorDataset(torch.randn(30, 4), torch.randint(0, 3, (30,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
import sys
run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.cross_entropy, batch_size=8, sync_batchnorm="sync" in sys.argv)
run.fit(3, validate=data)
"""


def test_equal_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = ronde_run(
        ["prove", "--json", "v.json", "--steps", "5", "train.py", "sync"], tmp_path, 120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b[" not in done.stdout and done.stdout.startswith(
        "equal: 2 and 3 workers against one process, 5 steps, float64; with the end of an epoch, a "
        "shorter batch, evaluation; without a resume\n"
    )
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert verdict["equal"] is True and verdict["exit_status"] == 0
    holds = {"steps": 5, "workers": [2, 3], "plan": "replicate", "dtype": "float64"}
    inside = dict.fromkeys(("epoch_end", "short_batch", "evaluation"), True)
    assert verdict["holds"] == {**holds, **inside, "resume": False}
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [".proofs"]


@long
def test_a_difference_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = ronde_run(["prove", "--json", "v.json", "--steps", "2", "train.py"], tmp_path, 120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("differs")
    for text in ("outputs of '1' differ first, in step 1", "[batchnorm]", "sync_batchnorm=True"):
        assert text in done.stdout
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert verdict["cause"]["id"] == "batchnorm" and verdict["difference"]["phase"] == "outputs"


TWO_IN_A_LOOP = """
import sys
import torch, ronde
torch.manual_seed(0)
made, judge = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
if "normed" in sys.argv:
    made = torch.nn.Sequential(made, torch.nn.BatchNorm1d(4))
data = torch.utils.data.TensorDataset(torch.randn(30, 4), torch.randn(30, 2))
mse = torch.nn.functional.mse_loss

def judged(model, batch):
    with torch.no_grad():
        fakes = made.eval()(batch[1])
    made.train()
    return model(batch[0]) - model(fakes), torch.ones(len(batch[0]), 1)

def fooled(model, batch):
    return judge(model(batch[1])), torch.ones(len(batch[0]), 1)

def last(output, target):
    return mse(output, target, reduction="sum" if "sum" in sys.argv else "mean")

one = ronde.distribute(judge, torch.optim.SGD(judge.parameters(), 0.1), data, loss=mse, forward=judged, batch_size=8)
two = ronde.distribute(made, torch.optim.SGD(made.parameters(), 0.1), one, loss=last, forward=fooled, name="made")
for epoch in one.epochs(3):
    for batch in one.batches():
        one.step(batch)
        two.step(batch)
"""


@pytest.mark.parametrize(
    ("argument", "status", "cause"),
    [
        ("sum", "differs", "loss-is-a-sum"),
        ("mean", "equal", ""),
        ("normed", "differs", "batchnorm"),  # not the numbers that the first run's step draws
    ],
)
def test_a_run_that_shares_the_batches_of_another_is_proved(
    pool: Pool, tmp_path: Path, argument: str, status: str, cause: str
) -> None:
    (tmp_path / "train.py").write_text(TWO_IN_A_LOOP)
    verdict = Study(pool, [str(tmp_path / "train.py"), argument], 3, 60).verdict(["replicate"])
    assert verdict.status == status, verdict
    assert status == "equal" or verdict.cause.id == cause


def test_a_script_that_distributes_nothing_cannot_be_proved(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    verdict = Study(pool, [str(tmp_path / "train.py")], 2, 60).verdict(["replicate"])
    assert verdict.exit_status == 2 and "without calling ronde.distribute" in verdict.error


def test_a_script_that_fails_is_shown_with_its_traceback(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\ndef f():\n    raise KeyError('no such column')\nf()\n"
    )
    verdict = Study(pool, [str(tmp_path / "train.py")], 2, 60).verdict(["replicate"])
    assert verdict.exit_status == 2 and "no such column" in verdict.error
    assert "line 3, in f" in verdict.error and "pool_worker" not in verdict.error


def test_what_a_script_expects_after_its_last_step_is_no_failure(
    pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(
        TRAIN + "assert run.state.step == 3 * run.steps_per_epoch, 'too few'\n"
    )
    (tmp_path / "early.py").write_text(
        TRAIN.replace("run.fit", "assert run.world_size == 1, 'alone'\nrun.fit")
    )
    late = Study(pool, [str(tmp_path / "late.py"), "sync"], 4, 60).verdict(["replicate"])
    assert late.status == "equal" and any("AssertionError: too few" in n for n in late.notes), late
    early = Study(pool, [str(tmp_path / "early.py"), "sync"], 4, 60).verdict(["replicate"])
    assert early.status != "equal" and early.exit_status, early


def test_a_script_may_write_into_its_run_directory(pool: Pool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        TRAIN.replace(
            "run.fit", "(run.dir.path / f'{run.rank}.txt').write_text(run.dir.name)\nrun.fit"
        )
    )
    verdict = Study(pool, [str(tmp_path / "train.py"), "sync"], 4, 60).verdict(["replicate"])
    assert verdict.status == "equal", verdict
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


@long
def test_a_run_that_takes_too_long_is_ended(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(100)\n")
    verdict = Study(pool, [str(tmp_path / "train.py")], 2, 2.0).verdict(["replicate"])
    assert verdict.exit_status == 2
    assert "had not ended after 2 s: rank 0 after 0 steps" in verdict.error


def test_a_worker_that_is_killed_is_named_and_its_loop_not_blamed(
    pool: Pool, tmp_path: Path
) -> None:
    killed = "if os.environ.get('RANK') == '1': os.kill(os.getpid(), 9)\n"
    (tmp_path / "train.py").write_text("import os\n" + TRAIN + killed)
    verdict = Study(pool, [str(tmp_path / "train.py"), "sync"], 4, 60).verdict(["replicate"])
    assert verdict.exit_status == 2 and verdict.difference is None
    assert "rank 1: killed by signal 9 after 4 steps" in verdict.error


def test_a_plan_that_refuses_the_model_is_not_a_difference(pool: Pool) -> None:
    study = Study(pool, planted.healthy_command("own"), 2, 120)
    both = study.verdict(["replicate", "pipeline=2"], explicit=False)
    assert both.status == "equal" and [p.status for p in both.plans] == ["equal", "refused"]
    assert "run.step(batch)" in both.plans[1].error


REPLACED = """
model[2] = torch.nn.Linear(8, 4)
optimizer.add_param_group({"params": model[2].parameters()})
run.fit"""


@long
def test_a_head_that_was_replaced_may_stay_in_the_optimizer(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("run.fit", REPLACED))
    verdict = Study(pool, [str(tmp_path / "train.py"), "sync"], 3, 60).verdict(["replicate"])
    assert verdict.status == "equal", verdict


def test_a_scripts_annotations_are_types_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)  # asks for it; under prove, as every test here
    done = ronde_run(["run", "--workers", "1", "train.py"], tmp_path, 120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_signal_ends_every_process(
    tmp_path: Path, number: signal.Signals = signal.SIGINT
) -> None:
    (tmp_path / "train.py").write_text(
        f"import time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\ntime.sleep(100)\n"
    )
    with child(ronde("prove", "train.py"), tmp_path) as started:
        while not (tmp_path / "begun").exists():
            assert started.process.poll() is None
            time.sleep(0.05)
        os.kill(started.pid, number)
        done = started.done(30)
    assert done.returncode == 128 + number
    assert f"stopped by {number.name}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prove", "--workers", "1", "t.py"], "at least 2"),
        (["prove", "--workers", "two", "t.py"], "a number, or several"),
        (["prove", "--plans", "sharded", "t.py"], "is not known"),
        (["prove", "--steps", "0", "t.py"], "steps=0"),
        (["prove", "--plam", "replicate", "t.py"], "option --plam is not known"),
        (["prove", "--json", "no/v.json", "t.py"], "there is no folder"),
        (["prove", "missing.py"], "script not found"),
    ],
)
def test_what_cannot_be_used_is_said(
    tmp_path: Path, arguments: list[str], said: str, capsys, monkeypatch
) -> None:
    from ronde.cli import main

    (tmp_path / "t.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ronde", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


# -- its parts -------------------------------------------------------------------------


def test_plans() -> None:
    assert chosen_plans(["zero3", "fsdp"], 2) == ["shard=parameters"]
    assert chosen_plans("tensor=2,tensor=4", 4) == ["tensor=2", "tensor=4"]
    assert "pipeline=2,tensor=2" in chosen_plans("all", 4)
    assert chosen_plans("replicate,micro_batch=2,pipeline=2,virtual=2,schedule=looped", 2) == [
        "replicate,micro_batch=2",
        "pipeline=2,virtual=2,schedule=looped",
    ]
    with pytest.raises(ArgumentError, match="no plan"):
        prove(["train.py"], plans=[])


def test_rounding_is_told_from_error() -> None:
    one = np.linspace(1.0, 2.0, 50)

    def error(many, floor, largest=1.0):
        return Rounding(Comparison(), 1e-9, False).differs(one, many, floor, largest, "x")

    assert error(one * (1 + 1e-12), None) is None
    assert error(one * (1 + 1e-8), None) is not None
    # rounding alone moves it by a hundredth
    assert error(one * (1 + 1e-8), one * (1 + 1e-10)) is None
    assert error(one * (1 + 1e-5), one * (1 + 1e-3)) is not None  # no amount of noise excuses that
    assert error(one[:3], None) is not None
    assert error(np.where(one > 1.5, np.nan, one), None) is not None
    one *= 1e-9  # a small part of the largest tensor
    assert error(one * (1 + 1e-6), None, 1e6) is None


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("mean", F.cross_entropy),
        ("sum", lambda o, y: F.cross_entropy(o, y, reduction="sum")),
        (
            "weighted",
            lambda o, y: F.cross_entropy(
                o, y, weight=torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
            ),
        ),
        ("over-batch", lambda o, y: F.mse_loss(o, F.one_hot(y, 4).double()).sqrt()),
        ("over-batch", lambda o, y: torch.logsumexp(o.sum(1), 0)),
        ("pair", lambda o, y: (F.cross_entropy(o, y, reduction="sum"), len(y))),
        ("pair-mean", lambda o, y: (F.cross_entropy(o, y), len(y))),
        ("pair-weight", lambda o, y: (F.cross_entropy(o, y, reduction="sum"), 9)),
        ("pair-other", lambda o, y: (F.mse_loss(o, F.one_hot(y, 4).double()).sqrt(), len(y))),
        ("sum", lambda o, y: F.cross_entropy(o, y, reduction="sum") + 0.25),
        ("mean", lambda o, y: F.cross_entropy({"o": o}["o"], y) + 0.25),
        ("unknown", lambda o, y: o.no_such_thing()),
    ],
)
def test_what_kind_of_function_a_loss_is(kind: str, loss) -> None:
    for seed in range(40):
        torch.manual_seed(seed)
        assert (
            probe(loss, (torch.randn(9, 4, dtype=torch.float64), torch.randint(0, 4, (9,))), 9)
            == kind
        )


def test_a_cut_epoch_has_only_batches_of_sizes_that_the_training_has() -> None:
    def sizes(samples: int, size: int, drop_last: bool) -> set[int]:
        last = 0 if drop_last else samples % size
        return {n for n in (size if samples >= size else 0, last) if n}

    for drop_last, steps, size in itertools.product((False, True), range(1, 9), range(1, 13)):
        for samples in range(1, 12 * size):
            order = SimpleNamespace(epoch_samples=samples, ends=lambda epoch: None)
            cut = cut_epoch(SimpleNamespace(order=order, drop_last=drop_last), size, steps)
            assert cut <= samples
            assert sizes(cut, size, drop_last) == sizes(samples, size, drop_last)
    order = SimpleNamespace(
        epoch_samples=400, ends=lambda epoch: None
    )  # was 51: two batches of 20, and one of 11
    assert cut_epoch(SimpleNamespace(order=order, drop_last=False), 20, 6) == 60


def test_a_disagreement_of_ranks_is_read() -> None:
    text = (
        "The ranks disagree on seed in ronde.distribute: rank 0: 0; rank 1: 1. Every worker "
        "must run the same script."
    )
    difference, cause = disagreement(text)
    assert (difference.name, difference.many, cause) == (
        "seed",
        "rank 0: 0; rank 1: 1",
        "arguments-depend-on-workers",
    )
    assert disagreement("something else") is None
