"""Checks a checkpoint's plain values before anything of them is loaded: a manifest may have the
right digest and still be wrong.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ronde import checkpoint
from ronde.world import CheckpointError

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = ["check_saved", "check_values"]

_COUNTS = ("epoch", "step", "samples", "epoch_samples")
# Settings and counters that torch's optimizers and schedulers cannot go on without. None of them
# is ever negative. Others may be missing: versions of torch differ.
_NEEDED = {
    *("lr", "betas", "momentum", "weight_decay", "eps", "alpha"),
    *("milestones", "_milestones", "_schedulers", "gamma", "step_size", "total_steps"),
    *("last_epoch", "_step_count", "base_lrs", "_last_lr", "scale", "_growth_tracker"),
}
_DICTS = ("data", "plan", "same_tensors", "optimizer", "randomness")


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value!r:.60}"


def _complaints(run: Parts, saved: Mapping[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        if not _is_count(saved.get(name)):
            yield f"{name} is {_shown(saved.get(name))}, expected a whole number, 0 or more"
    if not _is_count(saved.get("workers"), 1):
        yield f"workers is {_shown(saved.get('workers'))}, expected a whole number, 1 or more"
    missing = [n for n in _DICTS if not isinstance(saved.get(n), dict)]
    for name in missing:
        yield f"{name} is {_shown(saved.get(name))}, expected a mapping"
    for name in ("registered", "averages", "best", "exchange", "batch_schedule", "ending"):
        kinds = dict if name in ("registered", "averages", "ending") else dict | None
        if not isinstance(saved.get(name, {}), kinds):
            yield f"{name} is {_shown(saved[name])}, expected a mapping"
    given = saved.get("given", [])
    if not isinstance(given, list) or not all(isinstance(group, dict) for group in given):
        yield f"given is {_shown(given)}, expected a list of mappings"
    elif not all(_is_number(group.get("lr")) for group in given):
        yield "a learning rate in given is no number"
    else:
        try:
            checkpoint.decode(given)
        except Exception as error:  # whatever it may be of damaged values
            yield f"given cannot be read ({type(error).__name__}: {error})"
    if missing:
        return
    for name in ("samples", "epoch_samples", "seed", "shuffle"):
        if name not in saved["data"]:
            yield f"data has no {name}"
    order = run.data.order
    if order.ends(0) is None and saved["epoch_samples"] > order.epoch_samples:
        yield f"epoch_samples is {saved['epoch_samples']}, an epoch has {order.epoch_samples}"
    if max(saved["epoch"], saved["epoch_samples"]) > max(saved["step"], saved["samples"]):
        yield f"epoch {saved['epoch']} cannot begin after {saved['step']} steps"
    plan = saved["plan"]
    if not _is_count(plan.get("batch_size"), 1):
        yield f"the plan's batch_size is {_shown(plan.get('batch_size'))}"
    factor = plan.get("lr_factor")
    if not _is_number(factor) or not 0 < factor < math.inf:
        yield f"the plan's lr_factor is {_shown(factor)}, expected a number above 0"
    if not all(isinstance(v, str) for v in saved["same_tensors"].values()):
        yield "same_tensors does not map names to names"
    yield from _optimizer(run, saved["optimizer"])
    for name, owner in (("scheduler", run.scheduler), ("scaler", run.scaler)):
        if name not in saved:
            yield f"{name} is missing"
        elif saved[name] is not None and owner is not None:
            yield from _form(checkpoint.decode(saved[name]), owner.state_dict(), name)
    numpy, python = saved["randomness"]["numpy"], saved["randomness"]["python"]
    kind, place, has_gauss, gauss = numpy
    fine = kind == "MT19937" and _is_count(place) and place <= 624 and has_gauss in (0, 1)
    version, gauss_next = python
    fine = fine and _is_number(gauss) and version == random.getstate()[0]
    if not fine or not (gauss_next is None or _is_number(gauss_next)):
        yield "randomness holds no states of generators"


def _optimizer(run: Parts, saved: Mapping[str, Any]) -> Iterator[str]:
    groups = saved["groups"]
    if not isinstance(saved["kind"], str) or not isinstance(groups, list):
        yield "the optimizer has no kind and groups"
        return
    names = {name for group in groups for name in group["params"]}
    if not all(isinstance(name, str) for name in names):
        yield "the optimizer's groups do not list names of parameters"
    for key, value in saved["values"].items():
        if key.rpartition("/")[0] not in names:
            yield f"the optimizer has the value {key!r} of no parameter"
        checkpoint.decode(value)
    for i, group in enumerate(groups):
        settings = {k: checkpoint.decode(v) for k, v in group["settings"].items()}
        if saved["kind"] == type(run.optimizer).__name__ and i < len(run.optimizer.param_groups):
            own = {k: v for k, v in run.optimizer.param_groups[i].items() if k != "params"}
            yield from _form(settings, own, f"the optimizer's group {i}")


def _form(value: Any, own: Any, where: str) -> Iterator[str]:
    """Where a value is not of the form that the script's own object has now."""
    if own is None or value is own:
        return
    if isinstance(own, torch.Tensor) or isinstance(value, torch.Tensor):
        fine = _is_number(own) or isinstance(own, torch.Tensor)
        fine = fine and (_is_number(value) or isinstance(value, torch.Tensor))
        wrong = fine and isinstance(value, torch.Tensor) and value.numel() != _numel(own)
        if not fine or wrong:
            yield f"{where} is {_shown(value)}, expected one like {_shown(own)}"
    elif isinstance(own, Mapping):
        if not isinstance(value, type(own) if isinstance(own, Counter) else Mapping):
            yield f"{where} is {_shown(value)}, expected a mapping"
            return
        for key in own:
            if key in value:
                yield from _form(value[key], own[key], f"{where}.{key}")
            elif key in _NEEDED:
                yield f"{where} has no {key!r}"
    elif isinstance(own, list | tuple):
        if not isinstance(value, list | tuple):
            yield f"{where} is {_shown(value)}, expected a list"
        elif len(value) != len(own) and where.rpartition(".")[2] in _NEEDED:
            yield f"{where} has {len(value)} values, expected {len(own)}"
        else:
            for i, (a, b) in enumerate(zip(value, own, strict=False)):
                yield from _form(a, b, f"{where}[{i}]")
    elif isinstance(own, bool):
        if value is not None and not isinstance(value, bool):
            yield f"{where} is {_shown(value)}, expected True or False"
    elif _is_number(own):
        if not _is_number(value):
            yield f"{where} is {_shown(value)}, expected a number"
        elif where.rpartition(".")[2] in ("last_epoch", "_step_count") and not _is_count(value):
            yield f"{where} is {value}, expected a whole number, 0 or more"
        elif set(re.split(r"[.\[]", where)) & _NEEDED and not 0 <= value < math.inf:
            yield f"{where} is {value}, expected a number, 0 or more"
    elif isinstance(own, str) and not isinstance(value, str):
        yield f"{where} is {_shown(value)}, expected a text"


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


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
    try:
        wrong = next(_complaints(run, saved), None)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        wrong = f"its values cannot be understood ({type(error).__name__}: {error})"
    if wrong is not None:
        raise CheckpointError(wrong)
