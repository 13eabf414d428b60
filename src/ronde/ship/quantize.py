"""A model in 8 bits: calibrated on samples, judged by class and by speed."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ronde.ship.bundle import ShipError
from ronde.ship.runtime import open_session

__all__ = ["Int8Verdict", "judge_int8", "quantize"]

_CALIBRATION_SAMPLES = 32
_SPEEDUP = 1.5  # below it, 8 bits are not offered

Inputs = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Int8Verdict:
    """How a quantized model compares with the exported one.

    Attributes:
        accuracy: of the exported model, and of the quantized one.
        worst: slice, and the points of accuracy that it loses.
        speedup: of a batch, here: a median of alternating rounds.
        refused: why it is not offered; empty if it is.
    """

    accuracy: tuple[float, float]
    worst: tuple[str, float]
    speedup: float
    refused: str = ""


def quantize(model: Path, inputs: Inputs, target: Path) -> None:
    """Write a copy with 8-bit weights, per channel, and activations calibrated on these samples.

    Raises:
        ShipError: the model has inputs that are not floats, or the quantizer fails.
    """
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    def batches() -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        n = len(next(iter(inputs.values())))
        for low in range(0, n, _CALIBRATION_SAMPLES):
            yield {k: v[low : low + _CALIBRATION_SAMPLES] for k, v in inputs.items()}

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rest = batches()

        def get_next(self) -> Any:
            return next(self.rest, None)

    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.onnx"
        try:
            quant_pre_process(str(model), str(ready), skip_symbolic_shape=True)
            quantize_static(
                str(ready),
                str(target),
                Reader(),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8,
            )
        except Exception as error:  # onnxruntime's own classes have no common base
            raise ShipError(f"--int8: the quantizer fails: {str(error)[:200]}") from None


def judge_int8(
    model: Path,
    small: Path,
    inputs: Inputs,
    labels: np.ndarray[Any, Any],
    slices: Sequence[Any] | None,
    most_drop: float,
) -> Int8Verdict:
    """Compare accuracies, whole and by slice, and speeds.

    Args:
        labels: class numbers, ``[samples]``; the model's first output is ``[samples, classes]``.
        slices: of the samples; None: their labels.
        most_drop: of accuracy, as a share: 0.005.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise ShipError(
            f"--int8 needs 'target' as class numbers, one for each sample; it has shape "
            f"{labels.shape} and type {labels.dtype}."
        )
    if slices is not None and len(slices) != len(labels):
        raise ShipError(f"'slice' has {len(slices)} values for {len(labels)} samples.")
    # one thread each: what is compared is the arithmetic, not the cores that are free
    plain, quick = open_session(model, threads=1), open_session(small, threads=1)
    feeds = dict(inputs)
    hits = []
    for session in (plain, quick):
        out = session.run(None, feeds)[0]
        if out.ndim != 2 or len(out) != len(labels):
            raise ShipError(
                f"--int8 is judged by accuracy, and output 0 has shape {out.shape}: give a model "
                "with one score per class."
            )
        hits.append(out.argmax(1) == labels)
    before, after = (float(h.mean()) for h in hits)
    names = np.asarray([str(s) for s in (labels if slices is None else slices)])
    losses = {}
    for name in dict.fromkeys(names.tolist()):
        mine = names == name
        losses[name] = (int(hits[0][mine].sum()) - int(hits[1][mine].sum()), int(mine.sum()))
    name, (fewer, of) = max(losses.items(), key=lambda kv: kv[1][0] / kv[1][1])
    speedup = _speedup(plain, quick, {k: v[:_CALIBRATION_SAMPLES] for k, v in feeds.items()})
    refused = ""
    if fewer / of > most_drop:
        refused = (
            f"int8 drops {'class' if slices is None else 'slice'} {name!r} by "
            f"{100 * fewer / of:.1f} points (limit {100 * most_drop:g}): {fewer} of {of} fewer. "
            "Calibrate on more data, or ship without --int8."
        )
    elif before - after > most_drop:
        refused = f"int8 drops accuracy from {before:.1%} to {after:.1%}."
    elif speedup < _SPEEDUP:
        refused = f"int8 is {speedup:.2f}x as fast here, less than {_SPEEDUP}x: not offered."
    return Int8Verdict((before, after), (name, 100 * fewer / of), speedup, refused)


def _speedup(plain: Any, quick: Any, feeds: Inputs) -> float:
    ratios = []
    for _ in range(7):  # in turn: another process slows both down
        seconds = []
        for session in (plain, quick):
            start = time.perf_counter()
            session.run(None, dict(feeds))
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)
