"""Is it still the same training? N workers against one, step by step, in float64.

Offers :func:`~ronde.prove.prove.prove` and its :class:`~ronde.prove.prove.Verdict`: equal, or the
first thing that differs, with its likely cause.
"""
