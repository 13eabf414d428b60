"""What a script holds: :func:`distribute` makes a :class:`Run`, and the Run trains, evaluates, saves and records."""

from ronde.run.entry import distribute
from ronde.run.run import MicroBatches, Run, State

__all__ = ["MicroBatches", "Run", "State", "distribute"]
