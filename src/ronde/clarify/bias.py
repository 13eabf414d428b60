"""Bias as a metric of an evaluation, and as a condition that a model must meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ronde.clarify.counts import BiasTable, GroupVersusRest, as_text
from ronde.clarify.metrics import METRICS
from ronde.world import ArgumentError, RondeError

__all__ = ["Bias", "BiasError", "require"]


class BiasError(RondeError):
    """A metric is beyond its limit, or not defined."""


def _listed(value: Any, name: str, rows: int) -> list[Any]:
    listed = _flat(value)
    if len(listed) != rows:
        raise ArgumentError(f"{name} gave {len(listed)} values for a batch of {rows} samples.")
    return listed


def _flat(values: Any) -> list[Any]:
    """One value for each sample: ``[n, 1]`` is ``[n]``."""
    flat = values.tolist() if hasattr(values, "tolist") else list(values)
    return [v[0] if isinstance(v, list) and len(v) == 1 else v for v in flat]


class Bias:
    """A metric of ``run.evaluate``: how a model treats each group. One integer table is counted
    and added over all workers, so the result is the same on any number of them.

    Args:
        facets: name -> function of a batch that returns one value per sample: a tensor, an array
            or a list; ``true`` and ``false``, or up to 20 values.
        positive: the label, or labels, that count as positive.
        threshold: of a model with one output: above it a prediction is positive. 0 for logits,
            0.5 for probabilities. A model with one output per class needs none: the largest wins.
        group: function of a batch, for conditional metrics.
        sensitive: facet -> values to compare; else each value is compared with the rest.
        outcome: ``(*what the loss takes) -> (labels, predictions)``, one each per sample, for
            models with other outputs; predictions are positive or not.

    Example:
        >>> bias = Bias({"age": lambda batch: batch[0][:, 3] >= 40})     # doctest: +SKIP
        >>> run.evaluate(test, metrics={"bias": bias})["bias"]["age"]["DPPL"]   # doctest: +SKIP
        0.18
        >>> bias.require(DPPL=0.1)                                       # doctest: +SKIP
        BiasError: age: DPPL is +0.180 [0.150, 0.210], beyond ±0.1.
    """

    takes_batch = True

    def __init__(
        self,
        facets: Mapping[str, Callable[[Any], Any]],
        *,
        positive: Any = 1,
        threshold: float | None = None,
        group: Callable[[Any], Any] | None = None,
        sensitive: Mapping[str, Sequence[str]] | None = None,
        outcome: Callable[..., tuple[Any, Any]] | None = None,
    ) -> None:
        if not facets or not all(callable(f) for f in facets.values()):
            raise ArgumentError("Bias(facets=…): expected name -> function of a batch.")
        self.facets, self.group, self.sensitive = dict(facets), group, sensitive
        self.positive = list(positive) if isinstance(positive, list | tuple | set) else [positive]
        self.threshold, self._outcome = threshold, outcome
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.counts = BiasTable(self.positive, predicted=True, grouped=self.group is not None)

    def update(self, batch: Any, *arguments: Any) -> None:
        """Count a batch.

        Args:
            batch: as the data set gives it.
            arguments: what the loss takes.
        """
        labels, predictions = (self._outcome or self._default)(*arguments)
        labels = _flat(labels)
        n = len(labels)
        predictions = _listed(predictions, "the predictions", n)
        if any(p not in (0, 1) for p in predictions):
            raise ArgumentError(
                "Bias: outcome's predictions are positive or not: true and false, or 1 and 0."
            )
        groups = _listed(self.group(batch), "group", n) if self.group else [None] * n
        for name, facet in self.facets.items():
            values = _listed(facet(batch), f"facet {name!r}", n)
            self.counts.add(name, values, groups, labels, predictions)

    def _default(self, *arguments: Any) -> tuple[Any, Any]:
        if len(arguments) != 2 or not all(isinstance(v, torch.Tensor) for v in arguments):
            raise ArgumentError(
                "Bias reads predictions from (output, target), but this loss takes something "
                "else. Give outcome=, which returns labels and predictions."
            )
        output, target = arguments
        if output.dim() == 2 and output.shape[1] > 1:
            if self.threshold is not None:
                raise ArgumentError("Bias(threshold=…) is for a model with one output.")
            chosen = output.argmax(1).tolist()
            return target.reshape(-1), [as_text(c) in self.counts.positive for c in chosen]
        if output.numel() != target.numel():
            raise ArgumentError(
                f"Bias cannot read predictions from an output of shape {tuple(output.shape)}: "
                "give outcome=, which returns labels and predictions."
            )
        if self.threshold is None:
            raise ArgumentError(
                "Bias(threshold=…) is missing: this model has one output. 0 for logits, 0.5 for "
                "probabilities."
            )
        return target.reshape(-1), output.reshape(-1) > self.threshold

    def state(self) -> Any:
        """What was counted, as plain JSON."""
        return self.counts.state()

    def merge(self, states: Any) -> None:
        """Take the sum of the states of all workers."""
        self.counts.merge(states)

    def compare(self) -> list[GroupVersusRest]:
        """All metrics of each value of each facet against the rest.

        Raises:
            ArgumentError: no label is positive: ``positive=`` names another one.
        """
        labels = {key[3] for key in self.counts.cells}
        if labels and not labels & self.counts.positive:
            raise ArgumentError(
                f"Bias(positive={self.positive}): no such label was seen, but "
                f"{', '.join(sorted(labels)[:8])}."
            )
        return self.counts.compare(self.sensitive)

    def compute(self) -> dict[str, dict[str, float | None]]:
        """Facet -> metric -> value, or None where it is not defined."""
        return {c.name: {name: m.value for name, m in c.measures.items()} for c in self.compare()}

    def require(self, **limits: float | tuple[float, float]) -> None:
        """Fail unless every facet keeps the limits: for continuous integration.

        Args:
            limits: metric -> largest distance from 0, or ``(low, high)``.

        Raises:
            BiasError: a value is beyond its limit, or not defined.
        """
        require(self.compare(), limits)


def require(
    comparisons: Sequence[GroupVersusRest], limits: Mapping[str, float | tuple[float, float]]
) -> None:
    """Fail unless every comparison keeps the limits; see :meth:`Bias.require`."""
    if not comparisons:
        raise BiasError("no row was counted: evaluate with this metric first.")
    beyond = []
    for name, limit in limits.items():
        if name not in METRICS:
            raise ArgumentError(f"no metric is called {name!r}: there are {', '.join(METRICS)}.")
        if name == "DI" and not isinstance(limit, tuple):
            raise ArgumentError("DI is a ratio: give its lowest and highest value, 0.8 and 1.25.")
        low, high = limit if isinstance(limit, tuple) else (-limit, limit)
        wanted = f"±{limit:g}" if not isinstance(limit, tuple) else f"{low:g} to {high:g}"
        for each in comparisons:
            m = each.measures.get(name)
            if m is None or m.value is None:
                why = m.why if m else "there are no predictions"
                beyond.append(f"{each.name}: {name} is not defined ({why}).")
            elif not low <= m.value <= high:
                beyond.append(f"{each.name}: {name} is {m}, beyond {wanted}.")
    if beyond:
        raise BiasError(" ".join(beyond))
