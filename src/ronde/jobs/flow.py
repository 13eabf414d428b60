"""A flow: steps that are commands, what they need, and what is said about a wrong one."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ronde.world import ArgumentError

__all__ = ["Condition", "Flow", "FlowStep", "fill", "load_flow", "parse_condition", "references"]

_KEYS = ("run", "needs", "in", "out", "on", "time", "retries", "retry", "when", "each", "env")
_ON = ("workers", "hosts", "slurm")
_NAME = re.compile(r"[A-Za-z][\w-]*")
_REFERENCE = re.compile(r"\{([A-Za-z][\w-]*)((?:\.[\w@-]+)*)\}")
_CONDITION = re.compile(r"\s*([A-Za-z][\w-]*)\.([\w.@-]+)\s*(<=|>=|==|!=|<|>)\s*([-+\d.eE]+)\s*")


@dataclass(frozen=True)
class Condition:
    """``STEP.KEY OP NUMBER``."""

    step: str
    key: str
    operator: str
    number: float

    def holds(self, value: Any) -> bool:
        """Whether it is true of a step's value. NaN, and what is no number, is not."""
        try:
            found = float(value)
        except (TypeError, ValueError):
            return False
        return {
            "<": found < self.number,
            "<=": found <= self.number,
            ">": found > self.number,
            ">=": found >= self.number,
            "==": found == self.number,
            "!=": found != self.number,
        }[self.operator]


@dataclass(frozen=True)
class FlowStep:
    """One step.

    Attributes:
        name: of the step.
        run: its command, as for a shell, with ``{step.key}`` and ``{name}`` to be filled in.
        needs: steps that come before.
        optional: those of ``needs`` that may be left out (``publish?``).
        inputs: files and folders whose content decides whether it is run again; patterns too.
        outputs: files and folders that it makes.
        on: where it runs: ``workers``, ``hosts``, or ``slurm``.
        time: seconds that it may take; None: any.
        retries: how often it is tried again.
        retry: ``lost``, after a signal, a lost host, or when it was asked to leave; ``any``.
        when: all must hold, or the step is left out.
        each: a pattern of files: the command is run for each, ``{}`` in it.
        env: environment variables.
    """

    name: str
    run: str
    needs: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    on: Mapping[str, Any] = field(default_factory=dict)
    time: float | None = None
    retries: int = 0
    retry: str = "lost"
    when: tuple[Condition, ...] = ()
    each: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def verb(self) -> str:
        """The verb of ``ronde`` that it runs; empty for another command."""
        words = shlex.split(self.run)[:2]
        return words[1] if words[:1] == ["ronde"] and len(words) > 1 else ""


@dataclass(frozen=True)
class Flow:
    """Steps, and values that they are filled with.

    Example:

        flow = Flow.of(train={"run": "ronde run train.py"}, test={"run": "…", "needs": "train"})
    """

    steps: Mapping[str, FlowStep]
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any] | None = None, **steps: Mapping[str, Any]) -> Flow:
        """Make one in Python, from the same keys as the file has.

        Raises:
            ArgumentError: it is wrong; says where.
        """
        text = yaml.safe_dump({"set": dict(values or {}), "steps": steps}, sort_keys=False)
        return _read(text, "flow")

    def order(self) -> list[str]:
        """Steps, each after those that it needs, otherwise as they are written."""
        done: list[str] = []
        while len(done) < len(self.steps):
            done.append(
                next(
                    name
                    for name, step in self.steps.items()
                    if name not in done and all(need in done for need in step.needs)
                )
            )
        return done

    def before(self, name: str) -> set[str]:
        """All steps that come before one."""
        found: set[str] = set()
        for need in self.steps[name].needs:
            found |= {need} | self.before(need)
        return found

    def after(self, name: str) -> set[str]:
        """All steps that come after one."""
        return {other for other in self.steps if name in self.before(other)}


def references(text: str) -> Iterator[tuple[str, str]]:
    """Names in braces, and their keys: ``{train.best.lr}`` is ``("train", "best.lr")``."""
    for match in _REFERENCE.finditer(text):
        yield match[1], match[2][1:]


def fill(text: str, look_up: Any) -> str:
    """Put values in place of names in braces; ``look_up(name, key)`` gives them."""
    return _REFERENCE.sub(lambda match: str(look_up(match[1], match[2][1:])), text)


def parse_condition(text: str) -> tuple[Condition, ...]:
    """Read ``STEP.KEY OP NUMBER [and …]``.

    Raises:
        ValueError: it is something else.

    Example:
        >>> parse_condition("test.accuracy >= 0.97")
        (Condition(step='test', key='accuracy', operator='>=', number=0.97),)
    """
    found = []
    for part in re.split(r"\band\b", text):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ValueError(part.strip())
        found.append(Condition(match[1], match[2], match[3], float(match[4])))
    return tuple(found)


def load_flow(path: Path, values: Mapping[str, str] | None = None) -> Flow:
    """Read a file, and check all of it before anything runs.

    Args:
        path: of ``flow.yaml``.
        values: replace those under ``set``.

    Raises:
        ArgumentError: it is wrong: file, line, column, and a sentence.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}.") from None
    return _read(text, str(path), values)


class _Reader:
    """Turns YAML nodes, which know their place, into steps."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[tuple[str, str], yaml.Node] = {}

    def wrong(self, node: yaml.Node | None, text: str) -> ArgumentError:
        if node is None:
            return ArgumentError(f"{self.file}: {text}")
        mark = node.start_mark
        return ArgumentError(f"{self.file}:{mark.line + 1}:{mark.column + 1}: {text}")

    def pairs(self, node: yaml.Node, what: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self.wrong(node, f"{what} is a mapping of names.")
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.value in found:
                raise self.wrong(key, f"{key.value} is there twice.")
            found[str(key.value)] = key, value
        return found

    def plain(self, node: yaml.Node) -> Any:
        return yaml.SafeLoader("").construct_object(node, deep=True)  # type: ignore[no-untyped-call]

    def words(self, node: yaml.Node, key: str) -> tuple[str, ...]:
        value = self.plain(node)
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.wrong(node, f"{key} is a text, or a list of texts.")
        return tuple(value)

    def step(self, name: str, node: yaml.Node) -> FlowStep:
        found = self.pairs(node, f"the step {name}")
        for key, (place, _) in found.items():
            if key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, 1)
                hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(_KEYS)}."
                raise self.wrong(place, f"a step has no key {key}. {hint}")
        if "run" not in found:
            raise self.wrong(node, f"the step {name} has no run: give its command.")
        self.places |= {(name, key): value for key, (_, value) in found.items()}
        given = {key: value for key, (_, value) in found.items()}
        run = self.plain(given["run"])
        try:
            empty = not isinstance(run, str) or not shlex.split(run)
        except ValueError as error:
            raise self.wrong(given["run"], f"the command cannot be split: {error}.") from None
        if empty:
            raise self.wrong(given["run"], "run is a command.")
        needs = self.words(given["needs"], "needs") if "needs" in given else ()
        return FlowStep(
            name,
            run,
            tuple(need.removesuffix("?") for need in needs),
            frozenset(need[:-1] for need in needs if need.endswith("?")),
            self.words(given["in"], "in") if "in" in given else (),
            self.words(given["out"], "out") if "out" in given else (),
            self._on(given.get("on"), run),
            self._time(given.get("time")),
            self._number(given.get("retries")),
            self._retry(given.get("retry")),
            self._when(given.get("when")),
            self._each(given.get("each")),
            {k: str(v) for k, v in self.mapping(given.get("env"), "env").items()},
        )

    def mapping(self, node: yaml.Node | None, key: str) -> dict[str, Any]:
        if node is None:
            return {}
        return {name: self.plain(value) for name, (_, value) in self.pairs(node, key).items()}

    def _on(self, node: yaml.Node | None, run: str) -> dict[str, Any]:
        found = self.mapping(node, "on")
        for key in found:
            if key not in _ON:
                raise self.wrong(node, f"on has no key {key}: there are {', '.join(_ON)}.")
        if len(found) > 1:
            raise self.wrong(node, f"on says where once: {' or '.join(found)}.")
        words = shlex.split(run)[:2]
        if "workers" in found or "hosts" in found:
            (key,) = found
            if words[:1] != ["ronde"] or words[1:] not in (["run"], ["map"], ["tune"]):
                raise self.wrong(node, f"on: {key} is for commands of ronde run, map, or tune.")
        return found

    def _time(self, node: yaml.Node | None) -> float | None:
        if node is None:
            return None
        units = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
        text = str(self.plain(node))
        parts = re.findall(r"([\d.]+)([dhms])", text)
        if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
            raise self.wrong(node, f"time {text}: expected a time, as 20h, 90m, or 45s.")
        return sum(float(number) * units[unit] for number, unit in parts)

    def _number(self, node: yaml.Node | None) -> int:
        value = 0 if node is None else self.plain(node)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(node, f"retries is a number: {value!r} is not.")
        return value

    def _retry(self, node: yaml.Node | None) -> str:
        value = "lost" if node is None else self.plain(node)
        if value not in ("lost", "any"):
            raise self.wrong(node, f"retry is lost or any: {value!r} is neither.")
        return str(value)

    def _when(self, node: yaml.Node | None) -> tuple[Condition, ...]:
        if node is None:
            return ()
        try:
            return parse_condition(str(self.plain(node)))
        except ValueError as error:
            raise self.wrong(
                node, f"when: {error} is not STEP.KEY OP NUMBER, as test.accuracy >= 0.97."
            ) from None

    def _each(self, node: yaml.Node | None) -> str:
        return "" if node is None else str(self.plain(node))


def _read(text: str, file: str, values: Mapping[str, str] | None = None) -> Flow:
    reader = _Reader(file)
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ArgumentError(f"{file}{where}: {error.problem}.") from None
    if root is None:
        raise ArgumentError(f"{file}: there are no steps.")
    top = reader.pairs(root, "a flow")
    for key, (place, _) in top.items():
        if key not in ("set", "steps"):
            raise reader.wrong(place, f"a flow has set and steps, and no {key}.")
    if "steps" not in top:
        raise reader.wrong(root, "there are no steps.")
    known = reader.mapping(top["set"][1], "set") if "set" in top else {}
    for name in values or {}:
        if name not in known:
            raise ArgumentError(f"--set {name}: {file} has no {name} under set.")
    steps = {}
    for name, (place, node) in reader.pairs(top["steps"][1], "steps").items():
        if not _NAME.fullmatch(name) or name in known:
            raise reader.wrong(place, f"{name} is no name of a step, or is under set.")
        steps[name] = reader.step(name, node)
    flow = Flow(steps, {**known, **(values or {})})
    _check(flow, reader)
    return flow


def _check(flow: Flow, reader: _Reader) -> None:
    """Refuse what could not end well: unknown steps, cycles, values that are not there."""
    for name, step in flow.steps.items():
        for need in step.needs:
            if need not in flow.steps:
                near = difflib.get_close_matches(need, flow.steps, 1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise reader.wrong(
                    reader.places[name, "needs"], f"{name} needs {need}, which is no step.{hint}"
                )
    _check_cycles(flow, reader)
    makers: dict[str, str] = {}
    for name, step in flow.steps.items():
        for output in step.outputs:
            if output in makers:
                raise reader.wrong(
                    reader.places[name, "out"],
                    f"{name} and {makers[output]} both make {output}: the last one would win.",
                )
            makers[output] = name
    for name, step in flow.steps.items():
        _check_references(flow, step, reader)
        for given in step.inputs:
            maker = makers.get(given)
            if maker is not None and maker not in flow.before(name) and maker != name:
                raise reader.wrong(
                    reader.places[name, "in"],
                    f"{name} reads {given}, which {maker} makes: add needs: {maker}.",
                )


def _check_cycles(flow: Flow, reader: _Reader) -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " → ".join([*path[path.index(name) :], name])
            raise reader.wrong(reader.places[name, "needs"], f"a cycle: {circle}.")
        if name not in done:
            for need in flow.steps[name].needs:
                visit(need, (*path, name))
            done.add(name)

    for name in flow.steps:
        visit(name, ())


def _check_references(flow: Flow, step: FlowStep, reader: _Reader) -> None:
    before = flow.before(step.name)
    texts = [("run", step.run), ("each", step.each)]
    texts += [("in", t) for t in step.inputs] + [("out", t) for t in step.outputs]
    texts += [("env", value) for value in step.env.values()]
    for key, text in texts:
        for name, value in references(text):
            place = reader.places[step.name, key]
            if not value and name == "out":
                continue
            if not value and name not in flow.values:
                raise reader.wrong(place, f"{{{name}}} is not under set, and has no key of a step.")
            if value and name not in before:
                what = f"{step.name} does not need {name}" if name in flow.steps else "no such step"
                raise reader.wrong(place, f"{{{name}.{value}}} is not known here: {what}.")
    for condition in step.when:
        if condition.step not in before:
            is_step = condition.step in flow.steps
            what = f"{step.name} does not need it" if is_step else "there is no such step"
            raise reader.wrong(
                reader.places[step.name, "when"],
                f"when asks for {condition.step}.{condition.key}, and {what}: it would never run.",
            )
