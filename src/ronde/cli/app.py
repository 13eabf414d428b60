"""The ``ronde`` command."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from ronde.cli.early_interrupt import begin_quiet, end_quiet
from ronde.cli.options import Group, option, tidy
from ronde.world import RondeError
from ronde.world.version import VERSION

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
    end_quiet()


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
    begin_quiet()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without the characters of a table
            stream.reconfigure(errors="replace")
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        _give_up(error)
    except RondeError as error:
        from rich.text import Text

        from ronde.watch import plain_console

        told = Text.assemble(("error:", "bold red"), " ", str(error))
        plain_console(stderr=True).print(told, soft_wrap=True)
        sys.exit(2)


def _give_up(error: OSError) -> NoReturn:
    """Standard output takes no more. What is left in its buffer would fail again at exit."""
    with contextlib.suppress(OSError):
        print(
            f"error: the output cannot be written ({error.strerror}). Free some space, or send it "
            "elsewhere.",
            file=sys.stderr,
        )
    os._exit(1)
