"""Check that all ranks agree. Facts travel as JSON; nothing from the network is unpickled."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ronde.world import errors
from ronde.world.errors import CheckpointError, RondeError, WorldError
from ronde.world.identity import World, ranks_text

__all__ = ["agree", "ask_main", "broadcast_json", "gather_json", "gather_or_raise"]

_SHOWN = 5

T = TypeVar("T")


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def gather_json(me: World, value: Any) -> list[Any]:
    """Return every rank's ``value`` (anything JSON holds), in rank order, on every rank. A
    collective.
    """
    if me.size == 1:
        return [json.loads(json.dumps(value))]
    mine = _bytes(value)
    lengths = [torch.zeros(1, dtype=torch.int64, device=me.device) for _ in range(me.size)]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=me.device))
    longest = max(int(n) for n in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=me.device)
    padded[: len(mine)] = mine.to(me.device)
    texts = [torch.empty_like(padded) for _ in range(me.size)]
    dist.all_gather(texts, padded)
    return [
        json.loads(bytes(t[: int(n)].cpu().numpy()).decode())
        for t, n in zip(texts, lengths, strict=True)
    ]


def broadcast_json(me: World, value: Any) -> Any:
    """Return rank 0's ``value`` on every rank. A collective."""
    if me.size == 1:
        return value
    text = _bytes(value if me.is_main else None).to(me.device)
    length = torch.tensor([len(text)], device=me.device)
    dist.broadcast(length, 0)
    if not me.is_main:
        text = torch.empty(int(length), dtype=torch.uint8, device=me.device)
    dist.broadcast(text, 0)
    return json.loads(bytes(text.cpu().numpy()).decode())


def _packed(error: RondeError | None) -> list[str] | None:
    """An error in JSON: the name of a kind that every rank knows, and the text."""
    if error is None:
        return None
    return [
        next(k.__name__ for k in type(error).__mro__ if hasattr(errors, k.__name__)),
        f"{error}",
    ]


def _raise(packed: list[str], prefix: str = "") -> NoReturn:
    kind, text = packed
    raise getattr(errors, kind)(prefix + text)


def ask_main(me: World, ask: Callable[[], T]) -> T:
    """Return what ``ask()`` gives on rank 0, on every rank: anything JSON holds. A collective.

    Raises:
        RondeError: on every rank, what rank 0 has raised; an OSError as a CheckpointError.
    """
    answer: Any = None
    error: RondeError | None = None
    if me.is_main:
        try:
            answer = ask()
        except RondeError as caught:
            error = caught
        except OSError as caught:
            error = CheckpointError(str(caught))
    answer, failed = broadcast_json(me, [answer, _packed(error)])
    if failed:
        _raise(failed)
    given: T = answer
    return given


def gather_or_raise(me: World, value: Any, error: RondeError | None) -> list[Any]:
    """Return every rank's ``value``, as :func:`gather_json`, if no rank has an error. A collective.

    Raises:
        RondeError: on every rank, the first of all ranks' errors, with its rank.
    """
    everyone = gather_json(me, [value, _packed(error)])
    for rank, (_, failed) in enumerate(everyone):
        if failed:
            _raise(failed, f"rank {rank}: ")
    return [each for each, _ in everyone]


def _is_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _without_common(lists: list[list[str]]) -> dict[str, list[int]]:
    """What each list has and not all others, shown -> ranks; what follows their common beginning,
    if all have the same in another order.
    """
    common = set(lists[0]).intersection(*lists)
    start = None
    if len(set(map(frozenset, lists))) == 1:
        common, places = set(), enumerate(itertools.zip_longest(*lists))
        start = next(i for i, names in places if len(set(names)) > 1)
    values: dict[str, list[int]] = {}
    for rank, each in enumerate(lists):
        own = [name for name in each[start:] if name not in common]
        more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
        shown = ", ".join(map(repr, own[:_SHOWN])) + more
        values.setdefault(shown or "none", []).append(rank)
    return values


_SAME_SCRIPT = (
    "Every worker must run the same script with the same arguments, model and data: look for what "
    "depends on the rank, the host or an unseeded choice."
)


def agree(me: World, facts: Mapping[str, Any], where: str, advice: str = _SAME_SCRIPT) -> None:
    """Raise unless every rank has the same ``facts``. A collective.

    gloo adds tensors of different shapes without an error and returns wrong sums, so Ronde asks
    first.

    Args:
        facts: name -> value that JSON holds.
        where: what is being compared, for the error: ``"ronde.distribute"``.
        advice: what to do, for the error.

    Raises:
        WorldError: on every rank, naming the first fact that differs, the ranks and their values.
    """
    if me.size == 1:
        return
    everyone = gather_json(me, dict(facts))
    names = list(dict.fromkeys(name for each in everyone for name in each))
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(everyone):
            shown = json.dumps(each[name]) if name in each else "nothing"
            values.setdefault(shown, []).append(rank)
        if len(values) > 1 and all(_is_of_names(each.get(name)) for each in everyone):
            values = _without_common([each[name] for each in everyone])
        if len(values) > 1:
            said = "; ".join(f"{ranks_text(ranks)}: {value}" for value, ranks in values.items())
            raise WorldError(f"The ranks disagree on {name} in {where}: {said}. {advice}")
