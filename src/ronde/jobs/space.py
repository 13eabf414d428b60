"""Spaces of hyper-parameters, and values drawn from them."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ronde.world import ArgumentError

__all__ = [
    "Space",
    "Values",
    "draw_random",
    "draw_with_optuna",
    "grid_values",
    "log_names",
    "read_space",
]

Values = dict[str, Any]
Space = Callable[[Any], Any]
"""Asks a trial for values, as in Optuna: ``trial.suggest_float(name, low, high, log=True)``, …"""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:|int:)?({_NUMBER})\.\.({_NUMBER})")


@dataclass
class _Random:
    """A trial that draws uniformly."""

    rng: random.Random
    params: Values = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        if log:
            self.log.append(name)
            value = math.exp(self.rng.uniform(math.log(low), math.log(high)))
        elif step is not None:
            value = low + step * self.rng.randint(0, math.floor((high - low) / step + 1e-9))
        else:
            value = self.rng.uniform(low, high)
        # exp(log(high)) may be a hair above high
        return float(self.params.setdefault(name, min(max(value, low), high)))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        if log:
            self.log.append(name)
            value = round(math.exp(self.rng.uniform(math.log(low), math.log(high))))
        else:
            value = self.rng.randrange(low, high + 1, step)
        return int(self.params.setdefault(name, value))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self.params.setdefault(name, self.rng.choice(list(choices)))


class _Grid(_Random):
    """A trial that takes given places, one after the other, and notes how many there are."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(random.Random(0))
        self.places, self.sizes = places, list[int]()

    def suggest_float(self, name: str, low: float, high: float, **_: Any) -> float:
        raise ArgumentError(f"--method grid: {name} is a range: give its values, as {name}=1,2,3.")

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, **_: Any) -> int:
        return int(self.suggest_categorical(name, range(low, high + 1, step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        place = len(self.sizes)
        self.sizes.append(len(choices))
        self.params[name] = choices[self.places[place] if place < len(self.places) else 0]
        return self.params[name]


def read_space(texts: Sequence[str]) -> Space:
    """Read ``NAME=…`` for each value, or one ``FILE.py`` that defines ``space(trial)``.

    A range is ``a..b``, ``log:a..b`` or ``int:a..b``; choices are ``x,y,z``.

    Raises:
        ArgumentError: one is neither; starts with ``--space``.

    Example:
        >>> draw_random(read_space(["lr=log:1e-4..1e-1", "batch=32,64"]), seed=0, number=0)
        {'lr': 0.00087..., 'batch': 32}
    """
    if len(texts) == 1 and texts[0].endswith(".py"):
        return _file(Path(texts[0]))
    asks: dict[str, Callable[[Any], Any]] = {}
    for text in texts:
        name, is_there, written = text.partition("=")
        if not is_there or not re.fullmatch(r"[\w.-]+", name) or name in asks:
            raise ArgumentError(
                f"--space {text}: expected NAME=0..1, NAME=log:1e-4..1e-1, NAME=int:1..8, "
                "NAME=x,y,z, each name once, or one FILE.py."
            )
        asks[name] = _one(name, written)
    if not asks:
        raise ArgumentError("--space is missing: say what to search, as --space lr=log:1e-4..1e-1.")

    def space(trial: Any) -> None:
        for ask in asks.values():
            ask(trial)

    return space


def _one(name: str, written: str) -> Callable[[Any], Any]:
    if match := _RANGE.fullmatch(written):
        kind, low, high = match[1], float(match[2]), float(match[3])
        if not low < high or (kind == "log:" and low <= 0):
            above = "above 0, and " if kind == "log:" else ""
            raise ArgumentError(f"--space {name}={written}: the ends must be {above}in order.")
        if kind == "int:":
            return lambda trial: trial.suggest_int(name, int(low), int(high))
        return lambda trial: trial.suggest_float(name, low, high, log=kind == "log:")
    choices = [_value(each) for each in written.split(",")]
    if ".." in written or "" in choices:
        raise ArgumentError(f"--space {name}={written}: expected a range a..b, or choices x,y,z.")
    return lambda trial: trial.suggest_categorical(name, choices)


def _value(text: str) -> int | float | str:
    # to Python 2024_01 and 007 are numbers too, and would be written in another way
    if not re.fullmatch(_NUMBER, text.strip()) or re.match(r"\s*[-+]?0\d", text):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _file(path: Path) -> Space:
    if not path.is_file():
        raise ArgumentError(f"--space {path}: no such file.")
    space = runpy.run_path(str(path)).get("space")
    if not callable(space):
        raise ArgumentError(f"--space {path}: it defines no function space(trial).")
    made: Space = space
    return made


def draw_random(space: Space, seed: int, number: int) -> Values:
    """Values of trial ``number``: they depend on nothing else."""
    # a text: Python seeds with its SHA-512, so neighbors have nothing in common
    trial = _Random(random.Random(f"{seed}-{number}"))
    space(trial)
    return trial.params


def grid_values(space: Space) -> list[Values]:
    """All combinations of choices, the last one changing first.

    Raises:
        ArgumentError: something is a range.
    """
    first = _Grid(())
    space(first)
    combinations = []
    for places in itertools.product(*map(range, first.sizes)):
        trial = _Grid(places)
        space(trial)
        if trial.sizes != first.sizes:
            raise ArgumentError("--method grid: what is asked must not depend on values.")
        combinations.append(trial.params)
    return combinations


def log_names(space: Space) -> list[str]:
    """Names of the values that are drawn on a log scale."""
    trial = _Random(random.Random(0))
    with contextlib.suppress(Exception):  # a space that only Optuna can ask; for display only
        space(trial)
    return trial.log


def draw_with_optuna(
    space: Space, seed: int, number: int, earlier: Sequence[tuple[Mapping[str, Any], float | None]],
    maximize: bool,
) -> Values:  # fmt: skip
    """Values of trial ``number`` by the tree-structured Parzen estimator (Bergstra et al. 2011), a
    pure function of the arguments: the study is made anew each time.

    Args:
        space: what is asked.
        seed: of the search.
        number: of the trial.
        earlier: values of the trials before, in order, with their results; None: none yet.
        maximize: whether large results are good.
    """
    from ronde.world.paths import need

    need("optuna", "tune", "--method bayes")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # seeded by the trial: a search that was killed asks for the same values again
    sampler = optuna.samplers.TPESampler(seed=seed * 100_003 + number, constant_liar=True)
    study = optuna.create_study(direction="maximize" if maximize else "minimize", sampler=sampler)
    for values, result in earlier:
        known = optuna.trial.FixedTrial(dict(values))
        space(known)
        state = (
            {"value": result} if result is not None else {"state": optuna.trial.TrialState.RUNNING}
        )
        study.add_trial(
            optuna.trial.create_trial(
                params=known.params, distributions=known.distributions, **state
            )
        )
    trial = study.ask()
    space(trial)
    return dict(trial.params)
