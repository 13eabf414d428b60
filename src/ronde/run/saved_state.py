"""Checks a checkpoint's plain values before anything of them is loaded. What is wrong deeper inside
ends in the error of whoever loads it, which :mod:`ronde.run.resume` makes a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ronde import checkpoint
from ronde.world import CheckpointError

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = ["check_saved", "check_values"]

_COUNTS = {"epoch": 0, "step": 0, "samples": 0, "epoch_samples": 0, "workers": 1}
_MAPPINGS = ("data", "plan", "same_tensors", "optimizer", "randomness")
_VALUES = {
    "data": ("samples", "epoch_samples", "seed", "shuffle"),
    "plan": ("batch_size", "lr_factor"),
    "optimizer": ("kind", "groups", "values"),
    "randomness": ("numpy", "python"),
}


def _complaints(run: Parts, saved: Mapping[str, Any]) -> Iterator[str]:
    for name, least in _COUNTS.items():
        count = saved.get(name)
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            yield f"{name} is {count!r:.60}, expected a whole number, {least} or more"
    for name in _MAPPINGS:
        if not isinstance(saved.get(name), dict):
            yield f"{name} is {saved.get(name)!r:.60}, expected a mapping"
    for owner, names in _VALUES.items():
        for name in names:
            if name not in saved[owner]:
                yield f"{owner} has no {name}"
    for name in ("scheduler", "scaler"):
        if name not in saved:
            yield f"{name} is missing"
    order = run.data.order
    if order.ends(0) is None and saved["epoch_samples"] > order.epoch_samples:
        yield f"epoch_samples is {saved['epoch_samples']}, an epoch has {order.epoch_samples}"


def check_saved(run: Parts, found: checkpoint.Checkpoint) -> None:
    """Check that a checkpoint has the parts, and its plain values the form, that this run writes.

    Raises:
        CheckpointError: names the first value that is wrong.
    """
    parts = {*found.tensors, *(file.removesuffix(".safetensors") for file in found.files)}
    for part in ("model", "optimizer", "random"):
        if part not in parts:
            raise CheckpointError(f"its manifest lists no file of the part {part!r}")
    check_values(run, found.state)


def check_values(run: Parts, saved: Mapping[str, Any]) -> None:
    """Check that plain values have the form that this run writes.

    Raises:
        CheckpointError: names the first value that is wrong.
    """
    wrong = next(_complaints(run, saved), None)
    if wrong is not None:
        raise CheckpointError(wrong)
