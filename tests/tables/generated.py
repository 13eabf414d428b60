"""Tables of every kind that a recipe may meet, and a recipe for each."""

import datetime
import random

import pyarrow as pa

_ZONES = (None, "UTC", "Europe/Berlin")
_TEXTS = ("Ärztin", "baker", "", "Zoë", "clerk", "007", "2.0", "2", "NA", "TRUE", "nil'\"")


def _numbers(draw, n):
    """A column of numbers: one of many shapes, some of them extreme."""
    kind = draw.choice(["normal", "cauchy", "whole", "huge", "tiny", "constant", "zero", "mixed"])
    values = {
        "normal": lambda: draw.gauss(1e6, 1),
        "cauchy": lambda: draw.gauss(0, 1) / (draw.gauss(0, 1) or 1.0),
        "whole": lambda: float(draw.randrange(18, 90)),
        "huge": lambda: draw.choice([1e300, -1e300, 1.0, 1.7e308, -1.7e308]),
        "tiny": lambda: draw.choice([1e-300, -1e-300, 5e-324, 0.0]),
        "constant": lambda: -7.25,
        "zero": lambda: draw.choice([0.0, -0.0]),
        "mixed": lambda: draw.choice([1e300, 1e-300, -0.0, 2.0**53 + 2, 0.1]),
    }[kind]
    return [_gap(draw, values(), (None, float("nan"), float("inf"))) for _ in range(n)]


def _gap(draw, value, missing=(None,), share=0.08):
    return draw.choice(missing) if draw.random() < share else value


def _moment(draw):
    start = datetime.datetime(2024, 3, 30, 20, tzinfo=datetime.UTC)
    return start + datetime.timedelta(seconds=draw.randrange(10**8), microseconds=7)


def generated(seed):
    """An Arrow table of one to a few hundred rows, and the steps, target, and key of a recipe."""
    draw = random.Random(seed)
    n = draw.choice([1, 2, 3, 60, 300])
    rows = range(n)
    zone = draw.choice(_ZONES)
    whole = pa.int64() if draw.random() < 0.7 else pa.float32()
    columns = {
        "id": pa.array([draw.randrange(-(10**12), 10**12) for _ in rows], pa.int64()),
        "y": pa.array([draw.choice([0, 1, 3]) for _ in rows], pa.int64()),
        "a": pa.array(_numbers(draw, n), pa.float64()),
        "b": pa.array(_numbers(draw, n), pa.float64()),
        "big": pa.array([_gap(draw, 2**53 + draw.randrange(9)) for _ in rows], pa.int64()),
        "gone": pa.array([None] * n, pa.float64()),
        "ok": pa.array([_gap(draw, draw.random() < 0.5) for _ in rows], pa.bool_()),
        "job": pa.array([_gap(draw, draw.choice(_TEXTS)) for _ in rows], pa.string()),
        "city": pa.array([_gap(draw, f"c{int(draw.expovariate(0.2))}") for _ in rows]),
        "level": pa.array([_gap(draw, draw.randrange(4)) for _ in rows], whole),
        "pay": pa.array([_gap(draw, draw.lognormvariate(9, 3)) for _ in rows], pa.float64()),
        "when": pa.array([_gap(draw, _moment(draw)) for _ in rows], pa.timestamp("us", zone)),
        "note": pa.array([_gap(draw, "Größe 2, größe!") for _ in rows], pa.string()),
    }
    clip = draw.choice([[0.1, 0.9], {"min": -5, "max": 1e6}])
    steps = {
        "a": {"impute": draw.choice(["mean", "median", 3]), "scale": "standard", "clip": clip},
        "b": {"scale": draw.choice(["standard", "minmax"]), "missing_flag": True, "bins": 4},
        "big": {"scale": "standard", "bins": [9007199254740993, 9007199254740998]},
        "gone": {"scale": "standard", "missing_flag": True},
        "ok": {"one_hot": True},
        "job": {"codes": True, "target_mean": {"smooth": draw.choice([0, 1.5]), "folds": 3}},
        "city": {"codes": True, "rare": 3},
        "level": {"one_hot": True, "target_mean": True},
        "pay": {"log": True, "scale": "standard", "impute": "median"},
        "when": {"date": ["hour", "weekday", "day_of_year", "year"], "cyclic": True},
        "note": {"text": {"length": True, "words": 3}, "missing_flag": True},
    }
    return pa.table(columns), {"columns": steps, "target": "y", "key": "id"}
