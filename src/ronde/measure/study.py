"""Report from a study's process to the command that started it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ronde.data import Order
from ronde.watch import MARK
from ronde.world import ArgumentError, RondeError
from ronde.world.whole_file import write_whole


def study_target() -> tuple[dict[str, Any], Path]:
    """The study's options, and the file for its result."""
    options = json.loads(os.environ.get("RONDE_STUDY_OPTIONS", "{}"))
    return options, Path(os.environ["RONDE_STUDY_FILE"])


def answer_at_distribute(study: Callable[[Any, Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Have this process answer at ``distribute``, and end there.

    Args:
        study: (work, calls, the study's options) -> values of JSON. What it refuses is an answer.
    """
    from ronde.run import hooks

    options, file = study_target()

    class Answering(hooks.Observer):
        def on_plan(self, plan: Any, work: Any, calls: Any, me: Any) -> Any:
            try:
                values = study(work, calls, options)
            except RondeError as error:
                values = {"refused": str(error), "argument": isinstance(error, ArgumentError)}
            write_study(file, values)
            raise SystemExit(0)

    hooks.observer = Answering()


def refuse_batches(order: Order) -> None:
    """Refuse global batches of several sizes: a measured step stands for all others.

    Raises:
        ArgumentError: a ``batch_sampler`` decides.
    """
    if order.ends(0) is not None:
        raise ArgumentError(
            f"the batch_sampler ({order.sampler}) makes global batches of several sizes, and this "
            "measures steps of one size. Measure with DataLoader(dataset, batch_size=…) of a "
            "typical size; ronde run and ronde prove take the batch_sampler as it is."
        )


def report_progress(text: str) -> None:
    """Show a line of progress on the command's terminal."""
    if os.environ.get("RONDE_LAUNCHER_PID"):
        os.write(1, (MARK + json.dumps({"study": text}) + "\n").encode())


def write_study(file: Path, values: dict[str, Any]) -> None:
    """Write a result, whole or not at all."""
    write_whole(file, json.dumps(values))


def load_study(file: Path, purpose: str) -> dict[str, Any]:
    """Read a result.

    Raises:
        RondeError: the script ended without calling ``distribute``.
    """
    try:
        values: dict[str, Any] = json.loads(file.read_text())
    except OSError:
        raise RondeError(
            f"the script ended without calling ronde.distribute: there is nothing to {purpose}."
        ) from None
    return values
