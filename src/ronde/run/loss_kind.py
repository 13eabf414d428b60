"""What kind of loss a script has: asked of the loss itself, with parts of a batch.

A mean over samples is the same training on any number of workers. A sum, a mean in which samples
weigh differently, and a loss that relates samples to each other are not. Nothing here needs
gradients, draws random numbers that the script would see, or changes a tensor of the script's.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ronde.introspect import Marks
from ronde.run.snapshot import kept_attributes
from ronde.world.tensors import leaves, map_leaves, parts

Kind = str
"""``mean``, ``pair`` for a ``(sum, weight)`` that adds up, ``sum``, ``weighted`` for a mean with
weights, ``relation``, ``bad pair``, ``flat`` if the values say nothing yet, or ``unknown``.
"""

Value = tuple[float, float | None]
"""A loss and its weight, None for a plain loss."""

_MOST_SAMPLES = 24  # of a batch that are asked about, where they are small
_FEW_SAMPLES = 6
_MOST_NUMBERS = 2**19  # in the arguments of a call, as long as there are more than a few samples
_MOST_COPIED = 2**22  # numbers of a loss or a model that is copied to be asked in float64
_MOST_READINGS = 8
_MOST_WIDE = 2**23  # numbers that are asked about in float64


class _CannotTell(Exception):
    """The loss or its arguments cannot be asked about parts of a batch."""


@dataclass(frozen=True)
class _Precision:
    """Errors relative to the largest value: of rounding at most, and of no rounding."""

    same: float
    other: float


# A loss may compute in float32 inside, whatever it is given: Hugging Face's do.
_EXACT = _Precision(1e-9, 2e-5)
_SINGLE = _Precision(1e-5, 2e-4)
_HALF = _Precision(1e-2, 1e-1)


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to tensors from outside, collectives, parts of tensors on other workers, and
    draws from the script's own generators, before they happen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "c10d" in func.namespace or any(t.__name__ == "DTensor" for t in types):
            raise _CannotTell
        if kwargs.get("generator") is not None:
            raise _CannotTell
        taken = [v for v in leaves([args, kwargs]) if isinstance(v, torch.Tensor)]
        before = {_memory(t) for t in taken}
        if func._schema.is_mutable:
            for argument, value in itertools.zip_longest(func._schema.arguments, args):
                if argument is None or argument.alias_info is None:
                    continue
                value = kwargs.get(argument.name) if value is None else value
                if argument.alias_info.is_write and any(
                    _memory(t) not in self._own
                    for t in leaves(value)
                    if isinstance(t, torch.Tensor)
                ):
                    raise _CannotTell
        result = func(*args, **kwargs)
        made = [v for v in leaves(result) if isinstance(v, torch.Tensor)]
        self._own |= {_memory(t) for t in made} - before
        return result


def _memory(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        raise _CannotTell
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _undisturbed(device: torch.device, *owners: Any) -> Iterator[None]:
    """Inside, calls leave no trace: generators and attributes of ``owners`` are put back."""
    before = Marks()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    kept = [each for owner in owners for each in kept_attributes(owner)]
    try:
        # set_stance imports torch's compiler, which takes seconds
        compiled = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with torch.no_grad(), eager, _Guard():
            yield
        if not before.unmoved() or (
            on_device is not None and not torch.equal(on_device, torch.cuda.get_rng_state(device))
        ):
            raise _CannotTell
    finally:
        before.put_back()
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        for each in kept:
            each.put_back()


# -- cutting ---------------------------------------------------------------------------------


def _cuts(value: Any, samples: int, without: set[int]) -> list[list[tuple[int, int]]]:
    """For each tensor in a value the ways to cut it, as (dimension, rows for a sample); the rows
    are negative if they stand in blocks, one row of each sample. None for one without samples.

    Raises:
        _CannotTell: what belongs to a sample cannot be seen.
    """
    _refuse_lists(value, samples, top=True)
    ways: list[list[tuple[int, int]]] = []
    tensors = []
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided or type(leaf) not in (torch.Tensor, nn.Parameter):
                raise _CannotTell
            tensors.append(leaf)
        elif not isinstance(leaf, bool | int | float | complex | str | bytes | None):
            raise _CannotTell
    for t in tensors:
        fixed = t.dim() == 0 or isinstance(t, nn.Parameter) or _memory(t) in without
        dims = () if fixed else (0, 1)
        ways.append([(d, 1) for d in dims if d < t.dim() and t.size(d) == samples])
    # Several rows for a sample: tokens, one sample after the other, or views, one after the other.
    free = [t for t in tensors if t.dim() and _memory(t) not in without]
    rows = next((t.size(0) for t in free if t.size(0) > samples and t.size(0) % samples == 0), 0)
    if rows and (any(ways) or free[0].size(0) == rows):
        for t, way in zip(tensors, ways, strict=True):
            if not way and t.dim() and t.size(0) == rows and _memory(t) not in without:
                way += [(0, rows // samples), (0, -rows // samples)]
    return ways


def _refuse_lists(value: Any, samples: int, top: bool = False) -> None:
    """A list with an item for each sample, of tensors that may be of any size."""
    held = None if isinstance(value, torch.Tensor) else parts(value)
    if held is None:
        return
    if not top and not isinstance(value, Mapping) and len(held) == samples:
        raise _CannotTell
    for each in held.values():
        _refuse_lists(each, samples)


def _readings(ways: list[list[tuple[int, int]]]) -> list[list[tuple[int, int] | None]]:
    """Each way to read a value: by which dimension, if any, each of its tensors is cut."""
    options: list[list[tuple[int, int] | None]] = []
    for i, way in enumerate(ways):
        # Beyond output and target, a tensor may be as long as the batch by chance.
        options.append([*way, None] if way and i > 1 else [*way] if way else [None])
    return [list(r) for r in itertools.islice(itertools.product(*options), _MOST_READINGS)]


def _part(
    value: Any, reading: list[tuple[int, int] | None], low: int, high: int, wide: bool
) -> Any:
    steps = iter(reading)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        how, leaf = next(steps), leaf.detach()
        if how is not None and how[1] < 0:
            leaf = leaf.unflatten(0, (-how[1], -1)).narrow(1, low, high - low).flatten(0, 1)
        elif how is not None:
            leaf = leaf.narrow(how[0], low * how[1], (high - low) * how[1])
        return leaf.double() if wide and leaf.is_floating_point() else leaf.clone()

    return map_leaves(cut, value)


def _numbers(value: Any) -> int:
    return sum(v.numel() for v in leaves(value) if isinstance(v, torch.Tensor))


def _asked(value: Any, samples: int) -> int:
    """How many of the samples are asked about."""
    affordable = _MOST_NUMBERS * samples // max(_numbers(value), 1)
    return min(samples, _MOST_SAMPLES, max(affordable, _FEW_SAMPLES))


# -- judging ---------------------------------------------------------------------------------


def judge_parts(
    call: Callable[[int, int], Value],
    samples: int,
    precision: _Precision = _EXACT,
    shifted: Callable[[int, int], Value] | None = None,
) -> Kind:
    """Tell a loss's kind from its values for parts of a batch.

    Args:
        call: the loss of the samples from the first number up to the second.
        samples: how many there are.
        shifted: the same with other outputs: weights that depend on them are no weights.

    Example:
        >>> losses = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
        >>> judge_parts(lambda low, high: (sum(losses[low:high]), None), 6)
        'sum'
    """
    if samples < 2:
        return "flat"
    kind = _judge(call, _bounds(samples, (1, 3)), precision, shifted)
    again = kind
    if kind in ("flat", "gap") and samples >= 6:
        again = _judge(call, _bounds(samples, (2, 4)), precision, shifted)
    if kind == "gap":  # a sample without a loss, such as one of padding only: this is no mean
        return "weighted" if again in ("gap", "flat", "mean") else again
    return again


def _bounds(samples: int, sixths: tuple[int, int]) -> list[int]:
    """Where to cut: unequal parts, so that a mean of means is no mean."""
    if samples == 2:
        return [0, 1, 2]
    first = max(samples * sixths[0] // 6, 1)
    second = max(samples * sixths[1] // 6, first + 1)
    return [0, first, second, samples]


def _judge(
    call: Callable[[int, int], Value],
    bounds: list[int],
    precision: _Precision,
    shifted: Callable[[int, int], Value] | None,
) -> Kind:
    n = bounds[-1]
    edges = list(itertools.pairwise(bounds))
    whole, weight = call(0, n)
    values = [call(low, high) for low, high in edges]
    again, _ = call(0, n)
    if math.isfinite(whole) and not _near(whole, again, [], precision.same):
        return "unknown"  # it keeps state, or is not deterministic
    losses = [v for v, _ in values]
    if not math.isfinite(whole):
        return "flat"
    if weight is not None:
        weights = [w for _, w in values if w is not None]
        if not all(map(math.isfinite, (*losses, *weights, weight))):
            return "unknown"
        if whole == 0 and not any(losses):
            return "flat"
        adds = _near(whole, sum(losses), losses, precision.same)
        return "pair" if adds and _near(weight, sum(weights), weights, 1e-5) else "bad pair"
    if not all(map(math.isfinite, losses)):
        return "gap"  # a mean's parts are finite if all of it is
    scale = max(map(abs, (whole, *losses)))
    spread = max(losses) - min(losses)
    if scale == 0:
        return "flat"
    mean = sum(v * (high - low) for v, (low, high) in zip(losses, edges, strict=True)) / n
    if _near(whole, mean, losses, precision.same):
        return "mean" if spread > 100 * precision.same * scale else "flat"
    if _near(whole, sum(losses), losses, max(precision.same, 1e-5)):
        return "sum"
    if abs(whole - mean) < precision.other * scale:
        return "flat"
    if len(losses) == 2:
        return "weighted" if min(losses) < whole < max(losses) else "relation"
    first, last = call(bounds[0], bounds[2])[0], call(bounds[1], bounds[3])[0]
    constant = losses[0] + losses[1] - first  # a penalty on the weights
    others = (losses[1] + losses[2] - last, (sum(losses) - whole) / 2)
    if all(_near(constant, c, losses, precision.same) for c in others):
        return "sum"
    ratios = _weights(losses, first, last, whole, precision)
    if ratios is None:
        return "relation"
    if shifted is not None:
        moved = [shifted(low, high)[0] for low, high in edges]
        ends = shifted(bounds[0], bounds[2])[0], shifted(bounds[1], bounds[3])[0]
        shift = _weights(moved, *ends, shifted(0, n)[0], precision)
        close = 1e-4 if precision is _EXACT else 0.05
        if shift is not None and any(
            abs(a - b) > close for a, b in zip(ratios, shift, strict=True)
        ):
            return "relation"
    return "weighted"


def _near(a: float, b: float, values: list[float], tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), *map(abs, values))


def _weights(
    losses: list[float], first: float, last: float, whole: float, precision: _Precision
) -> list[float] | None:
    """The parts' weights by their losses and those of the first two and the last two together;
    None if no weights give the whole's loss.
    """
    one, two, three = losses
    a, b, c, d = first - one, two - first, last - two, three - last
    weights = [b * d, a * d, a * c]
    total = sum(weights)
    if total == 0 or any(w / total < -1e-6 for w in weights):
        return None
    weights = [w / total for w in weights]
    expected = sum(w * v for w, v in zip(weights, losses, strict=True))
    spread = max(losses) - min(losses)
    scale = max(map(abs, (whole, *losses)))
    allowed = min(max(precision.same, 1e-6) * scale * (1 + scale / spread), 0.02 * spread)
    return weights if abs(expected - whole) <= max(allowed, 1e-12 * scale) else None


# -- asking ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossFunction:
    """A loss and how to call it.

    Attributes:
        loss: the script's function or module.
        check: its value as ``(mean, None)`` or ``(sum, weight)``; raises for others.
        autocast: makes the context that the training runs in.
        device: of this worker.
        without: memory of the model's parameters and buffers, which hold no samples.
    """

    loss: Callable[..., Any]
    check: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]
    autocast: Callable[[], AbstractContextManager[Any]]
    device: torch.device
    without: frozenset[int] = frozenset()


def memory_of(model: nn.Module) -> frozenset[int]:
    """Memory of a model's parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    plain = [t for t in tensors if type(t) in (torch.Tensor, nn.Parameter)]
    return frozenset(
        t.untyped_storage()._cdata for t in plain if t.layout is torch.strided and not t.is_meta
    )


def ask_loss(ask: LossFunction, arguments: tuple[Any, ...], samples: int) -> Kind:
    """The kind of a loss, asked with the arguments of one micro-batch of a step.

    Args:
        arguments: what the script's forward returned.
        samples: how many samples it was for.
    """
    if samples < 2:
        return "flat"
    try:
        ways = _cuts(arguments, samples, set(ask.without))
        if not any(ways):
            return "unknown"
        tensors = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
        outputs = [t.requires_grad for t in tensors]
        if not any(outputs):  # in an evaluation
            outputs = [t is tensors[0] for t in tensors]
    except _CannotTell:
        return "unknown"
    asked = _asked(arguments, samples)
    wide = asked * _numbers(arguments) // samples <= _MOST_WIDE
    found = "unknown"
    for reading in _readings(ways):
        kind = _ask_reading(ask, arguments, reading, asked, outputs, wide)
        if kind == "unknown":
            continue
        if found == "unknown":
            found = kind
            if kind in ("mean", "pair", "sum", "flat"):
                break
        elif kind in ("mean", "pair"):
            return "unknown"  # it depends on which tensors hold samples
    return found


def _ask_reading(
    ask: LossFunction,
    arguments: tuple[Any, ...],
    reading: list[tuple[int, int] | None],
    samples: int,
    outputs: list[bool],
    wide: bool,
) -> Kind:
    for double in (True, False) if wide else (False,):
        loss: Any = ask.loss
        if isinstance(loss, nn.Module) and sum(p.numel() for p in _tensors_of(loss)) < _MOST_COPIED:
            try:
                loss = copy.deepcopy(loss)
            except Exception:
                loss = ask.loss
            if double and loss is not ask.loss:
                loss = loss.double()
        context = _no_autocast(ask.device) if double else ask.autocast()

        def call(
            low: int, high: int, factor: float = 1.0, loss: Any = loss, wide: Any = double
        ) -> Value:
            part = _part(arguments, reading, low, high, wide)
            if factor != 1.0:
                part = _scaled(part, outputs, factor)
            value, weight = ask.check(loss(*part))
            if wide and value.dtype != torch.float64:
                raise TypeError  # rounding is that of a smaller type
            return _numbers_of((value, weight))

        def shifted(low: int, high: int, call: Any = call) -> Value:
            return call(low, high, 0.7)  # type: ignore[no-any-return]

        try:
            with _undisturbed(ask.device, loss), context:
                return judge_parts(call, samples, _precision(ask, double, arguments), shifted)
        except _CannotTell:
            return "unknown"
        except Exception:  # the loss takes no float64, or no part of a batch
            continue
    return "unknown"


def _scaled(value: Any, outputs: list[bool], factor: float) -> Any:
    chosen = iter(outputs)

    def scale(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf * factor if next(chosen) and leaf.is_floating_point() else leaf

    return map_leaves(scale, value)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False)


def _precision(ask: LossFunction, double: bool, value: Any) -> _Precision:
    if double:
        return _EXACT
    floats = [t for t in leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    plain = isinstance(ask.autocast(), nullcontext) and all(t.itemsize >= 4 for t in floats)
    return _SINGLE if plain else _HALF


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _numbers_of(value: tuple[torch.Tensor, torch.Tensor | None]) -> Value:
    loss, weight = value
    return float(loss), None if weight is None else float(weight)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def ask_model(
    ask: LossFunction,
    model: nn.Module,
    compute: Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | None]],
    batch: Any,
    samples: int,
) -> Kind:
    """The kind of a loss that the model computes, asked with parts of the batch in evaluation mode.

    Only for a model whose layers exchange nothing with other workers.

    Args:
        compute: forward and loss of a batch.
        samples: how many samples the batch has.
    """
    if samples < 2:
        return "flat"
    try:
        ways = _cuts(batch, samples, set())
    except _CannotTell:
        return "unknown"
    if not any(ways):
        return "unknown"
    leading = any(way and way[0] == (0, 1) for way in ways)
    reading = [next((w for w in way if w == (0, 1) or not leading), None) for way in ways]
    small = sum(t.numel() for t in _tensors_of(model)) < _MOST_COPIED
    asked = min(samples, 12 if small else _FEW_SAMPLES)
    for double in (True, False) if small else (False,):
        asked_model = model
        with ExitStack() as stack:
            try:
                if double:
                    asked_model = copy.deepcopy(model).double()
                precision = _precision(ask, double, _tensors_of(model))
                if ask.device.type != "cpu" and not double:
                    precision = _HALF  # kernels differ by the size of a batch, as TF32 does
                stack.enter_context(_evaluating(asked_model))

                def call(low: int, high: int, used: Any = asked_model, wide: Any = double) -> Value:
                    return _numbers_of(compute(used, _part(batch, reading, low, high, wide)))

                stack.enter_context(_undisturbed(ask.device, model, ask.loss))
                stack.enter_context(_no_autocast(ask.device) if double else ask.autocast())
                return judge_parts(call, asked, precision)
            except _CannotTell:
                return "unknown"
            except Exception:  # the model takes no float64, or no part of a batch
                continue
    return "unknown"
