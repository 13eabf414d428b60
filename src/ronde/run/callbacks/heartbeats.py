"""Tells the launcher where this worker is: it notices a run that hangs."""

from __future__ import annotations

from ronde.run.callback import Callback, StepView
from ronde.run.parts import Parts

__all__ = ["Heartbeats"]


class Heartbeats(Callback):
    """Beats once a step, those of a tool included."""

    while_measuring = True

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        run = step.parts
        run.rendezvous.heartbeat.stepped(run.state.step, run.strategy.waited_seconds)

    def ended(self, parts: Parts, status: str) -> None:
        """See :class:`Callback`."""
        parts.rendezvous.heartbeat.ended()
