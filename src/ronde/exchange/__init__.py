"""How gradients are averaged over the workers: a reducer is DDP's communication hook behind one
small protocol.

Offers :func:`build_reducer` and the registry ``KINDS`` (:mod:`ronde.exchange.kinds`),
:class:`Exchange`, which runs a :class:`Reducer` under DDP, and :func:`choose_reducer`, which
measures what ``auto`` takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.exchange.auto import choose_reducer
    from ronde.exchange.kinds import KINDS, build_reducer
    from ronde.exchange.reducer import Bucket, Exchange, Members, Reducer

__all__ = [
    "KINDS",
    "Bucket",
    "Exchange",
    "Members",
    "Reducer",
    "build_reducer",
    "choose_reducer",
]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.exchange.auto": "choose_reducer",
            "ronde.exchange.kinds": "KINDS build_reducer",
            "ronde.exchange.reducer": "Bucket Exchange Members Reducer",
        },
    )
