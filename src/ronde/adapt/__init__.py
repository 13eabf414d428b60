"""Apply settings and cures to other people's data sets, without a change to their code.

Offers :func:`~ronde.adapt.apply_settings.apply_settings`, which reads what ``ronde doctor --apply``
wrote, and the cures themselves in :mod:`~ronde.adapt.remedies`. They change how samples are
fetched, never which.
"""
