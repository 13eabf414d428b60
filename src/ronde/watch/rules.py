"""Rules on a training's health: pure functions of a :class:`ronde.watch.rule_view.RuleView`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ronde.watch.record import Alert
from ronde.watch.rule import RULES, Alerts, no_loss, rule
from ronde.watch.rule_view import RuleView, Table
from ronde.world.identity import ranks_text

__all__ = ["RULES"]


@rule("any", "a lower learning rate, clip_norm=1.0, or on_nan='skip' if it is one sample")
def nan(view: RuleView) -> Alerts:
    """A loss, a gradient, or an activation is not finite."""
    if bad := [line for line in view.health.bad if not _skipped_by_scaler(view, line)]:
        line = bad[0]
        ranks, name = list(line["bad_ranks"]), line.get("first_bad")
        where = f" first in {name}" if name else ""
        yield Alert(
            line["step"],
            f"not finite on {ranks_text(ranks)}{',' if where else ''}{where}",
            rank=ranks[0],
            tensor=name,
            values={"ranks": ranks},
        )
    elif view.non_finite:
        event = view.non_finite[0]
        on = f" on {ranks_text(event.ranks)}" if event.ranks else ""
        shown = ", ".join(map(str, event.samples[:8])) + (", …" if len(event.samples) > 8 else "")
        rank = event.ranks[0] if event.ranks else None
        text = f"the {event.what} is not finite{on}; its samples: {shown}"
        yield Alert(event.step, text, rank=rank, values={"ranks": event.ranks})
    elif not np.isfinite(view.loss).all():
        step = int(view.step[~np.isfinite(view.loss)][0])
        yield Alert(step, f"the loss is {view.loss[view.step == step][0]}")
    elif view.ended is not None and (view.ended.error or "").startswith("LossError"):
        step = int(view.step[-1]) + 1 if len(view.step) else 1
        yield Alert(step, str(view.ended.error))


def _skipped_by_scaler(view: RuleView, line: Mapping[str, Any]) -> bool:
    """Whether only gradients overflowed: a scaler leaves such a step out, and lowers its scale."""
    return view.precision == "fp16" and line.get("first_bad") is None


@rule("scaler", "precision='bf16', which needs no scaler; or clip_norm=1.0")
def scaler(view: RuleView, share: float = 0.05, rows: int = 40, after: int = 100) -> Alerts:
    """The scaler of fp16 leaves out steps long after it has found a scale."""
    bad = [line["step"] for line in view.health.bad if _skipped_by_scaler(view, line)]
    step = np.sort(np.concatenate([view.health.tensors.step, np.array(bad, np.int64)]))[-64:]
    left_out = np.count_nonzero(np.isin(step, bad))
    if len(step) < rows or step[0] <= after or left_out <= share * len(step):
        return
    yield Alert(
        int(step[-1]),
        f"gradients overflowed in {left_out} of the last {len(step)} measured steps, which the "
        "scaler left out",
        values={"skipped": int(left_out), "measured": len(step)},
    )


@rule("replicas", "what the error says; go on from a checkpoint before it")
def replicas(view: RuleView) -> Alerts:
    """Workers that hold the same weights hold different ones."""
    error = (view.ended and view.ended.error) or ""
    if view.ended is not None and "replicas of the model are not equal" in error:
        yield Alert(view.ended.step, error.removeprefix("WorldError: "))


@rule("loss", "a higher learning rate; look at inputs and labels: do they belong together?")
def loss_flat(view: RuleView, steps: int = 300, fallen: float = 0.05) -> Alerts:
    """The loss has not fallen since the learning rate was at its highest."""
    loss, step = _finite_loss(view)
    if len(loss) < 64 or no_loss(view):
        return
    if step[-1] - step[int(np.argmax(view.lr))] < steps:
        return
    first, now = float(np.median(loss[:10])), float(np.median(loss[-len(loss) // 5 :]))
    half, at = _medians(loss[len(loss) // 2 :], step[len(loss) // 2 :])
    slope = _theil_sen(at, half)
    ahead = -slope * float(step[-1])  # at this pace, in as many steps again
    constant = _constant_loss(view)
    stays = (1 - fallen) * first < now < 2 * first or abs(now / constant - 1) < 0.03
    if stays and ahead < fallen * now:
        yield Alert(
            int(step[-1]),
            f"loss {now:.4g}, {first:.4g} at the start; at this pace {now - ahead:.4g} after "
            f"{step[-1]:,} more steps",
            values={"first": first, "now": now, "slope": slope},
        )


def _constant_loss(view: RuleView, samples: int = 250) -> float:
    """The cross-entropy of always answering the share of each class; NaN where it is not known."""
    counts = view.health.targets
    if counts.sum() < samples:
        return float("nan")
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()) or float("nan")


@rule("loss", "a lower learning rate, or a warm-up; go on from a checkpoint before it")
def diverging(
    view: RuleView, steps: int = 100, above_least: float = 1.5, above_first: float = 2.0
) -> Alerts:
    """The loss has stayed above where it began."""
    loss, step = _finite_loss(view)
    if len(loss) > 10 and not no_loss(view) and np.all(loss[-10:] > 1e3 * loss[0]):
        text = (
            f"loss {loss[-1]:.4g} after 10 steps above 1,000 times its {loss[0]:.4g} at the start"
        )
        yield Alert(int(step[-1]), text, values={"first": float(loss[0]), "now": float(loss[-1])})
        return
    if len(loss) < 32 or step[-1] < steps or no_loss(view):
        return
    first, recent = float(loss[0]), loss[step > step[-1] - steps]
    least = min(first, float(np.min(_medians(loss, step)[0])))
    now = np.array([np.median(part) for part in np.array_split(recent, max(1, len(recent) // 8))])
    if np.all(now > above_least * least) and np.all(now > above_first * first):
        yield Alert(
            int(step[-1]),
            f"loss {now[-1]:.4g} for {steps} steps, {first:.4g} at the start, {least:.4g} at best",
            values={"first": first, "least": least, "now": float(now[-1])},
        )


@rule("evaluations", "end here and keep the best (keep_best); more data, or weight decay")
def overfit(view: RuleView, above: float = 0.1, evaluations: int = 3) -> Alerts:
    """The loss of evaluations rises while that of the training falls."""
    for name, table in _losses(view):
        value, step = table["value"], table.step
        best = int(np.argmin(value))
        if len(value) - 1 - best < evaluations or value[best] <= 0:
            continue
        train = [_between(view, step[i - 1] if i else 0, step[i]) for i in (best, -1)]
        if np.all(value[-evaluations:] > (1 + above) * value[best]) and train[1] < train[0]:
            yield Alert(
                int(step[-1]),
                f"{name} {value[-1]:.4g}, {value[best]:.4g} at step {step[best]:,}; training loss "
                f"{train[1]:.4g}, {train[0]:.4g} then",
                tensor=name,
                values={"best": float(value[best]), "step": int(step[best])},
            )


@rule("evaluations", "end here: run.stop when an evaluation is no better, and keep_best")
def overtrained(view: RuleView, evaluations: int = 10, better: float = 0.01) -> Alerts:
    """No evaluation has been better for long."""
    for name, table in _losses(view):
        value, step = table["value"], table.step
        if len(value) <= evaluations or np.min(value) <= 0:
            continue
        best = float(np.min(value[:-evaluations]))
        if np.min(value[-evaluations:]) > (1 - better) * best:
            yield Alert(
                int(step[-1]),
                f"{name} {best:.4g} at step {step[int(np.argmin(value[:-evaluations]))]:,}; none "
                f"of the last {evaluations} evaluations is {better:.0%} better",
                tensor=name,
                values={"best": best},
            )


@rule("health", "clip_norm=1.0, or a warm-up")
def exploding_gradient(
    view: RuleView, over_median: float = 100.0, over_largest: float = 10.0
) -> Alerts:
    """A gradient is far above all before, twice in a row."""
    table = view.health.tensors
    if len(table) < 18:
        return
    norm, step = np.nan_to_num(table["gradient"]), table.step
    before, last = norm[:-2], norm[-2:].min(axis=0)
    median = np.median(before[-64:], axis=0)
    far = (last > over_median * median) & (last > over_largest * before.max(axis=0))
    for i in np.flatnonzero(far & (median > 0)):  # not one that was frozen before
        yield Alert(
            int(step[-1]),
            f"norm {norm[-1, i]:.2g}, {_times(norm[-1, i], median[i])} its median of "
            f"{median[i]:.2g}",
            tensor=view.health.names[i],
            values={"norm": float(norm[-1, i]), "median": float(median[i])},
        )


@rule("health", "normalization or residual connections before it; is the layer used at all?")
def vanishing_gradient(
    view: RuleView, rms: float = 1e-7, of_median: float = 1e-4, rows: int = 8
) -> Alerts:
    """A layer's gradient is next to nothing, and others' are not."""
    health = view.health
    if len(health.tensors) < rows:
        return
    norms = np.nan_to_num(health.tensors["gradient"][-rows:])  # none at all is NaN
    rate, weights = norms / np.sqrt(health.elements), _weights(view)
    middle = np.nanmedian(rate[:, weights], axis=1, keepdims=True) if len(weights) else rate
    middle = np.where(middle > 0, middle, rate.max(axis=1, keepdims=True))
    small = np.all((rate < rms) & (rate < of_median * middle), axis=0)
    for i in weights:
        if small[i] and not health.frozen[i]:
            value = float(rate[-1, i])
            yield Alert(
                int(health.tensors.step[-1]),
                f"gradient's root mean square {value:.2g} in {rows} measurements, "
                f"{float(middle[-1, 0]):.2g} in the middle layer",
                tensor=health.names[i],
                values={"rms": value, "middle": float(middle[-1, 0])},
            )


@rule("health", "give the parameter to the optimizer; with bf16 weights, keep fp32 ones")
def unchanged(view: RuleView, rows: int = 8) -> Alerts:
    """A tensor has a gradient, and steps leave it as it is, while they change others."""
    health = view.health
    if len(health.tensors) < rows:
        return
    table = health.tensors
    same = np.all(table["same"][-rows:] == 1, axis=0)
    change = table["update"][-rows:] / np.maximum(table["weight"][-rows:], 1e-30)
    moves = np.all(change > 0, axis=0)
    if not np.any(moves) or not np.median(change[:, moves]) > 1e-6:
        return  # the rate itself is next to nothing
    rate = table["gradient"][-rows:] / np.sqrt(health.elements)
    usual = np.median(rate[:, moves], axis=1, keepdims=True)
    steady = same & np.all(rate > 1e-3 * usual, axis=0) & ~health.frozen
    for i in np.flatnonzero(steady):
        yield Alert(
            int(table.step[-1]),
            f"the same bit for bit in {rows} measurements, with a gradient of norm "
            f"{table['gradient'][-1, i]:.2g}",
            tensor=health.names[i],
            values={"gradient": float(table["gradient"][-1, i])},
        )


@rule("health", "another learning rate: steps usually change weights by about 1/1000")
def update_ratio(
    view: RuleView, low: float = 1e-6, high: float = 0.2, rows: int = 8, after: int = 20
) -> Alerts:
    """Steps change weights by far too much, or all of them by next to nothing."""
    health, table, weights = view.health, view.health.tensors, _weights(view)
    if len(table) < rows or table.step[-rows] <= after or not len(weights):
        return
    change = (table["update"] / np.maximum(table["weight"], 1e-30))[-rows:, weights]
    for i in np.flatnonzero(np.all(change > high, axis=0)):
        yield Alert(
            int(table.step[-1]),
            f"steps change it by {change[-1, i]:.2g} of its norm, in {rows} measurements",
            tensor=health.names[weights[i]],
            values={"ratio": float(change[-1, i])},
        )
    full = len(view.lr) and view.lr[-1] > 0.5 * view.lr.max() and table.step[-1] > 5 * after
    moving = change[:, ~health.frozen[weights]]
    if full and moving.size and np.all(np.median(moving, axis=1) < low):
        ratio = float(np.median(moving[-1]))
        text = f"steps change weights by {ratio:.2g} of their norm, in {rows} measurements"
        yield Alert(int(table.step[-1]), text, values={"ratio": ratio})


@rule("activations", "a lower learning rate, another initialization of biases, or LeakyReLU")
def dead_units(view: RuleView, share: float = 0.7, rows: int = 1) -> Alerts:
    """Most units of a layer never have a positive output, over all samples of 8 measurements."""
    what = "of its units have had no positive output in 8 measurements"
    yield from _layers(view, "dead", share, rows, ("relu",), what)


@rule("activations", "a smaller initialization, or normalization before it")
def saturated(view: RuleView, share: float = 0.5, rows: int = 8) -> Alerts:
    """Most outputs of a tanh or sigmoid are at their bounds."""
    kinds = ("tanh", "sigmoid")
    yield from _layers(view, "saturated", share, rows, kinds, "of its outputs are at their bounds")


def _layers(
    view: RuleView, column: str, share: float, rows: int, kinds: tuple[str, ...], what: str
) -> Alerts:
    health, table = view.health, view.health.activations
    if len(table) < rows:
        return
    high = np.all(table[column][-rows:] > share, axis=0)
    for i in np.flatnonzero(high):
        if health.kinds[i] in kinds and i + 1 < len(health.layers):  # an output may be saturated
            value = float(table[column][-1, i])
            yield Alert(
                int(table.step[-1]),
                f"{value:.0%} {what}" + (f", in {rows} measurements" if rows > 1 else ""),
                tensor=health.layers[i],
                values={column: value},
            )


@rule("activations", "PyTorch's own initialization, or nn.init.kaiming_normal_")
def initialization(view: RuleView, larger: float = 300.0, smaller: float = 1000.0) -> Alerts:
    """In the first steps, a layer's outputs are far larger or smaller than the first layer's, or
    most weights are zero.
    """
    health, table = view.health, view.health.activations
    if not len(table) or table.step[-1] > 10:
        return
    weights = _weights(view)
    if len(health.tensors) == 1 and len(weights):
        # after one step, a weight that was zero is what the step made of it
        update, weight = (health.tensors[n][0][weights] for n in ("update", "weight"))
        zero = np.isclose(update, weight, rtol=1e-3)
        if zero.mean() > 0.5:
            yield Alert(
                int(health.tensors.step[0]),
                f"{zero.sum()} of {len(zero)} weights began at zero, so units stay alike",
                tensor=health.names[int(weights[np.flatnonzero(zero)[0]])],
                values={"zero": int(zero.sum())},
            )
            return
    rms = table["rms"][-1]
    for i in range(1, len(rms)):
        ratio = rms[i] / max(rms[0], 1e-30)
        if ratio > larger or (ratio < 1 / smaller and i + 1 < len(rms)):  # a zero head is usual
            yield Alert(
                int(table.step[-1]),
                f"outputs' root mean square {rms[i]:.2g}, {rms[0]:.2g} in the first layer",
                tensor=health.layers[i],
                values={"rms": float(rms[i]), "first": float(rms[0])},
            )
            return  # the layers after it follow


@rule("inputs", "normalize the inputs to mean 0, standard deviation 1; do they vary at all?")
def inputs(
    view: RuleView, means: float = 10.0, largest: float = 20.0, constant: float = 0.99
) -> Alerts:
    """Inputs are far from 0, large, or the same for all samples."""
    health = view.health
    mean, std, same = (float(health.inputs[n][-1]) for n in ("mean", "std", "constant"))
    if abs(mean) > means * std or std > largest or same > constant:
        varies = f"; {same:.0%} of the features do not vary in the batch" if same else ""
        yield Alert(
            int(health.inputs.step[-1]),
            f"inputs' mean {mean:.3g}, standard deviation {std:.3g}{varies}",
            tensor=health.layers[0] if health.layers else None,
            values={"mean": mean, "std": std, "constant": same},
        )


@rule(
    "targets", "weight the classes in the loss, or sample them alike; look at each class's recall"
)
def class_imbalance(view: RuleView, share: float = 0.9, samples: int = 250) -> Alerts:
    """Nearly all targets are of one class."""
    counts = view.health.targets
    if counts.sum() >= samples and counts.max() > share * counts.sum():
        yield Alert(
            int(view.health.tensors.step[-1]),
            f"class {int(counts.argmax())} has {counts.max() / counts.sum():.1%} of "
            f"{int(counts.sum()):,} samples",
            values={"class": int(counts.argmax()), "samples": int(counts.sum())},
        )


def _finite_loss(view: RuleView) -> tuple[Any, Any]:
    good = np.isfinite(view.loss)
    return view.loss[good], view.step[good]


def _medians(loss: Any, step: Any) -> tuple[Any, Any]:
    """Medians of at least 8 rows each, 64 at most, and their steps."""
    count = max(1, min(64, len(loss) // 8))
    return (
        np.array([np.median(part) for part in np.array_split(loss, count)]),
        np.array([np.mean(part) for part in np.array_split(step, count)]),
    )


def _theil_sen(x: Any, y: Any) -> float:
    """The median slope of all pairs (Theil 1950, Sen 1968)."""
    i, j = np.triu_indices(len(x), 1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i]))) if len(i) else 0.0


def _losses(view: RuleView) -> list[tuple[str, Table]]:
    """Evaluations of a loss: the only metrics of which less is known to be better."""
    tables = [(f"{n}/{m}", t) for (n, m), t in view.evaluations.items() if m.endswith("loss")]
    return [(name, table) for name, table in tables if len(table)]


def _between(view: RuleView, low: int, high: int) -> float:
    rows = view.loss[(view.step > low) & (view.step <= high)]
    return float(np.median(rows)) if len(rows) else math.nan


def _weights(view: RuleView) -> Any:
    """Indices of each module's largest tensor: a bias before a normalization has no gradient."""
    largest: dict[str, int] = {}
    for i, name in enumerate(view.health.names):
        module, best = name.rpartition(".")[0], None
        best = largest.get(module)
        if best is None or view.health.elements[i] > view.health.elements[best]:
            largest[module] = i
    return np.array(sorted(largest.values()), int)


def _times(value: float, base: float) -> str:
    return f"{value / base:,.0f} times" if base > 0 else "far above"


from ronde.watch import machine_rules  # noqa: E402, F401  they come after these
