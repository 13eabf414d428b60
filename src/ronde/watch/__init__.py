"""A run's outside view: its record, progress display, directory and loss curve.

Offers :class:`Record` and the event types, :class:`Watcher`, :class:`RunDir`, :func:`summarise` and
:func:`curve`. A failure in here never breaks the training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.watch.loss_curve import curve, curves
    from ronde.watch.progress import (
        MARK,
        Bar,
        Lines,
        Silent,
        choose_display,
        figure,
        plain_console,
    )
    from ronde.watch.record import (
        EVENTS,
        SCHEMA_VERSION,
        Alert,
        BestFound,
        Checkpointed,
        Ended,
        Epoch,
        Evaluated,
        HangFound,
        Logged,
        LossChecked,
        NonFiniteStep,
        Record,
        Restarted,
        Resumed,
        Started,
        StepRecorded,
        Warned,
        append_events,
        less_is_better,
        read,
    )
    from ronde.watch.run_dir import RunDir, check_name, claim_run_dir, latest, lock_run, script_stem
    from ronde.watch.summary import Summary, summarise
    from ronde.watch.watcher import Watcher, recorded

__all__ = [
    "EVENTS",
    "MARK",
    "SCHEMA_VERSION",
    "Alert",
    "Bar",
    "BestFound",
    "Checkpointed",
    "Ended",
    "Epoch",
    "Evaluated",
    "HangFound",
    "Lines",
    "Logged",
    "LossChecked",
    "NonFiniteStep",
    "Record",
    "Restarted",
    "Resumed",
    "RunDir",
    "Silent",
    "Started",
    "StepRecorded",
    "Summary",
    "Warned",
    "Watcher",
    "append_events",
    "check_name",
    "choose_display",
    "claim_run_dir",
    "figure",
    "curve",
    "curves",
    "latest",
    "less_is_better",
    "lock_run",
    "plain_console",
    "read",
    "recorded",
    "script_stem",
    "summarise",
]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.watch.loss_curve": "curve curves",
            "ronde.watch.progress": "Bar Lines MARK Silent choose_display figure plain_console",
            "ronde.watch.record": "Alert BestFound Checkpointed EVENTS Ended Epoch Evaluated "
            "HangFound Logged LossChecked NonFiniteStep Record Restarted Resumed "
            "SCHEMA_VERSION Started StepRecorded Warned append_events less_is_better read",
            "ronde.watch.run_dir": "RunDir check_name claim_run_dir latest lock_run script_stem",
            "ronde.watch.summary": "Summary summarise",
            "ronde.watch.watcher": "Watcher recorded",
        },
    )
