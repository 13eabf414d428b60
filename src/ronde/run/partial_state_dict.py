"""``state_dict()`` and ``load_state_dict()`` where each worker holds a part of model and optimizer.

A worker's state has its own stages and shards. It can be kept and loaded again (the best epoch's
weights), and a whole state from a file loads too: each worker takes its part. Parts of other
workers are left out, never replaced by something else, and a note names how to write the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.checkpoint import is_sharded, piece_of, shard_like
from ronde.world import PlanError

__all__ = ["hold_in_parts", "say_in_parts"]


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    texts: list[str] = []

    def say_once(text: str) -> None:
        if not texts:
            texts.append(text)
            say(text)

    return say_once


def hold_in_parts(
    model: nn.Module,
    owns: Callable[[str], bool],
    loaded: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Limit the model's state to this worker's part; ``loaded`` is called after each load."""
    say = _once(say)
    outermost: list[nn.Module] = []  # the module whose load_state_dict the script called
    # Functions and not methods: a deep copy of the model, for a moving average, must not copy the
    # run with it.
    for path, module in list(model.named_modules()):
        if "__deepcopy__" in vars(type(module)) and _is_fsdp(module):
            # torch's own refusal, an AssertionError, names no cure
            type(module).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]
        _hold(module, f"{path}." if path else "", owns, loaded, say, outermost)


def _is_fsdp(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _refuse_copy(module: nn.Module, _: dict[int, Any]) -> nn.Module:
    raise PlanError(
        f"{type(module).__name__.removeprefix('FSDP')} cannot be copied: the plan divides its "
        "weights over the workers. For a moving average (AveragedModel), use "
        "run.average(decay=…), which works under every plan; for a copy of the initial weights, "
        "copy the model before ronde.distribute."
    )


def say_in_parts(optimizer: Optimizer, say: Callable[[str], None]) -> None:
    """Say once, when the script asks for the optimizer's state, that it is this worker's part."""
    say = _once(say)

    def tell(*_: Any) -> None:
        say(
            "optimizer.state_dict() has only the state that this worker updates. It loads again "
            "under this plan; run.save() writes the whole, for any plan."
        )

    optimizer.register_state_dict_post_hook(tell)


def _hold(
    module: nn.Module,
    path: str,
    owns: Callable[[str], bool],
    loaded: Callable[[], None],
    say: Callable[[str], None],
    outermost: list[nn.Module],
) -> None:
    def leave_out(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if prefix:  # a module around this one was asked
            return
        of = len(state)
        theirs = [name for name in state if not owns(path + name)]
        shards = sum(is_sharded(v) for v in state.values() if isinstance(v, torch.Tensor))
        # Ronde's own calls use keep_vars
        ours = any(isinstance(v, nn.Parameter) for v in state.values())
        if (theirs or shards) and not ours:
            part = f"{shards} of {of} tensors as this worker's shard"
            say(
                "model.state_dict() has this worker's part only: "
                f"{f'{of - len(theirs)} of {of} tensors' if theirs else part}. It loads again "
                "under this plan; run.export(path), called on every worker, writes the whole "
                "model, and run.save() a checkpoint for any plan."
            )
        for name in theirs:
            del state[name]

    def take_part(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if prefix:
            return
        outermost[:] = [module]
        for name in [name for name in state if not owns(path + name)]:
            del state[name]
        for name, value in module.state_dict(keep_vars=True).items():
            new = state.get(name)
            if not isinstance(value, torch.Tensor) or not isinstance(new, torch.Tensor):
                continue
            if is_sharded(value) and not is_sharded(new) and new.shape == value.shape:
                piece = piece_of(value, path + name)
                box = zip(piece.box.offset, piece.box.sizes, strict=True)
                mine = new[tuple(slice(o, o + n) for o, n in box)]
                state[name] = shard_like(mine.to(piece.tensor), value)

    def forgive_missing(_: nn.Module, keys: Any) -> None:
        if outermost != [module]:
            return
        outermost.clear()
        keys.missing_keys[:] = [name for name in keys.missing_keys if owns(path + name)]
        loaded()

    module.register_state_dict_post_hook(leave_out)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(take_part)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(forgive_missing)  # type: ignore[no-untyped-call]
