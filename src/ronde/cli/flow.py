"""``ronde flow``: steps in sequence and side by side."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ronde.cli.answer_screen import tell
from ronde.cli.leaving import on_signals
from ronde.cli.options import JsonFlag, RunsOption, app, argument, setting, verb
from ronde.watch import check_name
from ronde.world import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde flow``, as the user gave them."""

    file: Path = argument("FLOW.yaml", "The steps.")
    values: list[str] | None = setting(
        None, "--set", "Replace a value under set. Repeat it for more.", "NAME=VALUE"
    )
    check: bool = setting(False, "--check", "Look for mistakes, and run nothing.")
    why: str | None = setting(None, "--why", "Say what has changed for a step.", "STEP")
    only: str | None = setting(None, "--only", "Run this step alone.", "STEP")
    anew: str | None = setting(None, "--from", "Run this step and all after it anew.", "STEP")
    export: str | None = setting(
        None, "--export", "Print it as another system's definition.", "airflow|argo|github|…"
    )
    image: str = setting("", "--image", "With --export: of the containers.", "IMAGE")
    parallel: int = setting(4, "--parallel", "Steps at once, at most.", "N", min=1)
    name: str | None = setting(None, "--name", "Name of its folder. Default: the file's.", "NAME")
    runs: RunsOption = Path("runs")
    as_json: JsonFlag = False


@verb(app, "flow")
def _flow(options: Options) -> None:
    """Run the steps of a flow.

    A step is a command, and runs once the steps that it needs are done. A step whose command,
    inputs and needed steps are as they were is kept. Killed at any moment, the same command goes
    on.

    Examples:

    ```sh
    ronde flow flow.yaml
    ronde flow --set lr=0.01 flow.yaml       replaces a value under set
    ronde flow --check flow.yaml             look for mistakes, run nothing
    ronde flow --why train flow.yaml         what has changed for a step
    ronde flow --only test flow.yaml         this step alone, on what there is
    ronde flow --from train flow.yaml        this step and all after it, anew
    ronde flow --export airflow flow.yaml    as a DAG; argo, github, sagemaker, …
    ```
    """
    from ronde.jobs.flow import load_flow
    from ronde.jobs.flow_run import FlowRun

    # Another system has inputs of its own, which are not here.
    file, why, only, anew = options.file, options.why, options.only, options.anew
    runs_here = options.export is None and why is None
    flow = load_flow(file, dict(map(_pair, options.values or [])), needs_inputs=runs_here)
    for asked, text in (("--why", why), ("--only", only), ("--from", anew)):
        if text is not None and text not in flow.steps:
            raise ArgumentError(f"{asked} {text}: {file} has no such step.")
    if options.check:
        tell(f"{file}: {len(flow.steps)} steps, in this order: {', '.join(flow.order())}")
        return
    if options.export is not None:
        from ronde.jobs.flow_export import export_flow

        print(export_flow(options.export, flow, str(file), options.image), end="")
        return
    if options.name is not None:
        check_name(options.name)
    folder = options.runs / (options.name or file.stem)
    run = FlowRun(
        flow,
        folder,
        parallel=options.parallel,
        only=only or "",
        anew=anew or "",
        tell=(lambda text: None) if options.as_json else tell,
    )
    if why is not None:
        changes = run.why(why)
        tell(f"{why}: {'; '.join(changes) if changes else 'nothing has changed: it is kept'}")
        return
    if not options.as_json:
        tell(f"ronde flow {file}  ·  {len(flow.steps)} steps  ·  {folder}")
    with on_signals(lambda _: run.stop()) as came:
        result = run.run()
    if options.as_json:
        print(json.dumps(result.to_dict(), indent=1))
    if came:
        typer.echo("stopped; the same command goes on", err=True)
        raise typer.Exit(130 if came[0] == signal.SIGINT else 75)
    raise typer.Exit(0 if result.is_good else 1)


def _pair(text: str) -> tuple[str, Any]:
    name, is_there, value = text.partition("=")
    if not is_there:
        raise ArgumentError(f"--set {text}: expected NAME=VALUE.")
    return name, value
