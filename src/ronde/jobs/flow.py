"""A flow: steps that are commands, what they need, and what is said about a wrong one."""

from __future__ import annotations

import fnmatch
import graphlib
import heapq
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ronde.world import ArgumentError
from ronde.world.errors import did_you_mean
from ronde.world.units import parse_duration

__all__ = ["Condition", "Flow", "FlowStep", "fill", "load_flow", "parse_condition", "references"]

_KEYS = ("run", "needs", "in", "out", "on", "time", "retries", "retry", "when", "each", "env")
_ON = ("workers", "hosts", "slurm")
_NAME = re.compile(r"[A-Za-z][\w-]{0,63}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_REFERENCE = re.compile(r"\{([A-Za-z][\w-]*)((?:\.[\w@-]+)*)\}")
_CONDITION = re.compile(
    r"\s*([A-Za-z][\w-]*)\.([\w.@-]+)\s*(<=|>=|==|!=|<|>)"
    r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*",
    re.ASCII,
)
_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


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
            return bool(_COMPARE[self.operator](float(value), self.number))
        except (TypeError, ValueError):
            return False


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
        whole = {"set": dict(values or {}), "steps": steps}
        return _read(yaml.safe_dump(whole, sort_keys=False), "flow")

    def order(self) -> list[str]:
        """Steps, each after those that it needs, otherwise as they are written."""
        # graphlib gives no order among steps that are ready together: a heap of places does.
        sorter = graphlib.TopologicalSorter({name: s.needs for name, s in self.steps.items()})
        sorter.prepare()
        places = {name: place for place, name in enumerate(self.steps)}
        ready: list[tuple[int, str]] = []
        done: list[str] = []
        while sorter.is_active():
            for name in sorter.get_ready():
                heapq.heappush(ready, (places[name], name))
            done.append(heapq.heappop(ready)[1])
            sorter.done(done[-1])
        return done

    def before(self, name: str) -> set[str]:
        """All steps that come before one."""
        earlier: set[str] = set()
        new = list(self.steps[name].needs)
        while new:
            need = new.pop()
            if need not in earlier:
                earlier.add(need)
                new += self.steps[need].needs
        return earlier

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
    conditions = []
    for part in re.split(r"\band\b", text):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ValueError(part.strip())
        conditions.append(Condition(match[1], match[2], match[3], float(match[4])))
    return tuple(conditions)


def load_flow(
    path: Path, values: Mapping[str, str] | None = None, *, needs_inputs: bool = False
) -> Flow:
    """Read a file, and check all of it before anything runs.

    Args:
        path: of ``flow.yaml``.
        values: replace those under ``set``.
        needs_inputs: refuse an input that is not there, and that no step makes.

    Raises:
        ArgumentError: it is wrong: file, line, column, and a sentence.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: expected UTF-8: {error.reason}.") from None
    return _read(text, str(path), values, needs_inputs)


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

    def root(self, text: str) -> yaml.Node:
        try:
            node: yaml.Node | None = yaml.compose(text, yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            problem = getattr(error, "problem", None) or " ".join(str(error).split())
            raise ArgumentError(f"{self.file}{place}: {problem}.") from None
        if node is None:
            raise ArgumentError(f"{self.file}: there are no steps.")
        return node

    def pairs(self, node: yaml.Node, what: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self.wrong(node, f"{what} is a mapping of names.")
        pairs_by_name: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.wrong(key, f"{what} is a mapping of names, and this is no name.")
            if key.value in pairs_by_name:
                raise self.wrong(key, f"{key.value} is there twice.")
            pairs_by_name[key.value] = key, value
        return pairs_by_name

    def scalar(self, node: yaml.Node, what: str) -> str:
        """A text or a number as it is written."""
        # YAML would turn `yes` into True and 0.10 into 0.1: commands get what is written.
        known = ("str", "int", "float", "bool", "timestamp")
        tags = [f"tag:yaml.org,2002:{tag}" for tag in known]
        if not isinstance(node, yaml.ScalarNode) or node.tag not in tags:
            raise self.wrong(node, f"{what} is a text or a number.")
        return str(node.value)

    def text(self, node: yaml.Node, what: str) -> str:
        is_text = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"
        if not is_text or not node.value.strip():
            raise self.wrong(node, f"{what}.")
        return str(node.value)

    def words(self, node: yaml.Node | None, key: str) -> tuple[str, ...]:
        if node is None:
            return ()
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return tuple(self.text(n, f"{key} is a text, or a list of texts") for n in nodes)

    def mapping(self, node: yaml.Node | None, key: str, name: re.Pattern[str]) -> dict[str, str]:
        entries = {} if node is None else self.pairs(node, key)
        for word, (place, _) in entries.items():
            # {out} is the folder of a step
            if not name.fullmatch(word) or (key, word) == ("set", "out"):
                raise self.wrong(place, f"{word} cannot be a name under {key}.")
        return {word: self.scalar(value, word) for word, (_, value) in entries.items()}

    def step(self, name: str, node: yaml.Node) -> FlowStep:
        entries = self.pairs(node, f"the step {name}")
        for key, (place, _) in entries.items():
            if key not in _KEYS:
                hint = did_you_mean(key, _KEYS, f" There are {', '.join(_KEYS)}.")
                raise self.wrong(place, f"a step has no key {key}.{hint}")
        if "run" not in entries:
            raise self.wrong(node, f"the step {name} has no run: give its command.")
        self.places |= {(name, key): value for key, (_, value) in entries.items()}
        given = {key: value for key, (_, value) in entries.items()}
        run = self.text(given["run"], "run is a command")
        try:
            words = shlex.split(run)
        except ValueError as error:
            raise self.wrong(given["run"], f"the command cannot be split: {error}.") from None
        needs = self.words(given.get("needs"), "needs")
        each = given.get("each")
        return FlowStep(
            name,
            run,
            tuple(dict.fromkeys(need.removesuffix("?") for need in needs)),
            frozenset(need[:-1] for need in needs if need.endswith("?")),
            self.words(given.get("in"), "in"),
            self.words(given.get("out"), "out"),
            self._on(given.get("on"), words),
            self._time(given.get("time")),
            self._whole(given["retries"], "retries", 0) if "retries" in given else 0,
            self._retry(given.get("retry")),
            self._when(given.get("when")),
            "" if each is None else self.text(each, "each is a pattern of files"),
            self.mapping(given.get("env"), "env", _VARIABLE),
        )

    def _on(self, node: yaml.Node | None, words: list[str]) -> dict[str, Any]:
        entries = {} if node is None else self.pairs(node, "on")
        for key, (place, _) in entries.items():
            if key not in _ON:
                raise self.wrong(place, f"on has no key {key}: there are {', '.join(_ON)}.")
        if len(entries) > 1:
            raise self.wrong(node, f"on says where once: {' or '.join(entries)}.")
        if "slurm" in entries:
            options = self.mapping(entries["slurm"][1], "slurm", _NAME)
            return {"slurm": options}
        for key, (place, value) in entries.items():
            if words[:1] != ["ronde"] or words[1:2] not in (["run"], ["map"], ["tune"]):
                raise self.wrong(place, f"on: {key} is for commands of ronde run, map, or tune.")
            if key == "hosts":
                return {key: self.text(value, "hosts is a text, as a:8,b:8")}
            return {key: self._whole(value, "workers", 1)}
        return {}

    def _time(self, node: yaml.Node | None) -> float | None:
        if node is None:
            return None
        text = self.scalar(node, "time")
        if (seconds := parse_duration(text)) is None:
            raise self.wrong(node, f"time {text}: expected a time, as 20h, 90m, or 45s.")
        return seconds

    def _whole(self, node: yaml.Node, what: str, least: int) -> int:
        text = self.scalar(node, what)
        is_whole = node.tag == "tag:yaml.org,2002:int" and re.fullmatch("[0-9]{1,9}", text)
        if not is_whole or int(text) < least:
            raise self.wrong(node, f"{what} is a whole number from {least}: {text} is not.")
        return int(text)

    def _retry(self, node: yaml.Node | None) -> str:
        value = "lost" if node is None else self.scalar(node, "retry")
        if value not in ("lost", "any"):
            raise self.wrong(node, f"retry is lost or any: {value} is neither.")
        return value

    def _when(self, node: yaml.Node | None) -> tuple[Condition, ...]:
        if node is None:
            return ()
        form = "STEP.KEY OP NUMBER, as test.accuracy >= 0.97"
        text = self.text(node, f"when is {form}")
        try:
            return parse_condition(text)
        except ValueError as error:
            raise self.wrong(node, f"when: {error} is not {form}.") from None


def _read(
    text: str,
    file: str,
    values: Mapping[str, str] | None = None,
    needs_inputs: bool = False,
) -> Flow:
    reader = _Reader(file)
    root = reader.root(text)
    top = reader.pairs(root, "a flow")
    for key, (place, _) in top.items():
        if key not in ("set", "steps"):
            raise reader.wrong(place, f"a flow has set and steps, and no {key}.")
    known = reader.mapping(top["set"][1], "set", _NAME) if "set" in top else {}
    for name in values or {}:
        if name not in known:
            raise ArgumentError(f"--set {name}: {file} has no {name} under set.")
    steps = {}
    entries = reader.pairs(top["steps"][1], "steps") if "steps" in top else {}
    for name, (place, node) in entries.items():
        if not _NAME.fullmatch(name):
            form = "a letter, then letters, digits, - and _, 64 at most"
            raise reader.wrong(place, f"{name} is no name of a step: {form}.")
        if name in known:
            raise reader.wrong(place, f"{name} is a step, and is under set.")
        steps[name] = reader.step(name, node)
    if not steps:
        raise reader.wrong(root, "there are no steps.")
    flow = Flow(steps, {**known, **(values or {})})
    _check(flow, reader, needs_inputs)
    return flow


def _check(flow: Flow, reader: _Reader, needs_inputs: bool) -> None:
    """Refuse what could not end well: unknown steps, cycles, values that are not there."""
    for name, step in flow.steps.items():
        for need in step.needs:
            if need not in flow.steps:
                hint = did_you_mean(need, flow.steps)
                raise reader.wrong(
                    reader.places[name, "needs"], f"{name} needs {need}, which is no step.{hint}"
                )
    try:
        order = flow.order()
    except graphlib.CycleError as error:
        circle = error.args[1][:0:-1]
        first = circle.index(min(circle, key=list(flow.steps).index))
        circle = circle[first:] + circle[: first + 1]
        raise reader.wrong(
            reader.places[circle[0], "needs"], f"a cycle: {' → '.join(circle)}."
        ) from None
    before = {name: flow.before(name) for name in order}  # a graph without circles, from here on
    for step in flow.steps.values():
        _check_references(flow, step, before[step.name], reader)
    _check_files(flow, before, reader, needs_inputs)


def _check_files(
    flow: Flow, before: Mapping[str, set[str]], reader: _Reader, needs_inputs: bool
) -> None:
    """Refuse files that two steps make, and those that are read before they are made."""

    def path(text: str) -> tuple[str, ...]:
        if any(value for _, value in references(text)):  # not known before the step runs
            return (text,)
        filled = fill(text, lambda name, _: flow.values.get(name, "{out}"))
        return tuple(part for part in os.path.normpath(filled).split("/") if part != ".")

    made: dict[tuple[str, ...], str] = {}
    for name, step in flow.steps.items():
        for output in map(path, step.outputs):
            if output in made:
                both = f"{name} and {made[output]} both make {'/'.join(output)}"
                why = f"{both}: the last one would win."
                raise reader.wrong(reader.places[name, "out"], why)
            made[output] = name
    for output, name in made.items():
        for end in range(len(output)):  # all folders above it
            maker = made.get(output[:end], name)
            if maker != name:
                why = f"{name} makes {'/'.join(output)}, and so changes what {maker} makes."
                raise reader.wrong(reader.places[name, "out"], why)
    for name, step in flow.steps.items():
        given = [("in", text) for text in step.inputs] + [("each", step.each)] * bool(step.each)
        for key, text in given:
            file, place = path(text), reader.places[name, key]
            makers = [maker for output, maker in made.items() if _overlap(file, output)]
            why = ""
            if name in makers:
                why = "and changes it by what it makes: it would never be kept"
            elif late := [maker for maker in makers if maker not in before[name]]:
                why = f"which {late[0]} makes: add needs: {late[0]}"
            elif needs_inputs and not makers and not _may_be("/".join(file) or "."):
                why = "which is not there, and which no step has under out"
            if why:
                raise reader.wrong(place, f"{name} reads {text}, {why}.")


def _may_be(file: str) -> bool:
    """Whether a file is there, or is only known once the flow runs."""
    # a dangling link is there: its step says what is wrong with it
    return bool(set(file) & set("*?[{")) or os.path.lexists(file)


def _overlap(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether a path or pattern names the same file as another path, one above, or one below."""
    return all(
        word == part or fnmatch.fnmatchcase(part, word)
        for word, part in zip(pattern, path, strict=False)  # the longer one lies below the other
    )


def _check_references(flow: Flow, step: FlowStep, before: set[str], reader: _Reader) -> None:
    texts = [("run", step.run), ("each", step.each)]
    texts += [("in", t) for t in step.inputs] + [("out", t) for t in step.outputs]
    texts += [("env", value) for value in step.env.values()]
    for key, text in texts:
        for name, value in references(text):
            place = reader.places[step.name, key]
            if not value and name == "out":
                continue
            if not value and name not in flow.values:
                raise reader.wrong(
                    place,
                    f"{{{name}}} is not under set, and has no key of a step. Braces of the "
                    f"command itself need spaces: {{ {name} }}.",
                )
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
