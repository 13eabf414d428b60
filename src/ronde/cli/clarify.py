"""``ronde clarify``: who is treated how?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ronde.cli.answer_screen import answer_table
from ronde.cli.explain import register_explain
from ronde.cli.options import GroupWithDefault, option
from ronde.cli.script import JsonOption, ReportOption, write_json
from ronde.watch import plain_console
from ronde.world import ArgumentError

if TYPE_CHECKING:
    from ronde.clarify import BiasTable, GroupVersusRest

_EXAMPLES = """
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


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group_of_verbs = typer.Typer(
        cls=GroupWithDefault,
        help="How are groups treated, and why does a model say what it says?\n" + _EXAMPLES,
        rich_markup_mode="markdown",
    )
    app.add_typer(group_of_verbs, name="clarify")

    @group_of_verbs.command(
        "table", help="How are groups treated, in labels and predictions?\n" + _EXAMPLES
    )
    def clarify(
        table: Annotated[
            str, typer.Argument(metavar="TABLE", help="Parquet or CSV; * is allowed.")
        ],
        label: Annotated[str, option("--label", "Column of the true outcome.", metavar="COLUMN")],
        facet: Annotated[
            list[str],
            option("--facet", "A column, COLUMN=VALUE, or a condition. Repeat.", metavar="FACET"),
        ],
        positive: Annotated[
            list[str] | None,
            option("--positive", "Label that counts as positive. Default: 1.", metavar="VALUE"),
        ] = None,
        prediction: Annotated[
            str | None,
            option("--prediction", "Column of predicted labels, or scores.", metavar="COLUMN"),
        ] = None,
        threshold: Annotated[
            float | None, option("--threshold", "A score above it is positive.", metavar="SCORE")
        ] = None,
        group: Annotated[
            str | None, option("--group", "Column for conditional disparity.", metavar="COLUMN")
        ] = None,
        features: Annotated[
            str | None,
            option("--features", "Columns of numbers, for the flip test.", metavar="A,B,…"),
        ] = None,
        limits: Annotated[
            list[str] | None,
            option("--require", "Fail beyond this limit. Repeat.", metavar="METRIC=LIMIT"),
        ] = None,
        json_file: JsonOption = None,
        report: ReportOption = None,
    ) -> None:
        from ronde.clarify import count_table
        from ronde.clarify.bias import BiasError, require

        asked = dict(_limit(text) for text in limits or ())
        if features and not prediction:
            raise ArgumentError("--features is for the flip test, which needs --prediction.")
        counts, sensitive, gone = count_table(
            table,
            label=label,
            facets=facet,
            positive=positive or (),
            prediction=prediction,
            threshold=threshold,
            group=group,
            features=[name.strip() for name in features.split(",")] if features else (),
        )
        comparisons = counts.compare(sensitive)
        values = _values(table, label, prediction, counts, comparisons, gone)
        _show(counts, comparisons, values)
        if json_file:
            write_json(json_file, values)
        if report:
            from ronde.clarify.bias_report import bias_report

            bias_report(counts, comparisons, report, table, values["attention"])
            plain_console().print(f"report    {report}", soft_wrap=True)
        # Last: the answer is shown and written, whatever the limits say.
        try:
            require(comparisons, asked)
        except BiasError as error:
            plain_console(stderr=True).print(f"error: {error}", soft_wrap=True)
            raise typer.Exit(1) from None

    register_explain(group_of_verbs)


def _values(
    table: str,
    label: str,
    prediction: str | None,
    counts: BiasTable,
    comparisons: list[GroupVersusRest],
    gone: int,
) -> dict[str, Any]:
    from dataclasses import asdict

    from ronde.clarify import attention

    def each(measures: Any) -> dict[str, Any]:
        return {name: asdict(m) for name, m in measures.items()}

    return {
        "table": table,
        "label": label,
        "prediction": prediction,
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
        console.print(f"–         {', '.join(names)}: {why}", soft_wrap=True)
    for line in values["attention"]:
        console.print(f"attention {line}", soft_wrap=True)
