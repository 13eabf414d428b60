"""Follow one forward pass of any model and keep it as events: module calls, and torch functions
between them.

Offers :func:`~ronde.capture.follow.follow` and :class:`~ronde.capture.trace.Trace`. Pipeline stages
and the planner read the trace; nothing here knows about workers.
"""
