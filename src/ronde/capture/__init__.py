"""Follow one forward pass of any model as events: module calls, and torch functions between them.

Offers :func:`~ronde.capture.follow.follow` and :class:`~ronde.capture.trace.Trace`. Pipeline stages
and the planner read the trace; nothing here knows about workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.capture.event_recorder import as_tuple, whole_size
    from ronde.capture.follow import following, not_training
    from ronde.capture.global_draws import (
        GlobalDraws,
        Recorded,
        drawing,
        draws_globally,
        recorded_draws,
        replaced,
        resume_draws,
    )
    from ronde.capture.intercept import (
        NUMBERS,
        Interceptor,
        Reads,
        compiled,
        data_shaped,
        not_an_event,
        stay,
        watching,
    )
    from ronde.capture.trace import Given, Point, Trace, TraceEvent, Value, bounds_of

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.capture.event_recorder": "as_tuple whole_size",
            "ronde.capture.follow": "not_training following",
            "ronde.capture.global_draws": "GlobalDraws Recorded drawing draws_globally "
            "recorded_draws replaced resume_draws",
            "ronde.capture.intercept": "Interceptor NUMBERS Reads compiled data_shaped "
            "not_an_event stay watching",
            "ronde.capture.trace": "Given Point Trace TraceEvent Value bounds_of",
        },
    )
