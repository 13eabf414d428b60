"""The ``ronde`` command."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated

import typer

from ronde.cli.answer_screen import tell
from ronde.cli.options import app, option
from ronde.world import VERSION, RondeError


def _version(asked: bool) -> None:
    if asked:
        print(f"ronde {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, option("--version", "Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


# One file each, in the order of ``ronde --help``.
_VERBS = (
    "run new map tune flow features plan prove doctor bench check clarify explain pack prepare "
    "runs scale ship show watch checkpoints submit horovodrun"
)
for _verb in _VERBS.split():
    importlib.import_module(f"ronde.cli.{_verb}")
# Some verbs import others.
app.registered_commands.sort(key=lambda command: _VERBS.split().index(command.name or ""))


def main() -> None:
    """Run the command; a user error is one line on standard error and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without the characters of a table
            stream.reconfigure(errors="replace")
    try:
        # An error that no RondeError is a bug, and keeps its traceback.
        app()
    except RondeError as error:
        tell(("error:", "bold red"), " ", str(error), err=True)
        sys.exit(2)
