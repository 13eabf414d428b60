"""Replace library functions temporarily, by several parties in any order, and restore them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_lock = threading.RLock()


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that is not here may have held it


os.register_at_fork(after_in_child=_forked)


class _Place:
    """One attribute, or one item of a dictionary: the original, and the replacements over it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.had = name in self._values()
        self.own = self._values().get(name)
        self.original = self.own if isinstance(owner, dict) else getattr(owner, name)
        self.layers: list[Callable[[Any], Any]] = []
        self.shown = self.own

    def _values(self) -> Mapping[str, Any]:
        return self.owner if isinstance(self.owner, dict) else vars(self.owner)

    def ours(self) -> bool:
        """Whether the attribute still holds our last value."""
        return bool(self._values().get(self.name) is self.shown)

    def show(self) -> None:
        if not self.ours():
            return  # it is another's now, and his to put back
        self._show()
        self.shown = self._values().get(self.name)

    def _show(self) -> None:
        # what a class of the user's does when an attribute is set is not asked
        plain = isinstance(self.owner, type | ModuleType)
        if self.layers:
            value = self.original
            for make in self.layers:
                value = make(value)
        elif self.had:
            value = self.own
        else:
            (delattr if plain else object.__delattr__)(self.owner, self.name)
            return
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            (setattr if plain else object.__setattr__)(self.owner, self.name, value)


_places: dict[tuple[int, str], _Place] = {}


def put(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace an attribute, or an item of a dictionary, by ``make(current)``.

    Returns:
        A function that takes this layer away again; when the last one is gone, what stood there
        before stands there again. Where somebody else has replaced the attribute meanwhile, it is
        left as it is.

    Raises:
        TypeError: a class written in C, whose attributes cannot be set.

    Example:
        >>> import math
        >>> sqrt = math.sqrt
        >>> undo = put(math, "sqrt", lambda f: lambda x: f(x) + 1)
        >>> math.sqrt(4)
        3.0
        >>> undo()
        >>> math.sqrt is sqrt
        True
    """
    with _lock:
        place = _places.get((id(owner), name))
        if place is None or not place.ours():
            place = _Place(owner, name)
        layer = functools.partial(make)  # told from another layer of the same function
        place.layers.append(layer)
        try:
            place.show()
        except (TypeError, AttributeError):
            place.layers.remove(layer)
            raise
        _places[id(owner), name] = place

    def take() -> None:
        with _lock:
            place.layers[:] = [other for other in place.layers if other is not layer]
            place.show()
            if not place.layers and _places.get((id(owner), name)) is place:
                del _places[id(owner), name]

    return take
