"""Judges a run by its files, while they grow or long after: the alerts are the same."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import runpy
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ronde.checkpoint.manifest import folder_name
from ronde.watch.health_record import HEALTH, IDLE_ROWS, RESOURCES
from ronde.watch.record import (
    Alert,
    Checkpointed,
    Ended,
    Evaluated,
    Event,
    NonFiniteStep,
    Resumed,
    Started,
    StepRecorded,
    appended,
    event_of,
)
from ronde.watch.rule import MACHINES, RECORD, Rule
from ronde.watch.rule_view import RuleView
from ronde.watch.rules import RULES
from ronde.watch.run_dir import RunDir
from ronde.world import ArgumentError
from ronde.world.errors import did_you_mean

__all__ = ["Judge", "alert_line", "alert_values"]

_ROWS = 32  # recorded steps between two looks of the rules on the record
_LATE_SECONDS = 5.0  # by which a line of resources may come after an event of the same moment


class Judge:
    """Reads a run's record, health, and resources from the beginning, and judges rules on them.

    Health lines are read before the record's ``step`` of the same number, in which order they were
    written, and lines of resources before the event that came five seconds later. So alerts depend
    on the files alone, and not on how often :meth:`look` was called.

    A run that repeats another one from a checkpoint, with the same script and arguments, goes on
    with that one's measurements.

    Args:
        run: the run directory.
        only: names of rules; empty: all.
        without: names of rules to leave out.
        rules_file: Python file with rules of one's own: functions whose first argument is ``view``.
        settings: ``RULE.KEY`` -> value.

    Raises:
        ArgumentError: a rule or a setting is unknown, or the file cannot be run.

    Example:
        >>> Judge(RunDir(Path("runs/big"))).look()  # doctest: +SKIP
        [Alert(step=412, ...)]
    """

    def __init__(
        self,
        run: RunDir,
        only: Iterable[str] = (),
        without: Iterable[str] = (),
        rules_file: Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        rules = RULES | (_own_rules(rules_file) if rules_file else {})
        only, without = list(only), list(without)
        for name in (*only, *without):
            _check_known(name, rules, "rule")
        self.rules = {n: r for n, r in rules.items() if n not in without and n in (only or rules)}
        self._settings = _settings(rules, settings or {})
        self.failed: dict[str, str] = {}
        """Rules that raised, and how: each was left out from then on."""
        self.alerts: list[Alert] = []
        self._run = run
        self._offsets = {"record.jsonl": 0, HEALTH: 0, RESOURCES: 0}
        self._health: deque[dict[str, Any]] = deque()
        self._resources: deque[dict[str, Any]] = deque()
        self._views: dict[str | None, RuleView] = {None: RuleView()}
        self._checkpoints: list[int] = []
        self._repeats: dict[tuple[str | None, str, str | None], tuple[int, list[str]]] = {}
        self._ancestors = frozenset({run.path.resolve()})
        self._time = 0.0
        self._begun = {0.0}  # when training started, resumed, or went back

    @property
    def view(self) -> RuleView:
        """The run so far."""
        return self._views[None]

    def look(self) -> list[Alert]:
        """Read what was appended to the files, and return the alerts that follow from it."""
        before = len(self.alerts)
        lines = self._appended("record.jsonl")  # before health, which is written first
        self._health.extend(self._appended(HEALTH))
        self._resources.extend(line for line in self._appended(RESOURCES) if "ranks" in line)
        self._take_resources(-math.inf)
        for line in lines:
            # Alerts that the launcher wrote are told again by the rules themselves.
            if (event := event_of(line)) is not None and not isinstance(event, Alert):
                self._take(event)
        return self.alerts[before:]

    def summary(self) -> str:
        """How many rules were judged, on how many steps; which were not, and why."""
        view = self.view
        why = {n: r.not_judged(view) for n, r in self.rules.items() if n not in self.failed}
        loud = {a.rule for a in self.alerts}
        silent = [n for n, reason in why.items() if not reason and n not in loud]
        parts = [
            f"{len(self.rules)} rules",
            f"{int(view.step[-1]) if len(view.step) else 0:,} steps",
            *([f"measured every {view.health.every} steps"] if view.health.every else []),
        ]
        counts = [f"{len(self.alerts)} alerts", f"{len(silent)} silent"]
        left: dict[str, int] = {}
        for name, reason in why.items():
            if reason and name not in loud:
                left[reason] = left.get(reason, 0) + 1
        counts += [f"{n} not judged ({reason})" for reason, n in left.items()]
        counts += [f"{name} left out ({error})" for name, error in self.failed.items()]
        return "  ·  ".join([*parts, ", ".join(counts)])

    def _appended(self, name: str) -> list[dict[str, Any]]:
        lines, path = [], self._run.path / name
        if path.exists():
            for offset, line in appended(path, self._offsets[name]):
                self._offsets[name] = offset
                if line is not None:
                    lines.append(line)
        return lines

    def _take(self, event: Event) -> None:
        part = event.part
        if isinstance(event, Started) and event.origin and self._is_new:
            self._go_on_from(event)
        if part not in self._views:
            self._views[part] = RuleView()
            for view in self._views.values():
                view.several = True
        view = self._views[part]
        self._take_resources(event.time - _LATE_SECONDS)
        self._time = event.time
        if part is None and isinstance(event, StepRecorded | Ended):
            self._take_health(event.step if isinstance(event, StepRecorded) else None)
        if part is None and isinstance(event, Resumed):
            self._checkpoints = [s for s in self._checkpoints if s < event.step] + [event.step]
            self._take_health(event.step)
            while self._health and not self._is_later(self._health[0]):
                self._health.popleft()  # of steps that are void
        if part is None and isinstance(event, Started | Resumed):
            self._begun.add(event.time)
        if isinstance(event, Checkpointed):
            self._checkpoints.append(event.step)
        view.take(event)
        mark = isinstance(event, Evaluated | NonFiniteStep | Ended)
        if isinstance(event, StepRecorded):
            mark = len(view.step) % _ROWS == 0 or not np.isfinite(event.loss)
        if mark:
            self._judge(part, RECORD)

    def _take_health(self, step: int | None) -> None:
        """Take the lines up to ``step``, or all, as far as the record has got."""
        while self._health and (step is None or self._health[0].get("step", 0) <= step):
            if self._is_later(self._health[0]):
                return
            line = self._health.popleft()
            self.view.health.take(line)
            if line.get("type") == "health":
                self._judge(None, ("any", "health", "scaler"))
            else:
                self._judge(None, (str(line.get("type")),))

    @property
    def _is_new(self) -> bool:
        """Whether no start has been read."""
        return len(self._views) == 1 and self.view.start is None

    def _is_later(self, line: Mapping[str, Any]) -> bool:
        """Whether a line begins the measurements of workers whose start is yet to be read."""
        return line.get("type") == "tensors" and line.get("start", 0.0) not in self._begun

    def _go_on_from(self, start: Started) -> None:
        """Begin with the rows of the run that this one repeats, if it does and they are there."""
        name, _, step = start.origin.rpartition("@")
        run = RunDir(self._run.path.parent / name)
        if run.path.resolve() in self._ancestors or not run.record.is_file():
            return
        # Without rules: only its measurements count here.
        before = Judge(run, without=RULES)
        before._ancestors |= self._ancestors
        before.look()
        then = before.view.start
        if then is not None and (then.script, then.arguments) == (start.script, start.arguments):
            self._views = before._views
            for view in self._views.values():
                view.cut(int(step))
                view.continues = True

    def _take_resources(self, until: float) -> None:
        """Take the lines up to a time, and those of a run that has not trained yet at once."""
        while self._resources:
            line = self._resources[0]
            if line["training"] and line["time"] > until:
                return
            self._time = float(self._resources.popleft()["time"])
            self.view.take_resources(line)
            self._judge(None, MACHINES if line["training"] else ("start",))

    def _judge(self, part: str | None, needs: tuple[str, ...]) -> None:
        view = self._views[part]
        for name, rule in self.rules.items():
            if name in self.failed or rule.needs not in needs:
                continue
            if rule.needs != "any" and rule.not_judged(view):
                continue
            try:
                for alert in rule.function(view, **self._settings.get(name, {})):
                    self._add(part, rule, alert)
            except Exception as error:  # of the user's own: it ends neither others nor the run
                self.failed[name] = f"{type(error).__name__}: {error}"

    def _add(self, part: str | None, rule: Rule, alert: Alert) -> None:
        view, step = self._views[part], int(alert.step)
        machine = rule.needs in (*MACHINES, "start")
        whole = dataclasses.replace(
            alert,
            step=step,
            rule=rule.name,
            samples=alert.samples or (None if machine else view.samples_of(step)),
            place=alert.place or view.health.place(alert.tensor),
            remedy=alert.remedy or rule.remedy,
            part=part,
            time=self._time,
        )
        if whole.key in self._repeats:
            return
        self._repeats[whole.key] = self._repeat(whole, rule)
        again = self._again(whole, self._checkpoints)
        self.alerts.append(dataclasses.replace(whole, again=again))

    def again(self, alert: Alert) -> str:
        """``alert.again``, from a checkpoint that is still there."""
        folder = self._run.checkpoints
        there = [s for s in self._checkpoints if (folder / folder_name(s)).is_dir()]
        return self._again(alert, there)

    def _again(self, alert: Alert, checkpoints: Iterable[int]) -> str:
        """The command that trains the step again, and measures what was measured."""
        since, words = self._repeats[alert.key]
        before = [s for s in checkpoints if s < since]
        origin = ["--from", f"{self._run.name}@{before[-1]}"] if before else []
        return shlex.join(["ronde", "run", *origin, *words]) if words else ""

    def _repeat(self, alert: Alert, rule: Rule) -> tuple[int, list[str]]:
        """The step before which to begin again, and what is then said besides the checkpoint."""
        view, health, since = self._views[alert.part], self.view.health, alert.step
        if rule.needs == "activations":  # no checkpoint says how long units were idle
            since = int(health.activations.step[-IDLE_ROWS:][0])
        start = view.start or self.view.start
        if start is None or not start.script or rule.needs in (*MACHINES, "start"):
            return since, []  # what shows a machine again is no step
        until = alert.samples[1] + 1 if alert.samples else _samples_at(view, alert.step)
        at = "@evaluate" if rule.needs == "evaluations" else ""
        words = ["--until", f"{until}{at}", f"--watch={health.every or 1}"]
        words += ["--workers", str(start.workers), *(start.command or [start.script])]
        return since, [*words, *start.arguments]


def _samples_at(view: RuleView, step: int) -> int:
    """Trained on up to the first recorded step at or after ``step``."""
    row = min(int(np.searchsorted(view.step, step)), len(view.step) - 1)
    return int(view.samples[row]) if row >= 0 else 0


def alert_values(alert: Alert) -> dict[str, Any]:
    """Plain values of an alert, for JSON."""
    return {f.name: getattr(alert, f.name) for f in dataclasses.fields(alert)}


def alert_line(alert: Alert) -> str:
    """An alert as one JSON line, the same on each machine."""
    return json.dumps(alert_values(alert), default=float, ensure_ascii=False)


def _check_known(name: str, known: Iterable[str], what: str) -> None:
    known = list(known)
    if name not in known:
        hint = did_you_mean(name, known)
        raise ArgumentError(f"no {what} {name!r}.{hint} There are: {', '.join(known)}.")


def _settings(rules: Mapping[str, Rule], asked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {}
    for key, value in asked.items():
        name, _, setting = key.partition(".")
        _check_known(name, rules, "rule")
        known = rules[name].settings
        _check_known(setting, known, f"setting of {name}")
        try:
            settings.setdefault(name, {})[setting] = type(known[setting])(value)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{key}={value}: {error}") from error
    return settings


def _own_rules(path: Path) -> dict[str, Rule]:
    try:
        names = runpy.run_path(str(path), run_name=path.stem)
    except Exception as error:
        raise ArgumentError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    rules = dict(_rules_in(path.stem, names))
    if not rules:
        raise ArgumentError(f"{path} has no rule: a function whose first argument is 'view'.")
    return rules


def _rules_in(module: str, names: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    for name, value in names.items():
        if not inspect.isfunction(value) or value.__module__ != module:
            continue  # imported
        if next(iter(inspect.signature(value).parameters), "") == "view":
            rule = Rule(name.replace("_", "-"), value)
            yield rule.name, rule
