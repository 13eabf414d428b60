"""What a script holds: :func:`distribute` makes a :class:`Run`, and the Run trains, evaluates,
saves and records.
"""

from ronde.run.distribute import distribute
from ronde.run.run import Run
from ronde.run.run_state import MicroBatches, State

__all__ = ["MicroBatches", "Run", "State", "distribute"]
