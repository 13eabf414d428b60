"""How much of a full search halving needs to find its best trial: replayed from whole trainings.

27 trials of examples/digits are trained for 9 epochs once, by ``ronde tune --method random``. Each
method then decides over their records, with the trials in 20 other orders; nothing is trained for
that. It counts the samples that the method would have trained, and how good its best trial is in
the full search::

    python benchmarks/tune_savings.py --json savings.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ronde.jobs.halving import best_of, brackets_of, promoted
from ronde.jobs.trials import Goal, progress_of
from ronde.watch import RunDir

ROOT = Path(__file__).parents[1]
EPOCH, ETA = 1_438, 3
RUNGS = (EPOCH, 3 * EPOCH, 9 * EPOCH)


def full_search(runs: Path, trials: int) -> list[list[float]]:
    """Train all trials, and return the result of each at each rung."""
    if not (runs / "full" / "result.json").exists():
        space = ("--space", "lr=log:1e-5..1", "--space", "batch=32,64,128")
        words = [sys.executable, "-m", "ronde", "tune", *space, "--goal", "max:accuracy"]
        words += ["--trials", str(trials), "--max", str(RUNGS[-1]), "--runs", str(runs)]
        words += ["--name", "full", str(ROOT / "examples" / "digits" / "train.py"), "--epochs", "9"]
        subprocess.run(words, check=True)
    goal = Goal.parse("max:accuracy")
    found = []
    for number in range(trials):
        run = RunDir(runs / "full" / "trials" / f"t{number:03d}")
        results = progress_of(run, goal, RUNGS).results
        found.append([0.0 if r is None else r for r in (*results, None, None, None)[:3]])
    return found


def replay(method: str, table: list[list[float]]) -> tuple[int, int]:
    """The samples that a method trains, and the trial that it finds."""
    results: dict[int, list[float]] = {}
    for bracket in brackets_of(method, len(table), RUNGS, ETA):
        shift = len(RUNGS) - len(bracket.rungs)
        if method == "asha":
            while (more := promoted(results, bracket, {}, ETA, True)) is not None:
                results.setdefault(more[0], []).append(table[more[0]][more[1]])
            continue
        own: dict[int, list[float]] = {}
        while True:
            alive, rung = bracket.alive(own, ETA, True)
            if rung == len(bracket.rungs):
                break
            for trial in alive:
                own.setdefault(trial, []).append(table[trial][rung + shift])
        results |= {trial: table[trial][: len(r) + shift] for trial, r in own.items()}
    samples = sum(RUNGS[len(r) - 1] for r in results.values())
    return samples, best_of(results, range(len(table)), len(RUNGS) - 1, True)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=27)
    parser.add_argument("--runs", type=Path, help="keep the trainings here")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = full_search(asked.runs or Path(folder), asked.trials)
    best = max(row[-1] for row in table)
    whole = asked.trials * RUNGS[-1]
    answer: dict[str, Any] = {"best of all": best, "methods": {}}
    for method in ("halving", "hyperband", "asha"):
        shares, lost = [], []
        for seed in range(20):
            order = random.Random(seed).sample(range(asked.trials), asked.trials)
            samples, found = replay(method, [table[i] for i in order])
            shares.append(samples / whole)
            lost.append(best - table[order[found]][-1])
        answer["methods"][method] = {
            "share of the samples": round(statistics.median(shares), 3),
            "found the best": sum(each == 0 for each in lost) / len(lost),
            "worse by, at most": round(max(lost), 4),
        }
    print(json.dumps(answer, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
