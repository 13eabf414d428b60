"""The summary of a run: what ran where, the curve, the speed, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ronde.cli.script import short
from ronde.watch import RunDir, curve, figure, summarise
from ronde.world.units import clock, count_of


def _numbers(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{k} {figure(v)}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()
    )


def print_summary(
    directory: RunDir,
    console: Any,
    seconds: float,
    one: float | None = None,
    workers: int = 1,
    kept: bool = True,
) -> None:
    """Print what ran where, the batch contract, the curve, the speed, and what to do next.
    ``kept`` is False if the run directory goes now.
    """
    from rich.box import ROUNDED
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from ronde.plan import Plan

    summary = summarise(directory)
    start = summary.start
    if start is None:
        console.print(
            f"the script ended after {clock(seconds)} without calling ronde.distribute"
            + (f"; its output is in {short(directory.logs)}" if kept else ""),
            highlight=False,
            soft_wrap=True,
        )
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    hosts = ", ".join(f"{host}:{n}" for host, n in start.hosts.items()) or start.host
    where = f"{count_of(start.workers, 'worker')} on {hosts}"
    if not start.framework:
        where += f" ({start.device}), {count_of(start.threads, 'thread')} each"

    def row(name: str, value: str, style: str = "") -> None:
        table.add_row(name, Text(value, style=style))  # a Text, not markup: names may hold brackets

    trains = start.framework or start.model
    if start.parameters:
        trains += f", {start.parameters:,} parameters, {start.optimizer}"
    row("ran", f"{short(Path(start.script))}: {trains}")
    row("where", where)
    took = clock(summary.seconds or seconds)
    if start.framework:
        row("took", took)
    elif start.optimizer == "boosting":
        row("trained", f"{summary.step:,} rounds of {start.samples:,} rows in {took}")
    else:
        plan = Plan.from_dict(start.plan)
        if plan.family != "replicate":
            row("plan", plan.spec)
        row("batch", plan.sentence(summary.differs, start.proof, start.smallest_batch))
        row(
            "trained",
            f"{summary.step:,} steps, {summary.samples:,} samples, {summary.epoch} "
            f"epoch{'s' if summary.epoch != 1 else ''} in {took}",
        )
    if summary.restarts:
        row("restarts", str(summary.restarts))
    if summary.samples_per_second:
        speed = f"{summary.samples_per_second:,.0f} samples/s"
        row("speed", speed)
        if one:
            ratio = summary.samples_per_second / one
            row(
                "one worker",
                f"{one:,.0f} samples/s with all cores, measured afterwards: {workers} "
                f"workers are {ratio:.2f}× as fast",
            )
    if summary.loss is not None:
        first = summary.curve[0][1]
        row("loss", f"{figure(first)} → {figure(summary.loss)}")
    for kind, values in summary.evaluations.items():
        row("evaluation" if kind == "evaluate" else kind, _numbers(values))
    for name, other in summary.parts.items():
        if other.start is not None:
            loss = (
                f", loss {figure(other.curve[0][1])} → {figure(other.loss)}"
                if other.curve and other.loss is not None
                else ""
            )
            row(
                name,
                f"{other.start.model}, {other.start.parameters:,} parameters, "
                f"{other.start.optimizer}: {other.step:,} steps{loss}",
            )
            for kind, values in other.evaluations.items():
                row("", f"{'evaluation' if kind == 'evaluate' else kind} {_numbers(values)}")
    if best := summary.best:
        row("best", f"{best.metric} {figure(best.value)} at step {best.step:,}, in {best.path}")
    if kept:
        row(
            "kept in",
            f"{short(directory.path)}  (record.jsonl, logs/"
            + ("" if start.framework else f", {summary.checkpoints} checkpoint")
            + ("" if start.framework or summary.checkpoints == 1 else "s")
            + ")",
        )
        folder = short(directory.path.parent)
        runs_option = "" if folder == "runs" else f" --runs {folder}"
        row("next", f"ronde show {directory.name}{runs_option}", "cyan")
    else:
        row("kept in", "nowhere: --runs none")
    width = max(20, min(console.width - 20, 72))
    drawn = curve([(float(x), y) for x, y in summary.curve], width=width, height=8)
    if not console.encoding.startswith("utf"):
        drawn = ""  # it is drawn with Braille patterns
    parts: list[Any] = [table]
    if drawn:
        parts += [Text(""), Text(drawn)]
    if summary.warnings:
        parts += [Text(""), *(Text(f"warning: {w}", style="yellow") for w in summary.warnings)]
    title = Text(
        f"{directory.name}: {summary.ending}"
    )  # a Text: names may hold brackets and colons
    console.print(Panel(Group(*parts), title=title, box=ROUNDED, expand=False))
