"""Where a run stands: epoch, step and position, and the micro-batches of a step."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ronde.world import PlanError

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


_UNPACKING = {dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"]}


class MicroBatches(list[Any]):
    """What ``run.batches()`` yields where a step has several micro-batches: a list of them.

    ``run.step`` takes it whole; a script that owns its loop goes through it and calls
    ``run.backward`` for each.

    Raises:
        PlanError: the script takes it for one batch and unpacks it (``inputs, target = batch``),
            or, under a pipeline, indexes it.
    """

    def __init__(self, micros: Iterable[Any] = (), pipeline: str = "") -> None:
        super().__init__(micros)
        self._pipeline = pipeline  # the plan's words, if it is a pipeline that yields this

    def __iter__(self) -> Iterator[Any]:
        # Two micro-batches would pass for inputs and target.
        frame = sys._getframe(1)
        if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _UNPACKING:
            self._refuse("unpacks")
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        if self._pipeline or isinstance(key, str):
            self._refuse("indexes")
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self._advice()} It has no attribute {name!r}.")

    def _refuse(self, how: str) -> NoReturn:
        raise PlanError(f"the script {how} a batch. {self._advice()}")

    def _advice(self) -> str:
        count = f"{len(self)} micro-batches" if len(self) > 1 else "1 micro-batch"
        if self.__dict__.get("_pipeline"):
            return (
                f"Under plan={self._pipeline!r} a step has {count}, which a pipeline interleaves: "
                "pass the batch whole to run.step(batch), or use another plan."
            )
        return (
            f"This step has {count}: pass the batch whole to run.step(batch), or call "
            "run.backward(loss) for each micro-batch of it (for micro in batch: …)."
        )
