"""The house rules of docs/architecture.md: names, room sizes, and the one way into a run."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from processes import TESTS
from ronde.world import VERSION

SOURCE = TESTS.parent / "src" / "ronde"
ROOMS = sorted(p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists())

# A verb's file in cli/ has the name of what it opens; `name` properties of a protocol are shared.
_VERBS = {path.name for path in (SOURCE / "cli").glob("*.py")}


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


@cache
def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_no_file_name_occurs_twice():
    places = defaultdict(list)
    for path in _files():
        if path.name != "__init__.py" and not (_room(path) == "cli" and path.name in _VERBS):
            places[path.name].append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_public_name_is_defined_in_two_rooms():
    """Verbs of the command line are functions of cli/, named as their rooms' functions."""
    places = defaultdict(set)
    for path in _files():
        for node in ast.parse(path.read_text()).body:
            public = isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_"
            if public and _room(path) != "cli":
                places[node.name].add(str(path.relative_to(SOURCE)))
    twice = {
        name: sorted(files)
        for name, files in places.items()
        if len({_room(SOURCE / p) for p in files}) > 1
    }
    assert twice == {}


def test_no_file_reaches_into_a_run():
    lines = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in _files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\brun\._[a-z]", line)
    ]
    assert lines == []


def test_no_class_of_a_run_has_more_than_25_methods_or_attributes():
    large = {}
    for path in (p for p in _files() if _room(p) == "run"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = sum(isinstance(n, ast.FunctionDef) for n in node.body)
            targets = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
            own = {
                n.attr
                for n in targets
                if isinstance(n.ctx, ast.Store)
                and isinstance(n.value, ast.Name)
                and n.value.id == "self"
            }
            if max(methods, len(own)) > 25:
                large[f"{path.relative_to(SOURCE)}:{node.name}"] = (methods, len(own))
    assert large == {}


def test_text_of_users_is_never_markup():
    """rich makes an emoji of the ``:x:`` in ``r1:x: completed``, and drops ``[bold]``."""
    lines = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in _files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bConsole\(|rich\.markup|from_markup", line)
    ]
    assert len(lines) == 1 and lines[0].startswith("watch/progress.py"), lines


def test_no_room_is_larger_than_15_percent():
    lines = defaultdict(int)
    for path in _files():
        lines[_room(path)] += len(path.read_text().splitlines())
    total = sum(lines.values())
    assert {room: n for room, n in lines.items() if n > 0.15 * total} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_says_what_it_is_for(room):
    """A sentence on the first line, and what the room offers."""
    text = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())) or ""
    first = text.splitlines()[0]
    assert first.endswith((".", "?")) or "." in text.split("\n\n")[0]
    assert "Offers" in text


@pytest.mark.parametrize("face", ["ronde", "ronde.feed", *(f"ronde.{room}" for room in ROOMS)])
def test_each_face_has_what_it_offers(face):
    """Names are imported when first used: a wrong one would show in nobody's import."""
    module = importlib.import_module(face)
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None, name
        assert not isinstance(getattr(module, name), ModuleType) or face == "ronde", name
    for name in dir(module):
        getattr(module, name)  # a room that lists its names once: each is where it says


def test_the_version_is_stated_once_more_for_the_package():
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    assert f"## [{VERSION}]" in (TESTS.parent / "CHANGELOG.md").read_text()
