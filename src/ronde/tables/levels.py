"""The order and the spelling of the levels of a column."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

POINT_ZERO = r"\.0+$"


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
