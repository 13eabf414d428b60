"""The shared sample cache: what was read or decoded is kept, for all workers of a node.

Offers :func:`~ronde.cache.cached.cached` and :func:`~ronde.cache.cached.cached_dataset`, over a
record store that many processes share, within a budget of memory or disk.
"""
