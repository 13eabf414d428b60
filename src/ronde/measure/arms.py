"""Arms of a throughput measurement, and their results.

An arm is the same training with one thing taken away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ronde.loader import FeedSettings


@dataclass(frozen=True)
class Arm:
    """One variant of the training.

    Args:
        kind: ``synthetic``: real batches, recycled on the device. ``alone``: synthetic without
            exchange, each rank by itself. ``real``: with the input pipeline. ``beside``: synthetic
            while the loaders run, their batches thrown away. ``loading``: the loaders without
            training.
        samples: replay whole samples through the real loaders, which leaves the transport.
        threads: compute threads inside loading processes; None leaves them alone.
        settings: settings file to read with.
        timed: time each stage, at a cost of some microseconds per call.
        first_only: of ``loading``: only rank 0's loaders run.
    """

    kind: str = "real"
    samples: bool = False
    threads: int | None = None
    settings: FeedSettings | None = None
    timed: bool = False
    first_only: bool = False

    @property
    def loads(self) -> bool:
        """Whether loaders run in it."""
        return self.kind in ("real", "beside", "loading")


@dataclass(frozen=True)
class Timed:
    """Cost of a stage per sample: time and bytes read."""

    cpu_seconds: float
    wall_seconds: float
    bytes: float = 0.0


@dataclass(frozen=True)
class ArmResult:
    """One window of one arm.

    Attributes:
        samples_per_second: of all ranks together.
        step_seconds: mean step without the wait for its batch, on the slowest rank.
        wait_seconds: mean wait for a batch per step, of each rank.
        usual_wait_seconds: of the rank that waits longest, the median over groups of as many steps
            as there are loaders. It leaves out short disturbances of the machine.
        per_rank: samples per second of each rank, by its own clock.
        steps: steps in the window.
        seconds: duration of the window.
        first_batch_seconds: from the start of the loaders to the first batch, on the slowest rank;
            0 without loaders.
        stages: for each rank, stage -> its cost in the loaders; empty unless timed.
        in_step: stage -> its cost within the step, on the slowest rank.
        cpu_seconds: per sample, in the training processes.
        other_threads: share of the loaders' CPU time spent outside their main threads.
        queued: seconds that reading threads waited for a core, per second on a core.
    """

    samples_per_second: float
    step_seconds: float
    wait_seconds: tuple[float, ...]
    usual_wait_seconds: float
    per_rank: tuple[float, ...]
    steps: int
    seconds: float
    first_batch_seconds: float = 0.0
    stages: tuple[Mapping[str, Timed], ...] = ()
    in_step: Mapping[str, Timed] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    other_threads: float = 0.0
    queued: float = 0.0
