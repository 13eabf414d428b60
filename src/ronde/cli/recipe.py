"""A recipe: a folder with a script to copy, and ``recipe.yaml``, which says what it is for."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ronde.world import ArgumentError
from ronde.world.errors import did_you_mean

_PLAIN = ("plain.py", "*_plain.py")  # the same training without Ronde, for the documentation
_LEFT_OUT = (*_PLAIN, "__pycache__", "runs", ".git")


@dataclass(frozen=True)
class Recipe:
    """A recipe as ``recipe.yaml`` describes it.

    Attributes:
        folder: where its files are.
        task: what kind of data or training: ``table``, ``text``, ``images``, …
        about: one line.
        data: what you bring, and in which shape.
        script: the file whose arguments ``ronde new`` can set.
        packages: what it needs beside Ronde, as pip names them.
        files: argument -> a file that the folder it names must contain.
        test: commands that train it on small data in seconds.
        learns: conditions that hold after them: ``evaluate.accuracy >= 0.9``, say.
        plans: those that ``ronde new --test --prove`` proves.
        large: commands that plan a large training; the last is ``ronde plan SCRIPT ARGS…``.
    """

    folder: Path
    name: str
    task: str
    about: str
    data: str = ""
    script: str = "train.py"
    packages: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    test: tuple[str, ...] = ()
    learns: str = ""
    plans: tuple[str, ...] = ()
    large: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.packages if not _is_installed(name)]

    @property
    def arguments(self) -> list[Argument]:
        """The script's own arguments."""
        return list(_arguments((self.folder / self.script).read_text()))

    @property
    def small(self) -> list[str]:
        """The script and its arguments in the last training of :attr:`test`."""
        for command in reversed(self.test):
            words = shlex.split(command)
            if words[:2] == ["ronde", "run"] and self.script in words:
                return words[words.index(self.script) :]
        return [self.script]

    def copy(self, target: Path, values: Mapping[str, str]) -> None:
        """Copy it into a new or empty folder, with these values as its arguments' defaults.

        Raises:
            ArgumentError: the folder has files, or the script has no such argument.
        """
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ArgumentError(f"{target} is there already. Name a new folder.")
        links = [p for p in self.folder.rglob("*") if p.is_symlink()]
        if links:
            raise ArgumentError(f"{links[0]} is a link. A recipe has files only.")
        text = filled_in_script((self.folder / self.script).read_text(), values, self.name)
        ignored = shutil.ignore_patterns(*_LEFT_OUT)
        shutil.copytree(self.folder, target, ignore=ignored, dirs_exist_ok=True)
        (target / self.script).write_text(text)


@dataclass(frozen=True)
class Argument:
    """An argument of a script: ``--lr``, its default as Python writes it, and its help."""

    name: str
    default: str
    help: str
    value: ast.expr | None  # the default's place in the script


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _arguments(text: str) -> Iterator[Argument]:
    """Every ``parser.add_argument("--name", …)``."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="add_argument"), args=[*_, ast.Constant(str(name))]
            ) if name.startswith("--"):
                named = {k.arg: k.value for k in node.keywords}
                help_text, value = named.get("help"), named.get("default")
                words = str(help_text.value) if isinstance(help_text, ast.Constant) else ""
                yield Argument(name, ast.unparse(value) if value else "", words, value)


def filled_in_script(text: str, values: Mapping[str, str], recipe: str) -> str:
    """A script with other defaults of its arguments.

    Raises:
        ArgumentError: it has no such argument, or the value is not of the default's type.

    Example:
        >>> script = 'parser.add_argument("--lr", type=float, default=0.1)'
        >>> filled_in_script(script, {"--lr": "3e-4"}, "linear")
        'parser.add_argument("--lr", type=float, default=0.0003)'
    """
    known = {a.name: a for a in _arguments(text) if a.value is not None}
    lines = text.splitlines(keepends=True)
    places = []
    for name, given in values.items():
        if name not in known:
            hint = did_you_mean(name, known, f" ronde new {recipe} --help lists them.")
            raise ArgumentError(f"recipe {recipe} has no argument {name}.{hint}")
        value = known[name].value
        assert value is not None
        places.append((value, repr(_as_default(name, given, value))))
    # From the last to the first: a change moves what stands behind it.
    for node, new in sorted(places, key=lambda p: (p[0].lineno, p[0].col_offset), reverse=True):
        assert node.lineno == node.end_lineno and node.end_col_offset is not None
        line = lines[node.lineno - 1].encode()  # columns count bytes
        changed = line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
        lines[node.lineno - 1] = changed.decode()
    return "".join(lines)


def _as_default(name: str, given: str, value: ast.expr) -> Any:
    """A value of the default's type; the path of what exists is absolute, for the new folder."""
    default = value.value if isinstance(value, ast.Constant) else None
    if isinstance(default, bool):
        if given not in ("True", "False"):
            raise ArgumentError(f"{name} takes no value.")
        return given == "True"
    if isinstance(default, int | float):
        try:
            return type(default)(given)
        except ValueError:
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise ArgumentError(f"{name} {given}: expected {kind}.") from None
    path = Path(given).expanduser()
    return str(path.absolute()) if given and path.exists() else given


def read_recipe(folder: Path) -> Recipe:
    """Read ``recipe.yaml`` of a folder.

    Raises:
        ArgumentError: it is not there, or is no recipe; the key is named.
    """
    file = folder / "recipe.yaml"
    try:
        given = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ArgumentError(f"{file} cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file} is no YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(given, dict):
        raise ArgumentError(f"{file}: expected keys and values.")
    fields = {f.name: f for f in dataclasses.fields(Recipe) if f.name != "folder"}
    for key in given:
        if key not in fields:
            hint = did_you_mean(str(key), fields)
            raise ArgumentError(f"{file}: a recipe has no key {key}.{hint}")
    for key in ("name", "task", "about"):
        if not isinstance(given.get(key), str):
            raise ArgumentError(f"{file}: {key} is missing, or no text.")
    script = given.get("script", "train.py")
    if not isinstance(script, str) or script != Path(script).name:
        raise ArgumentError(f"{file}: script {script!r} is no name of a file in the folder.")
    for key in ("packages", "test", "plans", "large"):
        value = given.setdefault(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ArgumentError(f"{file}: {key} is a list of texts.")
        given[key] = tuple(value)
    value = given.setdefault("files", {})
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ArgumentError(f"{file}: files is names of arguments, each with the name of a file.")
    recipe = Recipe(folder=folder, **given)
    if not (folder / recipe.script).is_file():
        raise ArgumentError(f"{file}: {folder} has no {recipe.script}.")
    return recipe


def built_in() -> Path:
    """The folder of the recipes that come with Ronde."""
    return Path(__file__).parents[1] / "recipes"


def catalogue(folder: Path) -> dict[str, Recipe]:
    """Recipes of a folder, or of the folders in it, by name.

    Raises:
        ArgumentError: it has none, or two of one name.
    """
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder.")
    inside = [folder] if (folder / "recipe.yaml").is_file() else sorted(folder.iterdir())
    recipes: dict[str, Recipe] = {}
    for place in inside:
        if not (place / "recipe.yaml").is_file():
            continue
        recipe = read_recipe(place)
        if recipe.name in recipes:
            twice = recipes[recipe.name].folder
            raise ArgumentError(f"two recipes are named {recipe.name}: {twice} and {place}.")
        recipes[recipe.name] = recipe
    if not recipes:
        raise ArgumentError(f"{folder} has no recipe: no folder in it has a recipe.yaml.")
    return recipes


def chosen(recipes: Mapping[str, Recipe], name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ArgumentError: there is none.
    """
    if name in recipes:
        return recipes[name]
    hint = did_you_mean(name, recipes, f" There are {', '.join(sorted(recipes))}.")
    raise ArgumentError(f"there is no recipe {name}.{hint}")


def parsed_values(words: Sequence[str], recipe: Recipe) -> dict[str, str]:
    """``--name value`` and ``--name=value``, by name; a flag of the script is True.

    Raises:
        ArgumentError: a word is neither, or a value is missing.
    """
    flags = {a.name for a in recipe.arguments if a.default in ("True", "False")}
    values: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise ArgumentError(f"{name}: expected --NAME VALUE, an argument of {recipe.script}.")
        if not equals and name in flags:
            value = "True"
        elif not equals:
            if not rest:
                raise ArgumentError(f"{name} has no value.")
            value = rest.pop(0)
        values[name] = value
    return values


def check_files(recipe: Recipe, values: Mapping[str, str]) -> None:
    """See that the folders that arguments name are what the recipe needs.

    A word that is no path may be a name that the recipe's library knows.

    Raises:
        ArgumentError: a folder is not there, or lacks the file.
    """
    for name, needed in recipe.files.items():
        given = values.get(f"--{name}")
        if not given:
            continue
        place = Path(given).expanduser()
        # It may be a name on a hub, which the library resolves.
        if not place.exists() and not given.startswith((".", "/", "~")):
            continue
        if not (place / needed).is_file():
            what = "has no" if place.exists() else "does not exist, so it has no"
            raise ArgumentError(
                f"--{name} {given} {what} {needed}. Give a folder that save_pretrained wrote."
                if needed == "config.json"
                else f"--{name} {given} {what} {needed}."
            )


def check_command(command: Sequence[str]) -> None:
    """See that a recipe's script is given the folders it needs, before any worker starts.

    Raises:
        ArgumentError: a folder is not there, or lacks the file.
    """
    script, words = Path(command[0]), command[1:]
    try:
        recipe = read_recipe(script.parent)
        arguments = recipe.arguments if script.name == recipe.script else []
    except (ArgumentError, SyntaxError, ValueError):
        return  # no recipe, a recipe.yaml of another tool, or a script that its worker refuses
    if script.name != recipe.script:
        return
    values = {a.name: str(a.value.value) for a in arguments if isinstance(a.value, ast.Constant)}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        values[name] = value if equals else following
    check_files(recipe, values)
