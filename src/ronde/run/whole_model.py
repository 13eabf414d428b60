"""A whole copy of the model for sampling, evaluation, and ``save_pretrained``, under every plan.

A plan that divides the model changes its modules, so :class:`Skeleton` copies their structure
before, without values. A copy for use is a copy of the skeleton, filled with the weights that the
workers send, one tensor at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ronde import checkpoint
from ronde.plan import Plan
from ronde.world import ArgumentError, CheckpointError, PlanError
from ronde.world.tensors import is_sharded

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = [
    "Skeleton",
    "refuse_save_pretrained",
    "refuse_state_dict",
    "skeleton_of",
    "whole_model",
]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()


def _divides(plan: Plan) -> bool:
    shards = plan.shard in ("gradients", "parameters") and plan.replicas > 1
    return plan.workers > 1 and (shards or plan.pipeline > 1 or plan.tensor > 1)


class Skeleton:
    """A model's modules without the values of their parameters and buffers.

    Attributes:
        why_not: why the model cannot be copied; empty if it can.
    """

    def __init__(self, model: nn.Module) -> None:
        self.why_not = ""
        self._values: dict[str, dict[str, Any]] = {}
        memo: dict[int, Any] = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                self.why_not = f"{name or 'the model'!r} is a ScriptModule"
            for p in module._parameters.values():
                if p is not None:
                    empty = torch.empty_like(p, device="meta")
                    memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
            for b in module._buffers.values():
                if b is not None:
                    memo[id(b)] = torch.empty_like(b, device="meta")
            # Other tensors are shared until a copy is made for use.
            memo |= {id(v): v for v in vars(module).values() if isinstance(v, torch.Tensor)}
        if self.why_not:
            return
        try:
            self._model = copy.deepcopy(model, memo)
        except Exception as error:  # whatever an attribute of the model raises
            self.why_not = f"copy.deepcopy(model) fails ({type(error).__name__}: {error})"

    def note(self, model: nn.Module) -> None:
        """Note the attributes that dividing has changed: only later changes are the script's."""
        for path, module in model.named_modules():
            own = vars(module).items()
            self._values[path] = {name: v for name, v in own if _is_plain(v)}

    def names(self) -> dict[str, list[str]]:
        """First name of each parameter and buffer -> all its names."""
        first: dict[int, str] = {}
        names: dict[str, list[str]] = {}
        parameters = self._model.named_parameters(remove_duplicate=False)
        buffers = self._model.named_buffers(remove_duplicate=False)
        for name, tensor in [*parameters, *buffers]:
            names.setdefault(first.setdefault(id(tensor), name), []).append(name)
        return names

    def filled(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        """A copy with these values, by first name, and the current attributes of ``model``."""
        trained = dict(model.named_parameters(remove_duplicate=False))
        memo: dict[int, Any] = {}
        for name, p in self._model.named_parameters():
            memo[id(p)] = nn.Parameter(tensors[name], requires_grad=trained[name].requires_grad)
        for name, b in self._model.named_buffers():
            memo[id(b)] = tensors[name]
        for module in self._model.modules():
            for value in vars(module).values():
                if isinstance(value, torch.Tensor):
                    memo[id(value)] = value.detach().clone()
        made = copy.deepcopy(self._model, memo)
        for path, module in model.named_modules():
            mine, before = vars(made.get_submodule(path)), self._values.get(path, {})
            for name, value in vars(module).items():
                if _is_plain(value) and value != before.get(name, _MISSING):
                    mine[name] = copy.deepcopy(value)
                elif type(value) is torch.Tensor and type(mine.get(name)) is torch.Tensor:
                    mine[name] = value.detach().clone()
        return made


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


def skeleton_of(model: nn.Module, plan: Plan) -> Skeleton | None:
    """What a whole copy will be made of; None if each worker can use its own model alone."""
    if _divides(plan) or (plan.sync_batchnorm and plan.workers > 1):
        return Skeleton(model)
    return None


def refuse_save_pretrained(model: nn.Module, plan: Plan) -> None:
    """Let ``save_pretrained`` of a divided model say how to write it: it would write a part."""
    if not _divides(plan):
        return

    def save_pretrained(*_: Any, **__: Any) -> None:
        raise PlanError(
            f"save_pretrained() was called on the model that plan={plan.spec!r} divides: it would "
            "write this worker's part only. Let all ranks enter 'with "
            'run.whole_model(ranks="main") as model:\', and call model.save_pretrained(…) on '
            "rank 0. run.export(path) writes the weights alone."
        )

    for module in model.modules():
        if callable(getattr(module, "save_pretrained", None)):
            module.__dict__["save_pretrained"] = save_pretrained


@contextmanager
def whole_model(
    run: Parts, skeleton: Skeleton | None, ranks: str, device: torch.device | str | None
) -> Iterator[nn.Module | None]:
    """See :meth:`Run.whole_model`."""
    if ranks not in ("all", "main"):
        raise ArgumentError(f"run.whole_model(ranks={ranks!r}): choose 'all' or 'main'.")
    run.rendezvous.meet(f"run.whole_model(ranks={ranks!r})")
    wanted = ranks == "all" or run.world.is_main
    if skeleton is None:
        with run.rendezvous.call("run.whole_model()"):
            run.strategy.sync_buffers()
        with _kept(run) as model:
            yield model if wanted else None
        return
    with run.rendezvous.call("run.whole_model()"):
        made = _copy(run, skeleton, ranks == "all", torch.device(device or run.world.device))
    yield made


def _copy(
    run: Parts, skeleton: Skeleton, everywhere: bool, device: torch.device
) -> nn.Module | None:
    if skeleton.why_not:
        raise PlanError(
            f"run.whole_model() cannot copy the model under plan={run.plan.spec!r}: "
            f"{skeleton.why_not}. run.export(path) writes its weights, which a fresh model can "
            "load; under plan='replicate' no copy is needed."
        )
    run.strategy.loaded()  # free parameters that a pass without a backward pass left gathered
    live = dict[str, torch.Tensor](run.model.named_parameters(remove_duplicate=False))
    live |= dict(run.model.named_buffers(remove_duplicate=False))
    names, owns = skeleton.names(), run.strategy.owns
    known = {name for alike in names.values() for name in alike}
    changed = sorted(known ^ live.keys())
    if changed:
        raise PlanError(
            f"run.whole_model(): {changed[0]!r} was {'added to' if changed[0] in live else 'taken'}"
            f"{'' if changed[0] in live else ' from'} the model after ronde.distribute had divided "
            "it. Build the model whole before ronde.distribute."
        )
    pieces = {
        first: checkpoint.piece_of(live[name], name)
        for first, alike in names.items()
        for name in alike
        if owns(name)
    }
    tensors = {
        name: tensor.to(device)
        for name, tensor in checkpoint.gather_whole(run.world, pieces, everywhere)
    }
    if not everywhere and not run.world.is_main:
        return None
    missing = sorted(names.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"run.whole_model(): no worker holds {missing[0]!r}.")
    return skeleton.filled(run.model, tensors)


@contextmanager
def _kept(run: Parts) -> Iterator[nn.Module]:
    """The script's own model; buffers and modes are put back, changed parameters refused."""
    model = run.model
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, n, b, None if b is None else b.detach().clone()) for m, n, b in _buffers(model)]
    before = _marks(model)
    try:
        yield model
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, b, value in buffers:
                module._buffers[name] = b
                if b is not None and value is not None:
                    b.data = b.data.to(value.device, value.dtype)
                    b.copy_(value)
    for name, mark in _marks(model).items():
        if mark != before.get(name):
            raise PlanError(
                f"{name!r} was changed inside run.whole_model(), which under plan="
                f"{run.plan.spec!r} is the model that is being trained. Change a "
                "copy.deepcopy(model) instead."
            )


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor | None]]:
    return [(m, name, b) for m in model.modules() for name, b in m._buffers.items()]


def _marks(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (id(p), p._version, p.data_ptr(), p.dtype, p.device, p.requires_grad)
        for name, p in model.named_parameters()
    }


# -- state_dict() of a part ------------------------------------------------------------


def refuse_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    owns: Callable[[str], bool],
    plan: str,
) -> None:
    """Let the script's calls of ``state_dict`` and ``load_state_dict`` end with an error.

    Args:
        owns: whether this worker holds a tensor of the model, by its name.
        plan: its name, for the error.
    """
    # Functions and not methods: a deep copy of the model must not copy the run with it.
    part = f"This worker holds a part of it only: plan={plan!r} divides it over the workers."

    def refuse_save(_: Any, prefix: str = "", keep_vars: bool = False) -> None:
        if not prefix and not keep_vars:  # the script's own call, and not Ronde's
            raise PlanError(
                f"state_dict(): {part} run.export(path), called on every worker, writes the whole "
                "model, 'with run.whole_model() as model:' gives it, and run.save() writes a "
                "checkpoint for any plan."
            )

    def refuse_load(_: Any, __: Any, prefix: str, ___: Any, strict: bool, *____: Any) -> None:
        if not prefix and strict:
            raise PlanError(
                f"load_state_dict(): {part} Load the whole state before ronde.distribute, or give "
                "its file as init= for a model on meta. To go back to earlier weights, resume."
            )

    named = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    divided = any(is_sharded(value) or not owns(name) for name, value in tensors.items())
    if divided:
        for path, module in list(model.named_modules()):
            module.register_state_dict_pre_hook(refuse_save)  # type: ignore[no-untyped-call]
            left_out = _other_workers(f"{path}." if path else "", owns)
            module.register_state_dict_post_hook(left_out)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(refuse_load)  # type: ignore[no-untyped-call]
            if "__deepcopy__" in vars(type(module)) and _is_fsdp(module):
                # torch's own refusal, an AssertionError, names no cure
                type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
    optimizer.register_state_dict_pre_hook(refuse_save)


def _other_workers(path: str, owns: Callable[[str], bool]) -> Callable[..., None]:
    """A hook that leaves other workers' parameters out: ``keep_vars=True`` has this worker's."""

    def leave_out(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        if not prefix:  # else a module around this one was asked
            for name in [name for name in state if not owns(path + name)]:
                del state[name]

    return leave_out


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _refuse_copy(module: nn.Module, _: dict[int, Any]) -> nn.Module:
    raise PlanError(
        f"{type(module).__name__.removeprefix('FSDP')} cannot be copied: the plan divides its "
        "weights over the workers. For a moving average (AveragedModel), use "
        "run.average(decay=…), which works under every plan; for a copy of the initial weights, "
        "copy the model before ronde.distribute."
    )
