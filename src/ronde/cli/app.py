"""The ``ronde`` command."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from ronde.cli.options import Group, option, tidy
from ronde.world import VERSION, RondeError

app = typer.Typer(
    name="ronde",
    cls=Group,
    help="One training script, on one device or on many.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


def _verbs() -> None:
    from ronde.cli import (
        bench,
        check,
        checkpoints,
        clarify,
        doctor,
        features,
        flow,
        horovodrun,
        map,
        new,
        pack,
        plan,
        prepare,
        prove,
        run,
        runs,
        scale,
        ship,
        show,
        submit,
        tune,
        watch,
    )

    verbs = (
        run,
        new,
        map,
        tune,
        flow,
        features,
        plan,
        prove,
        doctor,
        bench,
        check,
        clarify,
        pack,
        prepare,
        runs,
        scale,
        ship,
        show,
        watch,
        checkpoints,
        submit,
    )
    for verb in verbs:
        verb.register(app)
    horovodrun.register(app)
    tidy(app)


_verbs()


def main() -> None:
    """Run the command; a user error is one line on standard error and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without the characters of a table
            stream.reconfigure(errors="replace")
    try:
        # An error that no RondeError is a bug, and keeps its traceback.
        app()
    except RondeError as error:
        from rich.text import Text

        from ronde.watch import plain_console

        message = Text.assemble(("error:", "bold red"), " ", str(error))
        plain_console(stderr=True).print(message, soft_wrap=True)
        sys.exit(2)
