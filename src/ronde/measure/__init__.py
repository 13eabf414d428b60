"""Measure a script's model and a machine's links, so that the planner and the doctor need not
assume them.

Offers :func:`~ronde.measure.planner.choose` (``plan="auto"``),
:func:`~ronde.measure.time_units.measure` (the model, unit by unit),
:mod:`~ronde.measure.bench_links` (collectives) and :class:`~ronde.measure.throughput.Bench`
(synthetic and real rates).
"""
