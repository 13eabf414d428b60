"""Connections of sqlite3 whose queries count as reading while a sample is made.

Its classes are written in C, so their methods cannot be replaced: subclasses time them.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from typing import Any

from ronde.profile.function_hooks import timed_function


class _Cursor(sqlite3.Cursor):
    """A cursor whose queries and rows count."""


class _Connection(sqlite3.Connection):
    """A connection whose queries count."""

    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(_Cursor if factory is sqlite3.Cursor else factory)

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)


for _name in ("execute", "executemany", "fetchone", "fetchmany", "fetchall", "__next__"):
    setattr(_Cursor, _name, timed_function(getattr(sqlite3.Cursor, _name), "read"))


def timed_connect(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``sqlite3.connect``."""
    connect = timed_function(original, "read")

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 6:  # a class of the user's stays
            kwargs.setdefault("factory", _Connection)
        return connect(*args, **kwargs)

    return function
