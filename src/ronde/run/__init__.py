"""The script's side: a Run trains, evaluates, saves, and records.

Offers :func:`distribute`, which makes a :class:`Run`; its :class:`State`; and
:class:`MicroBatches`. Rooms that measure a run use :class:`~ronde.run.step_port.StepPort`.
"""

from ronde.run.distribute import distribute
from ronde.run.parts import MicroBatches, State
from ronde.run.run import Run

__all__ = ["MicroBatches", "Run", "State", "distribute"]
