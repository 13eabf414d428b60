"""``ronde prepare``: fit a preparation recipe on tables, and apply it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ronde.cli.options import JsonFlag, option
from ronde.watch import plain_console
from ronde.world import ArgumentError

_EXAMPLES = """
A recipe in YAML is fitted on the data, then applied. A fitted recipe (_recipe.json) is
applied as it is, never fitted again.

Examples:

```sh
ronde prepare prepare.yaml 'train/*.parquet' --out prepared
ronde prepare prepared/_recipe.json test.parquet --out prepared_test
ronde prepare prepare.yaml s3a://lake/train --engine spark --master yarn --out s3a://lake/out
```
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "prepare",
        help="Fit a preparation recipe on tables, and apply it.\n" + _EXAMPLES,
        no_args_is_help=True,
    )
    def prepare(
        recipe: Annotated[
            Path,
            typer.Argument(
                metavar="RECIPE", help="prepare.yaml, or a fitted _recipe.json.", show_default=False
            ),
        ],
        data: Annotated[
            list[str],
            typer.Argument(
                metavar="DATA",
                help="Files, folders, or globs of Parquet, CSV, or Arrow.",
                show_default=False,
            ),
        ],
        out: Annotated[str, option("--out -o", "The folder to write.", "FOLDER")] = "",
        engine: Annotated[
            str, option("--engine", "Where the fit is computed.", "duckdb|arrow|spark")
        ] = "duckdb",
        master: Annotated[
            str | None, option("--master", "Of Spark, such as local[4] or yarn.", "URL")
        ] = None,
        threads: Annotated[
            int | None, option("--threads", "Of DuckDB. Default: all usable cores.", "N", min=1)
        ] = None,
        report: Annotated[
            Path | None,
            option("--report", "Draw each column before and after into an HTML file.", "FILE"),
        ] = None,
        notebook: Annotated[
            Path | None,
            option("--notebook", "Write a marimo notebook to edit RECIPE in, and end.", "FILE.py"),
        ] = None,
        against: Annotated[
            list[str] | None,
            option("--against", "A second table: the report measures its drift.", "DATA"),
        ] = None,
        as_json: JsonFlag = False,
    ) -> None:
        from ronde.tables import Recipe

        if master is not None and engine != "spark":
            raise ArgumentError("--master needs --engine spark.")
        if notebook is not None:
            _write_notebook(notebook, recipe, data)
            return
        if not out:
            raise ArgumentError("--out FOLDER is missing: where the prepared table is written.")
        if against and report is None:
            raise ArgumentError("--against needs --report, which shows the drift.")
        if report is not None:
            _check_report(report, engine)
        given = Recipe.read(recipe)
        steps = _on_spark if engine == "spark" else _here
        began = time.monotonic()
        fitted, rows, seconds = steps(given, data, out, engine, master, threads)
        result = {
            "recipe": f"{out.rstrip('/')}/_recipe.json",
            "sha256": fitted.digest,
            "rows": rows,
            "outputs": [each.name for each in fitted.outputs],
            "fit_seconds": round(seconds, 3),
            "seconds": round(time.monotonic() - began, 3),
        }
        views = _draw(report, fitted, data, against or []) if report is not None else []
        if as_json:
            shown = {"report": [asdict(view) for view in views]} if report is not None else {}
            print(json.dumps({**result, **shown}))
            return
        say = plain_console().print
        if given.state is None:
            where = {"duckdb": "DuckDB", "arrow": "PyArrow", "spark": "Spark"}[engine]
            count = f"{fitted.state['rows']:,} rows, {len(fitted.steps)} columns"  # type: ignore[index]
            say(f"fit      {count}, {where}: {seconds:.1f} s", markup=False)
            for name, text in facts(fitted):
                say(f"         {name}  {text}", markup=False, soft_wrap=True)
        say(f"apply    {out}: {rows:,} rows, {len(fitted.outputs)} columns", markup=False)
        say(f"recipe   {result['recipe']} (sha256 {fitted.digest[:12]})", markup=False)
        if report is not None:
            say(f"report   {report}", markup=False)
            for view in views:
                if view.leaks:
                    say(
                        f"         {view.name} predicts {fitted.target} alone ({view.alone:.3f}): "
                        "is it known before?",
                        markup=False,
                        soft_wrap=True,
                    )
                if view.drifts and view.drift is not None:
                    say(f"         {view.name} has drifted: PSI {view.drift[0]:.2f}", markup=False)


def _write_notebook(notebook: Path, recipe: Path, data: list[str]) -> None:
    from ronde.tables.explore import write_notebook
    from ronde.watch.html import check_drawing
    from ronde.world.paths import need

    need("marimo", "explore", "--notebook")
    check_drawing()
    if recipe.suffix == ".json":
        raise ArgumentError(f"--notebook edits a recipe in YAML; {recipe} is a fitted one.")
    write_notebook(notebook, recipe, data)
    plain_console().print(f"notebook {notebook}: marimo edit {notebook}", markup=False)


def _check_report(report: Path, engine: str) -> None:
    from ronde.watch.html import check_drawing
    from ronde.world.whole_file import check_target

    if engine == "spark":
        raise ArgumentError("--report draws local files; --engine spark has none.")
    check_drawing()
    check_target(report)


def _draw(report: Path, fitted: Any, data: list[str], against: list[str]) -> Any:
    from ronde.tables.prepare_report import write_prepare_report
    from ronde.tables.reading import SUFFIXES
    from ronde.world.paths import files_of

    files = files_of(data, "ronde prepare", SUFFIXES)
    second = files_of(against, "--against", SUFFIXES) if against else []
    return write_prepare_report(report, fitted, files, second)


def _here(
    given: Any, data: list[str], out: str, engine: str, master: str | None, threads: int | None
) -> tuple[Any, int, float]:
    from ronde.tables.prepared import check_out, write_prepared
    from ronde.tables.reading import SUFFIXES
    from ronde.world.paths import files_of

    check_out(Path(out))
    files = files_of(data, "ronde prepare", SUFFIXES)
    began = time.monotonic()
    fitted = given if given.state else given.fit(files, engine, threads)
    seconds = time.monotonic() - began
    return fitted, write_prepared(fitted, files, Path(out), lambda rows: None), seconds


def _on_spark(
    given: Any, data: list[str], out: str, engine: str, master: str | None, threads: int | None
) -> tuple[Any, int, float]:
    from ronde.tables.spark import check_paths, is_out_of_fold, write_on_spark
    from ronde.tables.sql_engines import session

    check_paths(data)
    is_fitted = given.state is not None
    out_of_fold = is_out_of_fold(given, data) if is_fitted else given.needs_folds
    spark = session(master)
    try:
        began = time.monotonic()
        fitted = given if is_fitted else given.fit(data, "spark", spark=spark)
        seconds = time.monotonic() - began
        rows = write_on_spark(fitted, data, out, spark, out_of_fold)
    finally:
        spark.stop()
    return fitted, rows, seconds


def facts(recipe: Any) -> list[tuple[str, str]]:
    """A line for each column: what the fit has found."""
    rows = recipe.state["rows"]
    width = max(map(len, recipe.steps))
    lines = []
    for name, state in recipe.fitted.items():
        parts = []
        if state["missing"]:
            fill = state.get("fill")
            share = f"{100 * state['missing'] / rows:.1f} % missing"
            parts.append(f"{share} → {fill:g}" if fill is not None else share)
        if "edges" in state:
            parts.append(f"{len(state['edges']) + 1} bins")
        if "center" in state:
            parts.append(f"center {state['center']:g}, width {state['width']:g}")
        if "levels" in state:
            kept = sum(count for _, count in state["levels"])
            rare = 1 - kept / max(rows - state["missing"], 1)
            text = f"{len(state['levels']):,} of {state['distinct']:,} values"
            parts.append(f"{text}, {100 * rare:.1f} % of rows rare" if rare else text)
        lines.append((name.ljust(width), ", ".join(parts) or "none missing"))
    return lines
