"""How much of a full search halving and rules need to find its best trial: replayed from whole
trainings.

27 trials of examples/digits are trained for 9 epochs once, measured as ``--watch`` does, by ``ronde
tune --method random --on-rule ignore``. Each method then decides over their records, with the
trials in 20 other orders, with and without the rules that end hopeless trials; nothing is trained
for that. It counts the samples that the method would have trained, in all and until it had the best
trial, and how good its best trial is in the full search::

    python benchmarks/tune_savings.py --json savings.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ronde.jobs.halving import best_of, brackets_of, promoted
from ronde.jobs.trials import HOPELESS, Goal, progress_of
from ronde.watch import RunDir
from ronde.watch.judge import Judge
from ronde.watch.record import StepRecorded, read

ROOT = Path(__file__).parents[1]
EPOCH, ETA = 1_438, 3
RUNGS = (EPOCH, 3 * EPOCH, 9 * EPOCH)


@dataclass(frozen=True)
class Trial:
    """Its result at each rung, and after how many samples a rule would have ended it."""

    results: list[float]
    limit: float
    rule: str

    def reaches(self, rung: int, rules: bool) -> bool:
        return not rules or self.limit > RUNGS[rung]


def full_search(runs: Path, trials: int, seed: int) -> list[Trial]:
    """Train all trials, and read what their records say."""
    if not (runs / "full" / "result.json").exists():
        space = ("--space", "lr=log:1e-5..1", "--space", "batch=32,64,128")
        words = [sys.executable, "-m", "ronde", "tune", *space, "--goal", "max:accuracy"]
        words += ["--trials", str(trials), "--max", str(RUNGS[-1]), "--runs", str(runs)]
        words += ["--name", "full", "--seed", str(seed), "--on-rule", "ignore"]
        words += [str(ROOT / "examples" / "digits" / "train.py"), "--epochs", "9"]
        subprocess.run(words, check=True, env=os.environ | {"RONDE_WATCH": "auto"})
    goal = Goal.parse("max:accuracy")
    found = []
    for number in range(trials):
        run = RunDir(runs / "full" / "trials" / f"t{number:03d}")
        results = progress_of(run, goal, RUNGS).results
        values = [0.0 if r is None else r for r in (*results, None, None, None)[:3]]
        alerts = sorted(Judge(run, only=HOPELESS).look(), key=lambda alert: alert.step)
        steps = [(e.step, e.samples) for e in read(run.record) if isinstance(e, StepRecorded)]
        limit = next((n for step, n in steps if alerts and step >= alerts[0].step), math.inf)
        found.append(Trial(values, limit, alerts[0].rule if alerts else ""))
    return found


def replay(method: str, table: list[Trial], rules: bool) -> tuple[list[tuple[int, float]], int]:
    """Each training from one rung to the next, as trial and samples, in order, and the trial that
    the method finds.
    """
    results: dict[int, list[float | None]] = {}
    trained: list[tuple[int, float]] = []

    def train(trial: int, rung: int, own: dict[int, list[float | None]]) -> None:
        before = RUNGS[len(results[trial]) - 1] if trial in results else 0
        value = table[trial].results[rung] if table[trial].reaches(rung, rules) else None
        end = RUNGS[rung] if value is not None else table[trial].limit
        trained.append((trial, max(end - before, 0)))
        own[trial] = results[trial] = [*table[trial].results[:rung], value]

    for bracket in brackets_of(method, len(table), RUNGS, ETA):
        own: dict[int, list[float | None]] = {}
        if method == "asha":
            while (more := promoted(own, bracket, {}, ETA, True)) is not None:
                train(*more, own)
            continue
        while (now := bracket.alive(own, ETA, True))[1] < len(bracket.rungs):
            for trial in now[0]:
                if None not in own.get(trial, ()):
                    train(trial, now[1], own)
    return trained, best_of(results, range(len(table)), len(RUNGS) - 1, True)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=27)
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument("--runs", type=Path, help="keep the trainings here")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = full_search(asked.runs or Path(folder), asked.trials, asked.seed)
    best = max(trial.results[-1] for trial in table)
    whole = asked.trials * RUNGS[-1]
    ended = [trial for trial in table if trial.rule]
    answer: dict[str, Any] = {
        "best of all": best,
        "ended by": dict(Counter(trial.rule for trial in ended)),
        "best that a rule ends": max((trial.results[-1] for trial in ended), default=None),
        "methods": {},
    }
    for method, rules in product(("random", "halving", "hyperband", "asha"), (False, True)):
        shares, until, lost = [], [], []
        for seed in range(20):
            order = random.Random(seed).sample(range(asked.trials), asked.trials)
            trained, found = replay(method, [table[i] for i in order], rules)
            last = max(place for place, (trial, _) in enumerate(trained) if trial == found)
            shares.append(sum(samples for _, samples in trained) / whole)
            until.append(sum(samples for _, samples in trained[: last + 1]) / whole)
            lost.append(best - table[order[found]].results[-1])
        answer["methods"][f"{method}{' with rules' if rules else ''}"] = {
            "share of the samples": round(statistics.median(shares), 3),
            "until the best": round(statistics.median(until), 3),
            "found the best": sum(each == 0 for each in lost) / len(lost),
            "worse by, at most": round(max(lost), 4),
        }
    print(json.dumps(answer, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
