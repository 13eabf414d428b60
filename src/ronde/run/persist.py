"""A Run as a checkpoint's files and plain values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ronde import checkpoint
from ronde.run import rates
from ronde.world import CheckpointError

if TYPE_CHECKING:
    from ronde.run.run import Run

__all__ = ["collect", "restore"]

Tensors = Mapping[str, torch.Tensor]

_WORDS = {"samples": "samples in the data set", "epoch_samples": "samples an epoch", "seed": "seed", "shuffle": "shuffle"}


def _data(run: Run) -> dict[str, Any]:
    """What decides which samples are still to come, beside the place in the epoch."""
    order = run._taken.order
    return {"samples": order.n, "epoch_samples": order.epoch_samples, "seed": run.plan.seed, "shuffle": order.shuffle}


def collect(run: Run) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Files of tensors by name, and plain values: all that :func:`restore` needs."""
    weights, same = checkpoint.model_state(run.model)
    moments, optimizer = checkpoint.optimizer_state(run.model, run.optimizer)
    drawn, randomness = checkpoint.random_state()
    state = {
        "epoch": run.state.epoch,
        "step": run.state.step,
        "samples": run.state.samples,
        "epoch_samples": run.state.epoch_samples,
        "workers": run.world_size,
        "data": _data(run),
        "plan": run.plan.to_dict(),
        "same_tensors": same,
        "optimizer": optimizer,
        "scheduler": checkpoint.encode(run.scheduler.state_dict(), "scheduler") if run.scheduler is not None else None,
        "scaler": checkpoint.encode(run._scaler.state_dict(), "gradient scaler") if run._scaler is not None else None,
        "randomness": randomness,
    }
    return {"model.safetensors": weights, "optimizer.safetensors": moments, "random.safetensors": drawn}, state


def _refuse(why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint cannot be continued: {why}. Restore it, or start a new run.")


def restore(run: Run, found: Mapping[str, Any], tensors: Mapping[str, dict[str, torch.Tensor]]) -> None:
    """Go on from a checkpoint.

    Args:
        found: the plain values of :func:`collect`.
        tensors: ``"model"``, ``"optimizer"`` and ``"random"`` -> tensors by name, on every rank.

    Raises:
        CheckpointError: it is of another model, optimizer, data set or batch.
    """
    for name, value in _data(run).items():
        if found["data"][name] != value:
            raise _refuse(
                f"{_WORDS[name]} was {found['data'][name]} then and is {value} now, so the samples still to come would not be the same"
            )
    was = found["plan"]
    if run.plan.batch == "keep" and was["batch_size"] != run.plan.batch_size:
        raise _refuse(f"batch_size was {was['batch_size']} then and is {run.plan.batch_size} now, which is another training")
    if (found["scheduler"] is None) != (run.scheduler is None):
        raise _refuse(f"it was written with{'out' if found['scheduler'] is None else ''} a scheduler")
    checkpoint.load_model(run.model, tensors["model"], found["same_tensors"])
    checkpoint.load_optimizer(run.model, run.optimizer, tensors["optimizer"], found["optimizer"])
    if run.scheduler is not None:
        run.scheduler.load_state_dict(checkpoint.decode(found["scheduler"]))
    if run._scaler is not None and found["scaler"] is not None:
        run._scaler.load_state_dict(checkpoint.decode(found["scaler"]))
    if was["lr_factor"] != run.plan.lr_factor:  # batch="grow", on another number of workers
        rates.scale_rates(run.optimizer, run.scheduler, run.plan.lr_factor / was["lr_factor"])
    run.state.epoch, run.state.step = found["epoch"], found["step"]
    run.state.samples, run.state.epoch_samples = found["samples"], found["epoch_samples"]
    run._last_saved_step = run._watcher.steps_at_start = run.state.step
    if run.world_size == 1 and found["workers"] == 1:
        checkpoint.restore_random(tensors["random"], found["randomness"])
