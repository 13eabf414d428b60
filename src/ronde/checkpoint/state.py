"""A run's state as named tensors and plain values: weights, optimizer, scheduler, generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ronde.checkpoint.exact_values import decode_exact, encode
from ronde.checkpoint.pieces import Box, Piece, Want, piece_of, replicated, shard_like
from ronde.checkpoint.tensor_file import group_names, tied_names
from ronde.world import CheckpointError
from ronde.world.tensors import local_part

__all__ = [
    "join_optimizer",
    "model_pieces",
    "model_state",
    "model_wants",
    "optimizer_pieces",
    "optimizer_state",
    "optimizer_wants",
    "random_state",
    "restore_random",
]

Tensors = dict[str, torch.Tensor]


def model_state(model: nn.Module) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a model that this worker holds whole, each once, and the names that share
    them: ``(tensors, {name: same as name})``.
    """
    same = tied_names(model)
    pieces = model_pieces(model, same, lambda name: True)
    return {name: piece.tensor.detach() for name, piece in pieces.items()}, same


def _same_optimizer(optimizer: Optimizer, names: list[list[str]], saved: Mapping[str, Any]) -> None:
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint is of {saved['kind']}, the script now builds "
            f"{type(optimizer).__name__}"
        )
    saved_names = [list(g["params"]) for g in saved["groups"]]
    if names != saved_names:
        raise CheckpointError(
            "the optimizer's groups are not those of the checkpoint: "
            f"{[len(n) for n in saved_names]} parameters then, "
            f"{[len(n) for n in names]} now, or in another order"
        )


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of an optimizer that this worker holds whole as ``parameter/field``, the rest as
    plain values.
    """
    groups = group_names(model, optimizer)
    pieces, record = optimizer_pieces(model, optimizer, groups, {})
    tensors = {name: piece.tensor for name, piece in pieces.items()}
    return tensors, join_optimizer(groups, [record])


def _owned(model: nn.Module, owns: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in model.state_dict(keep_vars=True).items():
        if not owns(name):
            continue
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name!r} in model.state_dict() is a {type(value).__name__}, not a "
                "tensor: it cannot be written without pickle. "
                "Return a tensor from get_extra_state()."
            )
        yield name, value


def model_pieces(
    model: nn.Module, tied: Mapping[str, str], owns: Callable[[str], bool]
) -> dict[str, Piece]:
    """What this worker holds of the model, by each tensor's first name.

    Args:
        tied: see :func:`tied_names`, from before the model was split.
        owns: whether this worker holds what has that name.
    """
    pieces: dict[str, Piece] = {}
    for name, value in _owned(model, owns):
        key = tied.get(name, name)
        if key not in pieces:
            pieces[key] = piece_of(value, name)
    return pieces


def model_wants(
    model: nn.Module,
    source: Callable[[str], tuple[int, ...] | None],
    same: Mapping[str, str],
    owns: Callable[[str], bool],
) -> tuple[list[Want], Callable[[], None]]:
    """The boxes this worker needs of the model, and where to put them.

    Args:
        source: name -> shape of the tensor in the checkpoint, None if it has none of that name.
        same: further names of tensors, in the checkpoint.
    """
    # What state_dict() gives of these is the tensor itself; of anything else, perhaps a copy.
    live = {id(t) for t in (*model.parameters(), *model.buffers())}
    wants: list[Want] = []
    others: dict[str, torch.Tensor] = {}
    wrong: list[str] = []
    for name, value in _owned(model, owns):
        key = same.get(name, name)
        shape = source(key)
        if shape is None:
            wrong.append(f"it has no {name!r}")
        elif shape != tuple(value.shape):
            wrong.append(f"{name!r} has shape {list(shape)} there, {list(value.shape)} here")
        else:
            held = piece_of(value, name)

            def give(
                tensor: torch.Tensor,
                name: str = name,
                value: torch.Tensor = value,
                held: Piece = held,
            ) -> None:
                if tensor.dtype != value.dtype:
                    raise CheckpointError(
                        f"the checkpoint is of another model: {name!r} is of type {tensor.dtype} "
                        f"there, {value.dtype} here"
                    )
                if id(value) in live:
                    with torch.no_grad():
                        held.tensor.copy_(tensor)
                else:  # the module takes it back by its own load_state_dict
                    others[name] = shard_like(tensor.to(held.tensor), value)

            wants.append(Want("model", key, held.box, give))
    if wrong:
        raise CheckpointError(
            "the checkpoint is of another model: "
            f"{'; '.join(wrong[:5])}{'; …' if len(wrong) > 5 else ''}"
        )

    def done() -> None:
        if others:
            model.load_state_dict(others, strict=False)

    return wants, done


def optimizer_pieces(
    model: nn.Module, optimizer: Optimizer, groups: Sequence[Sequence[str]], tied: Mapping[str, str]
) -> tuple[dict[str, Piece], dict[str, Any]]:
    """What this worker holds of the optimizer's state as ``parameter/field``, the rest as plain
    values.

    Args:
        groups: names of the parameters of each group as the script made it (:func:`group_names`),
            whoever holds them now.
        tied: see :func:`tied_names`.
    """
    known = {name for names in groups for name in names}
    pieces: dict[str, Piece] = {}
    values: dict[str, Any] = {}
    held: list[list[str]] = []
    for group, names in zip(optimizer.param_groups, group_names(model, optimizer), strict=True):
        held.append([])
        for p, own in zip(group["params"], names, strict=True):
            # The script's groups name a tied weight as it was before the model was split.
            name = own if own in known else tied.get(own, own)
            held[-1].append(name)
            for field, value in optimizer.state.get(p, {}).items():
                key = f"{name}/{field}"
                if isinstance(value, torch.Tensor):
                    pieces[key] = piece_of(value, f"optimizer state {key}")
                else:
                    values[key] = encode(value, f"optimizer state {key}")
    settings = [
        {k: encode(v, f"optimizer group setting {k}") for k, v in g.items() if k != "params"}
        for g in optimizer.param_groups
    ]
    return pieces, {
        "kind": type(optimizer).__name__,
        "held": held,
        "settings": settings,
        "values": values,
    }


def join_optimizer(
    recorded: Sequence[Sequence[str]], everyone: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Join all workers' parts to one optimizer, as :func:`optimizer_wants` reads it.

    Args:
        recorded: the script's own groups.
        everyone: what :func:`optimizer_pieces` gave on every rank.
    """
    first = everyone[0]
    groups = []
    for i, settings in enumerate(first["settings"]):
        names = list(recorded[i]) if i < len(recorded) else []
        later = [n for each in everyone for n in each["held"][i]]
        # groups and parameters that were added after ronde.distribute come last
        names += [n for n in dict.fromkeys(later) if n not in set(names)]
        groups.append({"params": names, "settings": settings})
    values = {k: v for each in everyone for k, v in each["values"].items()}
    return {"kind": first["kind"], "groups": groups, "values": values}


def optimizer_wants(
    model: nn.Module,
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    tied: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    saved: Mapping[str, Any],
) -> tuple[list[Want], Callable[[], None]]:
    """The boxes this worker needs of the optimizer, and where to put them.

    Args:
        groups: the script's own groups, as in :func:`optimizer_pieces`.
        shapes: ``parameter/field`` -> shape of that tensor in the checkpoint.
        saved: kind, groups and values.

    Raises:
        CheckpointError: it is another optimizer, or over other parameters.
    """
    _same_optimizer(optimizer, [list(names) for names in groups], saved)
    fields: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for key, shape in shapes.items():
        name, _, field = key.rpartition("/")
        fields.setdefault(name, []).append((field, shape))
    plain: dict[str, dict[str, Any]] = {}
    for key, value in saved["values"].items():
        name, _, field = key.rpartition("/")
        plain.setdefault(name, {})[field] = value
    known = {name for names in groups for name in names}
    wants: list[Want] = []
    state: dict[int, dict[str, Any]] = {}
    parts: list[dict[str, Any]] = []
    index = 0
    for group, names, was in zip(
        optimizer.param_groups, group_names(model, optimizer), saved["groups"], strict=True
    ):
        first = index
        for p, own in zip(group["params"], names, strict=True):
            name = own if own in known else tied.get(own, own)
            mine = {field: decode_exact(v) for field, v in plain.get(name, {}).items()}
            for field, shape in fields.get(name, ()):
                wants.append(_want_state(f"{name}/{field}", field, shape, p, mine))
            if mine or name in fields:
                state[index] = mine
            index += 1
        parts.append(
            {
                **{k: decode_exact(v) for k, v in was["settings"].items()},
                "params": list(range(first, index)),
            }
        )

    def done() -> None:
        optimizer.load_state_dict({"state": state, "param_groups": parts})

    return wants, done


def _want_state(
    key: str, field: str, shape: tuple[int, ...], p: torch.Tensor, mine: dict[str, Any]
) -> Want:
    """State with its parameter's shape is sharded like it; the rest (step counters) is whole."""
    sharded = bool(shape) and shape == tuple(p.shape)

    def give(tensor: torch.Tensor) -> None:
        # The parameter's own part may be on another device: load_state_dict would move the shard,
        # but not wrap it.
        here = tensor.to(local_part(p).device)
        mine[field] = (
            shard_like(here, p) if sharded else replicated(here, p) if shape else tensor.clone()
        )

    return Want("optimizer", key, piece_of(p, key).box if sharded else Box.whole(shape), give)


def random_state() -> tuple[Tensors, dict[str, Any]]:
    """States of torch's, Python's and NumPy's generators in this process."""
    tensors: Tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    # int64 holds the unsigned words on every version of torch that Ronde supports
    tensors["numpy"] = torch.from_numpy(np.asarray(words).astype(np.int64))
    version, state, next_gauss = random.getstate()
    tensors["python"] = torch.tensor(state, dtype=torch.int64)
    return tensors, {
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
        "python": [version, next_gauss],
    }


def restore_random(tensors: Tensors, values: Mapping[str, Any]) -> None:
    """Restore :func:`random_state`."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    kind, position, has_gauss, gauss = values["numpy"]
    np.random.set_state(
        (kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss)
    )
    version, next_gauss = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
