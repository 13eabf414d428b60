"""``ronde flow``: steps in sequence and side by side."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from ronde.cli.answer_screen import tell
from ronde.cli.leaving import on_signals
from ronde.cli.options import JsonFlag, RunsOption, option
from ronde.watch import check_name
from ronde.world import ArgumentError

__all__ = ["register"]

_EXAMPLES = """
A step is a command, and runs once the steps that it needs are done. A step whose command,
inputs and needed steps are as they were is kept. Killed at any moment, the same command goes on.

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


def register(app: typer.Typer) -> None:
    """Add the verb."""

    @app.command(
        "flow",
        help="Run the steps of a flow.\n" + _EXAMPLES,
        no_args_is_help=True,
    )
    def flow(
        file: Annotated[
            Path, typer.Argument(metavar="FLOW.yaml", help="The steps.", show_default=False)
        ],
        values: Annotated[
            list[str] | None,
            option("--set", "Replace a value under set. Repeat it for more.", "NAME=VALUE"),
        ] = None,
        check: Annotated[bool, option("--check", "Look for mistakes, and run nothing.")] = False,
        why: Annotated[
            str | None, option("--why", "Say what has changed for a step.", "STEP")
        ] = None,
        only: Annotated[str | None, option("--only", "Run this step alone.", "STEP")] = None,
        anew: Annotated[
            str | None, option("--from", "Run this step and all after it anew.", "STEP")
        ] = None,
        export: Annotated[
            str | None,
            option("--export", "Print it as another system's definition.", "airflow|argo|github|…"),
        ] = None,
        image: Annotated[str, option("--image", "With --export: of the containers.", "IMAGE")] = "",
        parallel: Annotated[int, option("--parallel", "Steps at once, at most.", "N", min=1)] = 4,
        name: Annotated[
            str | None, option("--name", "Name of its folder. Default: the file's.", "NAME")
        ] = None,
        runs: RunsOption = Path("runs"),
        as_json: JsonFlag = False,
    ) -> None:
        from ronde.jobs.flow import load_flow
        from ronde.jobs.flow_run import FlowRun

        # Another system has inputs of its own, which are not here.
        runs_here = export is None and why is None
        flow = load_flow(file, dict(map(_pair, values or [])), needs_inputs=runs_here)
        for asked, text in (("--why", why), ("--only", only), ("--from", anew)):
            if text is not None and text not in flow.steps:
                raise ArgumentError(f"{asked} {text}: {file} has no such step.")
        if check:
            tell(f"{file}: {len(flow.steps)} steps, in this order: {', '.join(flow.order())}")
            return
        if export is not None:
            from ronde.jobs.flow_export import export_flow

            print(export_flow(export, flow, str(file), image), end="")
            return
        if name is not None:
            check_name(name)
        folder = runs / (name or file.stem)
        run = FlowRun(
            flow,
            folder,
            parallel=parallel,
            only=only or "",
            anew=anew or "",
            tell=(lambda text: None) if as_json else tell,
        )
        if why is not None:
            changes = run.why(why)
            tell(f"{why}: {'; '.join(changes) if changes else 'nothing has changed: it is kept'}")
            return
        if not as_json:
            tell(f"ronde flow {file}  ·  {len(flow.steps)} steps  ·  {folder}")
        with on_signals(lambda _: run.stop()) as came:
            result = run.run()
        if as_json:
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
