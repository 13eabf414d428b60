"""``ronde run --from``: the checkpoint of another run that a new one begins with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ronde.cli.show import find_run
from ronde.watch import RunDir
from ronde.world import ArgumentError, CheckpointError


@dataclass(frozen=True)
class Origin:
    """Where a new run begins.

    Attributes:
        text: ``RUN@STEP``.
        checkpoint: the folder, whole.
    """

    text: str
    checkpoint: Path

    def copy_to(self, directory: RunDir) -> None:
        """Give a new run the checkpoint, and say in its directory where it comes from: whatever
        starts it there resumes. Files are links where they can be: nobody changes them.
        """
        from ronde.checkpoint.remote import link_or_copy

        target = directory.checkpoints / self.checkpoint.name
        try:
            target.mkdir(parents=True)
            for file in self.checkpoint.iterdir():
                link_or_copy(file, target / file.name)
            directory.origin_file.write_text(f"{self.text}\n")
        except OSError as error:
            shutil.rmtree(directory.path, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint {self.text} cannot be copied to {directory.path}: {error}"
            ) from error


def find_origin(text: str, runs: Path, option: str = "--from") -> Origin:
    """The checkpoint that an option names, as ``RUN[@STEP]``.

    Raises:
        ArgumentError: no such run, or it has no such checkpoint.
        CheckpointError: it is damaged.
    """
    from ronde.checkpoint.manifest import check_files, list_checkpoints, load_manifest, step_of

    name, _, step = text.rpartition("@")
    if not name or not step.isdecimal():
        name, step = text, ""
    run = find_run(runs, name)
    folders = list_checkpoints(run.checkpoints)
    chosen = [path for path in folders if step_of(path) == int(step)] if step else folders
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in reversed(folders))
        raise ArgumentError(
            f"{option} {text}: {name} has no checkpoint"
            + (f" of step {step}; it has those of steps {steps}." if folders else " to begin with.")
        )
    reasons = []
    for path in chosen:
        try:
            check_files(path, load_manifest(path))
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        place = run.path.resolve()
        # The record keeps a name that ronde runs knows, or a path that holds elsewhere.
        where = run.name if place.parent == runs.resolve() else str(place)
        return Origin(f"{where}@{step_of(path)}", path)
    raise CheckpointError(f"{option} {text}: {reasons[0]}. 'ronde checkpoints' lists them.")
