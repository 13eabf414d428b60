"""Is an export the model? Measured against the rounding floor, not against a fixed tolerance.

A float64 twin of the model is the truth. ``e32`` is how far the model itself, in float32, is from
it; the export may be eight times as far. A fixed tolerance is too loose for one model and too
tight for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ronde.measure.model_call import ModelCall, inference_copy
from ronde.ship.bundle import ShipError
from ronde.ship.runtime import deviations, first_line, open_session

__all__ = ["Floor", "check_export", "model_outputs", "session_inputs"]

_TIMES_FLOOR = 8.0  # other kernels add in another order: 1.0 to 3 was seen on sound exports
_TINY_ULPS = 4.0  # of an output's scale: where the model happens to be exact
_ULPS_WITHOUT_TWIN = 32.0
_GAP, _LARGEST = 1e3, float(np.finfo(np.float64).max)
_HUGE_ULPS = 64.0


@dataclass(frozen=True)
class Floor:
    """The comparison of one output.

    Attributes:
        model: largest difference between the model and its float64 twin.
        export: largest difference between the export and the twin.
        limit: what it may be.
        scale: largest absolute value of the output.
        samples: how many were compared.
        ordinary: the largest magnitude that is judged by the limit; larger ones by their own ulps.
    """

    model: float
    export: float
    limit: float
    scale: float
    samples: int
    ordinary: float = _LARGEST


def model_outputs(model: nn.Module, call: ModelCall) -> list[torch.Tensor]:
    """The tensors that a model returns."""
    with torch.no_grad():
        leaves, _ = tree_flatten(model(*call.args, **call.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _twin(model: nn.Module, call: ModelCall) -> nn.Module | None:
    """The model in float64, or None if it cannot compute there."""
    twin = inference_copy(model).double()
    try:
        out = model_outputs(twin, call.rows(0, min(2, call.samples)).double())
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    wide = all(o.dtype == torch.float64 for o in out if o.is_floating_point())
    return twin if wide and out else None


def check_export(model: nn.Module, path: Path | bytes, call: ModelCall) -> list[Floor]:
    """Compare an export with the model, sample by sample: at batch sizes 1, 7 and the example's,
    with the runtime's optimizations on and off.

    Args:
        model: in any mode; a copy is evaluated.
        path: the ONNX file, or its bytes.
        call: arguments of a batch, the more samples the better.

    Returns:
        One for each output.

    Raises:
        ShipError: the export is another function: which output, how far off, on which sample.
    """
    plain = inference_copy(model)
    whole = call.samples
    twin = _twin(plain, call)
    own, truth = _truth(plain, twin, call)
    for i, out in enumerate(own):
        if out.ndim == 0 or out.shape[0] != whole:
            raise ShipError(
                f"output {i} has shape {out.shape} for {whole} samples: only outputs with one row "
                "per sample can be checked."
            )
    floors = _limits(own, truth, twin is not None)
    worst = [0.0] * len(own)
    sessions = {}
    for optimized in (True, False):
        sessions[optimized] = open_session(path, optimized=optimized)
    # 1 is broadcast where it should not be, 7 divides nothing, the whole is the example's own size
    for size in dict.fromkeys((1, 7, whole)):
        for low in _starts(whole, size):
            part = call.rows(low, min(low + size, whole))
            # its own: some models look at the whole batch
            true = truth if size >= whole else _truth(plain, twin, part, own=False)[1]
            for optimized, session in sessions.items():
                got = _run(session, part)
                _compare(got, true, floors, worst, low, size, optimized)
    return [
        dataclasses.replace(f, export=w, samples=whole) for f, w in zip(floors, worst, strict=True)
    ]


def _truth(
    model: nn.Module, twin: nn.Module | None, call: ModelCall, own: bool = True
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """What the model gives (if asked), and what its twin does: the same, where there is none."""
    try:
        mine = [_array(o) for o in model_outputs(model, call)] if own or twin is None else []
        true = [_array(o) for o in model_outputs(twin, call.double())] if twin else mine
    except RuntimeError as error:
        raise ShipError(
            f"the model itself fails for a batch of {call.samples}: {first_line(error)}"
        ) from None
    return mine, true


def _array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    if value.dtype == torch.bfloat16:
        raise ShipError("the model computes in bfloat16, which NumPy lacks: export it in float32.")
    return value.numpy()


def _starts(whole: int, size: int) -> Sequence[int]:
    """Where batches of a size begin: some of them, spread over the samples, because the whole batch
    is compared as well.
    """
    starts = range(0, whole, size)
    return starts[:: max(1, len(starts) // 8)]


def _limits(
    own: list[np.ndarray[Any, Any]],
    truth: list[np.ndarray[Any, Any]],
    twin: bool,
) -> list[Floor]:
    floors = []
    for mine, true in zip(own, truth, strict=True):
        if not np.issubdtype(mine.dtype, np.floating):
            floors.append(Floor(0.0, 0.0, 0.0, 0.0, len(mine)))
            continue
        finite = np.isfinite(true)
        if bool((lost := finite & ~np.isfinite(mine)).any()):
            sample = int(np.argwhere(lost)[0][0])
            raise ShipError(
                f"the model itself overflows on sample {sample}: it gives "
                f"{mine[lost].flat[0]} where float64 gives {true[lost].flat[0]:.3g}."
            )
        ordinary = _ordinary(true)
        plain = finite & (np.abs(true).astype(np.float64) <= ordinary)
        scale = float(np.abs(true[plain]).max(initial=0.0))
        ulp = float(np.finfo(mine.dtype).eps) * scale
        e32 = float(np.abs(mine[plain].astype(np.float64) - true[plain]).max(initial=0.0))
        limit = _TIMES_FLOOR * e32 + _TINY_ULPS * ulp if twin else _ULPS_WITHOUT_TWIN * ulp
        floors.append(Floor(e32, 0.0, limit, scale, len(mine), ordinary))
    return floors


def _ordinary(true: np.ndarray[Any, Any]) -> float:
    """The largest magnitude below a gap of 1e3: values beyond it, such as masks of -1e9, are judged
    by themselves, because their rounding says nothing about the others.
    """
    sizes = np.sort(np.abs(true[np.isfinite(true) & (true != 0)]).reshape(-1))
    few = max(1, len(sizes) // 100)  # single values near 0 are no group of their own
    gaps = np.flatnonzero(sizes[few:] >= _GAP * sizes[few - 1 : -1])
    return float(sizes[few - 1 + gaps[0]]) if gaps.size else _LARGEST


def session_inputs(session: Any, part: ModelCall) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a call by the names of an export's inputs.

    Raises:
        ShipError: the export has not all of them.
    """
    names = [i.name for i in session.get_inputs()]
    tensors = part.tensors
    if len(names) != len(tensors):
        raise ShipError(
            f"the export takes {len(names)} inputs, the model {len(tensors)}: the exporter dropped "
            "some that it does not use."
        )
    return {n: t.contiguous().numpy() for n, t in zip(names, tensors, strict=True)}


def _run(session: Any, part: ModelCall) -> list[np.ndarray[Any, Any]]:
    feeds = session_inputs(session, part)
    try:
        return list(session.run(None, feeds))
    except Exception as error:
        raise ShipError(
            f"the export fails for a batch of {part.samples}: {first_line(error)}"
        ) from None


def _compare(
    got: list[np.ndarray[Any, Any]],
    truth: list[np.ndarray[Any, Any]],
    floors: list[Floor],
    worst: list[float],
    low: int,
    size: int,
    optimized: bool,
) -> None:
    if len(got) != len(truth):
        raise ShipError(f"the export has {len(got)} outputs, the model {len(truth)}.")
    for i, (mine, true, floor) in enumerate(zip(got, truth, floors, strict=True)):
        if mine.shape != true.shape:
            raise ShipError(f"output {i} has shape {mine.shape}, the model's {true.shape}.")
        off = deviations(mine, true)
        huge = np.abs(true).astype(np.float64) > floor.ordinary
        with np.errstate(invalid="ignore"):
            own = _HUGE_ULPS * float(np.finfo(mine.dtype).eps) * np.abs(true) if huge.any() else 0.0
        off = np.where(huge & (off <= own), 0.0, off)
        worst[i] = max(worst[i], float(off.max(initial=0.0)))
        if off.size and float(off.max()) > floor.limit:
            sample = low + int(np.unravel_index(int(off.argmax()), off.shape)[0])
            how = "" if optimized else ", without the runtime's optimizations"
            raise ShipError(
                f"the export is another function: output {i} is off by {off.max():.2g} on sample "
                f"{sample}, at batch size {size}{how}. The model's own rounding is "
                f"{floor.model:.2g}, the limit {floor.limit:.2g}."
            )
