"""The calls of a run that only exchange something among the ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist

from ronde.world import ArgumentError, WorldError
from ronde.world.consensus import gather_json
from ronde.world.identity import ranks_text
from ronde.world.rendezvous import Rendezvous

__all__ = ["CollectiveCalls"]


class CollectiveCalls:
    """See :class:`Run`, which has these calls."""

    is_main: bool
    _rendezvous: Rendezvous

    def barrier(self) -> None:
        """Wait until every rank is here. Call it on every worker.

        Raises:
            WorldError: a rank called something else, or ended.

        Example:
            >>> if run.is_main:  # doctest: +SKIP
            ...     torch.save(vocabulary, "vocabulary.pt")
            >>> run.barrier()  # doctest: +SKIP
            >>> vocabulary = torch.load("vocabulary.pt")  # doctest: +SKIP
        """
        self._rendezvous.meet("run.barrier()")

    def reduce(self, value: Any, op: Literal["mean", "sum", "max"] = "mean") -> Any:
        """Combine a value of each rank. Call it on every worker: all get the same result.

        Numbers are exact: integers stay integers, and a sum of floats is rounded once. Tensors are
        computed in float64, rounded once to their own type, and carry no gradient. A sum of integer
        tensors is int64, their mean is float64. A NaN on any rank makes a maximum NaN.

        Args:
            value: a number, a tensor, or a dictionary of these, with the same names, types, and
                shapes on every rank.
            op: ``"mean"`` (each rank weighs the same), ``"sum"``, or ``"max"``.

        Returns:
            What ``value`` is: a number, a tensor on its device, or a dictionary.

        Raises:
            ArgumentError: a value that cannot be reduced, on every rank.
            WorldError: ranks give different operations, names, types, or shapes.

        Example:
            >>> run.reduce({"reward": 12.5, "episodes": 3}, "sum")  # doctest: +SKIP
            {'reward': 31.0, 'episodes': 7}
        """
        call, error = f"run.reduce(value, {op!r})", None
        named = dict(value) if isinstance(value, Mapping) else {"": value}
        plain: dict[str, Any] = {}
        try:
            if op not in _OPS:
                raise ArgumentError(f"{call}: the operation must be one of {', '.join(_OPS)}.")
            plain = {name: _reducible(name, each, op) for name, each in named.items()}
        except ArgumentError as caught:
            error = f"{caught}"
        numbers = {name: v for name, v in plain.items() if not isinstance(v, torch.Tensor)}
        kind = {name: _kind(v) for name, v in sorted(plain.items())}
        shown = json.dumps(kind if isinstance(value, Mapping) else kind.get("", ""))
        everyone = _same(self._rendezvous, call, {"kind": shown, "numbers": numbers}, error)
        result: dict[str, Any] = {}
        for name in sorted(plain):
            if name in numbers:
                result[name] = _reduce_numbers([each["numbers"][name] for each in everyone], op)
            else:
                result[name] = _reduce_tensor(self._rendezvous, plain[name], op)
        return {name: result[name] for name in named} if isinstance(value, Mapping) else result[""]

    def gather_objects(self, obj: Any) -> list[Any]:
        """Collect a JSON value of each rank. Call it on every worker.

        Args:
            obj: None, numbers, text, and lists or dictionaries of them. Tuples arrive as lists.

        Returns:
            list: the values by rank, the same on every rank.

        Raises:
            ArgumentError: JSON does not hold a value, on every rank.
            WorldError: a rank called something else, or ended.

        Example:
            >>> run.gather_objects({"rank": run.rank})  # doctest: +SKIP
            [{'rank': 0}, {'rank': 1}]
        """
        error = None
        try:
            _check_json(obj, "obj")
        except ArgumentError as caught:
            error = f"{caught}"
        _same(self._rendezvous, "run.gather_objects(obj)", {}, error)
        return gather_json(self._rendezvous.me, obj)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run a block on rank 0, then on all other ranks. Enter it on every worker.

        Raises:
            WorldError: on the other ranks, if rank 0's block failed; or if ranks call other things.

        Example:
            >>> with run.main_first():  # rank 0 downloads, the others find it  # doctest: +SKIP
            ...     data = load_dataset("wikitext")
        """
        meeting = self._rendezvous
        if not self.is_main:
            with meeting.call(_FIRST):
                error = meeting.meet(_FIRST)[0]
            if error is not None:
                raise WorldError(f"rank 0 failed in 'with run.main_first():', {error}")
            yield
            return
        meeting.begun += 1
        at = meeting.begun
        try:
            yield
        except BaseException as error:
            # Others wait for rank 0 in the meeting, where they read why it failed. If the block
            # itself met them, they have their error already.
            if meeting.begun == at:
                with suppress(WorldError):
                    meeting.meet(_FIRST, f"{type(error).__name__}: {error}", at_most_seconds=5.0)
            raise
        meeting.meet(_FIRST)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0; nothing on other ranks."""
        if self.is_main:
            print(*args, **kwargs)


_OPS = ("mean", "sum", "max")
_FIRST = "run.main_first()"


def _same(
    meeting: Rendezvous, call: str, facts: Mapping[str, Any], error: str | None
) -> list[dict[str, Any]]:
    """Every rank's facts, after a check that they agree and that no rank has an error."""
    everyone = meeting.meet(call, {"error": error, **facts})
    errors = [(r, each["error"]) for r, each in enumerate(everyone) if each["error"]]
    if errors:
        rank, text = errors[0]
        raise ArgumentError(text if rank == meeting.me.rank else f"rank {rank}: {text}")
    kinds: dict[str, list[int]] = {}
    for rank, each in enumerate(everyone):
        kinds.setdefault(str(each.get("kind")), []).append(rank)
    if len(kinds) > 1:
        said = "; ".join(f"{ranks_text(ranks)}: {kind}" for kind, ranks in kinds.items())
        raise WorldError(
            f"The ranks give different things to {call}: {said}. Every rank must give the same "
            "operation, names, types, and shapes."
        )
    return everyone


# -- objects ---------------------------------------------------------------------------


def _check_json(value: Any, where: str) -> None:
    """Refuse what JSON would change or not hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for i, each in enumerate(value):
            _check_json(each, f"{where}[{i}]")
        return
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ArgumentError(
                    f"run.gather_objects: {where} has the key {key!r}, and JSON keys are text. "
                    "Use str keys, or a list of pairs."
                )
            _check_json(each, f"{where}[{key!r}]")
        return
    raise ArgumentError(
        f"run.gather_objects: {where} is a {type(value).__name__}, which JSON does not hold "
        "(numbers, text, None, lists, and dictionaries of them). Give value.tolist() of a tensor; "
        "run.reduce(tensor) exchanges tensors."
    )


# -- reduce ----------------------------------------------------------------------------


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "a number"
    return f"a tensor, {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _reducible(name: Any, value: Any, op: str) -> Any:
    """A Python number or a dense tensor."""
    what = f"value[{name!r}]" if name != "" else "value"
    if not isinstance(name, str):
        raise ArgumentError(f"run.reduce: {what} has a key that is not text.")
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not plain or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise ArgumentError(
                f"run.reduce: {what} is a {type(value).__name__} ({value.layout}) that is not a "
                "whole dense tensor."
            )
        if value.is_complex() and op == "max":
            raise ArgumentError(f"run.reduce: {what} is complex, and has no maximum.")
        return value.detach()
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    raise ArgumentError(
        f"run.reduce: {what} is a {type(value).__name__}; expected a number, a tensor, or a "
        "dictionary of these by name. run.gather_objects(obj) takes lists and text."
    )


def _reduce_numbers(values: list[Any], op: str) -> Any:
    if op == "max":
        return math.nan if any(v != v for v in values) else max(values)
    exact = all(isinstance(v, int) for v in values)
    finite = exact or all(math.isfinite(v) for v in values)
    total = sum(values) if exact or not finite else math.fsum(values)
    return total if op == "sum" else total / len(values)


@torch.no_grad()
def _reduce_tensor(meeting: Rendezvous, value: torch.Tensor, op: str) -> torch.Tensor:
    """Computed in float64 (complex128, int64) and rounded once to the result's type."""
    me, kind = meeting.me, value.dtype
    if op == "max":
        wide = value.to(me.device, torch.float64 if kind.is_floating_point else torch.int64)
    elif kind.is_floating_point or kind.is_complex:
        wide = value.to(me.device, torch.promote_types(kind, torch.float64))
    else:
        kind = torch.int64 if op == "sum" else torch.float64
        wide = value.to(me.device, torch.int64)
    wide = wide.clone(memory_format=torch.contiguous_format)
    if me.size > 1 and wide.numel():
        flat = torch.view_as_real(wide) if wide.is_complex() else wide
        if op == "max":
            # Whether NaN wins a maximum depends on the order of ranks.
            nans = flat.isnan().to(torch.uint8)
            flat.nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
            dist.all_reduce(flat, dist.ReduceOp.MAX)
            if kind.is_floating_point:
                dist.all_reduce(nans, dist.ReduceOp.MAX)
                flat[nans.bool()] = math.nan
        else:
            dist.all_reduce(flat)
    if op == "mean":
        wide = wide / me.size
    return wide.to(value.device, kind)
