"""``ronde.keras.fit``: a compiled Keras model's own training, as a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from keras.src.trainers import compile_utils
from torch.utils.data import DataLoader, Dataset, TensorDataset

import keras
from ronde.keras.owned_variables import check_backend
from ronde.run.callback import StepView
from ronde.run.distribute import distribute
from ronde.run.run import Run
from ronde.world import ArgumentError, world

__all__ = ["fit_keras"]

_OWN = ("model", "optimizer", "data", "loss", "batch_size", "shuffle", "callbacks")
_KINDS = ("EarlyStopping", "ModelCheckpoint", "LearningRateScheduler", "TensorBoard")
_EPOCH = ("epoch", "sum", "samples", "ended")
_STATE = {
    "EarlyStopping": ("wait", "best", "best_epoch", "stopped_epoch"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
}


def fit_keras(
    model: Any,
    x: Any,
    y: Any,
    *,
    batch_size: int | None,
    epochs: int,
    callbacks: Any,
    validation_data: Any,
    shuffle: bool | None,
    options: Mapping[str, Any],
) -> Any:
    """See :func:`ronde.keras.fit`."""
    check_backend()
    _check_options(options)
    loss = _compiled_loss(model)
    metrics = _metrics_of(model)
    data = _dataset(x, y, "x")
    validation = _validation(validation_data)
    if batch_size is None and not isinstance(data, DataLoader):
        batch_size = 32
    calls = _Callbacks(callbacks, model, metrics if validation is not None else None, options)
    means = _EpochLoss()
    run = distribute(
        model,
        model.optimizer,
        data,
        loss=loss,
        batch_size=batch_size,
        shuffle=shuffle,
        callbacks=[means],
        **options,
    )
    return _train(run, calls, means, epochs, validation, metrics)


def _train(
    run: Run,
    calls: _Callbacks,
    means: _EpochLoss,
    epochs: int,
    validation: Any,
    metrics: dict[str, _MeanMetric],
) -> Any:
    calls.begin(run)
    run.register(epoch_loss=means)
    logs: dict[str, float] = {}
    for epoch in run.epochs(epochs):
        means.begin(epoch)
        calls.each("on_epoch_begin", epoch)
        for number, batch in enumerate(run.batches()):
            loss = run.step(batch)
            if calls.read_batches:
                calls.each("on_train_batch_end", number, {"loss": float(loss)})
        if means.ended or not means.samples:  # before a resume
            continue
        logs = {"loss": means.value()}
        if validation is not None:
            result = run.evaluate(validation, metrics, name="val")
            logs |= {f"val_{name}": float(value) for name, value in result.items()}
        calls.each("on_epoch_end", epoch, logs)
        means.ended = True
        if calls.proxy.stop_training:
            run.stop("EarlyStopping")
    calls.each("on_train_end", logs)
    calls.history.run = run
    return calls.history


class _EpochLoss:
    """The mean loss of an epoch's samples, as ``fit`` reports it; in checkpoints, which may be
    written in the midst of an epoch, or at its last step, before the callbacks have heard its end.

    Attributes:
        samples: so far.
        ended: whether the callbacks have.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Begin an epoch, or go on with it after a resume."""
        if epoch != self._epoch:
            self._epoch, self._sum, self.samples, self.ended = epoch, torch.zeros(()), 0, False

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        values = (self._epoch, float(self._sum), self.samples, self.ended)
        return dict(zip(_EPOCH, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set them."""
        self._epoch, total, self.samples, self.ended = (state[name] for name in _EPOCH)
        self._sum = torch.tensor(total, dtype=torch.float64)

    def step_ended(self, step: StepView) -> None:
        """Add a batch; nothing waits for the device."""
        value = step.loss.detach().double() * step.share.global_samples
        self._sum = self._sum.to(value.device) + value
        self.samples += step.share.global_samples

    def value(self) -> float:
        """The mean so far."""
        return float(self._sum) / self.samples


class _MeanMetric:
    """A Keras metric that is a mean: ``(sum, weight)`` of the samples it is given."""

    def __init__(self, identifier: Any) -> None:
        self._identifier, self._metric = identifier, None
        self.name = identifier if isinstance(identifier, str) else _name_of(identifier)
        if str(identifier).lower() not in ("accuracy", "acc"):
            self._check(compile_utils.get_metric(identifier, None, None))

    def _check(self, metric: Any) -> Any:
        if not isinstance(metric, keras.metrics.Mean):
            raise ArgumentError(
                f"compile(metrics={self.name!r}): {type(metric).__name__} is no mean over samples, "
                "so it cannot be added up over workers. Compute it in 'with run.whole_model() as "
                "model:' after the training."
            )
        return metric

    @property
    def direction(self) -> str:
        """``"up"``, ``"down"``, or empty."""
        shown = self._metric or self._identifier
        up = str(self._identifier).lower() in ("accuracy", "acc")
        return "up" if up else getattr(shown, "_direction", "")

    def __call__(self, output: Any, target: Any) -> tuple[float, float]:
        if self._metric is None:
            self._metric = self._check(compile_utils.get_metric(self._identifier, target, output))
        metric: Any = self._metric
        metric.reset_state()
        metric.update_state(target, output)
        return float(metric.total.value), float(metric.count.value)


def _name_of(identifier: Any) -> str:
    return str(getattr(identifier, "name", None) or getattr(identifier, "__name__", identifier))


class _Proxy:
    """What Keras's callbacks see of the model: collective where they save it."""

    def __init__(self, model: Any, metrics: Mapping[str, _MeanMetric]) -> None:
        self.optimizer = model.optimizer
        self.stop_training = False
        self.run: Any = None
        self._model = model
        # a callback looks up whether more or less of a metric is better
        listed = compile_utils.MetricsList([])
        listed.metrics = list(metrics.values())
        for each in metrics.values():
            vars(each)["_direction"] = each.direction
        self.metrics = [listed]

    def save(self, path: Any, **options: Any) -> None:
        """Save the whole model; every rank calls it."""
        with self.run.whole_model(ranks="main") as whole:
            if whole is not None:
                whole.save(path, **options)

    def save_weights(self, path: Any, **options: Any) -> None:
        """Save the whole model's weights; every rank calls it."""
        with self.run.whole_model(ranks="main") as whole:
            if whole is not None:
                whole.save_weights(path, **options)

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """The whole weights, copied."""
        with self.run.whole_model() as whole:
            return [np.array(w) for w in whole.get_weights()]

    def set_weights(self, weights: list[np.ndarray[Any, Any]]) -> None:
        """Set the weights; :meth:`_Callbacks.begin` has refused plans that divide the model."""
        self._model.set_weights(weights)


class _Callbacks:
    """Keras's callbacks, called at the points of ``Model.fit``."""

    def __init__(
        self,
        callbacks: Any,
        model: Any,
        metrics: Mapping[str, _MeanMetric] | None,
        options: Mapping[str, Any],
    ) -> None:
        given = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else callbacks or []
        known = {"loss"}
        if metrics is not None:
            known |= {"val_loss", *(f"val_{name}" for name in metrics)}
        for each in given:
            _check_callback(each, known, options)
        board = keras.callbacks.TensorBoard
        self.history = keras.callbacks.History()
        self.all = [*(_Board(c) if isinstance(c, board) else c for c in given), self.history]
        self.read_batches = any(getattr(c, "save_freq", "epoch") != "epoch" for c in given)
        self.proxy = _Proxy(model, metrics or {})

    def begin(self, run: Run) -> None:
        """``on_train_begin``, then what a resumed run has of their state."""
        self.proxy.run = run
        divided = run.plan.shard not in ("none", "optimizer")
        divided = divided or run.plan.pipeline > 1 or run.plan.tensor > 1
        if divided and any(getattr(c, "restore_best_weights", False) for c in self.all):
            raise ArgumentError(
                f"EarlyStopping(restore_best_weights=True): plan={run.plan.spec!r} divides the "
                "model. Use ModelCheckpoint(save_best_only=True), and load its file."
            )
        for i, each in enumerate(self.all):
            each.set_model(self.proxy)
            if not run.is_main and hasattr(each, "verbose"):
                each.verbose = 0
            each.on_train_begin()
            if fields := _STATE.get(type(each).__name__):
                run.register(**{f"{type(each).__name__}_{i}": _Kept(each, fields)})

    def each(self, event: str, *arguments: Any) -> None:
        """Call an event of all."""
        for callback in self.all:
            getattr(callback, event)(*arguments)


class _Kept:
    """A callback's counters, in checkpoints."""

    def __init__(self, callback: Any, fields: tuple[str, ...]) -> None:
        self._callback, self._fields = callback, fields

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        values = {name: getattr(self._callback, name) for name in self._fields}
        return {k: float(v) if isinstance(v, np.floating) else v for k, v in values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set them."""
        for name, value in state.items():
            setattr(self._callback, name, value)


class _Board(keras.callbacks.Callback):  # type: ignore[misc]
    """Keras's TensorBoard writes with TensorFlow; this writes its epoch curves without."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self._folder = Path(given.log_dir)
        self._writers: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the epoch's numbers, in the folders and under the names that Keras uses."""
        if not world().is_main:
            return
        from torch.utils.tensorboard import SummaryWriter

        rate = float(self.model.optimizer.learning_rate)
        for name, value in {**logs, "learning_rate": rate}.items():
            part = "validation" if name.startswith("val_") else "train"
            if part not in self._writers:
                self._writers[part] = SummaryWriter(str(self._folder / part))  # type: ignore[no-untyped-call]
            tag = f"epoch_{name.removeprefix('val_')}"
            self._writers[part].add_scalar(tag, value, epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()


def _check_options(options: Mapping[str, Any]) -> None:
    known = [n for n in inspect.signature(distribute).parameters if n not in _OWN]
    for name in options:
        if name not in known:
            raise ArgumentError(
                f"ronde.keras.fit(…, {name}=…): not supported. It takes model, x, y, batch_size, "
                "epochs, callbacks, validation_data, shuffle, and the options of ronde.distribute."
            )


def _check_callback(each: Any, known: set[str], options: Mapping[str, Any]) -> None:
    kind = type(each)
    if kind.__name__ not in _KINDS or kind is not getattr(keras.callbacks, kind.__name__, None):
        raise ArgumentError(
            f"callbacks: {kind.__name__} is not supported by ronde.keras.fit; "
            f"{', '.join(_KINDS)} are. Write the loop with ronde.distribute for others."
        )
    monitored = getattr(each, "save_best_only", kind.__name__ == "EarlyStopping")
    if monitored and each.monitor not in known:
        raise ArgumentError(
            f"{kind.__name__}(monitor={each.monitor!r}): there is {', '.join(sorted(known))}. "
            "Metrics are measured on validation_data."
        )
    if kind.__name__ == "LearningRateScheduler" and options.get("batch") == "grow":
        raise ArgumentError(
            "LearningRateScheduler sets the rate that batch='grow' scales: use one."
        )
    if kind.__name__ == "TensorBoard":
        plain = keras.callbacks.TensorBoard(write_graph=each.write_graph)
        for name in ("histogram_freq", "write_images", "update_freq", "embeddings_freq"):
            if getattr(each, name) != getattr(plain, name):
                raise ArgumentError(
                    f"TensorBoard({name}=…) is not supported by ronde.keras.fit: it writes the "
                    "numbers of each epoch."
                )


def _compiled_loss(model: Any) -> Any:
    if not getattr(model, "compiled", False):
        raise ArgumentError(
            "model is not compiled: call model.compile(optimizer, loss, metrics=…)."
        )
    settings = model._compile_config.config
    for name in ("loss_weights", "weighted_metrics"):
        if settings.get(name):
            raise ArgumentError(f"compile({name}=…) is not supported by ronde.keras.fit.")
    loss = model.loss
    if isinstance(loss, dict | list | tuple) or loss is None:
        raise ArgumentError(
            f"compile(loss={type(loss).__name__}): ronde.keras.fit takes one loss. Give "
            "ronde.distribute a function loss(outputs, target) for several outputs."
        )
    return keras.losses.get(loss)


def _metrics_of(model: Any) -> dict[str, _MeanMetric]:
    compiled = model._compile_metrics
    given = [] if compiled is None else compiled._user_metrics or []
    if isinstance(given, dict) or any(isinstance(m, dict | list | tuple) for m in given):
        raise ArgumentError("compile(metrics=…): ronde.keras.fit takes one list of metrics.")
    return {m.name: m for m in map(_MeanMetric, given)}


def _validation(given: Any) -> Any:
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise ArgumentError(
                "validation_data: expected (x, y); sample weights are not supported."
            )
        return _dataset(given[0], given[1], "validation_data")
    return None if given is None else _dataset(given, None, "validation_data")


def _dataset(x: Any, y: Any, name: str) -> Any:
    """Arrays as a data set; a Dataset or DataLoader of torch as it is."""
    if isinstance(x, Dataset | DataLoader) and y is None:
        return x
    arrays = (np.ndarray, torch.Tensor)
    if isinstance(x, arrays) and isinstance(y, arrays):
        return TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    shown = type(x if not isinstance(x, arrays) else y).__name__
    raise ArgumentError(
        f"{name}: expected two arrays, or a torch Dataset or DataLoader; found {shown}."
    )
