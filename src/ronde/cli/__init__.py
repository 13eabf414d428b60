"""The command line: one file a verb. A user's error is one line, without a traceback.

Offers :func:`main`, the ``ronde`` command, and :data:`app`, its Typer application.
"""

from ronde.cli.early_interrupt import begin_quiet, end_quiet

begin_quiet()
from ronde.cli.app import app, main

end_quiet()

__all__ = ["app", "main"]
