"""What starts the script of a run again, to look at its saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ronde.cli.answer_screen import Doing
from ronde.cli.script import examine
from ronde.watch import plain_console, read
from ronde.world import ArgumentError, RondeError


def start_of(directory: Any) -> tuple[Path, list[str], dict[str, Any]]:
    """A run's newest whole checkpoint, the command of its script, and facts for the model card."""
    from ronde.checkpoint import find_valid
    from ronde.watch import Evaluated, Started

    events = list(read(directory.record))
    started = [e for e in events if isinstance(e, Started)]
    if not started or started[-1].framework:
        raise ArgumentError(f"{directory.path} has no model of ronde.distribute.")
    checkpoint, _ = find_valid(directory.checkpoints)
    if checkpoint is None:
        raise ArgumentError(f"{directory.path} has no whole checkpoint: nothing to load.")
    last = started[-1]
    # Records of a script started without ronde run have no command.
    script = last.command[-1] if last.command else last.script
    module = last.command[-2:-1] == ["-m"]
    if not module and not Path(script).is_file():
        raise ArgumentError(
            f"the script {script} of this run is not here: start this command in the folder where "
            "the run was started."
        )
    facts = {
        "run": last.run,
        "model": last.model,
        "parameters": last.parameters,
        "plan": last.plan,
        "git": last.git,
        "versions": last.versions,
        "metrics": {e.name: e.metrics for e in events if isinstance(e, Evaluated)},
    }
    return checkpoint.path, [*(["-m"] if module else []), script, *last.arguments], facts


def answer_of(study: str, command: list[str], options: dict[str, Any], done: str) -> dict[str, Any]:
    """What a study says of a script's model, on one worker, up to ``ronde.distribute``.

    Args:
        done: what it does to the model, for an error: ``"exported"``.

    Raises:
        RondeError: the script failed, or did not call ``distribute``.
    """
    failed = f"the script failed before its model was {done}"
    with Doing(plain_console()) as say:
        return examine(study, command, 1, options, say, failed, _loaded)


def _loaded(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise RondeError("the script ended without calling ronde.distribute.")
    values: dict[str, Any] = json.loads(file.read_text())
    return values
