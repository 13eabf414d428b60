"""The run directory of a script, which all ranks agree on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ronde.run.group import count_groups
from ronde.watch import RunDir
from ronde.world import CheckpointError, RondeError, World
from ronde.world.consensus import broadcast_json

__all__ = ["open_run_dir"]


def open_run_dir(me: World, name: str | None, alone: bool = False) -> tuple[RunDir | None, bool]:
    """This run's directory, chosen by rank 0 or the launcher, and whether it is resumed. A
    collective.

    Args:
        alone: whether the run is in no :class:`RunGroup`, and counts by itself.
    """
    from ronde.watch import claim_run_dir, lock_run, script_stem  # of a new training, on rank 0

    answer: dict[str, Any] = {"path": None}
    if me.is_main:
        base = os.environ.get("RONDE_RUNS", "runs")
        of_launcher = os.environ.get("RONDE_RUN_DIR")
        answer["resume"] = resume = os.environ.get("RONDE_RESUME") == "1"
        try:
            if base == "none" and not of_launcher:
                answer["resume"] = False
            elif of_launcher:
                # The launcher made it. Later runs of the same script get directories beside it.
                number = count_groups() + 1
                path = Path(of_launcher if number == 1 else f"{of_launcher}.{number}")
                path.mkdir(exist_ok=True)
                if number > 1:  # the launcher holds the first
                    lock_run(RunDir(path))
                answer["path"] = str(path)
            else:
                run = claim_run_dir(Path(base), name, script_stem(), resume)
                lock_run(run)
                answer["path"] = str(run.path.absolute())
        except (RondeError, OSError) as error:
            answer["error"] = str(error)
    answer = broadcast_json(me, answer)
    count_groups(besides=int(alone))
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return (RunDir(Path(answer["path"])) if answer["path"] else None), bool(answer["resume"])
