"""``state_dict()`` and ``load_state_dict()`` of a script's model and optimizer, where each worker
holds a part of them.

A worker's state is what it holds: its stages' weights, its shards. That can be kept and loaded
again (the best epoch's weights), and
a whole state, from a file, loads too: each worker takes its own part. What a worker does not hold
is left out, never written as something else, and a line says how to write the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ronde.checkpoint import is_sharded, like, piece_of

__all__ = ["hold_in_parts", "say_in_parts"]


def hold_in_parts(
    model: nn.Module,
    owns: Callable[[str], bool],
    loaded: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """From now on the model's state is what this worker holds of it.

    Args:
        model: as it was split.
        owns: whether this worker holds (part of) what has that name in ``model.state_dict()``.
        loaded: called after a state was loaded.
        say: called once, when the script first asks for the state.
    """
    told = False

    def told_once(kept: int, of: int, shards: int) -> None:
        nonlocal told
        if told:
            return
        told = True
        what = (
            f"{kept} of {of} tensors"
            if kept < of
            else f"{shards} of {of} tensors as this worker's shard"
        )
        say(
            f"model.state_dict() has what this worker holds: {what}. It loads again under "
            "this plan; run.export(path), called on every "
            "worker, writes the whole model, and run.save() a checkpoint for any plan."
        )

    outermost: list[
        nn.Module
    ] = []  # of the modules that are being loaded: the one that the script called
    # Functions and not methods: a deep copy of the model, for a moving average, must not copy what
    # they belong to.
    for path, module in list(model.named_modules()):
        _hold(module, f"{path}." if path else "", owns, loaded, told_once, outermost)


def say_in_parts(optimizer: Optimizer, say: Callable[[str], None]) -> None:
    """From now on a line says, once, that the optimizer's state is what this worker holds of it."""
    told = False

    def tell(_: Optimizer, __: dict[str, Any]) -> None:
        nonlocal told
        if not told:
            told = True
            say(
                "optimizer.state_dict() has the state of what this worker updates, and no other's. "
                "It loads again under this plan; run.save() writes the whole, for any plan."
            )

    optimizer.register_state_dict_post_hook(tell)


def _hold(
    module: nn.Module,
    path: str,
    owns: Callable[[str], bool],
    loaded: Callable[[], None],
    tell: Callable[[int, int, int], None],
    outermost: list[nn.Module],
) -> None:
    def leave_out(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if prefix:  # asked of a module around this one
            return
        theirs = [name for name in state if not owns(path + name)]
        shards = sum(
            is_sharded(value) for value in state.values() if isinstance(value, torch.Tensor)
        )
        # ours are asked for with keep_vars
        if (theirs or shards) and not any(
            isinstance(value, nn.Parameter) for value in state.values()
        ):
            tell(len(state) - len(theirs), len(state), shards)
        for name in theirs:
            del state[name]

    def take_part(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if prefix:
            return
        outermost[:] = [module]
        for name in [name for name in state if not owns(path + name)]:
            del state[name]
        for name, value in module.state_dict(keep_vars=True).items():
            given = state.get(name)
            if not (
                isinstance(value, torch.Tensor)
                and is_sharded(value)
                and isinstance(given, torch.Tensor)
            ) or is_sharded(given):
                continue
            if given.shape == value.shape:
                held = piece_of(value, path + name)
                whole = tuple(
                    slice(o, o + n) for o, n in zip(held.box.offset, held.box.sizes, strict=True)
                )
                state[name] = like(given[whole].to(held.tensor), value)

    def not_missing(_: nn.Module, keys: Any) -> None:
        if outermost != [module]:
            return
        outermost.clear()
        keys.missing_keys[:] = [name for name in keys.missing_keys if owns(path + name)]
        loaded()

    module.register_state_dict_post_hook(leave_out)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(take_part)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(not_missing)  # type: ignore[no-untyped-call]
