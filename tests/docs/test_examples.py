"""The examples are what they say: a few lines apart from a plain script, and the same training on
one worker and on two.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from processes import TESTS, python, ronde_run
from ronde.watch import Ended, Evaluated, Started, StepRecorded, read
from sampling import long

EXAMPLES = TESTS.parent / "examples"
SMALL_GPT = ["--epochs", "1", "--megabytes", "0.1", "--batch", "16"]
SMALL_GPT += ["--context", "32", "--width", "32", "--layers", "2"]


def _events(cwd: Path, name: str, kind: type) -> list:
    return [e for e in read(cwd / "runs" / name / "record.jsonl") if isinstance(e, kind)]


def _printed(output: str) -> float:
    """The last number of the last evaluation that a plain script printed."""
    return float([line for line in output.splitlines() if "evaluate" in line][-1].split()[-1])


@pytest.mark.parametrize(
    ("plain", "train", "most"),
    [
        ("gpt/plain", "gpt/train", 9),
        ("gan/dcgan_plain", "gan/dcgan", 14),
    ],
)
def test_ronde_changes_few_lines(plain, train, most):
    before, after = ((EXAMPLES / f"{n}.py").read_text().splitlines() for n in (plain, train))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert len([line for line in changes if line[0] == "-"]) <= most, "\n".join(changes)
    assert len([line for line in changes if line[0] == "+"]) <= most, "\n".join(changes)


def test_the_readme_shows_the_difference_as_it_is():
    plain, train = (
        (EXAMPLES / "gpt" / name).read_text().splitlines() for name in ("plain.py", "train.py")
    )
    changed = [line[0] + line[2:] for line in difflib.ndiff(plain, train) if line[0] in "+-"]
    readme = (EXAMPLES.parent / "README.md").read_text()
    shown = readme.partition("```diff\n")[2].partition("```")[0].splitlines()
    assert sorted(line for line in shown if line) == sorted(changed)


def test_the_page_of_scripts_shows_lines_that_are_there():
    page = (EXAMPLES.parent / "docs" / "my-script-is.md").read_text()
    blocks = re.findall(r'^```diff title="([^"]+)"\n(.*?)^```', page, re.M | re.S)
    assert len(blocks) >= 6
    for place, block in blocks:
        folder = EXAMPLES.parent / place
        plain, train = folder / "plain.py", folder / "train.py"
        if not folder.is_dir():
            plain, train = folder.with_name(f"{folder.name}_plain.py"), folder.with_suffix(".py")
        scripts = {
            sign: path.read_text().splitlines()
            for sign, path in (("-", plain), ("+", train), (" ", train))
        }
        for line in block.splitlines():
            assert line[1:] in scripts[line[0]], f"{place} has no line {line[1:]!r}"


def test_the_page_of_scripts_counts_lines_as_they_are():
    root = EXAMPLES.parent
    counted = python([str(root / "benchmarks" / "diff_lines.py")], root, timeout=60).stdout
    assert counted.count("\n") >= 10
    assert counted in (root / "docs" / "my-script-is.md").read_text()


def test_digits_is_the_same_training_on_one_worker_and_on_two(tmp_path):
    pytest.importorskip("sklearn")
    script = str(EXAMPLES / "digits" / "train.py")
    one = python([script, "--epochs", "6"], tmp_path, timeout=80)
    assert one.returncode == 0, one.stderr
    two = ronde_run(
        ["run", "--workers", "2", "--name", "two", script, "--epochs", "6"], tmp_path, timeout=80
    )
    assert two.returncode == 0, two.stderr

    (started,) = _events(tmp_path, "two", Started)
    assert started.workers == 2
    alone, together = (_events(tmp_path, name, Evaluated) for name in ("digits-1", "two"))
    assert len(alone) == len(together) == 6
    for a, b in zip(alone, together, strict=True):
        assert a.samples == b.samples == 359  # a fifth of 1,797
        assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], rel=0.02)
        # two images may flip by rounding
        assert a.metrics["accuracy"] == pytest.approx(b.metrics["accuracy"], abs=2.5 / 359)
    assert together[-1].metrics["accuracy"] > 0.95
    losses, losses_of_two = (
        [s.loss for s in _events(tmp_path, name, StepRecorded)] for name in ("digits-1", "two")
    )
    assert len(losses) == 6 * 45
    assert losses[:45] == pytest.approx(losses_of_two[:45], rel=1e-3, abs=1e-4)


def test_gpt_learns_on_two_workers(tmp_path):
    script = str(EXAMPLES / "gpt" / "train.py")
    done = ronde_run(
        ["run", "--workers", "2", "--name", "small", script, *SMALL_GPT], tmp_path, timeout=80
    )
    assert done.returncode == 0, done.stderr
    steps = _events(tmp_path, "small", StepRecorded)
    (evaluated,) = _events(tmp_path, "small", Evaluated)
    (ended,) = _events(tmp_path, "small", Ended)
    assert ended.status == "completed" and ended.step == len(steps) == 186
    assert steps[0].loss == pytest.approx(5.545, abs=0.1)  # ln 256: it knows nothing yet
    assert steps[-1].loss < 3.5
    assert evaluated.metrics["loss"] < 3.5
    assert "The model writes:\n\ndef " in done.stdout


@long
def test_gpt_plain_learns_as_much(tmp_path):
    done = python([str(EXAMPLES / "gpt" / "plain.py"), *SMALL_GPT], tmp_path, timeout=80)
    assert done.returncode == 0, done.stderr
    assert _printed(done.stdout) < 3.5
    assert "The model writes:\n\ndef " in done.stdout


def test_churn_from_raw_files_to_equal_predictions(tmp_path):
    pytest.importorskip("duckdb")
    here = EXAMPLES / "churn"
    for done in (
        python([str(here / "sample.py")], tmp_path),
        ronde_run(
            ["prepare", str(here / "prepare.yaml"), "raw-*.csv", "--out", "prepared"], tmp_path
        ),
    ):
        assert done.returncode == 0, done.stderr
    answers = []
    for workers in ("1", "2"):
        out = f"{workers}.safetensors"
        words = ["run", "-q", "-n", workers, "--runs", "none", str(here / "train.py")]
        done = ronde_run([*words, "--epochs", "2", "--out", out], tmp_path, timeout=150)
        assert done.returncode == 0, done.stderr
        answers.append(python([str(here / "serve.py"), out, "test.csv"], tmp_path, 100).stdout)
    assert answers[0] == answers[1] and answers[0].startswith("1500 rows, accuracy 0.")
    assert float(answers[0].split()[-1]) > 0.75
