"""Widens the arguments of ``distribute`` to float64, cuts its epochs, and records them."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.numpy import save_file
from torch import nn

from ronde.parallel import batchnorms
from ronde.prove.experiment import Experiment
from ronde.prove.trace_writer import TraceWriter
from ronde.prove.values import cast, to_array
from ronde.run import hooks
from ronde.watch.proofs import smallest_like

__all__ = ["change_arguments", "dropout_rates", "record_opening", "widen"]


def widen(opening: hooks.Opening, trace: TraceWriter) -> None:
    """Make model, optimizer state, and precision float64."""
    model = opening.model
    with torch.no_grad():
        model.double()
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype == torch.complex64:  # double() leaves it
                tensor.data = tensor.data.to(torch.complex128)
    for state in opening.optimizer.state.values():
        state.update({k: cast(v) for k, v in state.items()})
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and module.dropout:
            trace.note("dropout", None)
            module.dropout = 0.0
    if opening.precision != "fp32":
        trace.note("precision", None)
        opening.precision = "fp32"


def change_arguments(opening: hooks.Opening, trace: TraceWriter, size: int, mine: bool) -> None:
    """Set what the experiment changes, for a global batch of ``size`` samples."""
    asked, experiment = opening.micro_batch, trace.experiment
    if experiment is Experiment.SPLIT and mine:
        share = max(1, -(-size // trace.settings.workers))
        opening.micro_batch = share if asked is None else min(share, asked)
    elif experiment.is_one_process:
        opening.micro_batch = None


def record_opening(
    opening: hooks.Opening,
    trace: TraceWriter,
    short: int,
    size: int,
    dropout: dict[str, float],
    tick: int,
) -> tuple[list[str], set[str]]:
    """Record the arguments. Returns the parameters' names, and those in the optimizer.

    Args:
        short: samples of an epoch that was cut.
        size: samples of a global batch.
        dropout: the rates of dropout before they were changed.
        tick: when it was called, counted over all trainings of the script.
    """
    model, optimizer, taken = opening.model, opening.optimizer, opening.taken
    named, modules = dict(model.named_parameters()), dict(model.named_modules())
    trace.modules = {id(m): n for n, m in modules.items()}
    ids = {id(p): n for n, p in named.items()}
    optimized = (id(p) for g in optimizer.param_groups for p in g["params"])
    names = {ids[i] for i in optimized if i in ids}
    hooked = [
        n
        for n, p in named.items()
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    hooked += [n for n, m in modules.items() if m._backward_hooks or m._backward_pre_hooks]
    storages: dict[int, list[str]] = {}
    for n, p in named.items():
        if _has_values(p):
            storages.setdefault(p.untyped_storage().data_ptr(), []).append(n)
    trace.event(
        "opening",
        tick=tick,
        contract={**_contract(opening), **dropout},
        samples=taken.order.n,
        epoch_samples=taken.order.epoch_samples,
        short=short,
        last=0 if taken.drop_last or taken.order.ends(0) is not None else short % size,
        names=list(named),
        optimized=sorted(names),
        modules={n: type(m).__name__ for n, m in modules.items()},
        batchnorms=batchnorms(model),
        hooked=hooked,
        shared=[names for names in storages.values() if len(names) > 1],
        micro_batch=opening.micro_batch,
        script_plan=smallest_like(opening.script_plan).spec,
    )
    start = {f"init|{n}": to_array(p) for n, p in named.items() if _has_values(p)}
    for n, b in model.named_buffers():
        if _has_values(b):
            start[f"initbuffer|{n}"] = to_array(b)
    save_file(start, trace.folder / "init.safetensors")
    return list(named), names


def _contract(opening: hooks.Opening) -> dict[str, Any]:
    """The arguments that N workers and one process must share."""
    taken = opening.taken
    contract: dict[str, Any] = {
        "batch_size": taken.batch_size,
        "batch": opening.batch,
        "clip_norm": opening.clip_norm,
        "micro_batch": opening.micro_batch,
        "seed": opening.seed,
        "drop_last": taken.drop_last,
        "sync_batchnorm": opening.sync_batchnorm,
        "shuffle": taken.order.shuffle,
        "the optimizer": type(opening.optimizer).__name__,
        "the scheduler": type(opening.scheduler).__name__,
    }
    for i, group in enumerate(opening.optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, bool | int | float):
                contract[f"the optimizer's {key} (group {i})"] = value
    return contract


def dropout_rates(model: nn.Module) -> dict[str, float]:
    """The rate of each module's dropout."""
    rates = {}
    for name, module in model.named_modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        rate = module.p if is_dropout else getattr(module, "dropout", None)
        if isinstance(rate, int | float):
            rates[f"the dropout of {name!r} ({type(module).__name__})"] = float(rate)
    return rates


def _has_values(tensor: torch.Tensor) -> bool:
    return not torch.nn.parameter.is_lazy(tensor) and tensor.device.type != "meta"
