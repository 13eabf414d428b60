"""Values as ``ronde prove`` records them: tensors as float64 arrays, samples as digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ronde.world.tensors import map_tensors, named_tensors, parts

__all__ = [
    "Array",
    "NARROW",
    "cast",
    "count_rows",
    "digest_value",
    "per_sample",
    "probe",
    "to_array",
]

Array = npt.NDArray[Any]
Loss = Callable[..., Any]
Draw = Callable[[int, int], None]

_WHOLE_ELEMENTS = 1 << 14  # elements; a larger tensor is recorded as this many sums of blocks
NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


def cast(value: Any) -> Any:
    """A batch with every floating tensor in float64."""

    def widen(t: torch.Tensor) -> torch.Tensor:
        if t.dtype in NARROW:
            return t.double()
        return t.to(torch.complex128) if t.dtype == torch.complex64 else t

    return map_tensors(widen, value)


def count_rows(batch: Any, samples: int) -> int | None:
    """The rows of a batch: as many as samples if a tensor has an axis of that length, or the length
    of all tensors' first axis; None if they have different ones.
    """
    shapes = [tensor.shape for _, tensor in named_tensors(batch) if tensor.dim()]
    if not shapes or any(samples in shape for shape in shapes):
        return samples
    lengths = {shape[0] for shape in shapes}
    return lengths.pop() if len(lengths) == 1 else None


_weights: dict[int, torch.Tensor] = {}


def _weights_of(n: int) -> torch.Tensor:
    """``n`` fixed random weights, without drawing from global generators."""
    if n not in _weights:
        if len(_weights) > 64:
            _weights.clear()
        sizes = np.random.Generator(np.random.PCG64(n)).uniform(0.5, 1.5, n)
        signs = np.random.Generator(np.random.PCG64(n + 1)).choice([-1.0, 1.0], n)
        _weights[n] = torch.from_numpy(sizes * signs)
    return _weights[n]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    full = getattr(tensor, "full_tensor", None)
    if full is not None:
        tensor = full()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor


def to_array(tensor: torch.Tensor) -> Array:
    """A tensor for comparison: whole, or as weighted sums of blocks if it is large."""
    flat = _whole(tensor).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    wide = flat.to(torch.float64)
    if wide.numel() > _WHOLE_ELEMENTS:
        block = -(-wide.numel() // _WHOLE_ELEMENTS)
        padded = torch.nn.functional.pad(wide, (0, block * _WHOLE_ELEMENTS - wide.numel()))
        wide = padded.view(_WHOLE_ELEMENTS, block) @ _weights_of(block)
    return _copy(wide)


def per_sample(tensor: torch.Tensor, samples: int) -> Array:
    """One number for each sample: a weighted sum of its values."""
    flat = tensor.detach().reshape(samples, -1)
    flat = torch.view_as_real(flat).reshape(samples, -1) if flat.is_complex() else flat
    return _copy(flat.to(torch.float64) @ _weights_of(flat.shape[1]))


def _copy(tensor: torch.Tensor) -> Array:
    # numpy() pins the storage of the tensor itself, but FSDP2 resizes that of a gathered parameter
    return tensor.detach().cpu().clone().numpy()


def digest_value(value: Any) -> str:
    """A sample's content in a few letters; an object of an unknown class counts by its type."""
    content = hashlib.blake2b(digest_size=8)

    def add(v: Any) -> None:
        if isinstance(v, torch.Tensor):
            content.update(f"{v.dtype}{tuple(v.shape)}".encode())
            if v.numel():
                content.update(_copy(v.contiguous().reshape(-1).view(torch.uint8)).tobytes())
        elif isinstance(v, np.ndarray):
            content.update(f"{v.dtype}{v.shape}".encode() + v.tobytes())
        elif (inner := parts(v)) is not None:
            for k, part in inner.items():
                add(k)
                add(part)
        elif v is None or isinstance(v, str | bytes | int | float | bool | np.generic):
            content.update(repr(v).encode())
        else:
            content.update(type(v).__name__.encode())

    add(value)
    return content.hexdigest()


def _as_it_draws(low: int, high: int) -> None:
    """Random numbers of a loss stay as they are."""


def _slice(values: tuple[Any, ...], samples: int, low: int, high: int) -> tuple[Any, ...]:
    def cut(v: torch.Tensor) -> torch.Tensor:
        if v.dim() and v.shape[0] and v.shape[0] % samples == 0:
            rows = v.shape[0] // samples
            return v[low * rows : high * rows]
        return v

    return tuple(map_tensors(cut, v) for v in values)


def _mean_gradient(
    loss: Loss, values: tuple[Any, ...], samples: int, part: int, draw: Draw
) -> bool:
    """Whether the first samples have the same gradient alone as among all, times their number.
    True if the loss cannot be asked.
    """

    def gradient(stop: int) -> torch.Tensor:
        leaves: list[torch.Tensor] = []

        def leaf(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point():
                return t
            leaves.append(t.detach().clone().requires_grad_())
            return leaves[-1]

        first, *others = _slice(values, samples, 0, stop)
        first = map_tensors(leaf, first)
        draw(0, stop)
        with torch.enable_grad():
            value = loss(first, *others)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        rows = [g for g in gradients if g is not None and g.shape[0] == stop]
        return torch.cat([torch.mul(g, stop).reshape(stop, -1) for g in rows], dim=1)

    try:
        alone, among = gradient(part), gradient(samples)
    except Exception:
        return True
    floor = 1e-9 * float(among.abs().max())
    return bool(torch.allclose(alone, among[: len(alone)], rtol=1e-6, atol=floor))


def _mean_of_any(ask: Loss, samples: int, whole: float) -> bool:
    """Whether it is a mean for any cut of the samples: thirds may weigh the same by chance."""
    # one sample against the rest, two, …: enough to tell that samples weigh differently
    for part in range(1, min(samples, 33)):
        try:
            first, rest = float(ask(0, part)), float(ask(part, samples))
        except Exception:
            continue  # one sample alone may be too few for it
        mean = first * part + rest * (samples - part)
        if math.isfinite(first + rest) and not _near(whole * samples, mean):
            return False
    return True


def _near(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-12)


def _pair(f: dict[str, tuple[float, float]]) -> str:
    """The kind of ``(sum, weight)``: does each add up over parts?"""

    def adds_up(v: dict[str, float]) -> bool:
        return _near(v["abc"], v["ab"] + v["c"]) and _near(v["ab"], v["a"] + v["b"])

    if not adds_up({k: weight for k, (_, weight) in f.items()}):
        return "pair-weight"
    if adds_up({k: total for k, (total, _) in f.items()}):
        return "pair"
    is_mean = adds_up({k: total * weight for k, (total, weight) in f.items()})
    return "pair-mean" if is_mean else "pair-other"


def probe(loss: Loss, values: tuple[Any, ...], samples: int, draw: Draw = _as_it_draws) -> str:
    """The kind of function that a loss is of its samples: ``mean``, ``sum``, ``weighted``,
    ``over-batch``, ``state``, ``pair``, or ``unknown``.

    ``state``: the same samples give another value the second time. ``over-batch``: none of these,
    or its gradient is not that of a mean. ``pair-mean``, ``pair-weight``, ``pair-other``: a pair
    whose first is a mean, whose second does not add up, or whose first is neither sum nor mean.

    Args:
        loss: takes ``values``.
        values: its arguments for all samples.
        samples: their number.
        draw: called with the first and last sample, plus one, of each call of the loss.
    """

    def ask(low: int, high: int) -> Any:
        draw(low, high)
        with torch.no_grad():
            return loss(*_slice(values, samples, low, high))

    tensors = [t for v in values[:1] for _, t in named_tensors(v)]
    if samples < 3 or not any(t.dim() and t.shape[0] % samples == 0 for t in tensors):
        return "unknown"
    third, two = max(1, samples // 3), max(2, 2 * samples // 3)
    cuts = {
        "a": (0, third),
        "b": (third, two),
        "c": (two, samples),
        "ab": (0, two),
        "bc": (third, samples),
        "abc": (0, samples),
    }
    try:
        losses = {k: ask(*cut) for k, cut in cuts.items()}
        if any(isinstance(v, tuple | list) for v in losses.values()):
            return _pair({k: (float(v[0]), float(v[1])) for k, v in losses.items()})
        f = {k: float(v) for k, v in losses.items()}
        again = float(ask(*cuts["abc"]))
    except Exception:
        return "unknown"
    if not all(map(math.isfinite, f.values())):
        return "unknown"
    if not _near(again, f["abc"]):
        return "state"
    totals = {k: f[k] * (high - low) for k, (low, high) in cuts.items()}
    is_mean = _near(totals["abc"], totals["ab"] + totals["c"])
    if is_mean and _near(totals["ab"], totals["a"] + totals["b"]):
        if not _mean_gradient(loss, values, samples, third, draw):
            return "over-batch"
        return "mean" if _mean_of_any(ask, samples, f["abc"]) else "weighted"
    if _near(f["abc"], f["ab"] + f["c"]) and _near(f["ab"], f["a"] + f["b"]):
        return "sum"
    # a part that does not depend on the samples: a penalty on the weights
    more = f["ab"] + f["c"] - f["abc"]
    if math.isclose(more, f["a"] + f["bc"] - f["abc"], rel_tol=1e-9) and math.isclose(
        more, f["a"] + f["b"] - f["ab"], rel_tol=1e-9
    ):
        return "sum"
    try:
        b = (f["ab"] - f["a"]) / (f["b"] - f["ab"])  # weights relative to a's
        c = b * (f["bc"] - f["b"]) / (f["c"] - f["bc"])
        whole = (f["a"] + b * f["b"] + c * f["c"]) / (1 + b + c)
    except ZeroDivisionError:  # some samples change nothing, as in a maximum
        return "over-batch"
    is_weighted = b > 0 and c > 0 and math.isclose(whole, f["abc"], rel_tol=1e-10)
    return "weighted" if is_weighted else "over-batch"
