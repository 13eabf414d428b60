"""Where a run stands: epoch, step and position, and the micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["State", "MicroBatches", "DTYPES"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class State:
    """How far a run has come.

    Attributes:
        epoch: the epoch being trained, from 0.
        step: optimizer steps done.
        samples: samples trained on, over all workers, repeats in later epochs included.
        epoch_samples: samples of this epoch done: where in its order the next batch starts.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    epoch_samples: int = 0


class MicroBatches(list[Any]):
    """What ``run.batches()`` yields where a step has several micro-batches: a list of them.

    ``run.step`` takes it whole; a script that owns its loop goes through it and calls
    ``run.backward`` for each.
    """
