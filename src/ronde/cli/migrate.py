"""``ronde migrate``: the diff that turns a script of another library into one of Ronde."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from ronde.cli.script_migration import migrate_script
from ronde.world import ArgumentError

_EXAMPLES = """
Examples:

  ronde migrate train.py                     show the diff

  ronde migrate train.py | patch train.py    apply it
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "migrate",
        help="Print the diff that turns a Horovod, Accelerate, or DDP script into one for "
        "ronde.distribute. Lines that it cannot translate are listed on standard error; the exit "
        "status is then 1.\n" + _EXAMPLES,
    )
    def migrate(
        script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A training script.")],
    ) -> None:
        try:
            source = script.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"{script}: cannot be read ({error}).") from None
        found = migrate_script(source, str(script))
        old, new = source.splitlines(keepends=True), found.source.splitlines(keepends=True)
        print("".join(difflib.unified_diff(old, new, str(script), str(script))), end="")
        for line, why in found.left.items():
            typer.echo(f"{script}:{line}: {why}", err=True)
        if found.left:
            typer.echo(f"from {found.library}: look at {len(found.left)} lines yourself", err=True)
            raise typer.Exit(1)
