"""Corrections from earlier runs: measured over predicted step time, per cluster and plan family.

Stored in a small JSON file, ``corrections.json``, in ``$RONDE_STATE``, ``$XDG_STATE_HOME/ronde`` or
``~/.local/state/ronde``. It is replaced atomically. An unreadable file is set aside, because
monitoring must not break training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ronde.predict.cluster import Cluster
from ronde.watch.whole_file import write_whole
from ronde.world import ArgumentError

_KEPT = 20  # residuals of one family
_USED = 5  # the last ones, of which the median is the factor


def corrections_file() -> Path:
    """Path of the corrections file."""
    own = os.environ.get("RONDE_STATE")
    if own:
        return Path(own) / "corrections.json"
    state = os.environ.get("XDG_STATE_HOME")
    return (
        (Path(state) if state else Path.home() / ".local" / "state") / "ronde" / "corrections.json"
    )


def record(
    cluster_name: str, family: str, predicted_seconds: float, measured_seconds: float
) -> float:
    """Store one ratio and return the family's new factor.

    Args:
        cluster_name: whose.
        family: :attr:`Plan.family` of what ran.
        predicted_seconds: the raw prediction, without a correction.
        measured_seconds: of one optimizer step.

    Raises:
        ArgumentError: a time is not above 0.
    """
    for name, value in (
        ("predicted_seconds", predicted_seconds),
        ("measured_seconds", measured_seconds),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ArgumentError(f"corrections: {name}={value!r} must be above 0 and finite.")
    path = corrections_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        everything = _read(path, set_aside=True)
        rows = everything.setdefault(cluster_name, {}).setdefault(family, [])
        rows.append({"predicted_seconds": predicted_seconds, "measured_seconds": measured_seconds})
        del rows[:-_KEPT]
        write_whole(path, json.dumps(everything, indent=1))
    return _factor(rows)


def factors(cluster_name: str) -> dict[str, float]:
    """Plan family -> median of measured over predicted step time, in its last runs here."""
    found = _read(corrections_file()).get(cluster_name, {})
    return {family: _factor(rows) for family, rows in found.items() if rows}


def ratios(cluster_name: str, family: str) -> list[float]:
    """Measured over predicted step time of a family's last runs here, as its factor uses them."""
    rows = _read(corrections_file()).get(cluster_name, {}).get(family, [])
    return [r["measured_seconds"] / r["predicted_seconds"] for r in rows[-_USED:]]


def corrected(cluster: Cluster) -> Cluster:
    """The cluster with its stored corrections."""
    found = factors(cluster.name)
    return (
        dataclasses.replace(cluster, corrections={**cluster.corrections, **found})
        if found
        else cluster
    )


def _factor(rows: list[dict[str, float]]) -> float:
    return float(
        statistics.median(r["measured_seconds"] / r["predicted_seconds"] for r in rows[-_USED:])
    )


def _read(path: Path, set_aside: bool = False) -> dict[str, dict[str, list[dict[str, float]]]]:
    try:
        text = path.read_text()
    except OSError:
        return {}
    try:
        return _checked(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError):
        if set_aside:
            with contextlib.suppress(OSError):
                os.replace(path, path.with_suffix(".damaged"))  # noqa: PTH105
        return {}


def _checked(values: Any) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Drop unusable values: a hand-edited file must not stop a run."""
    checked: dict[str, dict[str, list[dict[str, float]]]] = {}
    for cluster, families in values.items():
        for family, rows in families.items():
            for row in rows:
                pair = {k: float(row[k]) for k in ("predicted_seconds", "measured_seconds")}
                if all(math.isfinite(v) and v > 0 for v in pair.values()):
                    checked.setdefault(cluster, {}).setdefault(family, []).append(pair)
    return checked


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive access, if the file system supports it."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.with_suffix(".lock").open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
