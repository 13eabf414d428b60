"""The data library: where samples come from, in which order, and what is done to each.

Offers the sources (:mod:`ronde.data.sources`), :class:`~ronde.data.pipeline.Pipeline`,
:class:`~ronde.data.order.Order`, keyed randomness, transforms, images, text, tables and packing.
Users reach all of it as ``ronde.feed``.
"""
