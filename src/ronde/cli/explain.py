"""``ronde clarify explain``: why does a model say what it says?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ronde.cli.answer_screen import answer_table, tell
from ronde.cli.clarify import clarify
from ronde.cli.options import RunsOption, argument, setting, verb
from ronde.cli.saved_run import answer_of, start_of
from ronde.cli.script import JsonOption, ReportOption, check_folders, write_json
from ronde.cli.show import find_run
from ronde.watch import plain_console
from ronde.world import ArgumentError, RondeError

_SHOWN = 15  # columns, tokens, or patches


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde clarify explain``, as the user gave them."""

    run: str | None = argument("[RUN]", "A run, or a file of trees.", default=None)
    data: Path | None = setting(
        None, "--data", "Rows: a table of numbers, or .npz with input.", "FILE"
    )
    method: Literal["shapley", "ig", "trees"] = setting(
        "shapley", "--method", "shapley, ig, or trees.", "METHOD"
    )
    rows: int = setting(100, "--rows", "Rows to explain.", "N", min=1)
    output: int | None = setting(None, "--output", "Which of the model's outputs.", "N")
    budget: int = setting(2048, "--coalitions", "Of each row, for shapley.", "N", min=64)
    tokenizer: Path | None = setting(
        None, "--tokenizer", "tokenizer.json or its folder: tokens by text.", "FILE"
    )
    runs: RunsOption = Path("runs")
    json_file: JsonOption = None
    report: ReportOption = None


@verb(clarify, "explain")
def _explain(options: Options) -> None:
    """Why does a model say what it says?

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
    check_folders(json=options.json_file, report=options.report)
    vocabulary = None
    if options.tokenizer:  # first: a wrong file is told at once
        from ronde.clarify.explain import read_tokenizer

        vocabulary = read_tokenizer(options.tokenizer)
    values = _of_trees(options) if options.method == "trees" else _of_run(options)
    if vocabulary is not None:
        from ronde.clarify.explain import by_text

        values = by_text(values, vocabulary)
    _show(values)
    write_json(options.json_file, values)
    if report := options.report:
        from ronde.clarify.explain_report import explain_report

        explain_report(values, report, options.run or "the last run", options.method)
        tell(f"report    {report}")


def _of_trees(options: Options) -> dict[str, Any]:
    from ronde.clarify.explain import explain_trees, explanation_values
    from ronde.measure.model_call import read_columns

    run, data = options.run, options.data
    if run is None or data is None or not Path(run).is_file():
        raise ArgumentError("--method trees: name a model file of XGBoost or LightGBM, and --data.")
    try:
        columns = read_columns(data)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--data {data}: {error}") from None
    rows = columns["input"][: options.rows]
    explanation, names = explain_trees(Path(run), rows, columns["names"])
    return explanation_values(explanation, "column", names, (explanation.values.shape[1],))


def _of_run(options: Options) -> dict[str, Any]:
    checkpoint, command, _ = start_of(find_run(options.runs, options.run))
    asked = {name: getattr(options, name) for name in ("method", "rows", "output", "budget")}
    asked |= {"checkpoint": str(checkpoint), "data": options.data and str(options.data.absolute())}
    values = answer_of("explain", command, asked, "explained")
    if "refused" in values:
        raise RondeError(values["refused"])
    return values


def _show(values: dict[str, Any]) -> None:
    import numpy as np

    each = np.asarray(values["values"])
    console = plain_console()
    gap = f"largest |base + sum - output| {values['gap']:.1e}"
    tell(f"sum check {gap}, {len(each)} rows")
    mean = np.abs(each).mean(axis=0)
    table = answer_table(values["kind"], ">mean |value|", ">mean")
    for i in np.argsort(-mean, kind="stable")[:_SHOWN]:
        table.add_row(values["names"][i], f"{mean[i]:.4g}", f"{each[:, i].mean():+.4g}")
    console.print()
    console.print(table)
    if len(mean) > _SHOWN:
        console.print(f"… and {len(mean) - _SHOWN} more: --json has all")
