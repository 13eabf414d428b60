"""Algorithms on tables that give the same model on any number of workers.

Offers :func:`trees`: gradient-boosted trees of XGBoost or LightGBM, as a :class:`TreeModel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world.lazy import lazily

if TYPE_CHECKING:
    from ronde.algorithms.boosted_trees import trees
    from ronde.algorithms.tree_model import TreeModel

__all__ = ["TreeModel", "trees"]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.algorithms.boosted_trees": "trees",
            "ronde.algorithms.tree_model": "TreeModel",
        },
    )
