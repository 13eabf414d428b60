"""Rows counted by facet, group, label and prediction: parts add up to the whole exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ronde.clarify.metrics import Measure, measure_all, wilson
from ronde.world import ArgumentError

__all__ = ["GroupVersusRest", "BiasTable", "FacetValue", "as_text", "attention"]

_MOST_VALUES = 20  # of a facet: each is compared with the rest
_MISSING = "(missing)"
_FOUR_FIFTHS = 0.8  # the rule of US employers: 29 CFR 1607.4 D


@dataclass(frozen=True)
class FacetValue:
    """How many rows of one value of a facet there are, and how often they are positive.

    Attributes:
        value: of the facet.
        rows: how many.
        label: share of positive labels, with its 95 % interval.
        selected: share of positive predictions, with its interval, or None without predictions.
    """

    value: str
    rows: int
    label: tuple[float, float, float]
    selected: tuple[float, float, float] | None


@dataclass(frozen=True)
class GroupVersusRest:
    """One value of a facet against all other rows.

    Attributes:
        facet: its name.
        value: of the group in question.
        measures: by name.
        conditional: by value of the group column, the measures within it.
    """

    facet: str
    value: str
    measures: Mapping[str, Measure]
    conditional: Mapping[str, Mapping[str, Measure]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For example ``sex = F``."""
        return self.facet if self.value == "true" else f"{self.facet} = {self.value}"


def as_text(value: Any) -> str:
    """A value as it is shown and counted: 1.0 is 1, and None and NaN are one value."""
    if value is None or value != value:
        return _MISSING
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


class BiasTable:
    """Rows counted by facet, value, group, label and prediction.

    Args:
        positive: the labels that count as positive.
        predicted: whether rows have predictions.
        grouped: whether they belong to groups of their own.
    """

    def __init__(self, positive: Sequence[Any], *, predicted: bool, grouped: bool) -> None:
        texts = {as_text(p) for p in positive}
        for same in ({"1", "true"}, {"0", "false"}):  # a label of booleans, and one of numbers
            texts |= same if texts & same else set()
        self.positive = frozenset(texts)
        self.predicted, self.grouped = predicted, grouped
        self.cells: Counter[tuple[str, str, str, str, int]] = Counter()
        self.flips: dict[tuple[str, str], Measure] = {}

    def add(
        self,
        facet: str,
        values: Iterable[Any],
        groups: Iterable[Any],
        labels: Iterable[Any],
        predictions: Iterable[Any],
        times: Iterable[int] | None = None,
    ) -> None:
        """Count rows; ``times`` says how often each occurs."""
        rows = zip(values, groups, labels, predictions, strict=True)
        keys = ((facet, as_text(v), as_text(g), as_text(y), int(bool(p))) for v, g, y, p in rows)
        if times is None:
            self.cells.update(keys)
        else:
            for key, n in zip(keys, times, strict=True):
                self.cells[key] += int(n)

    def state(self) -> list[list[Any]]:
        """The cells as plain JSON."""
        return [[*key, n] for key, n in self.cells.items()]

    def merge(self, states: Iterable[list[list[Any]]]) -> None:
        """Take the sum of the given states."""
        self.cells = Counter()
        for state in states:
            for *key, n in state:
                self.cells[tuple(key)] += n  # type: ignore[index]

    @property
    def facets(self) -> list[str]:
        """In the order in which they were counted first on rank 0."""
        return list(dict.fromkeys(key[0] for key in self.cells))

    def rows(self) -> int:
        """How many rows were counted."""
        return max(
            (sum(n for key, n in self.cells.items() if key[0] == f) for f in self.facets), default=0
        )

    def values(self, facet: str) -> list[str]:
        """The values of a facet, sorted."""
        return sorted({key[1] for key in self.cells if key[0] == facet})

    def groups(self, facet: str) -> list[FacetValue]:
        """Each value's size and shares."""
        result = []
        for value in self.values(facet):
            rows = positive = selected = 0
            for (name, v, _, label, predicted), n in self.cells.items():
                if (name, v) == (facet, value):
                    rows += n
                    positive += n * (label in self.positive)
                    selected += n * predicted
            share = (positive / rows, *wilson(positive, rows))
            chosen = (selected / rows, *wilson(selected, rows)) if self.predicted else None
            result.append(FacetValue(value, rows, share, chosen))
        return result

    def compare(
        self, sensitive: Mapping[str, Sequence[str]] | None = None
    ) -> list[GroupVersusRest]:
        """Each value of each facet against the rest: of a facet of true and false, true only.

        Args:
            sensitive: facet -> the only values to compare.

        Raises:
            ArgumentError: a facet has too many values, or not the one asked for.
        """
        return [
            self._against_rest(facet, value)
            for facet in self.facets
            for value in self._chosen(facet, (sensitive or {}).get(facet))
        ]

    def _chosen(self, facet: str, asked: Sequence[str] | None) -> Iterator[str]:
        values = self.values(facet)
        if asked:
            for value in asked:
                if value not in values:
                    raise ArgumentError(
                        f"facet {facet!r} has no value {value!r}: its values are "
                        f"{', '.join(values[:8])}{' …' if len(values) > 8 else ''}."
                    )
            yield from asked
        elif set(values) <= {"true", "false", _MISSING}:
            yield "true"
        elif len(values) > _MOST_VALUES:
            raise ArgumentError(
                f"facet {facet!r} has {len(values)} values, at most {_MOST_VALUES} are compared: "
                f"make it a condition, such as '{facet} >= 40'."
            )
        else:
            yield from values

    def _against_rest(self, facet: str, value: str) -> GroupVersusRest:
        rows = {key[1:]: n for key, n in self.cells.items() if key[0] == facet}
        groups = sorted({key[1] for key in rows})
        labels = sorted({key[2] for key in rows})
        # integers: the sum over parts and workers is exact
        table = np.zeros((2, len(groups), len(labels), 2), dtype=np.int64)
        for (v, group, label, predicted), n in rows.items():
            at = int(v == value), groups.index(group), labels.index(label), predicted
            table[at] += n
        d = facet if value == "true" else f"{facet} = {value}"

        def measure(part: np.ndarray[Any, Any], flip: Measure | None) -> dict[str, Measure]:
            measures = measure_all(
                part,
                [label in self.positive for label in labels],
                labels,
                (f"the rest of {facet}", d),
                grouped=self.grouped,
                predicted=self.predicted,
                flip=flip,
            )
            return {m.name: m for m in measures}

        inside = (
            {group: measure(table[:, i : i + 1], None) for i, group in enumerate(groups)}
            if self.grouped
            else {}
        )
        return GroupVersusRest(facet, value, measure(table, self.flips.get((facet, value))), inside)


def attention(counts: BiasTable, comparisons: Sequence[GroupVersusRest]) -> list[str]:
    """A sentence for each group that is selected less than four fifths as often as the rest."""
    lines = []
    for c in comparisons:
        impact = c.measures.get("DI")
        if impact is None or impact.value is None:
            continue
        alone = c.value == "true"  # false is not compared by itself
        if impact.value >= _FOUR_FIFTHS and not (alone and impact.value > 1 / _FOUR_FIFTHS):
            continue
        hits = [0, 0]
        rows = [0, 0]
        for (facet, value, _, _, predicted), n in counts.cells.items():
            if facet == c.facet:
                hits[value == c.value] += n * predicted
                rows[value == c.value] += n
        beyond = "below 0.8" if impact.value < 1 else "above 1.25"
        lines.append(
            f"DI {impact.value:.2f} is {beyond} for {c.name}: {hits[1]:,} of "
            f"{rows[1]:,} selected, against {hits[0]:,} of {rows[0]:,}"
        )
    return lines
