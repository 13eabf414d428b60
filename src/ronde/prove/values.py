"""Values as ``ronde prove`` writes them down: in float64, tensors as numbers that can be compared,
samples as digests.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ronde.world.tensors import map_tensors, named_tensors, parts

__all__ = [
    "HALVES",
    "cast",
    "digest_value",
    "generators",
    "half_of",
    "moved",
    "per_sample",
    "probe",
    "written",
]

_PARTS = 33  # one sample against the rest, two, …: enough to tell that samples weigh differently
# elements up to which a tensor is written as it is; a larger one as this many sums of blocks
_WHOLE = 1 << 14
HALVES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def cast(value: Any) -> Any:
    """A batch with every floating tensor in float64."""
    return map_tensors(
        lambda t: (
            t.double()
            if t.dtype in HALVES
            else t.to(torch.complex128)
            if t.dtype == torch.complex64
            else t
        ),
        value,
    )


_signs: dict[int, torch.Tensor] = {}


def _weights_of(n: int) -> torch.Tensor:
    """``n`` fixed random weights, without using up randomness."""
    if n not in _signs:
        if len(_signs) > 64:
            _signs.clear()
        drawn = np.random.Generator(np.random.PCG64(n)).uniform(0.5, 1.5, n) * np.random.Generator(
            np.random.PCG64(n + 1)
        ).choice([-1.0, 1.0], n)
        _signs[n] = torch.from_numpy(drawn)
    return _signs[n]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    full = getattr(tensor, "full_tensor", None)
    if full is not None:
        tensor = full()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor


def written(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as it is compared: whole, or as weighted sums of blocks where it is large."""
    flat = _whole(tensor).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    wide = flat.to(torch.float64)
    if wide.numel() > _WHOLE:
        block = -(-wide.numel() // _WHOLE)
        wide = torch.nn.functional.pad(wide, (0, block * _WHOLE - wide.numel())).view(
            _WHOLE, block
        ) @ _weights_of(block)
    return _array(wide)


def per_sample(tensor: torch.Tensor, samples: int) -> np.ndarray[Any, Any]:
    """One number for each sample: a fixed random sum of what it has."""
    flat = tensor.detach().reshape(samples, -1)
    flat = torch.view_as_real(flat).reshape(samples, -1) if flat.is_complex() else flat
    return _array(flat.to(torch.float64) @ _weights_of(flat.shape[1]))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy. ``numpy()`` of the tensor itself would keep its memory from ever being resized, which
    FSDP2 does with a gathered parameter.
    """
    return tensor.detach().cpu().clone().numpy()


def digest_value(value: Any) -> str:
    """A sample's content in a few letters; what is neither tensors nor numbers counts by its
    type.
    """
    found = hashlib.blake2b(digest_size=8)

    def add(v: Any) -> None:
        if isinstance(v, torch.Tensor):
            found.update(f"{v.dtype}{tuple(v.shape)}".encode())
            found.update(
                _array(v.contiguous().reshape(-1).view(torch.uint8)).tobytes() if v.numel() else b""
            )
        elif isinstance(v, np.ndarray):
            found.update(f"{v.dtype}{v.shape}".encode() + v.tobytes())
        elif (held := parts(v)) is not None:
            for k, part in held.items():
                add(k)
                add(part)
        elif v is None or isinstance(v, str | bytes | int | float | bool | np.generic):
            found.update(repr(v).encode())
        else:
            found.update(type(v).__name__.encode())

    add(value)
    return found.hexdigest()


def generators() -> tuple[Any, ...]:
    """The states of torch's, Python's and numpy's generators."""
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        np.random.get_state(legacy=False),
    )


def moved(before: tuple[Any, ...]) -> list[str]:
    """Which of the three generators were drawn from."""
    now = generators()
    found = [] if torch.equal(before[0], now[0]) else ["torch"]
    if before[1] != now[1]:
        found.append("random")
    if repr(before[2]) != repr(now[2]):
        found.append("numpy.random")
    return found


def _slice(values: tuple[Any, ...], samples: int, low: int, high: int) -> tuple[Any, ...]:
    def cut(v: torch.Tensor) -> torch.Tensor:
        if v.dim() and v.shape[0] and v.shape[0] % samples == 0:
            rows = v.shape[0] // samples
            return v[low * rows : high * rows]
        return v

    return tuple(map_tensors(cut, v) for v in values)


def half_of(batch: Any) -> Any:
    """The first half of a batch: of every tensor that has as many rows as the first one."""
    samples = next(len(t) for _, t in named_tensors(batch) if t.dim())
    (half,) = _slice((batch,), samples, 0, -(-samples // 2))
    return half


def _mean_gradient(
    loss: Callable[..., Any], values: tuple[Any, ...], samples: int, part: int
) -> bool:
    """Whether the gradient of the first samples is, but for their number, the same alone and among
    all. True where it cannot be asked.
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
        with torch.enable_grad():
            value = loss(first, *others)
        found = torch.autograd.grad(value, leaves, allow_unused=True)
        return torch.cat(
            [
                torch.mul(g, stop).reshape(stop, -1)
                for g in found
                if g is not None and g.shape[0] == stop
            ],
            dim=1,
        )

    try:
        alone, among = gradient(part), gradient(samples)
    except Exception:
        return True
    return bool(
        torch.allclose(alone, among[: len(alone)], rtol=1e-6, atol=1e-9 * float(among.abs().max()))
    )


def _mean_of_any(
    loss: Callable[..., Any], values: tuple[Any, ...], samples: int, whole: float
) -> bool:
    """Whether it is a mean wherever the samples are parted: thirds may weigh the same by chance."""
    for part in range(1, min(samples, _PARTS)):
        try:
            with torch.no_grad():
                first, rest = (
                    float(loss(*_slice(values, samples, *cut)))
                    for cut in ((0, part), (part, samples))
                )
        except Exception:
            continue  # one sample alone may be too few for it
        if math.isfinite(first + rest) and not math.isclose(
            whole * samples, first * part + rest * (samples - part), rel_tol=1e-9, abs_tol=1e-12
        ):
            return False
    return True


def _pair(f: dict[str, tuple[float, float]]) -> str:
    """What kind of ``(sum, weight)``: is each the sum of what its parts give? The weight may be the
    same constant everywhere.
    """

    def adds(i: int) -> bool:
        return math.isclose(
            f["abc"][i], f["ab"][i] + f["c"][i], rel_tol=1e-9, abs_tol=1e-12
        ) and math.isclose(f["ab"][i], f["a"][i] + f["b"][i], rel_tol=1e-9, abs_tol=1e-12)

    if not adds(1):
        return "pair-weight"
    if adds(0):
        return "pair"
    mean = {k: (s * w, w) for k, (s, w) in f.items()}
    f = mean
    return "pair-mean" if adds(0) else "pair-other"


def probe(loss: Callable[..., Any], values: tuple[Any, ...], samples: int) -> str:
    """What kind of function of its samples a loss is: ``mean``, ``sum``, ``weighted``,
    ``over-batch``, ``state``, ``pair`` or ``unknown``.

    ``state``: asked again about the same samples it answers otherwise. ``over-batch``: neither, or
    its gradient is not that of a mean. ``pair-mean``, ``pair-weight``, ``pair-other``: a pair of
    which the first is a mean already, the second does not add up, or the first is neither.
    """
    if samples < 3 or not any(
        t.dim() and t.shape[0] % samples == 0 for v in values[:1] for _, t in named_tensors(v)
    ):
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
        with torch.no_grad():
            found: dict[str, Any] = {k: loss(*_slice(values, samples, *c)) for k, c in cuts.items()}
        if any(isinstance(v, tuple | list) for v in found.values()):
            return _pair({k: (float(v[0]), float(v[1])) for k, v in found.items()})
        f = {k: float(v) for k, v in found.items()}
        with torch.no_grad():
            again = float(loss(*_slice(values, samples, *cuts["abc"])))
    except Exception:
        return "unknown"
    n = {k: high - low for k, (low, high) in cuts.items()}

    def near(x: float, y: float) -> bool:
        return math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-12)

    if not all(map(math.isfinite, f.values())):
        return "unknown"
    if not near(again, f["abc"]):
        return "state"
    if near(f["abc"] * n["abc"], f["ab"] * n["ab"] + f["c"] * n["c"]) and near(
        f["ab"] * n["ab"], f["a"] * n["a"] + f["b"] * n["b"]
    ):
        if not _mean_gradient(loss, values, samples, third):
            return "over-batch"
        return "mean" if _mean_of_any(loss, values, samples, f["abc"]) else "weighted"
    if near(f["abc"], f["ab"] + f["c"]) and near(f["ab"], f["a"] + f["b"]):
        return "sum"
    # what does not depend on the samples: a penalty on the weights
    more = f["ab"] + f["c"] - f["abc"]
    if math.isclose(more, f["a"] + f["bc"] - f["abc"], rel_tol=1e-9) and math.isclose(
        more, f["a"] + f["b"] - f["ab"], rel_tol=1e-9
    ):
        return "sum"
    try:
        b = (f["ab"] - f["a"]) / (f["b"] - f["ab"])  # weights relative to a's
        c = b * (f["bc"] - f["b"]) / (f["c"] - f["bc"])
        whole = (f["a"] + b * f["b"] + c * f["c"]) / (1 + b + c)
    except ZeroDivisionError:  # parts that change nothing, as they do in a maximum
        return "over-batch"
    return (
        "weighted"
        if b > 0 and c > 0 and math.isclose(whole, f["abc"], rel_tol=1e-10)
        else "over-batch"
    )
