"""``ronde clarify explain``: why does a model say what it says?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ronde.cli.answer_screen import answer_table
from ronde.cli.options import RunsOption, option
from ronde.cli.saved_run import answer_of, start_of
from ronde.cli.script import JsonOption, ReportOption, write_json
from ronde.cli.show import find_run
from ronde.watch import plain_console
from ronde.world import ArgumentError, RondeError

_METHODS = ("shapley", "ig", "trees")
_SHOWN = 15  # columns, tokens, or patches

_EXAMPLES = """
The run's script is started up to ronde.distribute, and its newest checkpoint is loaded. The
values of each row add up to the model's output minus a base; how exactly is always printed.

Examples:

```sh
ronde clarify explain run-1 --data test.parquet             Shapley values of 100 rows
ronde clarify explain run-1 --data test.npz --output 3      of a classifier's fourth score
ronde clarify explain run-1 --method ig                     integrated gradients, training rows
ronde clarify explain run-1 --tokenizer saved/tokenizer.json          a text model's words
ronde clarify explain model.ubj --data test.parquet --method trees    XGBoost, LightGBM
```
"""


def register_explain(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command("explain", help="Why does a model say what it says?\n" + _EXAMPLES)
    def explain(
        run: Annotated[
            str | None, typer.Argument(metavar="[RUN]", help="A run, or a file of trees.")
        ] = None,
        folder: RunsOption = Path("runs"),
        data: Annotated[
            Path | None,
            option("--data", "Rows: a table of numbers, or .npz with input.", metavar="FILE"),
        ] = None,
        method: Annotated[
            str, option("--method", "shapley, ig, or trees.", metavar="METHOD")
        ] = "shapley",
        rows: Annotated[int, option("--rows", "Rows to explain.", "N", min=1)] = 100,
        output: Annotated[
            int | None, option("--output", "Which of the model's outputs.", metavar="N")
        ] = None,
        budget: Annotated[
            int, option("--coalitions", "Of each row, for shapley.", "N", min=64)
        ] = 2048,
        tokenizer: Annotated[
            Path | None,
            option("--tokenizer", "tokenizer.json or its folder: tokens by text.", "FILE"),
        ] = None,
        json_file: JsonOption = None,
        report: ReportOption = None,
    ) -> None:
        if method not in _METHODS:
            raise ArgumentError(f"--method {method}: expected {', '.join(_METHODS)}.")
        vocabulary = None
        if tokenizer:  # first: a wrong file is told at once
            from ronde.clarify.explain import read_tokenizer

            vocabulary = read_tokenizer(tokenizer)
        if method == "trees":
            values = _trees(run, data, rows)
        else:
            values = _run(folder, run, data, method, rows, output, budget)
        if vocabulary is not None:
            from ronde.clarify.explain import by_text

            values = by_text(values, vocabulary)
        _show(values)
        if json_file:
            write_json(json_file, values)
        if report:
            from ronde.clarify.explain_report import explain_report

            explain_report(values, report, run or "the last run", method)
            plain_console().print(f"report    {report}", soft_wrap=True)


def _trees(run: str | None, data: Path | None, rows: int) -> dict[str, Any]:
    from ronde.clarify.explain import explain_trees, explanation_values
    from ronde.measure.model_call import read_columns

    if run is None or data is None or not Path(run).is_file():
        raise ArgumentError("--method trees: name a model file of XGBoost or LightGBM, and --data.")
    try:
        columns = read_columns(data)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--data {data}: {error}") from None
    explanation, names = explain_trees(Path(run), columns["input"][:rows], columns["names"])
    return explanation_values(explanation, "column", names, (explanation.values.shape[1],))


def _run(
    folder: Path,
    run: str | None,
    data: Path | None,
    method: str,
    rows: int,
    output: int | None,
    budget: int,
) -> dict[str, Any]:
    checkpoint, command, _ = start_of(find_run(folder, run))
    options = {
        "checkpoint": str(checkpoint),
        "data": str(data.absolute()) if data else None,
        "method": method,
        "rows": rows,
        "output": output,
        "budget": budget,
    }
    values = answer_of("explain", command, options, "explained")
    if "refused" in values:
        raise RondeError(values["refused"])
    return values


def _show(values: dict[str, Any]) -> None:
    import numpy as np

    each = np.asarray(values["values"])
    console = plain_console()
    gap = f"largest |base + sum - output| {values['gap']:.1e}"
    console.print(f"sum check {gap}, {len(each)} rows", soft_wrap=True)
    mean = np.abs(each).mean(axis=0)
    table = answer_table(values["kind"], ">mean |value|", ">mean")
    for i in np.argsort(-mean, kind="stable")[:_SHOWN]:
        table.add_row(values["names"][i], f"{mean[i]:.4g}", f"{each[:, i].mean():+.4g}")
    console.print()
    console.print(table)
    if len(mean) > _SHOWN:
        console.print(f"… and {len(mean) - _SHOWN} more: --json has all")
