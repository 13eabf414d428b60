"""How many devices are worth it? Speed-up and efficiency for 1, 2, 4 ... workers, extrapolated.

Offers :func:`~ronde.scale.scale.scale` (measures) and :mod:`~ronde.scale.laws` (fits and
extrapolates).
"""
