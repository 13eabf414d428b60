"""Checks of the arguments of ``distribute``."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ronde.data import Order
from ronde.loader import TakenOver
from ronde.plan import Plan
from ronde.run.first_steps_check import MIXES
from ronde.world import ArgumentError, CheckpointError, PlanError, World, WorldError
from ronde.world.consensus import agree, gather_json

__all__ = [
    "check_arguments",
    "check_batches",
    "check_draw",
    "check_init",
    "check_length",
    "check_model",
    "check_optimizer",
    "check_saved",
    "check_same_parameters",
    "check_same_samples",
    "check_same_shares",
    "check_scheduler",
    "check_shared",
    "is_whole",
    "run_facts",
    "setting",
    "lazy_names",
]


def is_whole(value: Any) -> bool:
    """Whether a value is an integer and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _require(fine: bool, text: str) -> None:
    if not fine:
        raise ArgumentError(text)


def lazy_names(model: nn.Module) -> list[str]:
    """Parameters and buffers without a shape."""
    lazy = torch.nn.parameter.is_lazy
    return [n for n, p in [*model.named_parameters(), *model.named_buffers()] if lazy(p)]


def check_init(init: Any, model: nn.Module) -> None:
    """``init`` for a model on meta, and only there."""
    meta = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if init is None:
        names = f"{meta[0]!r} has" if meta else ""
        _require(
            not meta,
            f"model is on the meta device ({names} no values): give ronde.distribute(…, init=…) "
            "what fills it: a function of a module, 'reset' for each module's own "
            "reset_parameters(), or the path of a checkpoint or of safetensors.",
        )
        return
    fine, kind = callable(init) or isinstance(init, str | os.PathLike), type(init).__name__
    _require(fine, f"init must be a function of a module, 'reset' or a path; found {kind}.")
    _require(
        bool(meta),
        "init is for a model that was built under torch.device('meta'), and this one "
        f"({type(model).__name__}) has its values already: leave init out, or build it under meta.",
    )


def check_model(model: Any, me: World) -> None:
    """A module with trainable parameters, on meta or on one device that this worker may use."""
    kind = type(model).__name__
    _require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, found {kind}.")
    _require(
        not isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel),
        f"model is wrapped in {kind} already: give the module inside it (model.module), ronde "
        "distributes it.",
    )
    named = list(model.named_parameters())
    _require(bool(named), f"model ({kind}) has no parameters: there is nothing to train.")
    _require(
        any(p.requires_grad for _, p in named),
        f"every parameter of model ({kind}) is frozen (requires_grad=False): there is nothing to "
        "train.",
    )
    places: dict[torch.device, str] = {}
    for name, tensor in [*named, *model.named_buffers()]:
        if not torch.nn.parameter.is_lazy(tensor):
            places.setdefault(tensor.device, name)
    places.pop(torch.device("meta"), None)
    for device, name in places.items():
        if device not in (torch.device("cpu"), me.device):
            raise ArgumentError(
                f"model is on another device: {name!r} is on {device}, this worker (rank "
                f"{me.rank}) trains on {me.device}. Leave the model on the CPU; ronde moves it to "
                "the worker's device."
            )
    if len(places) > 1:
        pairs = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        raise ArgumentError(
            f"model is spread over several devices ({pairs}): leave it whole on the CPU; "
            "ronde moves it to the worker's device."
        )


def check_saved(model: nn.Module) -> None:
    """Tensors that a checkpoint can hold."""
    from ronde.checkpoint.tensor_file import tensor_header  # where a run writes

    kinds = {
        name: (t.dtype, tuple(t.shape))
        for name, t in model.state_dict(keep_vars=True).items()
        if isinstance(t, torch.Tensor)
    }

    try:
        tensor_header(kinds)
    except CheckpointError as error:
        raise ArgumentError(
            f"model: {error}, so no checkpoint could be written. Use complex64, or a tensor of "
            "real and imaginary parts (torch.view_as_complex in forward); without checkpoints "
            "(ronde run --runs none, or RONDE_RUNS=none), it trains."
        ) from None


def check_optimizer(optimizer: Any, model: nn.Module) -> list[str]:
    """An optimizer over the model's parameters. Returns the trainable ones that it leaves out."""
    kind = type(optimizer).__name__
    is_optimizer = isinstance(optimizer, Optimizer)
    _require(is_optimizer, f"optimizer must be a torch.optim.Optimizer, found {kind}.")
    _require(
        kind != "LBFGS",
        "optimizer is LBFGS, which evaluates the model several times a step by itself. Under "
        "plan='replicate', let its closure step a run whose optimizer stands still (SGD, lr=0): "
        "'Several passes over a batch' in docs/my-script-is.md. Or use a first-order one.",
    )
    named = dict(model.named_parameters())
    by_id = {id(p): n for n, p in named.items()}
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in optimized if id(p) not in by_id]
    if foreign:
        lazy = torch.nn.parameter.is_lazy
        shapes = ", ".join("lazy" if lazy(p) else str(tuple(p.shape)) for p in foreign[:3])
        more = "" if len(foreign) <= 3 else f" and {len(foreign) - 3} more"
        raise ArgumentError(
            f"optimizer is over other parameters: {len(foreign)} of its {len(optimized)} are not "
            f"the model's (shapes {shapes}{more}). It would train something else. Build it from "
            "model.parameters() of this very model, after any copy, wrap or replacement of its "
            "layers; parameters of the loss belong into the model."
        )
    ids = {id(p) for p in optimized}
    return [n for n, p in named.items() if p.requires_grad and id(p) not in ids]


def check_same_parameters(
    optimizer: Optimizer, known: Mapping[int, torch.Tensor], plan: Plan
) -> None:
    """Refuse a parameter that came to the optimizer after the model was divided."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in known:
                raise PlanError(
                    f"plan={plan.spec!r}: the optimizer holds a parameter of shape "
                    f"{tuple(p.shape)} that was not there when ronde.distribute divided the model "
                    "over the workers: nothing exchanges its gradients. Build the model and load "
                    "it before ronde.distribute, copy values into its parameters (p.copy_(…), "
                    "load_state_dict without assign=True), or use plan='replicate'."
                )


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """A scheduler of this optimizer that needs no measurement."""
    if scheduler is None:
        return
    kind = type(scheduler).__name__
    _require(
        not isinstance(scheduler, ReduceLROnPlateau),
        "scheduler is ReduceLROnPlateau, which needs a measurement: do not pass it, call "
        "run.register(scheduler=scheduler), and scheduler.step(value) yourself after "
        "run.evaluate().",
    )
    steps = isinstance(scheduler, LRScheduler) or callable(getattr(scheduler, "step", None))
    _require(steps, f"scheduler must be a torch.optim.lr_scheduler, found {kind}.")
    _require(
        getattr(scheduler, "optimizer", optimizer) is optimizer,
        "scheduler was built over another optimizer: build it from the one given here.",
    )


def setting(value: Any) -> Any:
    """An optimizer's setting as JSON: the same on all ranks, if the ranks agree."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() <= 16 else "tensor"
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain else re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def run_facts(
    plan: Plan, taken: TakenOver, model: nn.Module, optimizer: Optimizer, scheduler: Any
) -> dict[str, Any]:
    """Facts that must agree on all ranks before the first exchange."""
    shown = plan.to_dict()
    facts: dict[str, Any] = {"batch_size": shown.pop("batch_size")}
    facts["the length of the data set"] = taken.order.n
    facts["the samples of an epoch"] = taken.order.epoch_samples
    facts["shuffle"] = taken.order.shuffle
    if taken.fingerprint is not None:
        facts["the data set's fingerprint"] = taken.fingerprint
    facts["what is done about bad samples"] = [taken.settings.on_error, taken.settings.max_skipped]
    if taken.order.draw is not None:
        facts["the order that the sampler draws"] = _drawn(taken.order, 0)
    facts.update(shown)
    for name, p in model.named_parameters():
        facts[f"parameter {name!r}"] = _kind(p) + ("" if p.requires_grad else ", frozen")
    for name, b in model.named_buffers():
        facts[f"buffer {name!r}"] = _kind(b)
    names = {id(p): name for name, p in model.named_parameters()}
    facts["the order of the parameters"] = _digest(list(names.values()))
    facts["the optimizer"] = type(optimizer).__name__
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            fact = len(value) if key == "params" else setting(value)
            facts[f"the optimizer's {key} (group {i})"] = fact
        for place, p in enumerate(group["params"]):
            facts[f"the place of {names.get(id(p))!r} in the optimizer"] = f"group {i}, {place}"
    facts["the scheduler"] = type(scheduler).__name__
    return facts


def _digest(names: list[str]) -> str:
    return hashlib.sha256(repr(names).encode()).hexdigest()[:12]


def _drawn(order: Order, epoch: int) -> str:
    """Digest of what a sampler draws for an epoch."""
    digest = hashlib.sha256(order.ids(epoch, 0, order.samples_in(epoch)).tobytes())
    if (ends := order.ends(epoch)) is not None:
        digest.update(repr(ends).encode())
    return digest.hexdigest()[:12]


def check_draw(me: World, order: Order, epoch: int, where: str) -> None:
    """Raise unless the script's sampler draws the same on all ranks. A collective.

    Raises:
        WorldError: on every rank.
    """
    if me.size > 1:
        fact = f"the order that the sampler draws for epoch {epoch}"
        agree(me, {fact: _drawn(order, epoch)}, where)


def check_length(taken: TakenOver, epoch: int) -> None:
    """Refuse a data set that has grown or shrunk since its order was made."""
    if (n := taken.resized) is not None:
        raise ArgumentError(
            f"the data set has {n} samples in epoch {epoch + 1}, and had {taken.order.n} when "
            "ronde.distribute was called: its order is one of that number. Keep the length and "
            "give a sampler that chooses the samples of an epoch, or start another run."
        )


def check_same_samples(
    me: World, facts: tuple[list[int], list[Any], bool] | None, where: str
) -> str:
    """Raise if ranks have other samples under the same index. A collective if there are facts.

    Returns:
        str: a warning of a collate function that mixes samples, the same on every rank, or nothing.

    Raises:
        WorldError: on every rank.
    """
    if facts is None:
        return ""
    from ronde.loader import is_other

    ids, mine, mixes = facts
    everyone = gather_json(me, [mine, mixes])
    for rank, (theirs, _) in enumerate(everyone):
        for i, one, other in zip(ids, everyone[0][0], theirs, strict=True):
            if is_other(one, other):
                raise WorldError(
                    f"{where}: sample {i} of the data set is another one on rank {rank} than on "
                    "rank 0: the data set divides itself over the ranks (by RANK, with a Subset or "
                    "files of their own), each has an order of its own, or it is made of random "
                    "numbers that nobody seeded. Ronde divides it again, and samples would never "
                    "be used: give every rank the whole data set, in one order, and seed what "
                    "makes it (torch.manual_seed)."
                )
    mixing = MIXES.format("collate_fn makes rows from more than their own samples")
    return mixing if any(mixes for _, mixes in everyone) else ""


def check_batches(plan: Plan, order: Order, auto: bool) -> None:
    """Refuse arguments that need global batches of one size, if a ``batch_sampler`` decides.

    Raises:
        ArgumentError: names the argument.
    """
    if order.ends(0) is None:
        return
    argument = (
        "batch='grow'"
        if plan.batch == "grow"
        else f"pipeline={plan.pipeline}"
        if plan.pipeline > 1
        else "plan='auto'"
        if auto
        else None
    )
    _require(
        argument is None,
        f"{argument} needs global batches of one size, but the batch_sampler ({order.sampler}) "
        "makes batches of several sizes. Use another plan, or DataLoader(dataset, batch_size=…).",
    )


def check_arguments(
    *,
    choices: Mapping[str, tuple[Any, tuple[str | None, ...]]],
    counts: Mapping[str, Any],
    seed: Any,
    warmup_steps: Any,
    loss: Any,
    clip_norm: Any,
) -> None:
    """The plain arguments. ``choices``: name -> (value, options); ``counts``: name -> count."""
    for name, (value, options) in choices.items():
        known = ", ".join(repr(option) for option in options if option is not None)
        _require(value in options, f"{name}={value!r} is not known: choose one of {known}.")
    for name, count in counts.items():
        fine = count is None or (is_whole(count) and count > 0)
        _require(fine, f"{name}={count!r} must be a whole number above 0.")
    _require(is_whole(seed), f"seed={seed!r} must be a whole number.")
    fine = warmup_steps is None or (is_whole(warmup_steps) and warmup_steps >= 0)
    _require(fine, f"warmup_steps={warmup_steps!r} must be a whole number, 0 or more.")
    kind = type(loss).__name__
    _require(
        callable(loss), f"loss must be callable, loss(output, target) -> scalar; found {kind}."
    )
    fine = clip_norm is None or (not isinstance(clip_norm, bool | str) and clip_norm > 0)
    _require(fine, f"clip_norm={clip_norm!r} must be above 0, or None for no clipping.")


def check_shared(given: Mapping[str, Any]) -> None:
    """Refuse arguments that belong to the run whose batches are shared."""
    for name, value in given.items():
        _require(
            value is None,
            f"{name}={value!r} cannot be given with data=run: the batches are those of the other "
            f"run. Leave it out, or give it to that run.",
        )


def check_same_shares(plan: Plan, other: Plan) -> None:
    """Refuse two plans that divide a shared batch differently."""
    facts = ("replicas", "pipeline", "tensor", "accumulation")
    mine, theirs = ({f: getattr(p, f) for f in facts} for p in (plan, other))
    if mine != theirs:
        raise PlanError(
            f"data=run: the plan {plan.spec!r} gives each worker other samples of a batch than "
            f"{other.spec!r}, the plan of the run whose batches are shared. Use the same pipeline "
            "and tensor for both."
        )
