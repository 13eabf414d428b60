"""A Keras optimizer as a torch optimizer: Keras's own update, on state that torch keeps.

State is kept by parameter, as torch optimizers keep it, so that every plan can divide, save, and
resume it. Keras's formulas run on this worker's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from keras.src.backend.torch.core import get_device, to_torch_dtype
from torch.optim import Optimizer

import keras
from ronde.keras.owned_variables import OwnedVariable, local_values
from ronde.world import ArgumentError
from ronde.world.tensors import local_part

__all__ = ["KerasOptimizer", "torch_optimizer"]

_ELEMENTWISE = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Lion",
    "Ftrl",
)
_REFUSED = {
    "gradient_accumulation_steps": "give ronde.distribute(…, micro_batch=N)",
    "loss_scale_factor": "give ronde.distribute(…, precision='fp16')",
    "use_ema": "use run.average()",
}


def torch_optimizer(optimizer: Any, model: Any, batch: str) -> Optimizer:
    """A torch optimizer with a Keras optimizer's update; a torch optimizer is given back as it is.

    Raises:
        ArgumentError: it has state already, or an option that Ronde has its own for.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer  # type: ignore[no-any-return]  # checked by distribute
    name = type(optimizer).__name__
    for option, cure in _REFUSED.items():
        if getattr(optimizer, option, None):
            raise ArgumentError(f"optimizer={name}({option}=…): Ronde does this itself; {cure}.")
    if name == "LossScaleOptimizer":
        raise ArgumentError(f"optimizer={name}: give the inner one, and precision='fp16'.")
    if optimizer.built:
        raise ArgumentError(
            f"optimizer={name} has trained already. Give a fresh one; of a saved model, load the "
            "weights only: keras.models.load_model(path, compile=False)."
        )
    schedule = optimizer._learning_rate
    if not isinstance(schedule, keras.Variable | keras.optimizers.schedules.LearningRateSchedule):
        raise ArgumentError(f"optimizer={name}: learning_rate is a function; give a schedule.")
    if batch == "grow" and not isinstance(schedule, keras.Variable):
        raise ArgumentError(
            "batch='grow' with a Keras LearningRateSchedule: the rate would not follow the batch. "
            "Give a number, and scheduler=."
        )
    kind: type[KerasOptimizer] = type(f"Keras{name}", (KerasOptimizer,), {})
    return kind(optimizer, [v for v in model.trainable_variables if isinstance(v, OwnedVariable)])


class _State(keras.Variable):  # type: ignore[misc]
    """A moment: a tensor of the torch optimizer's state, made when it is first used."""

    @property
    def _value(self) -> torch.Tensor:
        p = self._reference.whole
        state = self._of.state[p]
        if self._field not in state:
            state[self._field] = torch.full_like(p, self._start, requires_grad=False)
        return local_part(state[self._field])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this worker's part."""
        return tuple(self._value.shape)


class _Setting(keras.Variable):  # type: ignore[misc]
    """A number: a setting of the torch optimizer's group."""

    @property
    def _value(self) -> torch.Tensor:
        value = self._of.param_groups[0][self._field]
        device = get_device()
        return torch.tensor(value, dtype=to_torch_dtype(self._dtype), device=device)

    def _direct_assign(self, value: Any) -> None:
        self._of.param_groups[0][self._field] = value.item()

    def assign_add(self, value: Any) -> Any:
        """Add a number without asking the device."""
        if isinstance(value, int | float):
            self._of.param_groups[0][self._field] += value
            return None
        return super().assign_add(value)


class KerasOptimizer(Optimizer):
    """The torch optimizer over a Keras optimizer.

    Attributes:
        inner: the Keras optimizer.
        schedule: its learning rate schedule, or None.
    """

    def __init__(self, inner: Any, variables: list[OwnedVariable]) -> None:
        self.inner = inner
        self.variables = variables
        rate = inner._learning_rate
        self.schedule = None if isinstance(rate, keras.Variable) else rate
        states: list[_State] = []
        add = inner.add_variable_from_reference

        def add_state(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
            states.append(self._state(reference_variable, name or "var", initializer))
            return states[-1]

        inner.add_variable_from_reference = add_state
        try:
            inner.build(variables)
        finally:
            inner.add_variable_from_reference = add
            del inner.add_variable_from_reference
        if self.schedule is not None:
            inner._learning_rate = keras.Variable(0.0, trainable=False, name="learning_rate")
        settings = {
            {"_learning_rate": "lr", "_iterations": "iteration"}.get(k, k.strip("_")): v
            for k, v in vars(inner).items()
            if isinstance(v, keras.Variable)
        }
        self._check_loose(settings, states)
        start = {k: v.value.item() for k, v in settings.items()}
        if self.schedule is not None:
            start["lr"] = self._scheduled(0)
        super().__init__([v.whole for v in variables], start)
        inner.save_own_variables = lambda _store: None  # state is the run's, in its checkpoints
        for field, variable in settings.items():
            del variable.__dict__["_value"]
            variable.__class__ = _Setting
            variable._of, variable._field = self, field

    @property
    def coupling(self) -> str:
        """Why a step needs all parameters: see :mod:`ronde.parallel.optimizer_coupling`."""
        return "coupled" if self.inner.global_clipnorm else ""

    @property
    def reads_whole(self) -> str:
        """Why the update of an element needs more than its own gradient; empty if it does not."""
        inner, name = self.inner, _name(self.inner)
        if not type(inner).__module__.startswith("keras.") or name not in _ELEMENTWISE:
            return f"{name} computes with whole parameters"
        if inner.global_clipnorm or inner.clipnorm:
            return f"{name} clips by norms (clip_norm= of ronde.distribute works under any plan)"
        named = [v.path for v in self.variables if v.constraint is not None]
        return f"{named[0]!r} has a constraint" if named else ""

    def over(self, copies: Mapping[int, torch.Tensor]) -> KerasOptimizer:
        """The same optimizer, without state, over copies of its parameters, by their ids."""
        inner = type(self.inner).from_config(self.inner.get_config())
        made = type(self)(inner, [v.over(copies[id(v.whole)]) for v in self.variables])
        for mine, theirs in zip(made.param_groups, self.param_groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
        return made

    def _state(self, reference: Any, field: str, initializer: Any) -> Any:
        made = keras.Variable(0.0, dtype=reference.dtype, trainable=False, name=field)
        start = float(keras.initializers.get(initializer)((), dtype=reference.dtype))
        del made.__dict__["_value"]
        made.__class__ = _State
        made._of, made._reference, made._field, made._start = self, reference, field, start
        return made

    def _check_loose(self, settings: dict[str, Any], states: list[_State]) -> None:
        """Refuse state that belongs to no parameter and is no number."""
        known = {id(v) for v in [*settings.values(), *states]}
        loose = [v for v in self.inner.variables if id(v) not in known or v.ndim]
        if loose := [v for v in loose if not isinstance(v, _State)]:
            raise ArgumentError(
                f"optimizer={_name(self.inner)}: its state {loose[0].path!r} is neither shaped "
                "like a parameter nor a number, so it cannot be divided or saved. Use another one."
            )

    def _scheduled(self, iteration: int) -> float:
        assert self.schedule is not None
        with keras.device("cpu"):
            return float(self.schedule(iteration))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        by_id = {id(v.whole): v for v in self.variables}
        pairs = [
            (by_id[id(p)], local_part(p.grad))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        first = self.param_groups[0]
        iteration = first["iteration"]
        with local_values():
            if pairs:
                variables, gradients = zip(*pairs, strict=True)
                self.inner.apply(list(gradients), list(variables))
        first["iteration"] = iteration + 1
        if self.schedule is not None:
            first["lr"] = self._scheduled(iteration + 1)


def _name(optimizer: Any) -> str:
    return type(optimizer).__name__
