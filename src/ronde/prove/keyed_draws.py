"""Random numbers of a step that do not depend on the number of workers: each sample's own.

N workers draw other numbers than one process, which hides every other difference. Here the numbers
of a draw follow from the step, the place in the code, and the sample's position in the global
batch. A draw that has no axis of samples is the same on every worker.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ronde.capture import drawing, draws_globally, following

__all__ = ["KeyedDraws", "generator_digest"]

# fmt: off
# aten operators that draw each element by itself, or each row of their input
_ROWWISE = frozenset({
    "rand", "randn", "randint", "normal", "bernoulli", "uniform", "random", "exponential",
    "geometric", "log_normal", "cauchy", "poisson", "binomial", "multinomial", "_standard_gamma",
    "_sample_dirichlet", "rrelu_with_noise",
})
# fmt: on


@dataclass
class _Pass:
    """One forward pass: its key, and its samples' positions in the global batch."""

    key: str
    low: int
    high: int
    whole: int  # samples of the global batch
    counts: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # of draws, by the generator's next value


@dataclass(frozen=True)
class _Rows:
    """An axis of samples: ``each`` elements for every one of ``positions``."""

    axis: int
    each: int
    positions: range


class KeyedDraws(TorchDispatchMode):
    """Replaces the random draws of passes that :meth:`begin` announces.

    Attributes:
        shapes: name of a draw over a whole global batch -> its shape.

    Args:
        given: ``shapes`` of one process; empty in that process itself.
        place: where the running script is, and in which module of the model.
        note: called with the place of a draw that cannot be made the same.
        is_active: whether draws belong to a step or an evaluation now.
    """

    def __init__(
        self,
        given: dict[str, list[int]],
        place: Callable[[], tuple[str, str]],
        note: Callable[[str], None],
        is_active: Callable[[], bool],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: dict[str, list[int]] = {}
        self._given = given
        self._place, self._note, self._is_active = place, note, is_active
        # smaller seeds are the script's
        self._seeds = itertools.count(1 << 40)
        self._passes: dict[int, _Pass] = {}
        self._pass: _Pass | None = None

    def begin(self, key: str, low: int, high: int, whole: int) -> None:
        """Announce a pass over samples ``low`` to ``high`` of a global batch of ``whole``."""
        seed = next(self._seeds)
        self._pass = self._passes[seed] = _Pass(key, low, high, whole)
        self._passes.pop(seed - 4096, None)
        if not draws_globally():
            torch.default_generator.manual_seed(seed)
        number = _number(key)
        random.seed(number)
        np.random.seed(number % 2**32)

    def end(self) -> None:
        """No pass is under way."""
        self._pass = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not drawn or drawing() or not self._is_active():
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2].rstrip("_")
        name = name.removesuffix("_like").removesuffix("_functional")
        # Recomputed activations find the pass that they belong to by the restored generator.
        at = self._passes.get(torch.default_generator.initial_seed(), self._pass)
        if at is None or at.high == at.low or following() or not _is_plain(args, kwargs):
            return func(*args, **kwargs)
        if name not in _ROWWISE and name != "randperm":
            return func(*args, **kwargs)  # attention with dropout=0, and the like
        with torch._C.DisableTorchFunction():
            return self._draw(func, name, args, kwargs, at)

    def _draw(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], at: _Pass
    ) -> Any:
        draw, where = self._name(at)
        shape, size_at = _shape_of(func, args, kwargs)
        before = self._given.get(draw) or self.shapes.get(draw) or shape
        if at.high - at.low == at.whole:
            self.shapes.setdefault(draw, shape)
        without_replacement = size_at is not None and name == "multinomial" and not args[2:3]
        together = name == "randperm" or without_replacement
        rows = None if together else _rows(shape, before, at)
        # Several elements for each sample may be blocks, or copies of the batch.
        if shape != before and (rows is None or rows.each > 1):
            self._note(f"{name}@{where}")
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        state = torch.default_generator.get_state()
        try:
            if rows is None:
                torch.default_generator.manual_seed(_number(draw))
                return func(*args, **kwargs)
            return _draw_rows(func, args, kwargs, draw, shape, size_at, rows)
        finally:
            torch.default_generator.set_state(state)

    def _name(self, at: _Pass) -> tuple[str, str]:
        """A draw's name, the same in every run, and its place in the code."""
        where, module = self._place()
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        if drawn not in at.names:
            key = f"{where}|{module}"
            count = at.counts[key] = at.counts.get(key, 0) + 1
            at.names[drawn] = f"{at.key}|{key}|{count}"
        return at.names[drawn], where


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def generator_digest() -> str:
    """The states of Python's and numpy's generators, in a few letters."""
    text = repr((random.getstate(), np.random.get_state(legacy=False)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _is_plain(args: Any, kwargs: Any) -> bool:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    leaves = (v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor))
    kinds = (torch.Tensor, torch.nn.Parameter)
    return all(type(t) in kinds and t.device.type == "cpu" for t in leaves)


def _shape_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[int], int | None]:
    """The shape that a draw has, and which argument says so; None: its tensors do."""
    leaves = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    shape = list(torch.broadcast_shapes(*(t.shape for t in leaves)))  # type: ignore[no-untyped-call]
    named = ("size", "n", "num_samples") if len(shape) < 2 else ("size", "n")
    for i, argument in enumerate(func._schema.arguments[: len(args)]):
        if argument.name in named:
            size = args[i]
            return ([int(size)] if isinstance(size, int) else list(map(int, size))), i
    return shape, None


def _rows(shape: Sequence[int], before: Sequence[int], at: _Pass) -> _Rows | None:
    """The samples along the first axis that may be theirs; None if the draw has none."""
    divisible = [a for a, length in enumerate(before) if length and length % at.whole == 0]
    axes = [a for a in divisible if before[a] == at.whole] or divisible
    if not axes:
        return None
    axis = axes[0]
    each = before[axis] // at.whole
    if list(shape) == list(before):
        return _Rows(axis, each, range(at.whole))
    if list(shape) == [*before[:axis], (at.high - at.low) * each, *before[axis + 1 :]]:
        return _Rows(axis, each, range(at.low, at.high))
    return None


def _draw_rows(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    draw: str,
    shape: list[int],
    size_at: int | None,
    rows: _Rows,
) -> Any:
    """The draw, sample by sample."""
    axis, each = rows.axis, rows.each
    parts = []
    for i, position in enumerate(rows.positions):

        def part(value: Any, i: int = i) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() != len(shape):
                return value
            return value.narrow(axis, i * each, each) if value.shape[axis] > 1 else value

        if size_at is None:
            own_args, own_kwargs = pytree.tree_map(part, (args, kwargs))
        else:
            size = [*shape[:axis], each, *shape[axis + 1 :]]
            sized = each if isinstance(args[size_at], int) else size
            own_args, own_kwargs = (*args[:size_at], sized, *args[size_at + 1 :]), kwargs
        torch.default_generator.manual_seed(_number(f"{draw}|{position}"))
        parts.append(func(*own_args, **own_kwargs))
    if func._schema.is_mutable and func._schema.name.endswith("_"):
        return args[0]
    return torch.cat(parts, dim=axis)
