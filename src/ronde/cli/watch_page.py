"""``ronde watch --page`` and ``--to``: the live page, and trackers that get the record."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

from ronde.cli.options import option
from ronde.watch import RunDir
from ronde.world import ArgumentError

__all__ = ["PageOption", "PortOption", "ToOption", "open_page", "send_to"]

PageOption = Annotated[
    bool, option("--page", "Open a page for the browser that shows all runs, live.")
]
PortOption = Annotated[
    int | None,
    option("--port", "Port of --page.", "N", min=1, max=65535),
]
ToOption = Annotated[
    str | None,
    option(
        "--to",
        "Send the record to a tracker instead: tensorboard, wandb, mlflow:URL, prometheus:PORT. "
        "With --follow, until the run ends.",
        "TRACKER",
    ),
]


def open_page(folder: Path, run: RunDir | None, port: int | None) -> None:
    """Serve the page until Ctrl-C."""
    if missing := [n for n in ("starlette", "uvicorn") if importlib.util.find_spec(n) is None]:
        raise ArgumentError(
            f"--page needs {' and '.join(missing)}: pip install '.[page]' in a clone of Ronde."
        )
    from ronde.watch.page import serve_page

    if run is None:
        serve_page(folder, port)
    else:
        serve_page(run.path.absolute().parent, port, run.name)


def send_to(run: RunDir, target: str, follow: bool) -> None:
    """Send the part of the record that a tracker does not have."""
    from ronde.watch.sinks import check_target_name, send_record

    if check_target_name(target)[0] == "prometheus" and not follow:
        raise ArgumentError(f"--to {target}: Prometheus asks a process that stays. Add --follow.")
    send_record(run, target, lambda text: print(f"ronde: {text}", file=sys.stderr), follow)
    print(f"{run.name}: {target} has it all")
