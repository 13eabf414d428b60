"""A fit in plain Python and fractions: one row after the other, nothing vectorized, no engine."""

import math
from fractions import Fraction


def cut_sum(values):
    """The sum of floats, each cut off 94 bits below the largest one's next power of two."""
    largest = max(map(abs, values), default=0.0)
    unit = Fraction(2) ** (max(math.frexp(largest)[1], -980) - 94)
    total = 0
    for v in values:
        total += (1 if v > 0 else -1) * math.floor(abs(Fraction(v)) / unit)
    return total * unit


def finite(column):
    return [float(v) + 0.0 for v in column if v is not None and math.isfinite(v)]


def quantile(values, share):
    values = sorted(values)
    place = (len(values) - 1) * share
    low, high = values[math.floor(place)], values[math.ceil(place)]
    part = place - math.floor(place)
    return low * (1.0 - part) + high * part if low != high else low


def number(column, do):
    """Fill, clip bounds, edges, center, and width of a column without log."""
    values = finite(column)
    facts = {}
    n = len(values)
    if isinstance(do.get("bins"), int):
        cuts = [i / do["bins"] for i in range(1, do["bins"])]
        facts["edges"] = sorted({quantile(values, q) for q in cuts}) if n else []
    fill = do.get("impute", "mean")
    if fill == "mean":
        fill = float(cut_sum(values) / n) if n else 0.0
    elif fill == "median":
        fill = quantile(values, 0.5) if n else 0.0
    facts["fill"] = float(fill)
    if not n:
        return {**facts, "center": 0.0, "width": 1.0} if "scale" in do else facts
    if clip := do.get("clip"):
        if isinstance(clip, list):
            bounds = [quantile(values, q) for q in clip]
        else:
            bounds = [float(clip["min"]), float(clip["max"])]
        facts["clip"] = bounds
        values = [min(max(v, bounds[0]), bounds[1]) for v in values]
    if do.get("scale") == "minmax":
        low, high = min(values), max(values)
        facts.update(center=low, width=min(high - low, 1.7976931348623157e308) or 1.0)
    elif do.get("scale"):
        center = float(cut_sum(values) / n)
        reach = max(max(values) * 0.25 - center * 0.25, center * 0.25 - min(values) * 0.25)
        factor = 2.0 ** -max(math.frexp(reach)[1], -1000)
        squares = [((v * 0.25 - center * 0.25) * factor) ** 2 for v in values]
        unit = Fraction(1, 2**93)
        total = sum(math.floor(Fraction(s) / unit) for s in squares) * unit
        width = math.sqrt(float(total / n)) * 4.0 / factor
        facts.update(center=center, width=width or 1.0)
    return facts


def levels(column, least=1):
    """Counts of the texts that a column holds, of those that occur often enough."""
    counts = {}
    for v in column:
        if v is None or v != v:
            continue
        text = ("true" if v else "false") if isinstance(v, bool) else None
        text = text or (str(int(v)) if not isinstance(v, str) else v)
        counts[text] = counts.get(text, 0) + 1
    if {v.lower() for v in counts} <= {"true", "false"}:
        counts = {t: sum(c for v, c in counts.items() if v.lower() == t) for t in ("false", "true")}
    return {v: c for v, c in counts.items() if c >= max(least, 1)}


def target_mean(column, targets, keys, smooth, folds):
    """Of each row, the target's mean at its level over the rows outside its fold."""
    texts = [
        None if v is None or v != v else v if isinstance(v, str) else str(int(v)) for v in column
    ]
    made = []
    for text, key in zip(texts, keys, strict=True):
        others = [i for i, k in enumerate(keys) if k % folds != key % folds]
        prior = Fraction(sum(targets[i] for i in others), len(others)) if others else Fraction(0)
        same = [targets[i] for i in others if texts[i] == text]
        weight = len(same) + Fraction(smooth)
        if text is None or not weight:
            made.append(float(prior))
        else:
            made.append(float((sum(same) + Fraction(smooth) * prior) / weight))
    return made
