"""Connections of sqlite3 whose queries count as reading while a sample is made.

Its classes are written in C, so their methods cannot be replaced: subclasses time them.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from typing import Any

from ronde.profile.function_hooks import timed_function


def _timed(kind: Any, name: str) -> Any:
    return timed_function(getattr(kind, name), "read", "wait", "sqlite3")


class _Cursor(sqlite3.Cursor):
    """A cursor whose queries and rows count."""


class _Connection(sqlite3.Connection):
    """A connection whose queries count."""

    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(_Cursor if factory is sqlite3.Cursor else factory)

    def execute(self, *args: Any) -> Any:
        return self.cursor().execute(*args)


for _name in ("execute", "executemany", "fetchone", "fetchmany", "fetchall", "__next__"):
    setattr(_Cursor, _name, _timed(sqlite3.Cursor, _name))
_Connection.commit = _timed(sqlite3.Connection, "commit")  # type: ignore[method-assign]


def timed_connect(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``sqlite3.connect``."""
    connect = timed_function(original, "read", "keep", "sqlite3")

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 6:  # a class of the user's stays
            kwargs.setdefault("factory", _Connection)
        return connect(*args, **kwargs)

    return function


class ObservedQueries:
    """Stands for a connection or cursor that was opened before, and times its queries."""

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "_ronde_value", value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._ronde_value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ronde_value, name)
        if name in ("execute", "executemany", "cursor", "fetchone", "fetchmany", "fetchall"):
            return functools.partial(_observed, timed_function(value, "read", "wait", "sqlite3"))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ronde_value, name, value)

    def __iter__(self) -> ObservedQueries:
        return self

    def __next__(self) -> Any:
        return timed_function(self._ronde_value.__next__, "read", "wait", "sqlite3")()

    def __enter__(self) -> Any:
        self._ronde_value.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._ronde_value.__exit__(*error)


def _observed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    value = function(*args, **kwargs)
    return ObservedQueries(value) if isinstance(value, sqlite3.Cursor) else value
