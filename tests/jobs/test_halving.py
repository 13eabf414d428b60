"""Decisions of a search: pure functions, against what the papers say and a naive oracle."""

import math
import random

import pytest

from ronde.jobs.halving import Bracket, best_of, brackets_of, promoted, rungs_between
from ronde.jobs.space import draw_random, draw_with_optuna, grid_values, read_space
from ronde.jobs.trials import Goal, argument_words
from ronde.world import ArgumentError


def test_halving_keeps_the_best_third_of_each_rung():
    rng = random.Random(0)
    for _ in range(50):
        count, maximize = rng.randrange(2, 40), rng.random() < 0.5
        bracket = Bracket(tuple(range(count)), (10, 30, 90))
        table = {
            t: [rng.choice([rng.random(), None, math.nan, 0.5]) for _ in range(3)]
            for t in range(count)
        }
        results: dict[int, list[float | None]] = {}
        alive = list(range(count))
        for rung in range(3):
            assert bracket.alive(results, 3, maximize) in ((alive, rung), ([], 3))
            for t in alive:
                results.setdefault(t, []).append(table[t][rung])
            good = [(table[t][rung], t) for t in alive if table[t][rung] is not None]
            good = [(v, t) for v, t in good if not math.isnan(v)]
            good.sort(key=lambda g: (-g[0] if maximize else g[0], g[1]))
            if rung < 2:
                alive = [t for _, t in good][: max(len(alive) // 3, 1)]
        assert bracket.alive(results, 3, maximize)[1] == 3


def test_hyperband_deals_brackets_as_its_paper():
    """Table 1 of Li et al. 2018: R = 81, eta = 3."""
    rungs = rungs_between(1, 81, 3)
    assert rungs == (1, 3, 9, 27, 81)
    found = brackets_of("hyperband", 143, rungs, 3)
    assert [len(b.trials) for b in found] == [81, 34, 15, 8, 5]
    assert [b.rungs[b.first] for b in found] == [1, 3, 9, 27, 81]
    assert [t for b in found for t in b.trials] == list(range(143))
    with pytest.raises(ArgumentError, match="1 trial cannot be halved"):
        brackets_of("halving", 1, rungs, 3)


def test_asha_promotes_a_third_and_ends_with_a_whole_training():
    bracket = Bracket(tuple(range(9)), (1, 3, 9))
    results: dict[int, list[float]] = {}
    while (more := promoted(results, bracket, {}, 3, True)) is not None:
        trial, rung = more
        assert len(results.get(trial, ())) == rung
        results.setdefault(trial, []).append(trial + rung / 10)
    assert max(len(r) for r in results.values()) == 3
    assert best_of(results, range(9), 2, True)[0] == 8
    assert len(results) == 9


def test_spaces_are_read_and_drawn_from():
    space = read_space(
        ["lr=log:1e-4..1e-1", "drop=0..0.5", "n=int:1..4", "act=relu,tanh", "b=32,64"]
    )
    drawn = [draw_random(space, 3, number) for number in range(200)]
    assert draw_random(space, 3, 7) == drawn[7]
    assert all(1e-4 <= d["lr"] <= 1e-1 and 0 <= d["drop"] <= 0.5 for d in drawn)
    assert sum(d["lr"] < 10**-2.5 for d in drawn) == pytest.approx(100, abs=25)
    assert {d["n"] for d in drawn} == {1, 2, 3, 4}
    assert {(d["act"], d["b"]) for d in drawn} == {
        (a, b) for a in ("relu", "tanh") for b in (32, 64)
    }
    assert grid_values(read_space(["a=1,2", "b=x,y"])) == [
        {"a": a, "b": b} for a in (1, 2) for b in ("x", "y")
    ]
    written = grid_values(read_space(["x=2024_01,007, 8,0.5"]))  # a date, a name, two numbers
    assert [each["x"] for each in written] == ["2024_01", "007", 8, 0.5]
    with pytest.raises(ArgumentError, match="lr is a range"):
        grid_values(space)
    assert argument_words({"lr": 0.1, "b": 2}, "") == ["--lr", "0.1", "--b", "2"]
    assert argument_words({"lr": 0.1}, "{name}={value}") == ["lr=0.1"]
    assert Goal.parse("min:loss@test") == Goal(False, "loss", "test")


def test_a_file_asks_for_values_that_depend_on_others(tmp_path):
    (tmp_path / "space.py").write_text(
        "def space(trial):\n"
        "    if trial.suggest_categorical('optimizer', ['sgd', 'adam']) == 'sgd':\n"
        "        trial.suggest_float('momentum', 0.0, 0.9)\n"
    )
    space = read_space([str(tmp_path / "space.py")])
    drawn = [draw_random(space, 0, number) for number in range(20)]
    assert all(("momentum" in d) == (d["optimizer"] == "sgd") for d in drawn)


def test_optuna_asks_the_same_again_and_finds_a_minimum():
    pytest.importorskip("optuna")
    space = read_space(["x=-5..5", "y=log:1e-3..1e3"])

    def result(values):
        return (values["x"] - 2) ** 2 + math.log10(values["y"]) ** 2

    told = []
    for number in range(30):
        values = draw_with_optuna(space, 1, number, told, False)
        assert draw_with_optuna(space, 1, number, told, False) == values
        told.append((values, result(values)))
    assert min(r for _, r in told[15:]) < min(r for _, r in told[:10])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lr", "expected NAME=0..1"),
        ("lr=", "expected a range"),
        ("lr=1..0", "must be in order"),
        ("lr=log:0..1", "above 0, and in order"),
        ("lr=a..b", "expected a range"),
        ("none.py", "no such file"),
    ],
)
def test_wrong_spaces_are_told(text, error):
    with pytest.raises(ArgumentError, match=error):
        read_space([text])
