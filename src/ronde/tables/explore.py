"""``ronde prepare --notebook``: a marimo notebook with a cell for each column of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ronde.tables.prepare_report import DrawnRows, draw_column, take_sample
from ronde.tables.reading import SUFFIXES
from ronde.tables.recipe import Recipe
from ronde.tables.steps import KINDS, expected_of, read_as
from ronde.world import RondeError
from ronde.world.paths import files_of
from ronde.world.whole_file import write_answer

_SWITCHES = ("log", "codes", "one_hot", "cyclic", "missing_flag")

_HEAD = """import marimo

app = marimo.App(app_title={title!r})


@app.cell
def _():
    import marimo as mo
    from ronde.tables.explore import Explorer

    explorer = Explorer({recipe!r}, {data!r})
    mo.md("# " + explorer.title)
    return explorer, mo
"""

_COLUMN = """

@app.cell
def _(explorer, mo):
    {control} = explorer.controls(mo, {name!r})
    {control}
    return ({control},)


@app.cell
def _(explorer, mo, {control}):
    explorer.picture(mo, {name!r}, {control}.value)
    return
"""

_TAIL = """

@app.cell
def _(mo):
    save = mo.ui.run_button(label={label!r})
    save
    return (save,)


@app.cell
def _(explorer, mo, save, {controls}):
    explorer.save(mo, {values}) if save.value else None
    return


if __name__ == "__main__":
    app.run()
"""


def write_notebook(path: Path, recipe_file: Path, data: Sequence[str]) -> None:
    """Write the notebook of a recipe; its controls change the recipe, a button writes it back.

    Args:
        recipe_file: the YAML file, which is read again when the notebook is opened.
        data: the tables that are drawn, as paths.

    Raises:
        ArgumentError: the recipe cannot be read, or there are no such tables.
    """
    recipe = Recipe.read(recipe_file)
    files_of(list(data), "--notebook", SUFFIXES)
    names = {name: f"column_{n}" for n, name in enumerate(recipe.steps)}
    head = _HEAD.format(title=recipe_file.name, recipe=str(recipe_file), data=list(data))
    cells = [_COLUMN.format(name=name, control=control) for name, control in names.items()]
    values = ", ".join(f"{name!r}: {control}.value" for name, control in names.items())
    tail = _TAIL.format(
        label=f"Save {recipe_file.name}",
        controls=", ".join(names.values()),
        values=f"{{{values}}}",
    )
    write_answer(path, head + "".join(cells) + tail)


class Explorer:
    """What the cells of the notebook call; ``mo`` is marimo.

    Args:
        recipe_file: the YAML file.
        data: the tables that are drawn.
    """

    def __init__(self, recipe_file: str, data: Sequence[str]) -> None:
        self._file = Path(recipe_file)
        self._recipe = Recipe.read(self._file)
        self._rows: DrawnRows = take_sample(self._recipe, files_of(list(data), "data", SUFFIXES))
        self.title = f"{self._file.name}: {self._rows.rows:,} rows"

    def controls(self, mo: Any, name: str) -> Any:
        """A control for each step that the column may have."""
        do = self._recipe.steps[name]
        made = {}
        for step in (*KINDS[read_as(do)], "missing_flag"):
            if step in _SWITCHES:
                made[step] = mo.ui.checkbox(value=step in do, label=step)
            elif step == "scale":
                options = ["none", "standard", "minmax"]
                made[step] = mo.ui.dropdown(options, value=do.get(step, "none"), label=step)
            else:
                made[step] = mo.ui.text(
                    value=_flow(do[step]) if step in do else "",
                    label=f"{step}: {expected_of(step)}",
                    full_width=True,
                )
        return mo.ui.dictionary(made, label=name)

    def picture(self, mo: Any, name: str, values: Mapping[str, Any]) -> Any:
        """The column before and after its steps, or why they cannot be."""
        try:
            recipe = self._with({name: steps_of(values)})
            return mo.Html(draw_column(recipe.fit(self._rows.table), name, self._rows))
        except (RondeError, yaml.YAMLError) as error:
            return mo.callout(str(error), kind="danger")

    def save(self, mo: Any, values: Mapping[str, Mapping[str, Any]]) -> Any:
        """Write the recipe back to its file."""
        try:
            self._with({name: steps_of(given) for name, given in values.items()}).write(self._file)
        except (RondeError, yaml.YAMLError) as error:
            return mo.callout(f"{self._file.name} is as it was. {error}", kind="danger")
        return mo.callout(f"{self._file.name} is saved.", kind="success")

    def _with(self, columns: Mapping[str, Any]) -> Recipe:
        return Recipe(columns, self._recipe.target, self._recipe.key, where=self._file.name)


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def steps_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Steps, as the controls of a column say."""
    steps: dict[str, Any] = {}
    for step, value in values.items():
        if step in _SWITCHES:
            given = value or None
        elif step == "scale":
            given = None if value in (None, "none") else value
        else:
            given = yaml.safe_load(value) if value.strip() else None
        if given is not None:
            steps[step] = given
    return steps
