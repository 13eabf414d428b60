"""``ronde watch``: judge a run by its files."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer

from ronde.cli.answer_screen import tell
from ronde.cli.options import RunArgument, RunsOption, app, setting, verb
from ronde.cli.show import find_run
from ronde.watch import Alert, RunDir
from ronde.world import ArgumentError

_TRIES = 3


def alert_text(alert: Alert) -> str:
    """An alert for people: what, where, the numbers, one thing to try, and how to see it again.

    Example:
        >>> print(alert_text(Alert(3, "the loss is nan", rule="nan")))
        alert   nan   step 3
                the loss is nan
    """
    place = f" ({alert.place})" if alert.place else ""
    samples = f", samples {alert.samples[0]:,}–{alert.samples[1]:,}" if alert.samples else ""
    words = [
        "alert",
        alert.rule,
        *([alert.part] if alert.part else []),
        f"step {alert.step:,}{samples}",
        *([f"rank {alert.rank}"] if alert.rank is not None else []),
        *([f"{alert.tensor}{place}"] if alert.tensor else []),
    ]
    lines = ["   ".join(words), alert.text]
    lines += [f"try: {alert.remedy}"] if alert.remedy else []
    lines += [f"look again: {alert.again}"] if alert.again else []
    return "\n        ".join(lines)


def notify(url: str, run: str, alert: Alert) -> str:
    """POST an alert as JSON, with a ``text`` that chat services show; three times at most.

    Returns:
        What failed, or an empty text.
    """
    import urllib.error
    import urllib.request

    from ronde.watch.judge import alert_values

    values = {**alert_values(alert), "run": run}
    values["numbers"] = values.pop("text")
    body = json.dumps({"text": f"{run}: {alert_text(alert)}", **values}, default=float).encode()
    failed = ""
    for tried in range(_TRIES):
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=5.0):
                return ""
        except (OSError, ValueError) as error:
            failed = str(error)
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                break  # it would say the same again
        if tried + 1 < _TRIES:
            time.sleep(0.5 * 2**tried)
    return f"{url} did not take the alert ({failed})"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde watch``, as the user gave them."""

    name: RunArgument = None
    follow: bool = setting(False, "--follow", "Go on until the run ends.")
    as_json: bool = setting(False, "--json", "One JSON object per alert instead.")
    rules: Path | None = setting(None, "--rules", "Python file with rules of your own.", "FILE")
    only: str = setting("", "--only", "Judge these rules alone: nan,overfit", "RULES")
    without: str = setting("", "--without", "Leave these rules out.", "RULES")
    settings: list[str] | None = setting(None, "--set", "Change a rule's setting.", "RULE.KEY=V")
    url: str | None = setting(None, "--notify", "POST each alert as JSON to this address.", "URL")
    page: bool = setting(False, "--page", "Open a page for the browser that shows all runs, live.")
    port: int | None = setting(None, "--port", "Port of --page.", "N", min=1, max=65535)
    target: str | None = setting(
        None,
        "--to",
        "Send the record to a tracker instead: tensorboard, wandb, mlflow:URL, prometheus:PORT. "
        "With --follow, until the run ends.",
        "TRACKER",
    )
    runs: RunsOption = Path("runs")


@verb(app, "watch")
def _watch(options: Options) -> None:
    """Judge a run by rules: does it learn, is it healthy? At any time, on any run. Without a name,
    the last one. Exit status: 0 no alert, 1 alerts.

    Examples:

    ```sh
    ronde watch
    ronde watch big --follow --notify https://ntfy.sh/my-topic
    ronde watch big --rules mine.py --set loss-flat.steps=1000
    ronde watch --page
    ronde watch big --to mlflow:http://127.0.0.1:5000
    ```
    """
    if options.page:
        return _open_page(options)
    if options.port is not None:
        raise ArgumentError("--port is that of --page: add --page.")
    if options.target is not None:
        return _send_to(find_run(options.runs, options.name), options.target, options.follow)
    from ronde.watch.judge import Judge, alert_line

    asked = dict(each.partition("=")[::2] for each in options.settings or ())
    if bad := [key for key, value in asked.items() if not value]:
        raise ArgumentError(f"--set {bad[0]}: write RULE.KEY=VALUE.")
    url = options.url
    if url is not None and not url.startswith(("http://", "https://")):
        raise ArgumentError(f"--notify {url}: an address begins with http:// or https://.")
    run = find_run(options.runs, options.name)
    judge = Judge(run, _names(options.only), _names(options.without), options.rules, asked)
    reported: set[str] = set()
    while True:
        for alert in judge.look():
            if options.as_json:
                print(alert_line(alert), flush=True)
            else:
                shown = dataclasses.replace(alert, again=judge.again(alert))
                tell(alert_text(shown))
            if url is not None and (failed := notify(url, run.name, alert)):
                print(f"ronde: {failed}", file=sys.stderr)
        for broken in judge.failed.keys() - reported:
            reported.add(broken)
            print(f"ronde: rule {broken} raised {judge.failed[broken]}", file=sys.stderr)
        if not options.follow or judge.view.ended is not None:
            break
        time.sleep(1.0)
    if not options.as_json:
        tell(judge.summary())
    raise typer.Exit(1 if judge.alerts else 0)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _open_page(options: Options) -> None:
    """Serve the page until Ctrl-C."""
    run = None if options.name is None else find_run(options.runs, options.name)
    if missing := [n for n in ("starlette", "uvicorn") if importlib.util.find_spec(n) is None]:
        raise ArgumentError(
            f"--page needs {' and '.join(missing)}: pip install '.[page]' in a clone of Ronde."
        )
    from ronde.watch.page import serve_page

    if run is None:
        serve_page(options.runs, options.port)
    else:
        serve_page(run.path.absolute().parent, options.port, run.name)


def _send_to(run: RunDir, target: str, follow: bool) -> None:
    """Send the part of the record that a tracker does not have."""
    from ronde.watch.sinks import check_target_name, send_record

    if check_target_name(target)[0] == "prometheus" and not follow:
        raise ArgumentError(f"--to {target}: Prometheus asks a process that stays. Add --follow.")
    send_record(run, target, lambda text: print(f"ronde: {text}", file=sys.stderr), follow)
    print(f"{run.name}: {target} has it all")
