"""What a rule is, and the names of all.

A rule is called each time something was added to the view, and yields an :class:`Alert` when the
newest rows say so. Its keyword arguments are its settings. It names what decided; the judge adds
the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ronde.watch.record import Alert
from ronde.watch.rule_view import RuleView

__all__ = ["MACHINES", "RECORD", "RULES", "Alerts", "Rule", "no_loss", "rule"]

Alerts = Iterator[Alert]
RECORD = ("any", "loss", "evaluations", "steps", "replicas")
MACHINES = ("hosts", "devices", "loading", "waited")


@dataclass(frozen=True)
class Rule:
    """A rule: its function, what it needs, and one thing to try.

    ``needs`` is ``any``; ``evaluations``, ``loss`` (one that is positive, of one model), ``steps``,
    or ``replicas`` of the record; ``health``, ``activations``, ``inputs``, ``targets``, or
    ``scaler`` of the health; ``hosts``, ``devices``, ``loading``, or ``waited`` of the resources;
    or ``start``, their lines before the first step.
    """

    name: str
    function: Callable[..., Alerts]
    needs: str = "any"
    remedy: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Defaults of the keyword arguments."""
        every = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in every if p.default is not p.empty}

    def not_judged(self, view: RuleView) -> str:
        """Why the rule has nothing to judge; empty if it has."""
        return _REASONS[self.needs](view)


RULES: dict[str, Rule] = {}
"""Name -> rule, in the order in which they are judged."""


def rule(needs: str, remedy: str) -> Callable[[Callable[..., Alerts]], Callable[..., Alerts]]:
    """Makes a function a rule of its name."""

    def add(function: Callable[..., Alerts]) -> Callable[..., Alerts]:
        name = function.__name__.replace("_", "-")
        RULES[name] = Rule(name, function, needs, remedy)
        return function

    return add


def no_loss(view: RuleView) -> str:
    """Why the loss says nothing about learning."""
    if view.several:
        return "several models in one loop"
    if not len(view.loss):
        return "no step yet"
    if view.start is not None and view.start.origin and not view.continues:
        return "the run began with a checkpoint of another one that it does not repeat"
    return "the loss is not positive" if bool((view.loss <= 0).any()) else ""


def _measured(count: Callable[[RuleView], int], what: str) -> Callable[[RuleView], str]:
    """Why nothing of the health is there: what counts the rows, and their name."""

    def why(view: RuleView) -> str:
        health = view.health
        tables = health.tensors, health.activations, health.inputs, health.targets, health.bad
        if not any(map(len, tables)):
            return "not measured: --watch"
        return "" if count(view) else f"no {what} measured"

    return why


_no_tensors = _measured(lambda view: len(view.health.tensors) + len(view.health.bad), "tensors")


def _no_scaler(view: RuleView) -> str:
    if view.precision != "fp16":
        return "not fp16"
    return _no_tensors(view)


def _no_hosts(view: RuleView) -> str:
    return "" if view.hosts else "no resources measured yet"


def _no_devices(view: RuleView) -> str:
    if not view.hosts or not view.on_gpus:
        return _no_hosts(view) or "no GPU"
    return (
        ""
        if any(host.devices for host in view.hosts.values())
        else "GPUs are not measured: pip install nvidia-ml-py"
    )


def _no_loading(view: RuleView) -> str:
    return _no_devices(view) if view.on_gpus else _no_hosts(view)


def _no_waits(view: RuleView) -> str:
    if view.start is not None and view.start.workers == 1:
        return "one worker"
    return _no_hosts(view) or ("waits are not known on GPUs" if view.on_gpus else "")


_REASONS: dict[str, Callable[[RuleView], str]] = {
    "any": lambda view: "",
    "evaluations": lambda view: "" if view.evaluations else "no evaluation yet",
    "loss": no_loss,
    "steps": lambda view: "" if len(view.step_seconds()[0]) >= 500 else "not 500 steps in a row",
    "replicas": lambda view: "one worker" if view.start and view.start.workers == 1 else "",
    "health": _no_tensors,
    "activations": _measured(lambda view: len(view.health.activations), "activations"),
    "inputs": _measured(lambda view: len(view.health.inputs), "inputs of floating point"),
    "targets": _measured(lambda view: len(view.health.targets), "classes"),
    "scaler": _no_scaler,
    "hosts": _no_hosts,
    "devices": _no_devices,
    "loading": _no_loading,
    "waited": _no_waits,
    "start": lambda view: "",
}
