"""Samples of what a server saw, and how far they are from what the model was checked on."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ronde.ship.bundle import Bundle
from ronde.ship.runtime import stored_samples
from ronde.tables.scores import stability
from ronde.world import ArgumentError

__all__ = ["Capture", "Drift", "watch_captures"]


class Capture:
    """Appends a share of the requests to a file of JSON lines, up to a size.

    Args:
        file: of the lines.
        share: of the requests, 0 to 1.
        most_bytes: beyond which nothing is written.
    """

    def __init__(self, file: Path, share: float, most_bytes: int = 64 << 20) -> None:
        if not 0 < share <= 1:
            raise ArgumentError(f"--sample {share}: expected a share above 0, at most 1.")
        written = file.stat().st_size if file.exists() else 0
        self._file, self._share, self._rest = file, share, most_bytes - written
        self._random, self._lock = random.Random(), threading.Lock()

    def write(self, serial: int, inputs: Any, outputs: Any, seconds: float) -> None:
        """Write a request, perhaps. A disk that fails does not fail the prediction."""
        if self._random.random() >= self._share:
            return
        values = {"serial": serial, "seconds": seconds, "inputs": inputs, "outputs": outputs}
        line = json.dumps(values) + "\n"
        with self._lock:
            if len(line) > self._rest:  # a shorter one may still fit
                return
            self._rest -= len(line)
            try:
                with self._file.open("a") as file:
                    file.write(line)
            except OSError:
                self._rest = 0


@dataclass(frozen=True)
class Drift:
    """One column of an input.

    Attributes:
        column: for example ``x[3]``.
        index: population stability index against the stored samples; above 0.25 it has shifted.
        missing: share of values that are not finite.
        shifted: whether to look at it.
    """

    column: str
    index: float
    missing: float
    shifted: bool


def _columns(name: str, values: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    flat = values.reshape(len(values), -1).astype(np.float64)
    if flat.shape[1] <= 64:  # of an image, say, mean and spread
        return {f"{name}[{i}]": flat[:, i] for i in range(flat.shape[1])}
    return {f"{name} mean": flat.mean(axis=1), f"{name} spread": flat.std(axis=1)}


def stability_index(expected: np.ndarray[Any, Any], seen: np.ndarray[Any, Any]) -> float:
    """Population stability index of values: bins are quantiles of those that are expected.

    Example:
        >>> stability_index(np.arange(100.0), np.arange(100.0))
        0.0
    """
    expected, seen = (v[np.isfinite(v)] for v in (expected, seen))
    if not len(expected) or not len(seen):
        return math.inf
    quantiles = np.unique(np.quantile(expected, np.linspace(0, 1, 9)[1:-1]))
    # below and at each: of a column with few values, a shift downwards leaves a bin as well
    edges = np.unique(np.concatenate([np.nextafter(quantiles, -np.inf), quantiles]))
    places = (np.searchsorted(edges, values, side="left") for values in (expected, seen))
    return stability(*(np.bincount(each, minlength=len(edges) + 1) for each in places))


def _chance(expected: int, seen: int) -> float:
    """The index that two samples of one distribution exceed once in a hundred times, about: it is
    chi-squared with seven degrees of freedom, scaled.
    """
    return 18.5 * (1 / expected + 1 / seen)


def watch_captures(bundle: Bundle, lines: Iterable[str]) -> dict[str, Any]:
    """What captures say: drift of each column, values that are not finite, latency, versions.

    Args:
        bundle: with the samples to compare with.
        lines: of :class:`Capture`; a torn last line is left out.

    Raises:
        ArgumentError: there is none.
    """
    expected, _ = stored_samples(bundle)
    seen: dict[str, list[Any]] = {name: [] for name in expected}
    seconds: list[float] = []
    serials: dict[str, int] = {}
    bad = 0
    for line in lines:
        try:
            values = json.loads(line)
            rows = {name: np.asarray(values["inputs"][name], dtype=np.float64) for name in seen}
            took = float(values["seconds"])
            if any(rows[n].shape[1:] != expected[n].shape[1:] for n in rows):
                raise ValueError("another model's")
        except (ValueError, KeyError, TypeError):
            bad += 1
            continue
        for name, array in rows.items():
            seen[name].append(array)
        seconds.append(took)
        serial = str(values.get("serial"))
        serials[serial] = serials.get(serial, 0) + 1
    if not seconds:
        raise ArgumentError("there is no captured request to compare.")
    drifts = []
    for name, stored in expected.items():
        known = _columns(name, stored)
        now = _columns(name, np.concatenate(seen[name]))
        for column, values in now.items():
            index = stability_index(known[column], values)
            missing = float(np.mean(~np.isfinite(values)))
            limit = max(0.25, _chance(len(known[column]), len(values)))
            drifts.append(Drift(column, index, missing, index > limit or missing > 0))
    low, high = np.quantile(seconds, [0.5, 0.99])
    return {
        "requests": len(seconds),
        "rows": int(sum(len(a) for a in next(iter(seen.values())))),
        "unreadable": bad,
        "serials": serials,
        "seconds": {"median": float(low), "p99": float(high)},
        "columns": [d.__dict__ for d in drifts],
    }
