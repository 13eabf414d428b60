"""``ronde doctor``: why are the devices idle? Measured on the script itself, with prescriptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from ronde.cli.answer_screen import Doing, StyledText, answer_line, answer_table, note_lines, tell
from ronde.cli.doctor_apply import apply_prescriptions, check_writable, parse_apply
from ronde.cli.options import app, setting, verb
from ronde.cli.script import ReportOptions, WorkersOption, examine, feed_of
from ronde.doctor.verdict import is_between_workers
from ronde.watch import plain_console
from ronde.world import ArgumentError
from ronde.world.units import count_of, format_rate


@dataclass(frozen=True, kw_only=True)
class Options(ReportOptions):
    """The options of ``ronde doctor``, as the user gave them."""

    workers: WorkersOption = "auto"
    to: int = setting(32, "--to", "Predict the gap up to N devices.", "N", min=1)
    nodes: int | None = setting(
        None,
        "--nodes",
        "Nodes that those devices are on. Default: as many as they fill.",
        "N",
        min=1,
    )
    seconds: float = setting(
        60.0,
        "--seconds",
        "How long measuring may take, in all; twice that on a disturbed machine.",
        "S",
        min=1,
        max=3600,
    )
    rounds: int = setting(3, "--rounds", "How often each rate is measured, at least.", "R", min=1)
    apply: str | None = setting(
        None, "--apply", "Write these prescriptions to SCRIPT's settings and measure again.", "1,2"
    )


@verb(app, "doctor")
def _doctor(options: Options) -> None:
    """Why are my devices idle? The gap to the synthetic rate, what it is lost to, and what
    would help.

    The script runs up to ronde.distribute. There its steps are timed in turns: on real
    batches that are reused (the synthetic ceiling), with its real input, and with samples
    that are given out again. Stages are timed where samples are made. Then some steps of the
    script's own loop are timed. Ronde writes nothing.

    Examples:

    ```sh
    ronde doctor train.py                               one worker per device, about a minute
    ronde doctor --workers 2 --to 64 train.py --lr 0.1  options after the script are its own
    ronde doctor --apply 1,2 train.py                   apply prescriptions 1 and 2, measure again
    ronde doctor --json doctor.json --report report.html -m my.train
    ```

    Exit status: 0 a verdict was given; 1 refused, the machine is too disturbed; 2 the script
    failed or an argument cannot be used; 130 stopped by Ctrl-C.
    """
    from ronde.launch import check_workers, resolve_workers

    command = options.command_for("doctor")
    count = resolve_workers(options.workers)
    check_workers(count)
    if options.nodes is not None and options.nodes > options.to:
        raise ArgumentError(
            f"--nodes {options.nodes} is more than the {options.to} devices of --to."
        )
    chosen = parse_apply(options.apply)
    options.check_files()
    script = options.module or command[0]
    # Before a minute is spent on measuring.
    if chosen:
        check_writable(script)
    feed, feed_note = feed_of(options.feed, script)
    asked = {name: getattr(options, name) for name in ("seconds", "rounds", "to", "nodes")}
    console = plain_console()
    with Doing(console) as say:
        values = _measured(command, count, feed, asked, say)
    values["script"] = f"-m {options.module}" if options.module is not None else command[0]
    if feed_note:
        values["notes"].append(f"{feed_note}.")
    options.give(values, console, screen(values, options.verbose), lambda: _draw(options, values))
    if chosen and not values["refused"]:
        # A minute was spent on the answer: it is written before anything else can go wrong.
        # verify: the rates are measured again, and no remedy is tried.
        def again(settings: str) -> dict[str, Any]:
            with Doing(console) as say:
                return _measured(command, count, settings, {**asked, "verify": True}, say)

        applied = apply_prescriptions(values, chosen, script, feed, again, console)
        if applied is not None:
            values["applied"] = applied
            options.write(values)
            _draw(options, values)
    if options.report is not None:
        tell(f"written: {options.report}")
    if values["refused"]:
        raise typer.Exit(1)


def _draw(options: Options, values: dict[str, Any]) -> None:
    def chart() -> tuple[str, str, str]:
        from ronde.doctor.doctor_report import losses_chart

        return "Where the speed goes", "Points of the synthetic ceiling", losses_chart(values)

    headline = answer_line(*_headline(values)).plain.strip()
    options.draw("doctor", values["script"], headline, screen(values, verbose=True), chart)


def _measured(
    command: list[str], workers: int, feed: str, options: dict[str, Any], say: Any
) -> dict[str, Any]:
    """The workers' result."""
    from ronde.doctor import load_doctor

    say(f"starting {count_of(workers, 'worker')}")
    failed = "the script failed before it was examined"
    feeding = {"RONDE_FEED": feed}
    return examine("doctor", command, workers, options, say, failed, load_doctor, feeding)


def screen(values: dict[str, Any], verbose: bool = False) -> list[Any]:
    """The lines and the table to show. Notes take three lines, unless ``verbose``."""
    rates = values["samples_per_second"]
    n = values["workers"]
    gap, half = 100 * values["gap"], 50 * (values["gap_high"] - values["gap_low"])
    top: list[list[StyledText]] = [
        [
            ("ronde doctor", "bold"),
            f" {values['script']}  ·  {values['model']}  ·  "
            f"{count_of(n, 'worker')} on {values['device']}, {_loaders(values)}  ·  "
            f"{values['measured_seconds']:.0f} s, {values['rounds']} rounds",
        ],
        _headline(values),
        [
            f"  synthetic {format_rate(rates['synthetic'])} samples/s   "
            f"real {format_rate(rates['real'])}   ",
            *_gap(values, gap, half),
        ],
    ]
    if values.get("order"):
        seconds, share = values["order"]["seconds"], values["order"]["share"]
        text = (
            f"the sampler takes {seconds:.1f} s to draw an epoch's order, {100 * share:.0f} % "
            "of each epoch"
        )
        top.append([("  EACH EPOCH  ", "bold yellow"), text])
    bottom = [*_scale(values), *_prescribed(values)]
    return [
        *(answer_line(*parts) for parts in top),
        _table(values),
        *(answer_line(*parts) for parts in bottom),
        *note_lines(values["notes"], verbose),
    ]


def _table(values: dict[str, Any]) -> Any:
    """The stages, and what is lost between workers."""
    table = answer_table("  stage", ">capacity/s", ">cpu ms", ">lost pts", "")
    stage = table.columns[0]  # of the script's own, a long one is cut
    stage.no_wrap, stage.max_width, stage.overflow = True, 18, "ellipsis"
    for row in (*_stage_rows(values), *_workers_rows(values)):
        table.add_row(*row)
    return table


def _loaders(values: dict[str, Any]) -> str:
    if values["executor"] == "none":
        return "samples read in the worker itself"
    what = "loading threads" if values["executor"] == "threads" else "loading processes"
    return f"{values['loaders']} {what} each"


def _gap(values: dict[str, Any], gap: float, half: float) -> list[StyledText]:
    """The gap and its uncertainty; no number if it cannot be told from zero."""
    if gap <= half and not values["refused"]:
        return [("no measurable gap", "bold green"), f" (± {half:.1f} %)"]
    cause = values["cause"]
    outside = is_between_workers(cause) or _is_script(cause) or _is_sampler(cause)
    blames_input = not values["healthy"] and not outside
    return [(f"GAP {gap:.0f} %", "bold red" if blames_input else "bold green"), f" (± {half:.1f})"]


def _is_script(cause: dict[str, Any] | None) -> bool:
    """Whether the loss is in the script's own loop, which neither rate has."""
    return cause is not None and cause["stage"] == "script"


def _is_sampler(cause: dict[str, Any] | None) -> bool:
    """Whether the loss is before the first batch of an epoch, which neither rate has."""
    return cause is not None and cause["stage"] == "sampler"


def _headline(values: dict[str, Any]) -> list[StyledText]:
    if values["refused"]:
        return [("  NO VERDICT  ", "bold yellow"), values["refused"]]
    cause = values["cause"]
    if values["healthy"] or cause is None:
        text = ": the input keeps up with the devices, nothing to prescribe"
        if values["startup_seconds"] > 1:
            text += f"; the first batch takes {values['startup_seconds']:.1f} s"
        return [("  healthy", "bold green"), text]
    name = _NAMES.get(cause["stage"], cause["stage"])
    name += f", in {cause['within']}" if cause.get("within") else ""
    name += f", rank {cause['rank']}" if "rank" in cause else ""
    text = f": {cause['points']:.0f} of {100 * values['gap']:.0f} points"
    if _is_script(cause):
        text = f": {cause['points']:.0f} points, beside the gap"
    if _is_sampler(cause):
        text = f": {cause['points']:.0f} % of each epoch, before its first batch"
    if is_between_workers(cause):
        # Not a part of the gap: synthetic steps lose it too.
        text = f": {cause['points']:.0f} % of what the workers reach without it"
        alone = values["samples_per_second"].get("alone")
        text += (
            f" ({format_rate(alone)} samples/s)" if alone and cause["stage"] == "exchange" else ""
        )
    return [("  CAUSE  ", "bold red"), (name, "bold"), text]


_NAMES = {
    "read": "storage read",
    "python": "Python in the data set",
    "subprocess": "child processes (subprocess)",
    "sampler": "the sampler",
    "transport": "the way between processes",
    "copy": "the copy to the device",
    "neighbour": "noisy neighbour: loaders slow the step down",
    "oversubscription": "too many compute threads in the loaders",
    "exchange": "the exchange of gradients",
    "straggler": "a straggler",
    "script": "the script's own loop",
    "unexplained": "not found",
}


def _shown(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every stage that matters, at most ten."""
    kept = [r for r in stages if r["lost_points"] >= 0.5 or (r["wall_ms_per_sample"] or 0) > 0]
    if len(kept) > 10:
        most = sorted(kept, key=lambda r: -r["lost_points"])[:10]
        kept = [r for r in kept if r in most]
    return kept


_Row = tuple[Any, ...]


def _row(name: str, lost: float, note: str, capacity: str = "-", cpu: str = "-") -> _Row:
    style = "bold red" if lost >= 5 else "yellow" if lost >= 1 else ""
    return tuple(
        answer_line(part) for part in (f"  {name}", capacity, cpu, (f"{lost:.0f}", style), note)
    )


def _stage_rows(values: dict[str, Any]) -> Iterator[_Row]:
    for r in _shown(values["stages"]):
        capacity, cpu = r["capacity_samples_per_second"], r["cpu_ms_per_sample"]
        yield _row(
            r["name"],
            r["lost_points"],
            r["note"] or "",
            format_rate(capacity) if capacity else "-",
            "-" if cpu is None else f"{cpu:.2f}",
        )


def _workers_rows(values: dict[str, Any]) -> Iterator[_Row]:
    neighbour, straggler = values["neighbour"], values["straggler"]
    if neighbour is not None and (neighbour["points"] >= 0.5 or neighbour["slowdown"] > 1.02):
        text = f"step {100 * (neighbour['slowdown'] - 1):.0f} % slower beside the loaders"
        text += f": {neighbour['cause']}" if neighbour["cause"] else ""
        yield _row("noisy neighbour", neighbour["points"], text)
    if values["workers"] > 1 and values["samples_per_second"]["alone"]:
        yield _row("exchange", values["exchange_points"], "of the ideal, each worker by itself")
    if straggler is not None:
        slower = f"rank {straggler['rank']}, {format_rate(straggler['slower'])} x the others"
        yield _row("straggler", straggler["points"], f"{slower}, {straggler['stage']}")
    loop = values.get("script_loop")
    if loop is not None and loop["points"] >= 0.5:
        before, after = 1e3 * loop["before_seconds"], 1e3 * loop["after_seconds"]
        text = f"{before:.1f} ms before each step, {after:.1f} ms after it; beside the gap"
        yield _row("script's loop", loop["points"], text)


def _scale(values: dict[str, Any]) -> list[list[StyledText]]:
    rows = values["scale"]
    if len(rows) < 2 or values["refused"]:
        return []
    gaps = "   ".join(f"{r['devices']}: {_gap_at(r)}" for r in rows)
    here, most = values["workers"], rows[-1]["devices"]
    met_here = [w for w in values["walls"] if w["devices"] <= here][:1]
    further = [w for w in values["walls"] if here < w["devices"] <= most][:1]
    walls = [f"{w['stage']} wall here already" for w in met_here]
    walls += [
        f"{w['stage']} wall at {w['devices']}"
        + (", if workers share it: unknown" if w["limit"] == "unknown" else "")
        for w in further
    ]
    met = f"   <- {', '.join(walls)}" if walls else ""
    return [["  gap at N devices   ", gaps, (met, "yellow")]]


def _gap_at(row: dict[str, Any]) -> str:
    """A predicted gap, or the two between which one worker cannot tell."""
    shared = row.get("shared_gap")
    return f"{row['gap']:.0%}" if shared is None else f"{row['gap']:.0%} or {shared:.0%}"


def _prescribed(values: dict[str, Any]) -> list[list[StyledText]]:
    prescriptions = values["prescriptions"]
    if not prescriptions:
        return []
    here = values["workers"]
    largest = values["scale"][-1]["devices"] if values["scale"] else here
    gaps = f"  predicted gap at {here} / {largest}; now {values['gap']:.0%}"
    lines: list[list[StyledText]] = [[("  PRESCRIBE", "bold"), (gaps, "dim")]]
    for p in prescriptions[:5]:
        gap = f"~{p['gain_here_points']:.0f} points"  # of something that is no part of the gap
        if p["gap_here"] is not None:
            gap = f"{'' if p['tried'] else '~'}{p['gap_here']:.0%} / ~{p['gap_largest']:.0%}"
        text = f"  {p['text']}  ({p['label']})  "
        lines.append([f"   {p['number']} ", (p["id"], "bold"), text, (gap, "green")])
    for p in [p for p in prescriptions if p["settings"] is not None][:1]:
        command = f"ronde doctor --apply {p['number']} {values['script']}"
        lines.append([(f"  apply and verify: {command}", "cyan")])
    return lines
