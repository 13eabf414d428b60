"""What a script owns besides its model: objects and values that it registers, and averages of the
weights. They are in the checkpoint, under every plan, and back after a resume.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ronde import checkpoint
from ronde.run.checks import is_whole
from ronde.world import ArgumentError, CheckpointError, RondeError
from ronde.world.consensus import agree, gather_or_raise
from ronde.world.tensors import is_sharded, local_part

if TYPE_CHECKING:
    from ronde.run.parts import Parts

__all__ = ["Averages", "Decay", "Registered", "Registry", "WeightAverage", "average_wants"]

_CONTAINERS = (list, dict, deque, torch.Tensor, np.ndarray)
_SHOWN_CHARACTERS = 60  # of a value in an error
_SHARED = (
    "A checkpoint holds one for all: compute it from values that all workers share, such as the "
    "loss that run.step returns and the results of run.evaluate."
)


class Registered:
    """What a script has registered, by name, as attributes. ``run.register`` returns it.

    A plain value is changed by assignment; the checkpoint holds the value it has then.

    Example:
        >>> kept = run.register(best=0.0)  # doctest: +SKIP
        >>> kept.best = max(kept.best, 0.93)  # doctest: +SKIP
    """

    __slots__ = ("_items",)

    def __init__(self, items: dict[str, Any]) -> None:
        object.__setattr__(self, "_items", items)

    def __getattr__(self, name: str) -> Any:
        items = object.__getattribute__(self, "_items")
        if name not in items:
            raise AttributeError(
                f"{name!r} is not registered: call run.register({name}=…) before the first step."
            )
        return items[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if _has_state(getattr(self, name)):
            raise AttributeError(
                f"{name!r} is a registered object, which comes back in place: it cannot be "
                "replaced by assignment."
            )
        self._items[name] = value

    def __dir__(self) -> list[str]:
        return [*self._items]

    def __repr__(self) -> str:
        shown = (f"{n}={type(v).__name__ if _has_state(v) else v}" for n, v in self._items.items())
        return f"Registered({', '.join(shown)})"


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


class Registry:
    """The registered objects and values of one run.

    Attributes:
        items: name -> object or value, as the script registered them.
        view: the same, as the script sees them.
    """

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self.view = Registered(self.items)
        # From the checkpoint, until the script registers it.
        self._waiting: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._resumed = False
        self._lr_factor = 1.0
        # Settings of an optimizer's groups after the resume. A scheduler that is built later sets
        # the rate to its first one.
        self._settings: dict[int, list[dict[str, Any]]] = {}

    # -- the script's side -------------------------------------------------------------

    def add(self, run: Parts, things: Mapping[str, Any]) -> Registered:
        """Register, and restore what the checkpoint has under these names."""
        for name, thing in things.items():
            self._check(run, name, thing)
        # An optimizer first: its scheduler's restoration sets its rates.
        for name in sorted(things, key=lambda n: not isinstance(things[n], Optimizer)):
            thing = things[name]
            for part in _metrics(thing):
                part.persistent(True)  # otherwise their state_dict() is empty
            _pack(name, thing, {})  # refuses what no checkpoint can hold
            self.items[name] = thing
            if name in self._waiting:
                try:
                    self._restore(run, name, thing)
                except RondeError:
                    raise
                except Exception as error:
                    raise CheckpointError(
                        f"registered {name!r} cannot be restored from the checkpoint: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            elif self._resumed:
                run.warn(f"the checkpoint has no registered {name!r}: it begins anew")
        return self.view

    def _check(self, run: Parts, name: str, thing: Any) -> None:
        if not name.isidentifier() or name.startswith("_"):
            raise ArgumentError(
                f"run.register: {name!r} is not a name. Use letters, digits, and '_', starting "
                "with a letter."
            )
        if name in self.items:
            raise ArgumentError(
                f"run.register: {name!r} is registered already. Register each name once."
            )
        for own in ("model", "optimizer", "scheduler"):
            if thing is not None and thing is getattr(run, own):
                raise ArgumentError(
                    f"run.register({name}=…): this is the {own} given to ronde.distribute, which "
                    "is in every checkpoint already. Leave it out."
                )
        if isinstance(thing, Optimizer) and not run.holds_all:
            divided = {id(p) for p in run.model.parameters()}
            divided |= {id(ref()) for ref in run.work.undivided}  # that it was built over
            updated = [p for group in thing.param_groups for p in group["params"]]
            if any(is_sharded(p) or id(p) in divided for p in updated):
                raise ArgumentError(
                    f"run.register({name}=…): {type(thing).__name__} updates parameters that "
                    f"the plan {run.plan.spec!r} divides over the workers. Only the optimizer "
                    "given to ronde.distribute can; use plan='replicate' for this script."
                )

    def _restore(self, run: Parts, name: str, thing: Any) -> None:
        saved = self._waiting.pop(name)
        then, now = saved["class"], _class(thing)
        is_value = "value" in saved
        if is_value == _has_state(thing) or (not is_value and then != now):
            raise CheckpointError(
                f"registered {name!r} is of {then} in the checkpoint, and the script now registers "
                f"{now}. Register it under another name, or start a new run."
            )
        if is_value:
            value = checkpoint.decode_exact(saved["value"], self._tensors, run.world.device)
            self.items[name] = _in_place(name, thing, value)
        else:
            state = checkpoint.decode_exact(saved["state"], self._tensors, run.world.device)
            thing.load_state_dict(state)
            for part, updates in zip(_metrics(thing), saved.get("updates", ()), strict=True):
                part._update_count = updates
            if isinstance(thing, Optimizer):
                self._settings[id(thing)] = _group_settings(thing)
            self._settle_rates(run, thing)
        for key in [k for k in self._tensors if k.split("/")[0] == name]:
            del self._tensors[key]

    def _settle_rates(self, run: Parts, scheduler: Any) -> None:
        """Undo what building the scheduler did to its optimizer."""
        optimizer = getattr(scheduler, "optimizer", None)
        settings = self._settings.get(id(optimizer))
        if not isinstance(optimizer, Optimizer) or settings is None:
            return
        if optimizer is run.optimizer:
            from ronde.run import lr_rules  # a resume

            lr_rules.scale_rates(optimizer, scheduler, self._lr_factor)
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(_copied(values))
        # torch would warn that the scheduler is stepped first, where the resume is an epoch's end
        optimizer._opt_called = run.state.step > 0  # type: ignore[attr-defined]

    # -- the checkpoint's side ---------------------------------------------------------

    def pack(self, run: Parts) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Everything registered, as JSON and tensors. A collective if there are several workers
        and anything is registered.

        Raises:
            ArgumentError: a value cannot be written.
            WorldError: it is not the same on all ranks.
        """
        packed: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        error = None
        try:
            for name, thing in self.items.items():
                packed[name] = _pack(name, thing, tensors)
        except ArgumentError as caught:
            error = caught
        if run.world.size > 1 and self.items:
            gather_or_raise(run.world, None, error)
            facts = {
                f"the registered {name!r}": _fact(thing, name, packed, tensors)
                for name, thing in self.items.items()
            }
            agree(run.world, facts, "run.save()", _SHARED)
        if error:
            raise error
        return packed, tensors

    def loaded(
        self,
        run: Parts,
        saved: Mapping[str, Any],
        tensors: dict[str, torch.Tensor],
        lr_factor: float,
    ) -> None:
        """Keep a checkpoint's registered state for when the script registers it.

        Args:
            lr_factor: factor on the learning rates, on another number of workers.
        """
        self._waiting, self._tensors, self._resumed = dict(saved), tensors, True
        self._lr_factor = lr_factor
        self._settings[id(run.optimizer)] = _group_settings(run.optimizer)

    def report_unused(self, run: Parts) -> None:
        """Say once what the checkpoint has and the script did not register before a step."""
        if self._waiting:
            names = ", ".join(map(repr, self._waiting))
            run.warn(
                f"the checkpoint has registered state that the script does not register: {names}. "
                "The next checkpoint will not have it"
            )
            self._waiting, self._tensors = {}, {}


def _class(thing: Any) -> str:
    return type(thing).__name__


def _metrics(thing: Any) -> list[Any]:
    """The torchmetrics objects in it."""
    if not isinstance(thing, nn.Module):
        return []
    return [m for m in thing.modules() if hasattr(m, "_update_count") and hasattr(m, "persistent")]


def _pack(name: str, thing: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    try:
        if not _has_state(thing):
            return {"class": _class(thing), "value": checkpoint.encode_exact(thing, name, tensors)}
        packed = {
            "class": _class(thing),
            "state": checkpoint.encode_exact(thing.state_dict(), name, tensors),
        }
        if metrics := _metrics(thing):
            packed["updates"] = [m._update_count for m in metrics]
        return packed
    except CheckpointError as error:
        plain = _has_state(thing) or isinstance(thing, (*_CONTAINERS, tuple))
        hint = "" if plain else " Or give it state_dict() and load_state_dict()."
        raise ArgumentError(f"run.register({name}=…): {error}{hint}") from None
    except RecursionError:
        raise ArgumentError(
            f"run.register({name}=…): it contains itself, or is nested too deeply."
        ) from None


def _in_place(name: str, now: Any, then: Any) -> Any:
    """Put a container's or a tensor's values back into the script's own object."""
    if not all(isinstance(each, _CONTAINERS) for each in (now, then)):
        return then
    tensors = isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor)
    if type(now) is not type(then) and not tensors:
        raise CheckpointError(
            f"registered {name!r} is a {_class(then)} in the checkpoint, and the script now "
            f"registers a {_class(now)}. Register it under another name, or start a new run."
        )
    if tensors or isinstance(now, np.ndarray):
        if tuple(now.shape) == tuple(then.shape) and now.dtype == then.dtype:
            with torch.no_grad():
                now.copy_(then) if tensors else np.copyto(now, then)
            return now
        if 0 in now.shape:
            return then  # it grows, by assignment
        raise CheckpointError(
            f"registered {name!r} is {then.dtype} {list(then.shape)} in the checkpoint, and the "
            f"script now registers {now.dtype} {list(now.shape)}. Register an empty one if it "
            "grows, or start a new run."
        )
    if isinstance(now, deque) and now.maxlen != then.maxlen:
        raise CheckpointError(
            f"registered {name!r} has maxlen {then.maxlen} in the checkpoint, and {now.maxlen} "
            "now. Register it under another name, or start a new run."
        )
    now.clear()
    now.update(then) if isinstance(now, dict) else now.extend(then)
    return now


def _group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [_copied(group) for group in optimizer.param_groups]


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v.clone() if isinstance(v, torch.Tensor) else v
        for k, v in settings.items()
        if k != "params"
    }


def _fact(
    thing: Any, name: str, packed: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Any:
    """A short plain value, or a digest of what is registered under a name."""
    value, own = packed[name].get("value", {}), [k for k in tensors if k.split("/")[0] == name]
    plain = not own and not isinstance(value, dict)
    if plain and len(json.dumps(value)) <= _SHOWN_CHARACTERS:
        return value
    text = json.dumps(packed[name], sort_keys=True)
    digest = hashlib.sha256(text.encode())
    # As for the model, rank 0's buffers count: batch normalization's differ between ranks.
    buffers = set()
    if isinstance(thing, nn.Module) and not _metrics(thing):
        buffers = {f"{name}/{b}" for b, _ in thing.named_buffers()}
    for key in own:
        if key not in buffers and tensors[key].numel():
            bits = tensors[key].cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(bits.numpy().data)
    return f"{packed[name]['class']} {digest.hexdigest()[:16]}"


# -- averages of the weights -----------------------------------------------------------

Decay = float | Callable[[int], float] | None


def _parameters(run: Parts) -> dict[str, nn.Parameter]:
    """The parameters of which this worker holds a part or all, each once, by its first name."""
    parameters: dict[str, nn.Parameter] = {}
    # FSDP puts its shards back for state_dict(): until then, it may hold whole parameters.
    for name, value in run.model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and run.strategy.owns(name):
            parameters.setdefault(run.work.tied.get(name, name), value)
    return parameters


class WeightAverage:
    """An average of a run's weights; ``run.average`` makes it.

    Each worker averages the parts of the weights that it holds. Buffers (such as the statistics of
    batch normalization) are not averaged: inside :meth:`applied` the model keeps its current ones.

    Attributes:
        name: in the checkpoint.
        updates: how many steps it has averaged.
    """

    def __init__(
        self, run: Parts, name: str, decay: Decay, start: int, every: int, averages: Averages
    ) -> None:
        self.name = name
        self.updates = 0
        self._decay, self._start, self._every = decay, start, every
        self._averages = averages
        self._run = run
        self._of = _parameters(run)
        self._parts = {key: _copy(local_part(p)) for key, p in self._of.items()}

    def after_step(self, step: int) -> None:
        """Take the weights after an optimizer step in."""
        if step <= self._start or (step - self._start) % self._every:
            return
        if self._decay is None:
            decay = self.updates / (self.updates + 1)
        else:
            decay = self._decay(self.updates) if callable(self._decay) else self._decay
            if not 0.0 <= decay <= 1.0:
                raise ArgumentError(
                    f"run.average: decay({self.updates}) is {decay!r}; expected 0.0 to 1.0."
                )
        self.updates += 1
        with torch.no_grad():
            averages = list(self._parts.values())
            weights = [
                local_part(p).to(a.dtype) for p, a in zip(self._live(), averages, strict=True)
            ]
            torch._foreach_lerp_(averages, weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights: for ``run.evaluate`` and ``run.export``.
        Afterwards it has its own again, bit by bit, also after an exception. Call it on every
        worker.

        Raises:
            RondeError: an average is applied already, or the model has other parameters now.

        Example:
            >>> with average.applied():  # doctest: +SKIP
            ...     result = run.evaluate(test_set)
        """
        run, averages = self._run, self._averages
        if averages.applied is not None:
            raise RondeError(
                f"average.applied(): the model has the weights of {averages.applied!r} already. "
                "Leave that block first."
            )
        parts = [local_part(p) for p in self._now(run).values()]
        before = [part.clone() for part in parts]
        averages.applied = self.name
        try:
            _fill(run, parts, list(self._parts.values()))
            yield
        finally:
            averages.applied = None
            _fill(run, parts, before)

    def pieces(self) -> dict[str, checkpoint.Piece]:
        """This worker's parts, as ``average/parameter``, for a checkpoint."""
        return {
            f"{self.name}/{key}": checkpoint.Piece(
                self._parts[key], tuple(p.shape), checkpoint.box_of(p, key)
            )
            for key, p in self._now(self._run).items()
        }

    def restore(self, parts: Mapping[str, torch.Tensor], updates: int) -> None:
        """Continue with a checkpoint's parts, by ``average/parameter``."""
        for key, part in self._parts.items():
            value = parts.get(f"{self.name}/{key}")
            if value is None or value.shape != part.shape:
                raise CheckpointError(
                    f"the checkpoint's average {self.name!r} does not have {key!r} of shape "
                    f"{list(part.shape)}: it is of another model. Start a new run, or give the "
                    "average another name."
                )
            part.copy_(value)
        self.updates = updates

    def _live(self) -> list[nn.Parameter]:
        return list(self._of.values())

    def _now(self, run: Parts) -> dict[str, nn.Parameter]:
        """The parameters, if they are those that are averaged."""
        parameters = _parameters(run)
        changed = [
            n for n in {**parameters, **self._of} if parameters.get(n) is not self._of.get(n)
        ]
        if changed:
            raise RondeError(
                f"the model's parameter {changed[0]!r} was added, removed, or replaced after "
                "run.average: call run.average when the model has all its parameters."
            )
        return parameters


def _copy(part: torch.Tensor) -> torch.Tensor:
    # Half precision cannot hold the small changes of an average.
    half = part.dtype in (torch.float16, torch.bfloat16)
    return part.to(torch.float32, copy=True) if half else part.clone()


def _fill(run: Parts, parts: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
    run.strategy.loaded()


class Averages:
    """All averages of one run.

    Attributes:
        items: name -> average.
        applied: the name of the average whose weights the model has just now; None for its own.
    """

    def __init__(self) -> None:
        self.items: dict[str, WeightAverage] = {}
        self.applied: str | None = None
        # From the checkpoint, until the script asks for the average.
        self._waiting: dict[str, int] = {}
        self._parts: Mapping[str, torch.Tensor] = {}
        self._resumed = False

    def add(self, run: Parts, name: str, decay: Decay, start: int, every: int) -> WeightAverage:
        """Make an average, or continue the checkpoint's of this name. A collective."""
        if not name.isidentifier():
            raise ArgumentError(
                f"run.average(name={name!r}): use letters, digits, and '_', starting with a letter."
            )
        if name in self.items:
            raise ArgumentError(
                f"run.average: there is an average {name!r} already. Give the second one another "
                "name: run.average(…, name='slow')."
            )
        number = isinstance(decay, float | int) and not isinstance(decay, bool)
        if not (decay is None or callable(decay) or (number and 0.0 <= decay < 1.0)):
            raise ArgumentError(
                f"run.average(decay={decay!r}): expected a number from 0.0 to below 1.0, a "
                "function of the number of updates, or None for the plain mean."
            )
        if not is_whole(start) or start < 0 or not is_whole(every) or every < 1:
            raise ArgumentError(
                f"run.average(start={start!r}, every={every!r}): expected whole numbers of "
                "optimizer steps, start from 0 and every from 1."
            )
        shown = decay if not callable(decay) else "a function"
        facts = {"name": name, "decay": shown, "start": start, "every": every}
        agree(run.world, facts, "run.average")
        average = WeightAverage(run, name, decay, start, every, self)
        if name in self._waiting:
            average.restore(self._parts, self._waiting.pop(name))
        elif self._resumed:
            run.warn(f"the checkpoint has no average {name!r}: it begins anew")
        self.items[name] = average
        return average

    def after_step(self, step: int) -> None:
        """Update all of them."""
        for average in self.items.values():
            average.after_step(step)

    def check(self, call: str) -> None:
        """Refuse what must not meet averaged weights."""
        if self.applied is not None:
            raise RondeError(
                f"{call} was called inside average.applied(), where the model has averaged "
                "weights. Leave that block first; run.evaluate and run.export work inside it."
            )

    def pack(self) -> tuple[dict[str, int], dict[str, checkpoint.Piece]]:
        """Names and updates, and this worker's parts."""
        pieces: dict[str, checkpoint.Piece] = {}
        for average in self.items.values():
            pieces |= average.pieces()
        return {name: each.updates for name, each in self.items.items()}, pieces

    def loaded(self, updates: Mapping[str, int], parts: Mapping[str, torch.Tensor]) -> None:
        """Keep a checkpoint's averages for when the script asks for them."""
        self._waiting, self._parts, self._resumed = dict(updates), parts, True

    def report_unused(self, run: Parts) -> None:
        """Say once which averages of the checkpoint the script did not ask for before a step."""
        if self._waiting:
            run.warn(
                f"the checkpoint has the average {', '.join(map(repr, self._waiting))}, and the "
                "script does not call run.average for it. The next checkpoint will not have it"
            )
        self._waiting, self._parts = {}, {}


def average_wants(
    run: Parts, names: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[checkpoint.Want], dict[str, torch.Tensor]]:
    """The boxes this worker needs of a checkpoint's averages, and where they will be."""
    parts: dict[str, torch.Tensor] = {}
    wants: list[checkpoint.Want] = []
    for key, p in _parameters(run).items() if names else ():
        for name in names:
            full = f"{name}/{key}"
            if shapes.get(full) == tuple(p.shape):  # otherwise refused when the script asks for it

                def give(tensor: torch.Tensor, full: str = full) -> None:
                    parts[full] = tensor

                wants.append(checkpoint.Want("average", full, checkpoint.box_of(p, key), give))
    return wants, parts
