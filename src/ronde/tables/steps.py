"""The steps of a recipe: what may be done to a column, what comes out of it, and the order of the
levels that it may have.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ronde.world import ArgumentError

Steps = dict[str, dict[str, Any]]

KINDS = {
    "number": ("impute", "clip", "log", "scale", "bins"),
    "level": ("codes", "one_hot", "rare", "target_mean"),
    "time": ("date", "cyclic"),
    "text": ("text",),
}
PERIODS = {"month": 12, "day": 31, "weekday": 7, "day_of_year": 366, "hour": 24, "minute": 60}
PARTS = ("year", *PERIODS)
POINT_ZERO = r"\.0+$"


class PreparedColumn(NamedTuple):
    """A column that a recipe makes.

    Attributes:
        name: its name.
        column: the column it is made of.
        size: how many codes it has, 0 included; 0 for a number.
        type: ``"double"``, ``"long"``, or ``"byte"``.
    """

    name: str
    column: str
    size: int = 0
    type: str = "double"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_increasing(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) > 0
        and all(map(_is_number, values))
        and all(a < b for a, b in itertools.pairwise(values))
    )


def _is_clip(value: Any) -> bool:
    if isinstance(value, dict):
        return {*value} <= {"min", "max"} and all(map(_is_number, value.values())) and bool(value)
    return _is_increasing(value) and len(value) == 2 and value[0] >= 0 and value[1] <= 1


def _is_target_mean(value: Any) -> bool:
    return value is True or (
        isinstance(value, dict)
        and {*value} <= {"smooth", "folds"}
        and _is_number(value.get("smooth", 20))
        and value.get("smooth", 20) >= 0
        and _is_count(value.get("folds", 5), 2)
    )


def _is_text(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and {*value} <= {"length", "words"}
        and isinstance(value.get("length", True), bool)
        and (_is_count(value.get("words", 1)))
    )


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "impute": (lambda v: v in ("mean", "median") or _is_number(v), "mean, median, or a number"),
    "clip": (_is_clip, "two quantiles such as [0.01, 0.99], or {min: 0, max: 100}"),
    "log": (lambda v: v is True, "true"),
    "scale": (lambda v: v in ("standard", "minmax"), "standard or minmax"),
    "bins": (lambda v: _is_count(v, 2) or _is_increasing(v), "a number of bins, or their edges"),
    "codes": (lambda v: v is True, "true"),
    "one_hot": (lambda v: v is True, "true"),
    "rare": (_is_count, "the rows that a value needs, such as 50"),
    "target_mean": (_is_target_mean, "true, or {smooth: 20, folds: 5}"),
    "date": (
        lambda v: isinstance(v, list) and bool(v) and {*v} <= {*PARTS},
        f"a list of {', '.join(PARTS)}",
    ),
    "cyclic": (lambda v: v is True, "true"),
    "text": (_is_text, "{length: true, words: 64}"),
    "missing_flag": (lambda v: v is True, "true"),
}


def expected_of(step: str) -> str:
    """The values that a step takes, in words."""
    return _CHECKS[step][1]


def near(word: Any, known: Iterable[str], otherwise: str = "") -> str:
    """``; did you mean 'x'?``, or what else there is to say: by default, what is known."""
    known = list(known)
    close = difflib.get_close_matches(str(word), known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return otherwise or f"; there are {', '.join(known)}."


def read_as(do: Mapping[str, Any]) -> str:
    """What a column with these steps is read as: number, level, time, or text."""
    return next((k for k, names in KINDS.items() if any(n in do for n in names)), "number")


def checked(given: Any, where: str) -> Steps:
    """The steps of each column, without those that are switched off.

    Raises:
        ArgumentError: a step is unknown, its value is none it takes, or two of them do not go
            together; the text begins with ``where``.
    """
    if not isinstance(given, dict) or not given:
        raise ArgumentError(
            f"{where}: columns must map names to steps, such as {{age: {{scale: standard}}}}."
        )
    steps: Steps = {}
    for name, do in given.items():
        place = f"{where}, column {name!r}"
        if not isinstance(name, str) or not isinstance(do or {}, dict):
            raise ArgumentError(f"{place}: expected steps such as {{scale: standard}}.")
        kept = {step: value for step, value in (do or {}).items() if value is not False}
        if (do or {}).get("impute") is False:
            kept["impute"] = False
        for step, value in kept.items():
            if step not in _CHECKS:
                hint = near(step, _CHECKS, f". Steps are {', '.join(_CHECKS)}.")
                raise ArgumentError(f"{place}: unknown step {step!r}{hint}")
            accepts, expected = _CHECKS[step]
            if not (accepts(value) or (step == "impute" and value is False)):
                raise ArgumentError(f"{place}: {step}: {value!r} must be {expected}.")
        kinds = [k for k, names in KINDS.items() if any(n in kept for n in names)]
        if len(kinds) > 1:
            clash = [next(n for n in KINDS[k] if n in kept) for k in kinds[:2]]
            raise ArgumentError(
                f"{place}: {clash[0]} is for a {kinds[0]}, {clash[1]} for a {kinds[1]}. Choose one."
            )
        _check_bounds(kept, place)
        if "rare" in kept and len({"codes", "one_hot", "target_mean"} & {*kept}) == 0:
            raise ArgumentError(f"{place}: rare needs codes, one_hot, or target_mean.")
        if "cyclic" in kept and "date" not in kept:
            raise ArgumentError(f"{place}: cyclic needs date: [hour, …].")
        steps[name] = kept
    return steps


def _check_bounds(do: Mapping[str, Any], place: str) -> None:
    clip = do["clip"] if isinstance(do.get("clip"), dict) else {}
    if clip.get("min", -math.inf) > clip.get("max", math.inf):
        raise ArgumentError(f"{place}: clip: min {clip['min']} is above max {clip['max']}.")
    if "log" not in do:
        return
    given = {"impute": do.get("impute"), **{f"clip: {k}": v for k, v in clip.items()}}
    for step, value in given.items():
        if _is_number(value) and value <= -1:
            raise ArgumentError(f"{place}: log needs values above -1, and {step} is {value:g}.")


def gives_number(do: Mapping[str, Any]) -> bool:
    """Whether the column itself comes out as a number."""
    return read_as(do) == "number" and ("bins" not in do or bool({*do} - {"bins", "missing_flag"}))


def outputs_of(steps: Steps, fitted: Mapping[str, Any]) -> list[PreparedColumn]:
    """The columns that a fitted recipe makes, in their order."""
    made: list[PreparedColumn] = []
    for name, do in steps.items():
        state = fitted[name]
        if gives_number(do):
            made.append(PreparedColumn(name, name))
        if "bins" in do:
            made.append(PreparedColumn(f"{name}_bin", name, len(state["edges"]) + 2, "long"))
        if "codes" in do:
            made.append(PreparedColumn(f"{name}_code", name, len(state["levels"]) + 1, "long"))
        if "one_hot" in do:
            made += [PreparedColumn(f"{name}={v}", name, 0, "byte") for v, _ in state["levels"]]
        if "target_mean" in do:
            made.append(PreparedColumn(f"{name}_mean", name))
        for part in do.get("date", ()):
            if "cyclic" in do and part in PERIODS:
                made += [PreparedColumn(f"{name}_{part}_{wave}", name) for wave in ("sin", "cos")]
            else:
                made.append(PreparedColumn(f"{name}_{part}", name, 0, "long"))
        if text := do.get("text"):
            if text.get("length"):
                made += [
                    PreparedColumn(f"{name}_{of}", name, 0, "long") for of in ("chars", "words")
                ]
            made += [
                PreparedColumn(f"{name}_{i}", name, 0, "long") for i in range(text.get("words", 0))
            ]
        if "missing_flag" in do:
            made.append(PreparedColumn(f"{name}_missing", name, 0, "byte"))
    return made


def whole_numbers(levels: Sequence[str]) -> list[str] | None:
    """Levels that are distinct whole numbers without ``.0``, else None."""
    plain = [re.sub(POINT_ZERO, "", level.strip()) for level in levels]
    if len(set(plain)) < len(plain) or not levels:
        return None
    return plain if all(re.fullmatch(r"-?(0|[1-9][0-9]*)", each) for each in plain) else None


def level_order(level: str) -> tuple[int, float, str]:
    """Sorts numbers by value, then texts by code point; NaN has no order, so it counts as text."""
    try:
        number = float(level)
    except ValueError:
        return (1, 0.0, level)
    return (0, number, level) if math.isfinite(number) else (1, 0.0, level)
