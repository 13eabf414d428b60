"""Horovod's callbacks for Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import keras
from ronde.horovod.collectives_api import allreduce
from ronde.horovod.lifecycle import size
from ronde.horovod.objects import broadcast_parameters
from ronde.world import ArgumentError

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Before the first batch, gives all ranks the weights and the optimizer's state of one.

    Seeds of dropout stay each rank's own.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast."""
        model = self.model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        # numbered: two layers may have one path
        named = [(f"{i} {v.path}", v) for i, v in enumerate(model.weights)]
        named += [(f"optimizer {i} {v.path}", v) for i, v in enumerate(model.optimizer.variables)]
        broadcast_parameters([(n, v.value.data) for n, v in named], self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """After each epoch, averages the metrics over all ranks, for the callbacks that follow it."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average."""
        for name in sorted(logs or ()):  # in one order on all ranks
            mine = torch.tensor(float(logs[name]), dtype=torch.float64)
            logs[name] = float(allreduce(mine, name=f"keras.metric.{name}"))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies the learning rate between two epochs.

    Args:
        initial_lr: what is multiplied; None: the optimizer's, when the training begins.
        multiplier: a number, or a function of the epoch.
        start_epoch, end_epoch: from which epoch on, and before which.
        staircase: change it once an epoch, or before every batch (``multiplier`` gets fractions).
        momentum_correction: while the rate changes, scale the momentum of that batch likewise.
        steps_per_epoch: None: as Keras says.
    """

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.multiplier = multiplier if callable(multiplier) else lambda _: multiplier
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out what the caller has left open."""
        if self.initial_lr is None:
            self.initial_lr = float(self.model.optimizer.learning_rate)
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = self.params.get("steps")
            if self.steps_per_epoch is None:
                raise ArgumentError(
                    f"{type(self).__name__}: Keras does not know how many batches an epoch has. "
                    "Give steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate, and the momentum of this batch."""
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if self.staircase and batch:
            return
        steps = 1 if self.staircase else self.steps_per_epoch
        assert steps is not None and self.initial_lr is not None
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        rate = self.initial_lr * self.multiplier(self._epoch + batch / steps)
        optimizer.learning_rate = rate
        if self.momentum_correction and getattr(optimizer, "momentum", None) and before:
            self._momentum = optimizer.momentum
            optimizer.momentum = self._momentum * rate / before

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Put the momentum back."""
        if self._momentum is not None:
            self.model.optimizer.momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Show the rate among the metrics."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr`` in some epochs.

    Args:
        initial_lr: the rate after the warm-up: that of one process, times ``hvd.size()``.
        warmup_epochs: how many.
        momentum_correction, steps_per_epoch: as in the schedule.
        verbose: say on each rank when it is over.
    """

    def __init__(
        self,
        initial_lr: float | None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        self._verbose = verbose

        def grown(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs  # with this batch
            return (1 + done * (size() - 1)) / size()

        super().__init__(
            initial_lr,
            grown,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Show the rate, and the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch + 1 == self.end_epoch:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the warm-up is over, the learning rate is {rate:g}.")
