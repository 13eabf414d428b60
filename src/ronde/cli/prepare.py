"""``ronde prepare``: fit a preparation recipe on tables, and apply it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ronde.cli.answer_screen import tell
from ronde.cli.options import JsonFlag, app, argument, setting, verb
from ronde.world import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde prepare``, as the user gave them."""

    recipe: Path = argument("RECIPE", "prepare.yaml, or a fitted _recipe.json.")
    data: list[str] = argument("DATA", "Files, folders, or globs of Parquet, CSV, or Arrow.")
    out: str = setting("", "--out -o", "The folder to write.", "FOLDER")
    engine: str = setting("duckdb", "--engine", "Where the fit is computed.", "duckdb|arrow|spark")
    master: str | None = setting(None, "--master", "Of Spark, such as local[4] or yarn.", "URL")
    threads: int | None = setting(
        None, "--threads", "Of DuckDB. Default: all usable cores.", "N", min=1
    )
    report: Path | None = setting(
        None, "--report", "Draw each column before and after into an HTML file.", "FILE"
    )
    notebook: Path | None = setting(
        None, "--notebook", "Write a marimo notebook to edit RECIPE in, and end.", "FILE.py"
    )
    against: list[str] | None = setting(
        None, "--against", "A second table: the report measures its drift.", "DATA"
    )
    as_json: JsonFlag = False


@verb(app, "prepare")
def _prepare(options: Options) -> None:
    """Fit a preparation recipe on tables, and apply it.

    A recipe in YAML is fitted on the data, then applied. A fitted recipe (_recipe.json) is
    applied as it is, never fitted again.

    Examples:

    ```sh
    ronde prepare prepare.yaml 'train/*.parquet' --out prepared
    ronde prepare prepared/_recipe.json test.parquet --out prepared_test
    ronde prepare prepare.yaml s3a://lake/train --engine spark --master yarn --out s3a://lake/out
    ```
    """
    from ronde.tables import Recipe

    recipe, data, out, engine = options.recipe, options.data, options.out, options.engine
    report, against = options.report, options.against or []
    if options.master is not None and engine != "spark":
        raise ArgumentError("--master needs --engine spark.")
    if options.notebook is not None:
        _write_notebook(options.notebook, recipe, data)
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
    fitted, rows, seconds = steps(given, options)
    result = {
        "recipe": f"{out.rstrip('/')}/_recipe.json",
        "sha256": fitted.digest,
        "rows": rows,
        "outputs": [each.name for each in fitted.outputs],
        "fit_seconds": round(seconds, 3),
        "seconds": round(time.monotonic() - began, 3),
    }
    views = _draw(report, fitted, data, against) if report is not None else []
    if options.as_json:
        shown = {"report": [asdict(view) for view in views]} if report is not None else {}
        print(json.dumps({**result, **shown}))
        return
    if given.state is None:
        where = {"duckdb": "DuckDB", "arrow": "PyArrow", "spark": "Spark"}[engine]
        count = f"{fitted.state['rows']:,} rows, {len(fitted.steps)} columns"  # type: ignore[index]
        tell(f"fit      {count}, {where}: {seconds:.1f} s")
        for name, text in facts(fitted):
            tell(f"         {name}  {text}")
    tell(f"apply    {out}: {rows:,} rows, {len(fitted.outputs)} columns")
    tell(f"recipe   {result['recipe']} (sha256 {fitted.digest[:12]})")
    if report is not None:
        tell(f"report   {report}")
        for view in views:
            if view.leaks:
                tell(
                    f"         {view.name} predicts {fitted.target} alone ({view.alone:.3f}): "
                    "is it known before?"
                )
            if view.drifts and view.drift is not None:
                tell(f"         {view.name} has drifted: PSI {view.drift[0]:.2f}")


def _write_notebook(notebook: Path, recipe: Path, data: list[str]) -> None:
    from ronde.tables.explore import write_notebook
    from ronde.watch.html import check_drawing
    from ronde.world.paths import need

    need("marimo", "explore", "--notebook")
    check_drawing()
    if recipe.suffix == ".json":
        raise ArgumentError(f"--notebook edits a recipe in YAML; {recipe} is a fitted one.")
    write_notebook(notebook, recipe, data)
    tell(f"notebook {notebook}: marimo edit {notebook}")


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


def _here(given: Any, options: Options) -> tuple[Any, int, float]:
    from ronde.tables.prepared import check_out, write_prepared
    from ronde.tables.reading import SUFFIXES
    from ronde.world.paths import files_of

    check_out(Path(options.out))
    files = files_of(options.data, "ronde prepare", SUFFIXES)
    began = time.monotonic()
    fitted = given if given.state else given.fit(files, options.engine, options.threads)
    seconds = time.monotonic() - began
    return fitted, write_prepared(fitted, files, Path(options.out), lambda rows: None), seconds


def _on_spark(given: Any, options: Options) -> tuple[Any, int, float]:
    from ronde.tables.spark import check_paths, is_out_of_fold, write_on_spark
    from ronde.tables.sql_engines import session

    data = options.data
    check_paths(data)
    is_fitted = given.state is not None
    out_of_fold = is_out_of_fold(given, data) if is_fitted else given.needs_folds
    spark = session(options.master)
    try:
        began = time.monotonic()
        fitted = given if is_fitted else given.fit(data, "spark", spark=spark)
        seconds = time.monotonic() - began
        rows = write_on_spark(fitted, data, options.out, spark, out_of_fold)
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
