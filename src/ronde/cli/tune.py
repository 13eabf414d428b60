"""``ronde tune``: search over hyper-parameters."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ronde.cli.answer_screen import answer_table, tell
from ronde.cli.leaving import on_signals
from ronde.cli.options import TIME, JsonFlag, RunsOption, app, parsed, setting, verb
from ronde.cli.script import ArgumentsOption, ModuleOption, command_of, short
from ronde.watch import claim_run_dir, plain_console, script_stem
from ronde.world import ArgumentError
from ronde.world.units import parse_duration

if TYPE_CHECKING:
    from ronde.jobs.tuner import Tuned, TunePlan


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde tune``, as the user gave them."""

    arguments: ArgumentsOption = None
    module: ModuleOption = None
    space: list[str] | None = setting(
        None,
        "--space",
        "What to search: NAME=0..1, log:1e-4..1e-1, int:1..8, or x,y,z; once a name. "
        "Or a file that defines space(trial) as for Optuna.",
        "NAME=… | FILE.py",
    )
    goal: str | None = setting(
        None,
        "--goal",
        "A metric of run.evaluate, as max:accuracy or min:loss@test.",
        "max:METRIC|min:METRIC",
    )
    trials: int = setting(20, "--trials", "How many.", "N", min=1)
    method: str = setting(
        "random",
        "--method",
        "random, grid, bayes, halving, hyperband, asha; bayes+halving, bayes+hyperband.",
        "METHOD",
    )
    most: str = setting(
        "",
        "--max",
        "How long a trial trains, as 50000 or 9ep. Default: as the script does.",
        "SAMPLES|EPep",
    )
    least: str = setting("", "--min", "First rung of halving. Default: an epoch.", "SAMPLES|EPep")
    eta: float = setting(3.0, "--eta", "One of so many goes on to the next rung.", min=1.5)
    seed: int = setting(0, "--seed", "Of the search.")
    style: str = setting(
        "", "--as", "How a value becomes an argument. Default: --NAME VALUE.", "'{name}={value}'"
    )
    devices: str = setting("auto", "--devices", "GPUs, or cores, for all trials.", "N|auto")
    workers: int = setting(1, "--workers -n", "Of each trial, at first.", "K", min=1)
    fixed: bool = setting(
        False,
        "--fixed-workers",
        "Do not give free devices to the trials that are left, where it pays.",
    )
    target: float | None = setting(None, "--target", "End when a trial is as good as this.")
    budget: str | None = setting(
        None, "--budget", "End after this time, as 2h, or so many samples.", "TIME|SAMPLES"
    )
    warm: list[Path] | None = setting(
        None, "--warm", "Folder of an earlier search, whose results bayes uses.", "DIR"
    )
    on_rule: Literal["stop", "ignore"] = setting(
        "stop",
        "--on-rule",
        "Whether rules of ronde watch end trials that are hopeless: nan, diverging, "
        "exploding-gradient, dead-units, loss-flat.",
        "stop|ignore",
    )
    keep: Literal["best", "all"] = setting(
        "best",
        "--keep",
        "Whether checkpoints of trials that fell behind are removed at once.",
        "best|all",
    )
    name: str | None = setting(
        None, "--name", "Name of the search. Default: the script's, numbered."
    )
    resume: str | None = setting(None, "--resume", "Go on with a search.", "NAME")
    runs: RunsOption = Path("runs")
    as_json: JsonFlag = False
    quiet: bool = setting(False, "--quiet -q", "Print the result only.")


@verb(app, "tune")
def _tune(options: Options) -> None:
    """Search over hyper-parameters: trials that pause at exact samples.

    The script takes each value as an argument, --lr 0.01. Every trial is a run of its own, on its
    own devices: all its workers have the same values. A trial that falls behind pauses, and costs
    no more.

    Examples:

    ```sh
    ronde tune --space lr=log:1e-4..1e-1 --goal max:accuracy train.py
    ronde tune --space lr=log:1e-4..1e-1 --space batch=32,64 --goal min:loss --trials 27 \\
      --method hyperband --max 9ep train.py --epochs 9
    ronde tune --space space.py --method bayes --devices 8 --workers 2 --goal max:accuracy train.py
    ronde tune --resume tune-1                      after anything; no sample is trained twice
    ```
    """
    from ronde.jobs.tuner import Tuner, load_plan

    quiet = options.quiet or options.as_json
    devices, gpus = _devices(options.devices)
    if options.workers > devices:
        raise ArgumentError(
            f"--workers {options.workers}: there are {devices} devices for all trials (--devices)."
        )
    if options.resume is not None:
        if options.arguments or options.module or options.space:
            raise ArgumentError("--resume goes on with a search as it was planned: give it alone.")
        folder = options.runs / options.resume
        plan = load_plan(folder)
    else:
        plan = _plan(options, max(devices // options.workers, 1))
        folder = _claim(options, plan)
    if not quiet:
        tell(
            f"ronde tune {' '.join(plan.command)}  ·  {plan.trials} trials  ·  {devices} "
            f"{'GPUs' if gpus else 'cores'}  ·  {short(folder)}"
        )
    seconds, samples = _budget(options.budget)
    tuner = Tuner(
        folder,
        plan,
        devices,
        options.workers,
        grows=not options.fixed,
        gpus=gpus,
        target=options.target,
        seconds=seconds,
        samples=samples,
        tell=(lambda text: None) if quiet else tell,
    )
    began = time.monotonic()
    # Trials save and leave, so that --resume loses no sample.
    with on_signals(lambda _: tuner.stop()) as asked:
        result = tuner.run()
    if options.as_json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        _show(result, plan, folder, time.monotonic() - began)
    if asked:
        typer.echo(f"stopped; go on with: ronde tune --resume {folder.name}", err=True)
        raise typer.Exit(130 if asked[0] == signal.SIGINT else 75)
    raise typer.Exit(0 if result.best else 1)


def _plan(options: Options, batch: int) -> TunePlan:
    """Check the options, before anything starts.

    Raises:
        ArgumentError: one is missing or wrong.
    """
    from ronde.jobs.halving import METHODS
    from ronde.jobs.space import read_space
    from ronde.jobs.trials import Goal
    from ronde.jobs.tuner import TunePlan

    kind = options.method.rpartition("+")[2]
    bayes = options.method.removesuffix(f"+{kind}") == "bayes" and kind in ("halving", "hyperband")
    if options.method not in METHODS and not bayes:
        raise ArgumentError(
            f"--method {options.method}: expected {', '.join(METHODS)}, bayes+halving or "
            "bayes+hyperband."
        )
    if kind in ("halving", "hyperband", "asha") and not options.most:
        raise ArgumentError(
            f"--method {options.method} compares trials at rungs: say how long one trains, as "
            "--max 9ep."
        )
    if options.goal is None:
        raise ArgumentError("--goal is missing: say what is best, as --goal max:accuracy.")
    Goal.parse(options.goal)
    read_space(options.space or [])
    for folder in options.warm or []:
        if not (folder / "result.json").is_file():
            raise ArgumentError(f"--warm {folder}: it holds no result of a search.")
    return TunePlan(
        command_of(options.module, options.arguments or []),
        options.space or [],
        options.goal,
        options.trials,
        options.method,
        options.least,
        options.most,
        options.eta,
        options.seed,
        options.style,
        batch,
        [str(path.absolute()) for path in options.warm or []],
        options.keep,
        options.on_rule,
    )


def _claim(options: Options, plan: TunePlan) -> Path:
    if options.name is not None and (options.runs / options.name / "tune.json").exists():
        raise ArgumentError(
            f"--name {options.name}: there is a search of this name already. Go on with: ronde "
            f"tune --resume {options.name}; or choose another name."
        )
    stem = f"{script_stem(options.module or plan.command[0])}-tune"
    folder = claim_run_dir(options.runs, options.name, stem, resume=False).path
    (folder / "tune.json").write_text(json.dumps(dataclasses.asdict(plan), indent=1) + "\n")
    return folder


def _devices(text: str) -> tuple[int, bool]:
    from ronde.launch import resolve_workers
    from ronde.world.cores import usable_cores

    # Without importing torch: trials are processes of their own.
    has_gpus = os.environ.get("RONDE_DEVICE") != "cpu" and Path("/dev/nvidia0").exists()
    if text == "auto":
        return (resolve_workers("auto") if has_gpus else usable_cores()), has_gpus
    if not text.isdecimal() or not int(text):
        raise ArgumentError(f"--devices {text}: expected a number, or auto.")
    return int(text), has_gpus


def _budget(text: str | None) -> tuple[float | None, int | None]:
    if text is None:
        return None, None
    if re.fullmatch(r"\d+", text):
        return None, int(text)
    return parsed("--budget", text, parse_duration, TIME), None


def _show(result: Tuned, plan: TunePlan, folder: Path, seconds: float) -> None:
    """A table of the trials, and the best one."""

    console = plain_console()
    names = list(dict.fromkeys(name for trial in result.trials for name in trial["values"]))
    metric = plan.goal.partition(":")[2]
    ended_by = ["ended by"] if any(t["rule"] or t["error"] for t in result.trials) else []
    table = answer_table("trial", *names, f">{metric}", ">samples", *ended_by)
    sign = -1 if plan.goal.startswith("max") else 1

    def order(trial: Any) -> tuple[int, float]:
        values = [v for v in trial["results"] if v is not None]
        return -len(values), sign * values[-1] if values else 0.0

    for trial in sorted(result.trials, key=order)[:20]:
        values = [v for v in trial["results"] if v is not None]
        shown_result = f"{values[-1]:.5g}" if values else "–"
        shown = (_brief(trial["values"].get(name, "")) for name in names)
        why = trial["rule"] or ("an error" if trial["error"] else "")
        row = (Path(trial["run"]).name, *shown, shown_result, f"{trial['samples']:,}", why)
        table.add_row(*row[: len(table.columns)])
    console.print(table)
    if len(result.trials) > 20:
        console.print(f"… {len(result.trials) - 20} more in {short(folder)}/result.json")
    share = (
        f", {result.samples / result.whole:.0%} of what all trials would take"
        if result.whole
        else ""
    )
    ended = {"target": "; the target is reached", "budget": "; the budget is used up"}
    tell(f"{result.samples:,} samples in {seconds:.0f} s{share}{ended.get(result.ended, '')}")
    if not result.best:
        tell(f"no trial has a result for --goal {plan.goal}")
        return
    best = result.best
    said = "   ".join(f"{name} {_brief(value)}" for name, value in best["values"].items())
    summary = f" {Path(best['run']).name}   {metric} {best['result']:.5g}   {said}"
    tell(("best", "bold"), summary)
    from ronde.jobs.trials import argument_words

    words = [*plan.command, *argument_words(best["values"], plan.style)]
    tell(f"again, whole: ronde run {' '.join(words)}")


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
