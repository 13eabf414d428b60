"""Find the parts of a model that tensor parallelism divides, and measure one worker's part.

Time and memory of that part are measured in this process.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from ronde.measure.light_weights import short_lists, small_values
from ronde.measure.memory_account import account
from ronde.measure.model_units import ModelUnit
from ronde.measure.stand_in import untouched
from ronde.measure.time_units import autocast_of
from ronde.measure.timed_model import TimedModel
from ronde.parallel import Work
from ronde.parallel.tensor_blocks import recognize
from ronde.parallel.tensor_layers import Block, split_dims
from ronde.parallel.tensor_parallel import one_part
from ronde.predict import Costs, LinearCost
from ronde.world.tensors import map_leaves

_SHORT_TOKENS = 64  # of a sequence, where the division is only tried out


def divisible(
    costs: Costs,
    work: Work,
    calls: Any,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    timed: bool = True,
) -> Costs:
    """The costs, with the share of each unit that tensor parallelism can divide.

    Args:
        calls: the script's forward and loss, a LossCall, to time and weigh one worker's part.
        timed: whether that part is timed; else it is weighed only.
    """
    blocks: tuple[Block, ...] = ()
    # Real values run through the model: layers and tokens that repeat the work are left out first.
    for short in (False,) if timed else (True, False):
        with contextlib.suppress(Exception):  # a model that cannot be analyzed is not divided
            blocks = _in_short(work, costs.sequence) if short else _blocks(work, work.sample(2))
        if blocks:
            break
    if not blocks:
        return costs
    divided = _with_refusals(_by_parameters(costs, work, blocks), work, blocks)
    try:
        return _by_measurement(divided, work, calls, precision, blocks, timed)
    except Exception as error:
        why = f"one worker's part could not be measured ({type(error).__name__}: {error})"
        refused = {**costs.refused, "tensor": why}
        return replace(
            costs, refused=refused, notes=(*costs.notes, f"no tensor parallelism: {why}")
        )


def _blocks(work: Work, batch: Any) -> tuple[Block, ...]:
    return recognize(work.model, lambda: work.compute(batch)[0], 2).blocks


def _in_short(work: Work, sequence: int) -> tuple[Block, ...]:
    """The blocks that can be divided, found in two layers of each list, on the first tokens."""
    tokens = min(sequence or _SHORT_TOKENS, _SHORT_TOKENS)

    def is_long(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == sequence

    batch = map_leaves(
        lambda v: v[:, :tokens].clone() if is_long(v) else v, work.sample(2), leaf=is_long
    )
    with short_lists(work.model) as lengths, small_values(work.model):
        short = _blocks(work, batch)
    longer = sequence / tokens if sequence else 1.0
    blocks = []
    for block in short:
        block = replace(block, reduced_bytes=block.reduced_bytes * longer)
        blocks.append(block)
        owner = next((name for name in lengths if _inside(block.row, f"{name}.1")), "")
        for i in range(2, lengths.get(owner, 0)):
            blocks.append(_renamed(block, f"{owner}.1", f"{owner}.{i}"))
    return tuple(blocks)


def _renamed(block: Block, old: str, new: str) -> Block:
    """The same block in another layer of its list."""

    def name(text: str) -> str:
        return new + text[len(old) :] if text == old or _inside(text, old) else text

    return replace(
        block,
        path=name(block.path),
        column=tuple(map(name, block.column)),
        row=name(block.row),
        attributes=tuple((name(module), attribute) for module, attribute in block.attributes),
        inside=tuple(map(name, block.inside)),
        per_head=tuple(map(name, block.per_head)),
    )


def _with_refusals(costs: Costs, work: Work, blocks: Sequence[Block]) -> Costs:
    """The costs, with what tensor parallelism does not combine with for this model."""
    refused = dict(costs.refused)
    if work.tensor_plan is not None:
        refused["pipeline × tensor"] = "tensor_plan does not go with a pipeline"
    for block in blocks:
        names = [*split_dims(work.model, block)[0], f"{block.row}.weight"]
        units = [i for i, u in enumerate(costs.units) for name in names if _inside(name, u.name)]
        if any(u.cut_after for u in costs.units[min(units, default=0) : max(units, default=0)]):
            refused["pipeline × tensor"] = f"block {block.path!r} spans several units"
    return replace(costs, refused=refused)


def _by_parameters(costs: Costs, work: Work, blocks: Sequence[Block]) -> Costs:
    sizes = {name: p.numel() for name, p in work.model.named_parameters()}

    def unit_of(name: str) -> int:
        owners = [i for i, u in enumerate(costs.units) if _inside(name, u.name)]
        return max(owners, key=lambda i: len(costs.units[i].name), default=-1)

    divided, reduced = [0] * len(costs.units), [0.0] * len(costs.units)
    messages = [0] * len(costs.units)
    between: set[int] = set()
    seen: set[str] = set()
    for block in blocks:
        places = []
        for name in split_dims(work.model, block)[0]:
            at = unit_of(name)
            if name not in seen and at >= 0:
                seen.add(name)
                divided[at] += sizes.get(name, 0)
            places.append(at)
        end = unit_of(f"{block.row}.weight")
        reduced[end] += block.reduced_bytes / 2  # the all-reduce comes at the block's end
        messages[end] += 1
        between.update(range(min(places, default=end) + 1, end))
    units = []
    for i, unit in enumerate(costs.units):
        whole = sum(n for name, n in sizes.items() if _inside(name, unit.name))
        # A unit without parameters between a block's columns and its row works on divided tensors.
        share = divided[i] / whole if whole else float(i in between)
        reduce_bytes = LinearCost(0.0, reduced[i])
        tensor = min(1.0, share)
        units.append(
            replace(
                unit,
                tensor=tensor,
                tensor_reduce_bytes=reduce_bytes,
                tensor_reduces=max(1, messages[i]),
            )
        )
    heads = [n for block in blocks for n in (block.heads, block.kv_heads) if n]
    divides = math.gcd(*heads) if heads else costs.tensor_divides
    return replace(costs, units=tuple(units), tensor_divides=divides)


def _inside(name: str, unit: str) -> bool:
    return bool(unit) and name.startswith(f"{unit}.")


def _by_measurement(
    costs: Costs, work: Work, calls: Any, precision: str, blocks: Sequence[Block], timed: bool
) -> Costs:
    """The costs with time and memory of a model whose blocks are halved."""
    model = work.model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    autocast = autocast_of(device, precision)
    chain = [ModelUnit(u.name, u.alike) for u in costs.units]
    sizes = sorted({costs.measured_samples[0], costs.measured_samples[-1]})
    part = account(
        model,
        calls,
        work.sample,
        sizes,
        autocast=autocast,
        chain=chain,
        within=lambda m: one_part(m, blocks, 2),
    )
    kinds = ("saved", "forward_transient", "backward_transient")
    saved, forward, backward = (part.lines(kind) for kind in kinds)
    moved = part.moved()
    factor = 1.0
    if timed:
        batch = work.sample(sizes[-1])
        ratios = []
        with untouched(model), contextlib.ExitStack() as stack:
            model.train()
            copy = TimedModel(stack, model, work.optimizer, calls, chain, device, autocast)
            # In turns: a machine that slows down meets both.
            for _ in range(7):  # the first is not counted
                whole = copy.whole(batch)
                with one_part(copy.model, blocks, 2):
                    ratios.append(copy.whole(batch) / whole)
        factor = _time_factor(costs, sizes[-1], statistics.median(ratios[1:]))
    units = tuple(
        replace(
            u,
            tensor_time=min(1.0, u.tensor * factor),
            tensor_saved_bytes=saved[i],
            tensor_forward_bytes=forward[i],
            tensor_backward_bytes=backward[i],
            tensor_moved_bytes=moved[i],
        )
        for i, u in enumerate(costs.units)
    )
    return replace(costs, units=units)


def _time_factor(costs: Costs, samples: int, ratio: float) -> float:
    """How much of its time tensor parallelism divides, against its share of the parameters."""
    # Without half of the divided part, the pass is shorter by half of that part's time.
    divided = 2.0 * (1.0 - min(1.0, ratio))
    seconds = [u.forward_seconds.at(samples) + u.backward_seconds.at(samples) for u in costs.units]
    by_parameters = sum(u.tensor * s for u, s in zip(costs.units, seconds, strict=True))
    assumed = by_parameters / max(1e-12, sum(seconds))
    return divided / assumed if assumed else 0.0
