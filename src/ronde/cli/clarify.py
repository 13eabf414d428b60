"""``ronde clarify``: who is treated how?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from ronde.cli.answer_screen import answer_table, tell
from ronde.cli.options import REQUIRED, GroupWithDefault, app, argument, setting, verb
from ronde.cli.script import JsonOption, ReportOption, write_json
from ronde.watch import plain_console
from ronde.world import ArgumentError

if TYPE_CHECKING:
    from ronde.clarify import BiasTable, GroupVersusRest

clarify = typer.Typer(
    cls=GroupWithDefault,
    help="How are groups treated, and why does a model say what it says?",
    rich_markup_mode="markdown",
)
app.add_typer(clarify, name="clarify")


def _limit(text: str) -> tuple[str, float | tuple[float, float]]:
    """``"DI=0.8:1.25"`` -> ``("DI", (0.8, 1.25))``."""
    name, _, value = text.partition("=")
    try:
        low, colon, high = value.partition(":")
        return name.strip(), (float(low), float(high)) if colon else float(value)
    except ValueError:
        raise ArgumentError(
            f"--require {text}: expected METRIC=LIMIT or METRIC=LOW:HIGH, such as DPPL=0.1."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde clarify``, as the user gave them."""

    table: str = argument("TABLE", "Parquet or CSV; * is allowed.")
    label: str = setting(REQUIRED, "--label", "Column of the true outcome.", "COLUMN")
    facet: list[str] = setting(
        REQUIRED, "--facet", "A column, COLUMN=VALUE, or a condition. Repeat.", "FACET"
    )
    positive: list[str] | None = setting(
        None, "--positive", "Label that counts as positive. Default: 1.", "VALUE"
    )
    prediction: str | None = setting(
        None, "--prediction", "Column of predicted labels, or scores.", "COLUMN"
    )
    threshold: float | None = setting(None, "--threshold", "A score above it is positive.", "SCORE")
    group: str | None = setting(None, "--group", "Column for conditional disparity.", "COLUMN")
    features: str | None = setting(
        None, "--features", "Columns of numbers, for the flip test.", "A,B,…"
    )
    limits: list[str] | None = setting(
        None, "--require", "Fail beyond this limit. Repeat.", "METRIC=LIMIT"
    )
    json_file: JsonOption = None
    report: ReportOption = None


@verb(clarify, "table")
def _clarify(options: Options) -> None:
    """How are groups treated, in labels and predictions?

    Compares each group of each facet with everyone else: the metrics of SageMaker Clarify before
    training (labels) and after it (predictions), with 95 % intervals.

    Examples:

    ```sh
    ronde clarify predictions.parquet --label hired --prediction score --threshold 0.5 --facet sex
    ronde clarify people.csv --label hired --facet sex=F --facet 'age >= 40'    labels only
    ronde clarify … --group department                                    conditional disparity too
    ronde clarify … --require DPPL=0.1 --require DI=0.8:1.25              exit status 1 if beyond
    ronde clarify explain RUN --data test.parquet         why a model says what it says
    ```

    Exit status: 0 measured, 1 a limit of --require is not kept, 2 an argument cannot be used.
    """
    from ronde.clarify import count_table
    from ronde.clarify.bias import BiasError, require

    asked = dict(_limit(text) for text in options.limits or ())
    features, prediction = options.features, options.prediction
    if features and not prediction:
        raise ArgumentError("--features is for the flip test, which needs --prediction.")
    counts, sensitive, gone = count_table(
        options.table,
        label=options.label,
        facets=options.facet,
        positive=options.positive or (),
        prediction=prediction,
        threshold=options.threshold,
        group=options.group,
        features=[name.strip() for name in features.split(",")] if features else (),
    )
    comparisons = counts.compare(sensitive)
    values = _values(options, counts, comparisons, gone)
    _show(counts, comparisons, values)
    write_json(options.json_file, values)
    if report := options.report:
        from ronde.clarify.bias_report import bias_report

        bias_report(counts, comparisons, report, options.table, values["attention"])
        tell(f"report    {report}")
    # Last: the answer is shown and written, whatever the limits say.
    try:
        require(comparisons, asked)
    except BiasError as error:
        tell(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _values(
    options: Options, counts: BiasTable, comparisons: list[GroupVersusRest], gone: int
) -> dict[str, Any]:
    from ronde.clarify import attention

    def each(measures: Any) -> dict[str, Any]:
        return {name: asdict(m) for name, m in measures.items()}

    return {
        "table": options.table,
        "label": options.label,
        "prediction": options.prediction,
        "rows": counts.rows(),
        "left_out": gone,
        "groups": {f: [asdict(g) for g in counts.groups(f)] for f in counts.facets},
        "comparisons": [
            {
                "facet": c.facet,
                "value": c.value,
                "measures": each(c.measures),
                "conditional": {group: each(m) for group, m in c.conditional.items()},
            }
            for c in comparisons
        ],
        "attention": attention(counts, comparisons),
    }


def _show(counts: BiasTable, comparisons: list[GroupVersusRest], values: dict[str, Any]) -> None:
    from ronde.clarify import METRICS

    console = plain_console()
    left = f", {values['left_out']:,} without a label or prediction left out"
    console.print(f"rows      {counts.rows():,}{left if values['left_out'] else ''}")
    predicted = (">predicted",) * counts.predicted
    sizes = answer_table("group", ">rows", ">positive labels", *predicted)
    for facet in counts.facets:
        for g in counts.groups(facet):
            chosen = (f"{g.selected[0]:.1%}",) if g.selected else ()
            sizes.add_row(f"{facet}: {g.value}", f"{g.rows:,}", f"{g.label[0]:.1%}", *chosen)
    console.print()
    console.print(sizes)
    for c in comparisons:
        grid = answer_table(c.name, ">", ">95 %", "")
        last = grid.columns[-1]
        last.no_wrap, last.overflow, last.style = True, "ellipsis", "dim"
        for m in c.measures.values():
            when, meaning = METRICS[m.name]
            if m.name in ("CI", "DPPL"):
                of = "labels" if when == "before" else "predictions"
                grid.add_row(when, "", "", f"training: {of}")
            interval = "" if m.low is None or m.high is None else f"{m.low:z.3f} {m.high:z.3f}"
            grid.add_row(f"  {m.name}", m.shown, interval, meaning)
        console.print()
        console.print(grid)
    reasons: dict[str, list[str]] = {}
    for c in comparisons:
        for m in c.measures.values():
            if m.why:
                reasons.setdefault(m.why, []).append(m.name)
    console.print()
    for why, absent in reasons.items():
        names = list(dict.fromkeys(absent))
        tell(f"–         {', '.join(names)}: {why}")
    for line in values["attention"]:
        tell(f"attention {line}")
