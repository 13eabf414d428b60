"""``ronde scale``: how many devices are worth it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ronde.cli.answer_screen import Doing, answer_line, note_lines, tell
from ronde.cli.options import app, setting, verb
from ronde.cli.script import ReportOptions, examine, feed_of
from ronde.watch import plain_console
from ronde.world import ArgumentError, openmp_waits, threads_per_worker, usable_cores
from ronde.world.units import count_of, format_rate, format_seconds

if TYPE_CHECKING:
    from ronde.scale import Scaling, Start

_CHART = (
    "Relative to the same rate at the smallest size. Solid: measured. Dashed, with a band: "
    "extrapolated, not measured"
)


def parse_sizes(text: str) -> list[int]:
    """``"4,1,2"`` -> ``[1, 2, 4]``."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise ArgumentError(
            f"--workers {text!r}: expected whole numbers above 0, separated by commas, such as "
            "--workers 1,2,4."
        )
    return sizes


def default_sizes(devices: int) -> list[int]:
    """Powers of two below the number of devices, and that number: 6 -> ``[1, 2, 4, 6]``."""
    return [*(2**k for k in range((devices - 1).bit_length())), devices]


@dataclass(frozen=True, kw_only=True)
class Options(ReportOptions):
    """The options of ``ronde scale``, as the user gave them."""

    workers: str | None = setting(
        None, "--workers -n", "Sizes to measure. Default: 1, 2, 4, … all devices.", "N,N,…"
    )
    to: int | None = setting(
        None,
        "--to",
        "Extrapolate up to N workers. Default: 64, or the largest size measured.",
        "N",
        min=1,
    )
    seconds: float = setting(
        2.0, "--seconds", "How long each rate is measured at a time.", "S", min=0.01, max=3600
    )
    rounds: int = setting(2, "--rounds", "How often each size is started, in turns.", "R", min=1)
    cost: float | None = setting(None, "--cost", "Price of a device-hour.", "PRICE", min=0, max=1e9)
    batch: Literal["keep", "grow"] | None = setting(
        None,
        "--batch",
        "Keep the global batch (strong scaling), or grow it with the workers (weak). "
        "Default: the rule of the script.",
        "keep|grow",
    )


@verb(app, "scale")
def _scale(options: Options) -> None:
    """How many devices are worth it? Speed-up, efficiency and cost for each number of workers, and
    where to stop.

    The script is started with each number of workers, several times in turns, up to
    ronde.distribute. There its steps are timed twice: on real batches that are reused
    (synthetic), and with its real input. Nothing is trained or written.

    Examples:

    ```sh
    ronde scale train.py                                   1, 2, 4, … up to this machine's devices
    ronde scale --workers 1,2,4 --to 64 train.py --lr 0.1  options after the script are its own
    ronde scale --workers 1,2,4 --cost 3.2 train.py        3.2 per device-hour, in any currency
    ronde scale --batch grow train.py                      keep the batch per worker constant
    ronde scale --json scale.json --report scale.html -m my.train
    ```

    Exit status: 0 measured, 2 the script failed or an argument cannot be used, 130 stopped by
    Ctrl-C.
    """
    from ronde.launch import check_workers
    from ronde.launch.node import devices
    from ronde.scale import summarize_scale

    command = options.command_for("scale")
    count, kind = devices()
    sizes = default_sizes(count) if options.workers is None else parse_sizes(options.workers)
    for n in sizes:
        check_workers(n)
    options.check_files()
    feed, feed_note = feed_of(options.feed, options.module or command[0])
    console = plain_console()
    threads = threads_per_worker(sizes[-1]) if kind == "cpu" else None
    with Doing(console) as say:
        starts = _measured(command, sizes, options, threads, feed, say)
    name = f"-m {command[1]}" if command[0] == "-m" else command[0]
    answer = summarize_scale(
        name,
        starts,
        to=options.to or max(64, sizes[-1]),
        cores=float(usable_cores()),
        per_node=max(1, count // (threads or 1)) if kind == "cpu" else count,
        threads=threads,
        price=options.cost,
    )
    if feed_note:
        answer.notes.append(f"{feed_note}.")
    values = answer.to_dict()

    def chart() -> tuple[str, str, str]:
        from ronde.scale.scale_report import speedup_chart

        return "Speed-up", _CHART, speedup_chart(values)

    def draw() -> None:
        parts = answer_parts(answer, verbose=True)
        options.draw("scale", name, answer.sentence, parts, chart)

    options.give(values, console, answer_parts(answer, options.verbose), draw)
    if options.report is not None:
        tell(f"written: {options.report}")


def _measured(
    command: list[str],
    sizes: list[int],
    options: Options,
    threads: int | None,
    feed: str,
    say: Any,
) -> dict[int, list[Start]]:
    """Start every size, in processes of its own."""
    from ronde.scale import load_scale, measure_sizes

    environment = {"RONDE_FEED": feed}
    if threads:  # the same at every size: otherwise a speed-up would come from threads
        environment |= {"OMP_NUM_THREADS": str(threads), **openmp_waits(sizes[-1], threads)}

    def start(n: int, first: bool) -> Start:
        # What loading costs does not depend on the size: it is measured in the first start alone.
        asked = {"rounds": 2, "seconds": options.seconds, "batch": options.batch, "loading": first}
        failed = f"the script failed with {count_of(n, 'worker')} before it was measured"
        return examine("scale", command, n, asked, say, failed, load_scale, environment)

    return measure_sizes(sizes, options.rounds, start, say)


def answer_parts(answer: Scaling, verbose: bool = False) -> Iterator[Any]:
    """The table, the fits, the answer, and the notes."""
    first = answer.first
    size = f"each step has {first.batch_size}"
    if first.batch != "keep":
        size = f"each worker's part of a step has {answer.rows[0].batch_per_worker:g}"
    yield answer_line(
        ("ronde scale", "bold"),
        f" {answer.script}  ·  {first.device}  ·  batch={first.batch!r}, {size} samples",
    )
    yield _table(answer)
    if answer.extrapolated:
        meaning = " extrapolated, not measured: the real rate is its 95 % interval"
        yield answer_line(("~", "dim"), meaning)
    for name in ("synthetic", "real"):
        law = answer.laws.get(name)
        if law is not None:
            yield answer_line(("fit   ", "bold"), f"{name}: {describe(law)}")
    if answer.wall is not None:
        wall, n = answer.wall, answer.wall.devices
        reached = f"{wall.stage} ({wall.limit}) at {count_of(n, 'worker')}"
        yield answer_line(("wall  ", "bold"), reached)
    yield answer_line(("so    ", "bold"), answer.sentence)
    yield from note_lines(answer.notes, verbose)


def _table(answer: Scaling) -> Any:
    from rich.table import Table
    from rich.text import Text

    def cost(money: float | None, device_seconds: float) -> str:
        return format_rate(device_seconds if money is None else money)

    def up(times: float, efficiency: float) -> str:
        return f"{times:.{1 if times >= 10 else 2}f}× {efficiency:>4.0%}"

    money = "cost" if answer.cost_per_hour is not None else "device-s"
    heads = ("workers", "synthetic/s", "real/s", "gap", "synthetic ×", "real ×", "epoch")
    rows = [
        (
            str(r.workers),
            format_rate(r.synthetic),
            format_rate(r.real),
            f"{r.gap:.0%}",
            up(r.speedup_synthetic, r.efficiency_synthetic),
            up(r.speedup_real, r.efficiency_real),
            format_seconds(r.epoch_seconds),
            cost(r.cost_per_epoch, r.cost_per_epoch_device_seconds),
        )
        for r in answer.rows
    ]
    first = answer.rows[0]
    base, real = first.synthetic / first.workers, first.real / first.workers
    for f in answer.extrapolated:
        times = f.synthetic.value / base
        rows.append(
            (
                f"~{f.workers}",
                format_rate(f.synthetic.value),
                f"{format_rate(f.real.low)}… {format_rate(f.real.high)}",
                f"{f.gap:.0%}",
                up(times, times / f.workers),
                up(f.real.value / real, f.efficiency_real),
                format_seconds(f.epoch_seconds),
                cost(f.cost_per_epoch, f.epoch_seconds * f.workers),
            )
        )
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for head in (*heads, money):  # a narrow terminal breaks a cell, and leaves out no digit
        table.add_column(head, justify="right", overflow="fold")
    for number, row in enumerate(rows):
        style = "dim italic" if number >= len(answer.rows) else ""
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def describe(fit: Any) -> str:
    """A fit in a line."""
    share = fit.parameter("contention")
    if fit.law == "amdahl":
        text = f"Amdahl's law, serial share {share.value:.1%} ({share.low:.1%} to {share.high:.1%})"
    else:
        pairs = fit.parameter("coherency")
        text = (
            f"universal scalability law, contention {share.value:.1%} ({share.low:.1%} to "
            f"{share.high:.1%}), coherency {pairs.value:.2g} "
            f"({pairs.low:.2g} to {pairs.high:.2g}), at its best with {fit.peak:.0f} "
            f"worker{'' if fit.peak < 1.5 else 's'}"
        )
    error = f"assumed error {fit.error:.0%}"
    if not fit.assumed:
        degrees = f"{fit.freedom} degree{'' if fit.freedom == 1 else 's'} of freedom"
        error = f"error {fit.error:.1%}, {degrees}"
    return f"{text}; {len(fit.points)} sizes, {error}"
