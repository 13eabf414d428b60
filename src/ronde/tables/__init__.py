"""Tables: exact sums, preparation that is fitted once, features that cannot see the future.

Offers exact sums (:mod:`ronde.tables.exact`). Only integers are added across threads, workers,
and engines, so that a result has the same bits on DuckDB, PyArrow, and Spark.
"""
