"""Instrumentation for the doctor: time the stages of any dataset.

Offers :class:`~ronde.profile.probe.Probe`. While it is installed, known functions of other
libraries are timed; afterwards every function is the original again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.profile.probe import Probe
    from ronde.profile.shared_counters import StageTimes, read_board

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.profile.probe": "Probe",
            "ronde.profile.shared_counters": "StageTimes read_board",
        },
    )
