"""The command line: one file a verb. A user's error is one line, without a traceback.

Offers :func:`main`, the ``ronde`` command, and :data:`app`, its Typer application.
"""

from ronde.cli.app import main
from ronde.cli.options import app

__all__ = ["app", "main"]
