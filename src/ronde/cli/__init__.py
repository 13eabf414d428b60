"""The command line: one file a verb. Errors of the user's are one line, without a traceback."""

from ronde.cli.app import app, main

__all__ = ["app", "main"]
