"""``ronde new``: copies a recipe, a training script that works, into a folder of yours."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ronde.cli.options import app, argument, setting, verb
from ronde.cli.recipe import (
    Recipe,
    built_in,
    catalogue,
    check_files,
    chosen,
    parsed_values,
)
from ronde.world import ArgumentError

_README = """# {name}

{about}

{data}

```bash
{try_it}
ronde plan {script}          # which split fits your devices
ronde prove {script}         # is it the same training on N workers?
```

| argument of `{script}` | default | meaning |
|---|---|---|
{arguments}

`python -m pytest` runs `test_small.py`: the commands of `recipe.yaml` on small data, in seconds.
"""
_TEST = '''"""Train on small data for some seconds, as recipe.yaml says."""

import subprocess
import sys
from pathlib import Path


def test_it_trains_and_learns():
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-m", "ronde", "new", "--test", here], check=True)
'''


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde new``, as the user gave them."""

    words: list[str] | None = argument(
        "[RECIPE] [FOLDER] [ARGS]...",
        "The recipe, a new folder for it (default: its name), and the script's arguments.",
        default=None,
    )
    source: str | None = setting(
        None, "--from", "Recipes of your own: a folder, or a git repository.", "DIR|GIT"
    )
    test: Path | None = setting(
        None, "--test", "Test the recipe, or all recipes, of a folder.", "DIR"
    )
    prove: bool = setting(False, "--prove", "With --test: also prove it under each of its plans.")


@verb(app, "new", allow_interspersed_args=False)
def _new(options: Options) -> None:
    """A working training script, copied into a folder of yours.

    The script is yours: read it, change it. Arguments after FOLDER become defaults of the
    script's own arguments. Nothing is downloaded.

    Examples:

    ```sh
    ronde new                                          list the recipes
    ronde new linear --help                            what it takes
    ronde new finetune-text reviews --data reviews.csv --model ./bert-small
    ronde new --from ../our-recipes churn              a catalogue of your own
    ronde new --test our-recipes/churn --prove         test one on two workers
    ```
    """
    words, source = options.words, options.source
    if options.test is not None:
        if words or source:
            raise ArgumentError("--test takes one folder: leave the other arguments out.")
        _test(options.test, options.prove)
        return
    if options.prove:
        raise ArgumentError("--prove goes with --test DIR.")
    with _catalogue(source) as recipes:
        if not words:
            _list(recipes)
            return
        recipe = chosen(recipes, words[0])
        if {"--help", "-h"} & set(words[1:]):
            print("\n".join(_about(recipe)))
            return
        named = len(words) > 1 and not words[1].startswith("-")
        folder = Path(words[1] if named else recipe.name)
        _copy(recipe, folder, words[2 if named else 1 :])


def _copy(recipe: Recipe, folder: Path, words: list[str]) -> None:
    values = parsed_values(words, recipe)
    check_files(recipe, values)
    recipe.copy(folder, values)
    (folder / "test_small.py").write_text(_TEST)
    (folder / "README.md").write_text(_readme(replace(recipe, folder=folder), values))
    names = sorted(p.name for p in folder.iterdir())
    print(f"{folder}: {', '.join(names)}")
    if recipe.missing:
        print(f"needs   pip install {' '.join(recipe.missing)}")
    print(f"try     cd {shlex.quote(str(folder))} && {' && '.join(_try_it(recipe, values))}")


def _try_it(recipe: Recipe, values: dict[str, str]) -> list[str]:
    """Commands of the test; a training with the user's own values needs no arguments."""
    if recipe.test and not values:
        return list(recipe.test)
    before = () if "--data" in values else recipe.test
    sample = [c for c in before if c.startswith(("python ", "ronde prepare "))]
    return [*sample, f"ronde run --workers 2 {recipe.script}"]


def _about(recipe: Recipe) -> list[str]:
    widest = max((len(a.name) for a in recipe.arguments), default=0)
    lines = [f"{recipe.name}  ({recipe.task})  {recipe.about}", "", *_paragraph(recipe.data)]
    lines += [
        f"  {a.name:<{widest}}  {a.help}{f' [default: {a.default}]' if a.default else ''}"
        for a in recipe.arguments
    ]
    if recipe.packages:
        lines += ["", f"needs   {', '.join(recipe.packages)}"]
    return [line.rstrip() for line in lines]


def _paragraph(text: str) -> list[str]:
    return [text.strip(), ""] if text.strip() else []


def _readme(recipe: Recipe, values: dict[str, str]) -> str:
    rows = [f"| `{a.name}` | `{a.default}` | {a.help} |" for a in recipe.arguments]
    return _README.format(
        name=recipe.name,
        about=recipe.about,
        data=recipe.data.strip(),
        try_it="\n".join(_try_it(recipe, values)),
        script=recipe.script,
        arguments="\n".join(rows),
    )


def _list(recipes: dict[str, Recipe]) -> None:
    name = max(len(r.name) for r in recipes.values())
    task = max(len(r.task) for r in recipes.values())
    for recipe in sorted(recipes.values(), key=lambda r: (r.task, r.name)):
        print(f"  {recipe.name:<{name}}  {recipe.task:<{task}}  {recipe.about}")


@contextlib.contextmanager
def _catalogue(source: str | None) -> Iterator[dict[str, Recipe]]:
    """Recipes that come with Ronde, of a folder, or of a git repository, which is cloned."""
    if source is None or Path(source).is_dir():
        yield catalogue(built_in() if source is None else Path(source))
        return
    if not source.endswith(".git") and ":" not in source:
        raise ArgumentError(f"--from {source}: no such folder, and no address of a git repository.")
    with tempfile.TemporaryDirectory(prefix="ronde-recipes-") as place:
        command = ["git", "clone", "--quiet", "--depth", "1", "--", source, place]
        try:
            done = subprocess.run(
                command,
                # A private repository fails instead of asking for a password.
                env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            raise ArgumentError("--from needs git for a repository, and git is not here.") from None
        if done.returncode:
            reason = (done.stderr.strip() or "git failed").splitlines()[-1]
            raise ArgumentError(f"--from {source} cannot be cloned: {reason}")
        yield catalogue(Path(place))


def _test(folder: Path, proves: bool) -> None:
    from ronde.cli.recipe_test import test_recipe

    for recipe in catalogue(folder).values():
        began = time.monotonic()
        test_recipe(recipe, proves, lambda line: print(f"  {line}", flush=True))
        print(f"{recipe.name}: passed in {time.monotonic() - began:.1f} s", flush=True)
