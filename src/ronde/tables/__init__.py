"""Tables: exact sums, preparation that is fitted once, features that cannot see the future.

Offers :class:`Recipe`, a preparation, :class:`FeatureStore`, features at a point in time, and
:class:`Online`, which reads published ones. Only integers are added across threads, workers, and
engines, so that a result has the same bits on DuckDB, PyArrow, and Spark.
"""

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.tables.feature_store import FeatureStore
    from ronde.tables.online import Online
    from ronde.tables.recipe import Recipe

__all__ = ["FeatureStore", "Online", "Recipe"]

if not TYPE_CHECKING:  # a server imports Online, and nothing that it does not need
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.tables.feature_store": "FeatureStore",
            "ronde.tables.online": "Online",
            "ronde.tables.recipe": "Recipe",
        },
    )
