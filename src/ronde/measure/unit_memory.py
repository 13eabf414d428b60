"""Weigh a model: its units with their bytes and operations, and the optimizer's state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ronde.measure.cost_lines import line
from ronde.measure.memory_account import MemoryAccount, account
from ronde.measure.model_units import LOSS
from ronde.measure.optimizer_memory import optimizer_bytes
from ronde.measure.storage_ledger import bytes_of
from ronde.parallel.batchnorm import normalizes_batch
from ronde.parallel.optimizer_coupling import ways_refused
from ronde.predict import Costs, Unit
from ronde.world import RondeError

_TRANSIENTS = {"forward": "forward_transient", "backward": "backward_transient"}
_KINDS = ("saved", *_TRANSIENTS.values(), "crossing", "crossing_grad")


def weigh(
    model: nn.Module,
    optimizer: Optimizer,
    compute: Any,
    batches: Callable[[int], Any],
    batch_size: int,
    *,
    sizes: Sequence[int] | None = None,
    autocast: Callable[[], Any] = contextlib.nullcontext,
) -> Costs:
    """A model's units with their bytes and operations, and no times.

    Args:
        compute: the script's forward and loss, a LossCall.
        batches: makes a micro-batch of so many samples.
        batch_size: global samples per optimizer step.
        sizes: micro-batch sizes to weigh at; costs between them are interpolated.
    """
    least = min(2, batch_size)  # normalization over a batch of one fails
    sizes = sorted(set(sizes or (least, max(least, batch_size // 8), batch_size)))
    memory = account(model, compute, batches, sizes, autocast=autocast)
    notes = []
    if not memory.faked:
        notes.append(
            "memory was counted in a real run, because the model does not run on fake tensors "
            f"({memory.reason})"
        )
    state: dict[str, int] = {}
    transient = 0
    try:
        state, transient = optimizer_bytes(model, optimizer)
    except RondeError as error:
        notes.append(str(error))
    refused = ways_refused(model, optimizer)
    if refused:
        reasons = "; ".join(dict.fromkeys(refused.values()))
        notes.append(f"not considered: {', '.join(refused)}: {reasons}")
    if several := [unit.name for unit in memory.chain if unit.calls > 1]:
        notes.append(
            f"{several[0]!r} runs several times in a forward pass: sharded plans gather it each "
            "time, and may take more memory and time than predicted"
        )
    if rest := state.get("", 0):
        notes.append(f"{rest:,} bytes of optimizer state belong to parameters outside the model")
    return Costs(
        units=_units(model, memory, state, sizes[-2:][0]),
        batch_size=batch_size,
        input_bytes=max(0.0, line([(b, float(n)) for b, n in memory.batch.items()]).per_sample),
        optimizer=type(optimizer).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        measured_samples=tuple(sizes),
        optimizer_transient_bytes=float(transient),
        notes=tuple(notes),
        again=tuple(memory.again),
        refused=refused,
    )


def _units(
    model: nn.Module, memory: MemoryAccount, state: Mapping[str, int], flops_size: int
) -> tuple[Unit, ...]:
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules(remove_duplicate=False))
    lines: dict[str, list[Any]] = {f"{kind}_bytes": memory.lines(kind) for kind in _KINDS}
    lines |= {
        f"{level}_{name}_bytes": memory.lines(kind, level)
        for level in memory.again
        for name, kind in {"saved": "saved", **_TRANSIENTS}.items()
    }
    units = []
    moved, work = memory.moved(), memory.work[flops_size]
    for i, link in enumerate(memory.chain):
        own = [parameters[name] for name in memory.parameters[i]]
        inner = modules[link.name].modules() if link.name in modules else ()
        units.append(
            Unit(
                name=link.name,
                parameter_bytes=sum(bytes_of(p) for p in own),
                trainable_bytes=sum(bytes_of(p) for p in own if p.requires_grad),
                optimizer_bytes=sum(state.get(name, 0) for name in memory.parameters[i]),
                buffer_bytes=memory.buffers[i],
                cut_after=not link.why_not and link.name != LOSS,
                why_not=link.why_not or ("the loss is the end" if link.name == LOSS else ""),
                alike=link.alike,
                flops=max(0.0, work[i].flops) / flops_size,
                operations=work[i].operations,
                attention_flops=work[i].attention / flops_size,
                vector_flops=work[i].vector / flops_size,
                inner=work[i].inner,
                moved_bytes=moved[i],
                tied=tuple(sorted(memory.shared[i])),
                tied_bytes=sum(bytes_of(parameters[name]) for name in memory.shared[i]),
                tied_grad_bytes=memory.sizes[flops_size][i].late_gradient,
                batchnorm=any(normalizes_batch(m) for m in inner),
                block=memory.block(link.name),
                recomputed=any(_overlap(link.name, b) for b in memory.recomputed),
                **{name: fits[i] for name, fits in lines.items()},
            )
        )
    return tuple(units)


def _overlap(unit: str, block: str) -> bool:
    """Whether one module is, or contains, the other; never for the whole model."""
    inside = unit.startswith(f"{block}.") or block.startswith(f"{unit}.")
    return bool(unit) and (unit == block or inside)
