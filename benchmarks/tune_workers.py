"""Simulate ASHA on up to 500 workers: the decisions of Ronde on a synthetic clock, no processes.

A whole training takes 16 units of time, rungs are at 1, 4, and 16 units, and a trial goes on where
it paused. A uniform number says how good a trial is; early rungs see it with more noise. Training
times vary by a factor of 1 + abs(normal(0, 0.3)), so there are stragglers. Printed, by workers: how
many trials begin within two whole trainings, and when the first trial of the best half percent has
been trained in whole, the median over seeds. At last, when the first whole training ends where 9
workers train each of three rungs from the start: it must be after (1 + 3 + 9) / 9 of its time::

    python benchmarks/tune_workers.py --json workers.json
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from ronde.jobs.halving import Bracket, promoted

RUNGS, ETA, GOOD = (1, 4, 16), 4, 0.005
_ANEW = (1, 3, 9), 3


def simulate(
    workers: int, seed: int, until: float = math.inf, anew: bool = False
) -> tuple[int, float, float]:
    """ASHA until a time, else until a good trial is whole; ``anew``: until one is whole, each
    rung trained from the start. Returns trials begun, the time in whole trainings, and milliseconds
    a decision.
    """
    rng = random.Random(seed)
    rungs, eta = _ANEW if anew else (RUNGS, ETA)
    bracket = Bracket(tuple(range(20_000)), rungs)
    quality = [rng.random() for _ in bracket.trials]
    results: dict[int, list[float | None]] = {}
    running: dict[int, int] = {}
    ends: list[tuple[float, int]] = []
    spent: list[float] = []
    now, begun, over = 0.0, 0, False
    while now < until and not over:
        while len(running) < workers:
            began = time.perf_counter()
            more = promoted(results, bracket, running, eta, False)
            spent.append(time.perf_counter() - began)
            assert more is not None  # there are more trials than are begun
            running[more[0]] = rung = more[1]
            begun += rung == 0
            length = rungs[rung] - (rungs[rung - 1] if rung and not anew else 0)
            length *= 1 if anew else 1 + abs(rng.gauss(0, 0.3))
            heapq.heappush(ends, (now + length, more[0]))
        now, trial = heapq.heappop(ends)
        rung = running.pop(trial)
        results.setdefault(trial, []).append(quality[trial] + rng.gauss(0, 0.05 / eta**rung))
        is_whole = rung == len(rungs) - 1
        over = is_whole and math.isinf(until) and (anew or quality[trial] <= GOOD)
    return begun, now / rungs[-1], 1e3 * statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    answer: dict[str, Any] = {}
    for workers in (1, 5, 25, 100, 500):
        begun, _, spent = simulate(workers, 0, 2 * RUNGS[-1])
        good = [simulate(workers, seed)[1] for seed in range(asked.seeds)]
        answer[f"{workers} workers"] = {
            "trials begun": begun,
            "good trial after": round(statistics.median(good), 2),
            "decision, ms": round(spent, 2),
        }
    answer["rungs from the start"] = simulate(9, 0, anew=True)[1]
    print(json.dumps(answer, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
