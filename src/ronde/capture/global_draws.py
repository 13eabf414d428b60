"""Random numbers by the samples' places in the global batch: the same on any number of workers.

While a pass over some samples is under way, torch's functions that draw are replaced. The numbers
of a draw are a function of a key (the run's seed and the step), of how many draws of the pass came
before, and of each element's place in the draw as one process makes it for the whole global batch.
A worker's samples are a range of it, which PCG64's jumps reach in one call.

Which axis has the samples follows from a probe: the same pass, earlier, over another number of
samples. torch's own generator stays the clock: each draw takes one number of it, so activations
that are computed again, after its state was restored, find the draws that they made at first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function

from ronde.world import PlanError

__all__ = [
    "GlobalDraws",
    "Recorded",
    "counted_draws",
    "drawing",
    "drawn_so_far",
    "draws_globally",
    "recorded_draws",
    "replaced",
    "resume_draws",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_random: Any = torch.Tensor.random_
_lock = threading.Lock()
_bits = np.random.PCG64DXSM(0)
_generator = np.random.Generator(_bits)
_INCREMENT = 0x5851F42D4C957F2D14057B7EF767814F  # any odd number
_LAYERS = "parallel/tensor_layers.py"  # has the same attention for some of the heads
_COMPLETE = 53  # random bits of a double's fraction
_FRACTION = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(eq=False)
class _Pass:
    """A forward pass of a micro-batch, and whatever computes a part of it again."""

    draws: GlobalDraws
    key: int
    low: int  # place of its first sample in the global batch
    rows: int
    in_loop: bool  # what the script draws in the body of its loop is in it
    numbers: dict[int, int] = field(default_factory=dict)  # of draws, by the clock
    following: int = 0  # number of the next draw
    watched: torch.Tensor | None = None  # state of torch's generator after the last draw

    def number(self) -> int:
        """The number of the draw that is made now."""
        if self.watched is not None and torch._C._current_graph_task_id() == -1:
            self.draws.moved |= not torch.equal(self.watched, torch.default_generator.get_state())
        now = int(_random(torch.empty((), dtype=torch.int64)))
        number = self.numbers.get(now)
        if number is None:
            number = self.numbers[now] = self.following
            self.following += 1
        if self.watched is not None:
            self.watched = torch.default_generator.get_state()
        return number


class Recorded(NamedTuple):
    """A draw of a probe."""

    name: str
    shape: tuple[int, ...]
    sums: torch.Tensor | None  # of each row of the activations that it is for


class _Now:
    """What the functions that draw do now."""

    passes: dict[int, _Pass] = {}  # noqa: RUF012  by the seed of torch's generator
    current: _Pass | None = None
    thread = 0
    inside = False  # one of them is at work
    count: int | None = None  # of a pass that is followed
    record: list[Recorded] | None = None  # of a probe
    depth = 0
    undo: contextlib.ExitStack | None = None


def draws_globally() -> bool:
    """Whether draws follow the samples' places now, or are noted for that."""
    return _Now.current is not None or _Now.record is not None or _Now.count is not None


def drawing() -> bool:
    """Whether a replaced function is at work."""
    return _Now.inside


def drawn_so_far() -> int:
    """Draws of the followed pass so far."""
    return _Now.count or 0


def resume_draws(number: int) -> None:
    """Go on with a draw's number: those of other pipeline stages were left out."""
    if _Now.current is not None:
        _Now.current.following = number


@contextlib.contextmanager
def counted_draws() -> Iterator[None]:
    """Count the draws of a pass that is followed, instead of making them."""
    before, _Now.count = _Now.count, 0
    try:
        with replaced():
            yield
    finally:
        _Now.count = before


@contextlib.contextmanager
def recorded_draws() -> Iterator[list[Recorded]]:
    """Note the draws of a pass. Its dropout drops nothing."""
    made: list[Recorded] = []
    _Now.record = made
    try:
        with replaced():
            yield made
    finally:
        _Now.record = None


# -- a run's draws ---------------------------------------------------------------------


class GlobalDraws:
    """How one run draws.

    Args:
        spec: the plan, for errors.
        tensor, place: of the workers that hold one layer together, and this one's among them.
        say: takes a sentence on a draw whose samples cannot be told.
        probes: of two numbers of samples, the larger one first, the draws of a pass over these, as
            :func:`recorded_draws` notes. Both begin with the same samples.

    Attributes:
        moved: torch's generator has moved in a watched pass by something that is not replaced.
        fused: widths of layers whose outputs belong to several tensors.
    """

    def __init__(
        self,
        spec: str,
        tensor: int,
        place: int,
        say: Callable[[str], None],
        probes: Mapping[int, list[Recorded]],
    ) -> None:
        self.moved = False
        self.fused: frozenset[int] = frozenset()
        self._spec, self._tensor, self._place, self._say = spec, tensor, place, say
        self._probes = dict(probes)
        self._layouts: dict[Any, _Layout] = {}

    def begin(
        self, key: int, low: int, high: int, seed: int, watched: bool, in_loop: bool = False
    ) -> None:
        """A pass begins, over samples ``low`` to ``high`` of the global batch.

        Args:
            key: of the step, the same on every worker.
            seed: of torch's generator, another one for each pass of a step.
            watched: notice draws that are not replaced.
            in_loop: the script draws in the body of its loop: the probes may not have seen that.
        """
        torch.default_generator.manual_seed(seed)
        at = _Pass(self, key, low, max(high - low, 1), in_loop)
        if watched:
            at.watched = torch.default_generator.get_state()
        _Now.passes[seed] = _Now.current = at
        _Now.thread = threading.get_ident()

    def end(self) -> int:
        """The forward pass is over, a backward pass may follow. Returns how often it drew."""
        at = _Now.current
        if at is None:
            return 0
        if at.watched is not None:
            self.moved |= not torch.equal(at.watched, torch.default_generator.get_state())
            at.watched = None
        return at.following

    @staticmethod
    def pause(current: _Pass | None = None) -> _Pass | None:
        """Functions draw torch's own numbers, until the pass that this returns is given back."""
        before, _Now.current = _Now.current, current
        return before

    def leave(self) -> Any:
        """Leave the pass under way for others; :meth:`close` takes it up again."""
        self.end()
        return _Now.current

    @staticmethod
    def close(around: Any = None, seed: int = 0) -> None:
        """The passes of a step are over. The one ``around`` them goes on, under another seed."""
        _Now.current = around
        _Now.passes.clear()
        if around is not None:
            _Now.passes[seed] = around
            torch.default_generator.manual_seed(seed)

    def layout(self, at: _Pass, number: int, name: str, shape: tuple[int, ...]) -> _Layout:
        """Where the samples are in a draw."""
        rows = at.rows
        key = (number, name, shape, rows, at.in_loop)
        layout = self._layouts.get(key)
        if layout is None:
            layout, doubt = self._find(number, name, shape, rows, at.in_loop)
            if doubt and self._tensor > 1:
                raise PlanError(
                    f"plan={self._spec!r}, randomness='global': {name} at {_where()} draws the "
                    f"shape {list(shape)} for {rows} samples, and {doubt}. Use "
                    "randomness='worker', or another plan."
                )
            if doubt:
                self._say(
                    f"{name} at {_where()} draws the shape {list(shape)} for {rows} samples, and "
                    f"{doubt}: on another number of workers the numbers may be others"
                )
            self._layouts[key] = layout
        return layout

    def _find(
        self, number: int, name: str, shape: tuple[int, ...], rows: int, in_loop: bool
    ) -> tuple[_Layout, str]:
        """The layout, and what is doubtful about it."""
        if not shape:
            return _Layout(), ""
        parts = self._tensor
        # A probe of which no length can be a worker's by chance.
        alike = (rows, rows * parts, rows / parts)
        probed = next((n for n in self._probes if n not in alike), 0)
        known = self._probe(probed, number)
        if known.name != name or len(known.shape) != len(shape):
            return self._guess(shape, rows)
        axis = divided = None
        for a, (was, now) in enumerate(zip(known.shape, shape, strict=True)):
            if was == now:
                continue
            if was * rows in (now * probed, now * probed * parts) and axis is None:
                axis = a
                divided = a if was * rows != now * probed else divided
            elif was == now * parts and divided is None:
                divided = a
            else:
                guess, doubt = self._guess(shape, rows)
                return guess, doubt if in_loop else "its shape depends on the other samples, too"
        if divided == len(shape) - 1 and known.shape[-1] in self.fused:
            return _Layout(), "its columns belong to several tensors"
        each = 1 if axis is None else shape[axis] // rows
        if each == 1 or _in_attention():
            return _Layout(axis, each, divided), ""
        outer = self._outer(number) if axis == 0 else None
        doubt = "which of its rows are whose cannot be told" if outer is None else ""
        return _Layout(axis, each, divided, outer or 1), doubt

    def _probe(self, samples: int, number: int) -> Recorded:
        made = self._probes.get(samples, [])
        return made[number] if number < len(made) else Recorded("", (), None)

    def _outer(self, number: int) -> int | None:
        """How often the samples follow each other along a draw's first axis: once if it has all
        rows of a sample next to each other. None: the probes do not tell.
        """
        if len(self._probes) < 2:
            return None
        many, few = self._probes
        every, some = self._probe(many, number).sums, self._probe(few, number).sums
        if every is None or some is None or len(every) * few != len(some) * many:
            return None
        each = len(every) // many
        ways = [n for n in range(1, each + 1) if each % n == 0]
        cut = {n: every.view(n, many, -1)[:, :few].flatten() for n in ways}
        fitting = [n for n in ways if torch.allclose(cut[n], some)]
        return fitting[0] if len(fitting) == 1 else None

    def _guess(self, shape: tuple[int, ...], rows: int) -> tuple[_Layout, str]:
        several = [a for a, n in enumerate(shape) if n and n % rows == 0]
        equal = [a for a in several if shape[a] == rows]
        if not several or (rows > 1 and math.prod(shape) == 1):
            return _Layout(), "" if math.prod(shape) <= 1 else "no axis has them"
        axis = (equal or several)[0]
        clear = equal == [0] and self._tensor == 1
        return _Layout(axis, shape[axis] // rows), "" if clear else "their axis is not clear"


@dataclass(frozen=True)
class _Layout:
    """Where a draw has samples.

    Attributes:
        axis: of the samples; None for a draw that is the same for all.
        each: its elements for one sample.
        divided: the axis that tensor parallel workers divide, or None.
        outer: how often the samples follow each other, each time with a part of their elements.
    """

    axis: int | None = None
    each: int = 1
    divided: int | None = None
    outer: int = 1


@dataclass(frozen=True)
class _Draw:
    """One draw: makes its numbers."""

    at: _Pass
    number: int
    layout: _Layout
    shape: tuple[int, ...]
    device: torch.device

    def words(self, half: bool = False) -> torch.Tensor:
        """Random bits: int64, or int32 where ``half``."""
        axis, each, divided = self.layout.axis, self.layout.each, self.layout.divided
        parts, place = self.at.draws._tensor, self.at.draws._place
        rows = [] if axis is None else [self.at.rows, each * (parts if divided == axis else 1)]
        whole = [n * (parts if a == divided else 1) for a, n in enumerate(self.shape) if a != axis]
        size = math.prod(rows[1:]) * math.prod(whole)
        low, count = (0, size) if axis is None else (self.at.low * size, self.at.rows * size)
        if half:
            made = self._bits(low // 2, (low + count + 1) // 2 - low // 2).view(torch.int32)
            made = made[low % 2 : low % 2 + count]
        else:
            made = self._bits(low, count)
        made = made.view((*rows, *whole))
        if divided is not None:
            n = each if divided == axis else self.shape[divided]
            at = divided if axis is None else 1 if divided == axis else divided + 1
            at += axis is not None and divided < axis
            made = made.narrow(at, place * n, n)
        if axis is not None:
            made = made.unflatten(1, (self.layout.outer, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
            made = made.flatten(0, 2).movedim(0, axis)
        return made.reshape(self.shape) if axis is None else made

    def _bits(self, start: int, count: int) -> torch.Tensor:
        text = f"{self.at.key} {self.number}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
        if self.device.type == "cpu":
            state: Any = {"state": key, "inc": _INCREMENT}
            with _lock:
                _bits.state = {
                    "bit_generator": "PCG64DXSM",
                    "state": state,
                    "has_uint32": 0,
                    "uinteger": 0,
                }
                _bits.advance(start)
                made = _generator.integers(0, 2**64 - 1, count, np.uint64, endpoint=True)
            return torch.from_numpy(made.view(np.int64))
        # SplitMix64 (Steele et al. 2014) of each element's number, in signed arithmetic.
        x = torch.arange(start, start + count, device=self.device)
        x.mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(key & (2**64 - 1)))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
        return x

    def kept(self, p: float) -> torch.Tensor:
        """True with probability ``1 - p``."""
        return self.words(half=True) >= min(round(p * 2**32), 2**32 - 1) - 2**31

    def uniform(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """In [0, 1), also after it is rounded to ``dtype``."""
        bits = _FRACTION.get(dtype, _COMPLETE)
        return self._fraction(bits).mul_(2.0**-bits)

    def open(self) -> torch.Tensor:
        """In (0, 1)."""
        return self._fraction(_COMPLETE - 1).add_(0.5).mul_(2.0 ** (1 - _COMPLETE))

    def _fraction(self, bits: int) -> torch.Tensor:
        words = self.words() >> (64 - bits)
        return words.bitwise_and_((1 << bits) - 1).to(torch.float64)

    def normal(self) -> torch.Tensor:
        """Standard normal numbers: each from one word (Box and Muller 1958)."""
        words = self.words()
        angle = (words & (2**32 - 1)).to(torch.float64).mul_(2 * math.pi / 2**32).cos_()
        radius = ((words >> 32) & (2**32 - 1)).to(torch.float64).add_(0.5).mul_(2.0**-32)
        return radius.log_().mul_(-2).sqrt_().mul_(angle)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _where() -> str:
    """The file and line of the model that draws."""
    from ronde.introspect import is_user_file

    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the model"


def _in_attention() -> bool:
    """Whether torch's attention draws, whose rows are the heads of one sample after the other."""
    from ronde.introspect import is_user_file

    frame: Any = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        code = frame.f_code
        if code.co_name == "multi_head_attention_forward" or code.co_filename.endswith(_LAYERS):
            return True
        frame = frame.f_back
    return False


# -- the functions that draw -----------------------------------------------------------


def _draw(
    name: str, shape: Any, device: torch.device, taken: tuple[Any, ...], generator: Any = None
) -> _Draw | None:
    """The draw that a function makes now; None if torch's own numbers are to be taken."""
    name, shape = name.rstrip("_"), tuple(shape)
    if _Now.count is not None:
        _Now.count += 1
        return None
    if _Now.record is not None:
        x = taken[0] if taken and isinstance(taken[0], torch.Tensor) else None
        rows = x is not None and x.dim() > 0 and x.is_floating_point()
        sums = None
        if x is not None and rows:
            flat = x.detach().double().reshape(len(x), -1)
            sums = flat @ torch.arange(flat.shape[1], dtype=flat.dtype, device=x.device).cos_()
        _Now.record.append(Recorded(name, shape, sums))
        return None
    alone = threading.get_ident() == _Now.thread or torch._C._current_graph_task_id() != -1
    plain = all(type(t) in _PLAIN for t in taken if isinstance(t, torch.Tensor))
    if not alone or not plain or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    at = _Now.passes.get(torch.default_generator.initial_seed(), _Now.current)
    if at is None:
        return None
    if generator is not None:
        at.draws._say(
            f"{name} at {_where()} draws from a generator of the script's own: on another number "
            "of workers the numbers may be others"
        )
        return None
    number = at.number()
    layout = at.draws.layout(at, number, name, shape)
    return _Draw(at, number, layout, shape, device)


def _dropout(original: Any, name: str, input: Any, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1:
        return original(input, p, train)
    shape = tuple(input.shape)
    if "feature" in name:
        shape = (*shape[:2], *[1] * (len(shape) - 2))
    draw = _draw(name, shape, input.device, (input,))
    if draw is None:
        return original(input, p, train and _Now.record is None)
    noise = draw.kept(p).to(input.dtype)
    if "alpha" not in name:
        noise.mul_(1 / (1 - p))
        return input.mul_(noise) if name.endswith("_") else input * noise
    # Klambauer et al. 2017: what is dropped takes the activation's lower limit.
    limit = 1.7580993408473766
    a = 1 / math.sqrt((limit**2 * p + 1) * (1 - p))
    shift = noise.sub(1).mul_(limit * a).add_(limit * a * p)
    noise.mul_(a)
    return input.mul_(noise).add_(shift) if name.endswith("_") else input * noise + shift


def _rrelu(
    original: Any,
    name: str,
    input: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    draw = _draw(name, input.shape, input.device, (input,), generator) if training else None
    if draw is None:
        return original(input, lower, upper, training and _Now.record is None)
    slope = draw.uniform().mul_(upper - lower).add_(lower).to(input.dtype)
    slope = torch.where(input.detach() > 0, slope.new_ones(()), slope)
    return input.mul_(slope) if name.endswith("_") else input * slope


def _attention(
    original: Any,
    name: str,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    draw = None
    if dropout_p > 0:
        shape = (*query.shape[:-1], key.shape[-2])
        draw = _draw(name, shape, query.device, (query, key, value))
    if draw is None:
        dropout_p = dropout_p if _Now.record is None else 0.0
        more = {"scale": scale, "enable_gqa": enable_gqa}
        return original(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    noise = draw.kept(dropout_p).to(query.dtype).mul_(1 / (1 - dropout_p))
    return (torch._safe_softmax(scores, -1) * noise) @ value


def _multinomial(
    original: Any,
    name: str,
    input: Any,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Any = None,
    **more: Any,
) -> Any:
    chosen = replacement and num_samples > 1
    shape = (*input.shape[:-1], num_samples) if chosen else input.shape
    draw = None if more else _draw(name, shape, input.device, (input,), generator)
    if draw is None:
        return original(input, num_samples, replacement, generator=generator, **more)
    if chosen:
        sums = input.double().cumsum(-1)
        at = torch.searchsorted(sums, draw.uniform() * sums[..., -1:], right=True)
        return at.clamp_(max=input.shape[-1] - 1)
    return (input / draw.open().log_().neg_()).topk(num_samples).indices


def _randperm(original: Any, name: str, n: int, *args: Any, **kwargs: Any) -> Any:
    made, draw = _drawn(original, name, (n, *args), kwargs)
    if draw is None:
        return made
    if draw.layout.axis is not None:
        draw.at.draws._say(
            f"randperm({n}) at {_where()} permutes the samples of a worker's share, not those of "
            "the global batch"
        )
    return made.copy_(draw.words().argsort())


def _filled(draw: _Draw, kind: str, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """The numbers of a draw with the arguments of ``Tensor.<kind>_``; None for unusual ones."""

    def given(place: int, names: tuple[str, ...], default: Any) -> Any:
        named = [kwargs[n] for n in names if n in kwargs]
        return args[place] if len(args) > place else named[0] if named else default

    if kind == "bernoulli":
        return draw.uniform() < given(0, ("p",), 0.5)
    if kind == "uniform":
        low, high = given(0, ("from", "a"), 0.0), given(1, ("to", "b"), 1.0)
        return draw.uniform(dtype).mul_(high - low).add_(low)
    if kind == "normal":
        return draw.normal() * given(1, ("std",), 1.0) + given(0, ("mean",), 0.0)
    if kind == "exponential":
        return draw.open().log_().mul_(-1 / given(0, ("lambd",), 1.0))
    low, high = (0, args[0]) if len(args) == 1 else (given(0, ("from", "low"), 0), None)
    high = given(1, ("to", "high"), high)
    if high is None:
        high = 2 ** _FRACTION.get(dtype, _COMPLETE) if dtype.is_floating_point else None
        high = torch.iinfo(dtype).max if high is None else high
    return (draw.words() >> 1).bitwise_and_(2**62 - 1).remainder_(high - low).add_(low)


def _fill(original: Any, name: str, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of tensors that fills them, or ``torch.bernoulli``."""
    generator = kwargs.pop("generator", None)
    kind, inplace = name.rstrip("_"), name.endswith("_")
    draw = None
    if "out" not in kwargs and not self.is_complex():
        draw = _draw(name, self.shape, self.device, (self, *args), generator)
    if draw is None:
        made = original(self, *args, generator=generator, **kwargs)
        return made if _Now.record is None else _middle(made)
    if inplace:
        return self.copy_(_filled(draw, kind, self.dtype, args, kwargs))
    p = args[0] if args else kwargs.get("p", self)  # bernoulli, whose input has probabilities
    return (draw.uniform() < p).to(self.dtype)


def _middle(made: torch.Tensor) -> torch.Tensor:
    """A probe's numbers: they depend on nothing, so that the samples of two probes are alike."""
    with torch.no_grad():
        return made.fill_(0.5 if made.is_floating_point() else 0)


_FILLS = {"rand": "uniform", "randn": "normal", "randint": "random", "normal": "normal"}


def _drawn(
    original: Any, name: str, args: tuple[Any, ...], kwargs: Any
) -> tuple[torch.Tensor, _Draw | None]:
    """The tensor that torch makes, which says shape and type, and how to draw it again."""
    host = torch.default_generator.get_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    made = original(*args, **kwargs)
    if made.is_complex() or "out" in kwargs:
        return made, None
    after = torch.default_generator.get_state()
    torch.default_generator.set_state(host)
    draw = _draw(name, made.shape, made.device, (made, *args), kwargs.get("generator"))
    if draw is None:
        torch.default_generator.set_state(after)
    elif device is not None:
        torch.cuda.set_rng_state(device)
    return made, draw


def _create(original: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """A function that makes a tensor of random numbers."""
    made, draw = _drawn(original, name, args, kwargs)
    if draw is None:
        return made if _Now.record is None else _middle(made)
    kind = _FILLS[name.removesuffix("_like")]
    if name == "normal":
        values = {k: v for k, v in kwargs.items() if k in ("mean", "std")}
        filled = _filled(draw, kind, made.dtype, args[:2], values)
    elif kind == "random":
        bounds = args[1:] if name.endswith("_like") else args
        bounds = tuple(v for v in bounds if isinstance(v, int | torch.Tensor))
        bounds = bounds[:2]
        filled = _filled(draw, kind, made.dtype, bounds, kwargs)
    else:
        filled = _filled(draw, kind, made.dtype, (), {})
    with torch.no_grad():
        return made.copy_(filled)


def _replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
        for each in (name, f"{name}_"):
            yield torch._VF, each, _dropout
            yield torch, each, _dropout
    for name in ("rrelu", "rrelu_"):
        yield torch, name, _rrelu
    yield F, "scaled_dot_product_attention", _attention
    for name in ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal"):
        yield torch, name, _create
    yield torch, "randperm", _randperm
    yield torch, "bernoulli", _fill
    yield torch, "multinomial", _multinomial
    yield torch.Tensor, "multinomial", _multinomial
    yield torch.Tensor, "bernoulli", _fill
    for name in ("bernoulli", "uniform", "normal", "exponential", "random"):
        yield torch.Tensor, f"{name}_", _fill


def _wrapped(original: Any, name: str, make: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # First: a compiler would guard what is read here.
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return original(*args, **kwargs)
        if _Now.inside or not draws_globally():
            return original(*args, **kwargs)
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(call, (), *args, **kwargs)
        _Now.inside = True
        try:
            return make(original, name, *args, **kwargs)
        finally:
            _Now.inside = False

    return call


@functools.cache
def _wrappers() -> list[tuple[Any, str, Any]]:
    """Made once, so that those who tell functions apart by identity know them."""
    from torch.utils._device import _device_constructors

    made = [(o, name, _wrapped(getattr(o, name), name, make)) for o, name, make in _replacements()]
    # torch.set_default_device goes by identity, too
    _device_constructors().update(call for owner, _, call in made if owner is torch)
    return made


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Replace torch's functions that draw. Outside of passes they do what torch's do."""
    _Now.depth += 1
    if _Now.depth == 1:
        _Now.undo = contextlib.ExitStack()
        for owner, name, call in _wrappers():
            if name in vars(owner):
                _Now.undo.callback(setattr, owner, name, vars(owner)[name])
            else:
                _Now.undo.callback(delattr, owner, name)
            setattr(owner, name, call)
    try:
        yield
    finally:
        _Now.depth -= 1
        if not _Now.depth and _Now.undo is not None:
            _Now.undo.close()
