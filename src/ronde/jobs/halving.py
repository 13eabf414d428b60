"""Which trials go on, and how far: pure decisions over what trials have reached.

Successive halving: Jamieson and Talwalkar 2016. Hyperband: Li et al. 2018. ASHA: Li et al. 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ronde.world import ArgumentError

__all__ = [
    "METHODS",
    "Bracket",
    "Results",
    "best_of",
    "brackets_of",
    "is_open",
    "promoted",
    "rungs_between",
]

METHODS = ("random", "grid", "bayes", "halving", "hyperband", "asha")
"""``bayes+halving`` and ``bayes+hyperband`` are two together."""

Results = Mapping[int, Sequence[float | None]]
"""Of each trial, by rung: its result; None where it failed. As many as it has reached."""


@dataclass(frozen=True)
class Bracket:
    """Trials that are halved together.

    Attributes:
        trials: their numbers.
        rungs: samples after which they are compared; the last is the whole training.
        first: the rung at which they are compared first.
    """

    trials: tuple[int, ...]
    rungs: tuple[int, ...]
    first: int = 0

    def alive(self, results: Results, eta: float, maximize: bool) -> tuple[list[int], int]:
        """The trials that go on to a rung, and which: the first one that not all have reached. All
        have reached the last one where this is ``len(rungs)``.
        """
        alive = list(self.trials)
        for rung in range(self.first, len(self.rungs)):
            if any(is_open(results, trial, rung) for trial in alive):
                return alive, rung
            if rung + 1 < len(self.rungs):
                alive = best_of(results, alive, rung, maximize)[: max(int(len(alive) / eta), 1)]
        return alive, len(self.rungs)


def is_open(results: Results, trial: int, rung: int) -> bool:
    """Whether a trial has not reached a rung yet, and has not failed."""
    reached = results.get(trial, ())
    return len(reached) <= rung and None not in reached


def best_of(results: Results, trials: Sequence[int], rung: int, maximize: bool) -> list[int]:
    """Those that have a result at a rung, the best one first; of two alike, the earlier."""
    ranked = []
    for trial in trials:
        reached = results.get(trial, ())
        value = reached[rung] if rung < len(reached) else None
        if value is not None and math.isfinite(value):  # NaN would sort anywhere
            ranked.append((-value if maximize else value, trial))
    return [trial for _, trial in sorted(ranked)]


def rungs_between(least: int, most: int, eta: float) -> tuple[int, ...]:
    """Rungs from ``most`` down, each ``eta`` times fewer samples, none below ``least``.

    Example:
        >>> rungs_between(1_000, 9_000, 3)
        (1000, 3000, 9000)
    """
    rungs = [most]
    while rungs[-1] / eta >= least:
        rungs.append(math.ceil(rungs[-1] / eta))
    return tuple(reversed(rungs))


def brackets_of(method: str, trials: int, rungs: Sequence[int], eta: float) -> list[Bracket]:
    """Deal trials out: one bracket, or for Hyperband one for each number of rungs, in the shares of
    its paper, again and again until all are dealt.

    Raises:
        ArgumentError: more rungs than trials.

    Example:
        >>> [(len(b.trials), b.first) for b in brackets_of("hyperband", 17, (1, 3, 9), 3)]
        [(9, 0), (5, 1), (3, 2)]
    """
    kind, rungs = method.rpartition("+")[2], tuple(rungs)
    if kind in ("random", "grid", "bayes"):
        return [Bracket(tuple(range(trials)), rungs, len(rungs) - 1)]
    if trials < 2 and len(rungs) > 1:
        raise ArgumentError(f"--method {method}: {trials} trial cannot be halved.")
    if kind in ("halving", "asha"):
        return [Bracket(tuple(range(trials)), rungs)]
    brackets: list[Bracket] = []
    first = 0
    while first < trials:
        for more in reversed(range(len(rungs))):
            # 1e-9: eta**more may be a hair above the whole number that it is
            count = math.ceil(len(rungs) / (more + 1) * eta**more - 1e-9)
            count = min(count, trials - first)
            if count:
                whole = tuple(range(first, first + count))
                brackets.append(Bracket(whole, rungs, len(rungs) - 1 - more))
            first += count
    return brackets


def promoted(
    results: Results, bracket: Bracket, running: Mapping[int, int], eta: float, maximize: bool
) -> tuple[int, int] | None:
    """ASHA: a trial that is in the best 1/eta of its rung and has not gone on, from the highest
    rung down, and the next rung; else a new trial at the first; at the end, the best one. None if
    there is none.

    Args:
        results: of trials of the bracket alone.
        running: the rung to which each trial is on its way.
    """
    for rung in reversed(range(len(bracket.rungs) - 1)):
        there = [t for t, reached in results.items() if len(reached) > rung]
        # of all that came there, failed ones too: as in the paper
        good = best_of(results, there, rung, maximize)[: int(len(there) / eta)]
        for trial in good:
            if len(results[trial]) == rung + 1 and trial not in running:
                return trial, rung + 1
    for trial in bracket.trials:
        if trial not in results and trial not in running:
            return trial, 0
    if not running:  # the paper's search goes on for ever; this one ends with a whole training
        for rung in reversed(range(len(bracket.rungs) - 1)):
            there = [t for t, reached in results.items() if len(reached) > rung]
            for trial in best_of(results, there, rung, maximize)[:1]:
                return (trial, rung + 1) if len(results[trial]) == rung + 1 else None
    return None
