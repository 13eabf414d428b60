"""Algorithms on tables that give the same model on any number of workers.

Offers :func:`trees` (XGBoost or LightGBM, as a :class:`TreeModel`), :func:`kmeans`
(:class:`Clusters`), and :func:`pca` (:class:`Components`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.algorithms.boosted_trees import trees
    from ronde.algorithms.clustering import Clusters, kmeans
    from ronde.algorithms.principal_components import Components, pca
    from ronde.algorithms.tree_model import TreeModel

__all__ = ["Clusters", "Components", "TreeModel", "kmeans", "pca", "trees"]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.algorithms.boosted_trees": "trees",
            "ronde.algorithms.clustering": "Clusters kmeans",
            "ronde.algorithms.principal_components": "Components pca",
            "ronde.algorithms.tree_model": "TreeModel",
        },
    )
