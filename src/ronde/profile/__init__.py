"""Instrumentation that the doctor uses: time the stages of any data set, or replay their earlier
results.

Offers :class:`~ronde.profile.probe.Probe`. While it is installed, known functions of other
libraries are timed; afterwards every function is the original again.
"""
