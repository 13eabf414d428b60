"""Tables: exact sums, preparation that is fitted once, features that cannot see the future.

Offers :class:`Recipe`, a preparation. Only integers are added across threads, workers,
and engines, so that a result has the same bits on DuckDB, PyArrow, and Spark.
"""

from ronde.tables.recipe import Recipe

__all__ = ["Recipe"]
