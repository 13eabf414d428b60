"""Samples in: their order (a pure function of seed, epoch and position), their keyed randomness, their loading.

Offers :class:`Order` and :func:`permute`, :class:`Feed` (torch's DataLoader driven by positions) and
:func:`take_over` (a user's Dataset or DataLoader as Ronde reads it).
"""

from ronde.feed.loader import Feed, LoaderSettings, die_with_parent
from ronde.feed.order import Order, key_of, permute
from ronde.feed.takeover import Taken, take_over

__all__ = ["Feed", "LoaderSettings", "Order", "Taken", "die_with_parent", "key_of", "permute", "take_over"]
