"""Test a recipe: copy it, train it on its small data, see that it learns, prove its plans."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ronde.cli.recipe import Recipe
from ronde.world import ArgumentError, RondeError


def test_recipe(recipe: Recipe, proves: bool, say: Callable[[str], None]) -> None:
    """Run a recipe's test in a folder of its own, which is removed.

    Args:
        proves: also prove its training under each of its plans.
        say: gets a line for each command, and for what was found.

    Raises:
        ArgumentError: it has no test, or its packages are not installed.
        RondeError: a command failed, or the training did not learn.
    """
    if not recipe.test:
        raise ArgumentError(f"{recipe.folder / 'recipe.yaml'} has no test: a list of commands.")
    if recipe.missing:
        raise ArgumentError(f"recipe {recipe.name} needs {', '.join(recipe.missing)}.")
    with tempfile.TemporaryDirectory(prefix="ronde-recipe-") as place:
        folder = Path(place) / recipe.name
        recipe.copy(folder, {})
        for command in recipe.test:
            _run(shlex.split(command), folder, recipe.name, say)
        for text, value in _learned(recipe, folder):
            say(f"{text}: {value:.4g}")
        if proves and recipe.plans:
            plans = [word for plan in recipe.plans for word in ("--plans", plan)]
            words = ["ronde", "prove", "--workers", "2", "--steps", "3", *plans, *recipe.small]
            _run(words, folder, recipe.name, say)


def _run(words: Sequence[str], folder: Path, name: str, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    own = {"ronde": [sys.executable, "-m", "ronde"], "python": [sys.executable]}
    command = [*own.get(words[0], [words[0]]), *words[1:]]
    # They would send the runs elsewhere, where the conditions do not look.
    kept = {k: v for k, v in os.environ.items() if k not in ("RONDE_RUNS", "RONDE_RESUME")}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise RondeError(f"{name}: {words[0]} cannot be started ({error.strerror}).") from None
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        raise RondeError(
            f"{name}: {shlex.join(words)} ended with exit status {done.returncode}.\n{tail}"
        )
    say(f"{shlex.join(words)}  {time.monotonic() - began:.1f} s")


def _learned(recipe: Recipe, folder: Path) -> list[tuple[str, float]]:
    """Each condition of ``learns`` with the value that met it."""
    from ronde.jobs.flow import parse_condition

    if not recipe.learns:
        return []
    try:
        conditions = parse_condition(recipe.learns)
    except ValueError as error:
        raise ArgumentError(
            f"{recipe.folder / 'recipe.yaml'}: learns: {error} is not NAME.METRIC OP NUMBER, as "
            "evaluate.accuracy >= 0.9."
        ) from None
    values = _values(folder)
    met = []
    for condition in conditions:
        value: Any = values.get(condition.step, {}).get(condition.key)
        text = f"{condition.step}.{condition.key} {condition.operator} {condition.number:g}"
        if not condition.holds(value):
            raise RondeError(f"{recipe.name} did not learn: {text} does not hold; it is {value}.")
        met.append((text, float(value)))
    return met


def _values(folder: Path) -> dict[str, dict[str, Any]]:
    """What the newest run recorded last: evaluations by their name, the training's loss, logged
    values.
    """
    from ronde.watch import Evaluated, Logged, StepRecorded, read

    records = sorted(folder.glob("runs/*/record.jsonl"), key=lambda p: p.stat().st_mtime_ns)
    values: dict[str, dict[str, Any]] = {}
    for event in read(records[-1]) if records else ():
        if isinstance(event, Evaluated):
            values[event.name] = event.metrics
        elif isinstance(event, StepRecorded) and event.part is None:
            values["training"] = {"loss": event.loss}
        elif isinstance(event, Logged):
            values["log"] = event.values
    return values
