"""Options shared by all verbs that take a script, and the launch of a script for examination."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ronde.cli.answer_screen import print_answer, report_answer
from ronde.cli.options import option, own_options
from ronde.world import ArgumentError, RondeError
from ronde.world.errors import did_you_mean
from ronde.world.paths import find_module
from ronde.world.whole_file import check_target, write_answer

T = TypeVar("T")

_TENSORFLOW = re.compile(r"^\s*(?:import|from) tensorflow\b", re.M)

ArgumentsOption = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT [ARGS]...", help="The script and its own arguments.", show_default=False
    ),
]
ModuleOption = Annotated[
    str | None,
    option("-m", "Run a module instead of a script.", "MODULE"),
]
IN_MAP = "RONDE_MAP"
"""Variable that ``ronde map`` sets for the ``ronde run`` that starts its workers."""

VerboseOption = Annotated[bool, option("--verbose", "Show every note, not only the first three.")]
WorkersOption = Annotated[
    str,
    option(
        "--workers -n", "How many. auto: one per GPU, or per usable core (at most 8).", "N|auto"
    ),
]
FeedOption = Annotated[
    str | None,
    option(
        "--feed",
        "Settings file for loading samples. Default: train.feed.yaml next to train.py, "
        "if it exists.",
        "FILE|none",
    ),
]
JsonOption = Annotated[
    Path | None,
    option("--json", "Write the answer as JSON.", "FILE"),
]
ReportOption = Annotated[
    Path | None,
    option("--report", "Write an HTML report.", "FILE"),
]


def command_of(module: str | None, arguments: list[str]) -> list[str]:
    """Check and return the worker's command, before anything starts.

    Raises:
        ArgumentError: no script, or none that is there.
    """
    if module is not None:
        if find_module(module) is None:
            raise ArgumentError(
                f"module not found: {module}. Python looked in {Path.cwd()} and in "
                "its installed packages."
            )
        return ["-m", module, *arguments]
    if not arguments:
        raise ArgumentError(
            "no script given: name one, SCRIPT [ARGS…], or a module, -m MODULE [ARGS…]."
        )
    script = Path(arguments[0])
    if arguments[0].startswith("-") and not script.exists():
        asked = arguments[0].partition("=")[0]
        known = [o for o in own_options() if o[:2] == asked[:2] == "--"]
        raise ArgumentError(
            f"option {asked} is not known.{did_you_mean(asked, known)} Ronde's options come "
            "before the script, the script's own after it; --help lists them."
        )
    if script.suffix == ".ipynb":
        raise ArgumentError(
            f"{script} is a notebook, and workers run scripts. Make one with 'jupyter nbconvert "
            f"--to script {script}', or move the training to {script.with_suffix('.py')}."
        )
    if script.is_dir():
        inside = script / "train.py"
        hint = f" Did you mean {inside}?" if inside.is_file() else ""
        raise ArgumentError(f"{script} is a folder, not a script.{hint}")
    if not script.is_file():
        folder = script.parent if str(script.parent) else Path()
        where = "" if folder == Path() else f"{folder}/"
        hint = did_you_mean(script.name, (p.name for p in folder.glob("*.py")), prefix=where)
        raise ArgumentError(f"script not found: {script} (in {Path.cwd()}).{hint}")
    if hint := misplaced(arguments):
        typer.echo(f"note: {hint}", err=True)
    return arguments


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The options of a verb that looks at a script's model, as the user gave them."""

    arguments: ArgumentsOption = None
    module: ModuleOption = None
    json_file: JsonOption = None

    def command_for(self, verb: str) -> list[str]:
        """The worker's command.

        Raises:
            ArgumentError: there is no such script, or TensorFlow trains it.
        """
        command = command_of(self.module, self.arguments or [])
        file = Path(command[0])
        text = file.read_text(errors="replace") if file.is_file() else ""
        # A script may import TensorFlow for its data alone, and train with Ronde.
        if _TENSORFLOW.search(text) and "ronde" not in text:
            raise ArgumentError(
                f"{file.name} trains with TensorFlow, and ronde {verb} looks at PyTorch models "
                "only. ronde run --tensorflow starts, watches, and restarts it."
            )
        return command

    def give(
        self, values: dict[str, Any], console: Any, parts: Iterable[Any], *more: Callable[[], None]
    ) -> None:
        """Write the answer, and what ``more`` writes; then show it, for standard output may be a
        closed pipe.
        """
        # Minutes were spent on the answer: a closed pipe must not lose the files.
        try:
            self.write(values)
            for write in more:
                write()
        finally:
            print_answer(console, parts)

    def write(self, values: dict[str, Any]) -> None:
        """Write the answer to the file that is asked for."""
        write_json(self.json_file, values)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(StudyOptions):
    """The same, of a verb that draws a report and times samples as they are loaded."""

    feed: FeedOption = None
    report: ReportOption = None
    verbose: VerboseOption = False

    def check_files(self) -> None:
        """See before anything is measured that the answer can be written.

        Raises:
            ArgumentError: it cannot, or the package that draws is missing.
        """
        check_folders(json=self.json_file, report=self.report)
        if self.report is not None:
            from ronde.watch.html import check_drawing

            check_drawing()

    def draw(
        self,
        verb: str,
        script: str,
        headline: str,
        parts: Iterable[Any],
        chart: Callable[[], tuple[str, str, str]],
    ) -> None:
        """Write the report, if it is asked for: what the screen shows, and a chart."""
        if self.report is not None:
            report_answer(self.report, f"ronde {verb}", script, headline, parts, [chart()])


def misplaced(command: list[str]) -> str:
    """A hint if options of Ronde stand after the script, which gets them and does not mention
    them; else empty.

    Args:
        command: the script and its arguments.
    """
    text = ""
    with contextlib.suppress(OSError):  # the worker says that it cannot be read
        text = Path(command[0]).read_text(errors="replace")
    for i, argument in enumerate(command[1:], 1):
        option, _, value = argument.partition("=")
        if option not in own_options() or option in ("--help", "-h") or option[:2] != "--":
            continue
        # argparse calls --batch-size args.batch_size: then the option is the script's own.
        if option[2:].replace("-", "_") in text:
            continue
        value = f"={value}" if value else ""
        if not value and i + 1 < len(command) and not command[i + 1].startswith("-"):
            value = f" {command[i + 1]}"
        return (
            f"{option}{value} comes after {command[0]}, so the script gets it. If it is meant for "
            f"Ronde, put it before the script: {option}{value} {command[0]}"
        )
    return ""


def feed_of(asked: str | None, script: str) -> tuple[str, str]:
    """Check ``--feed`` before anything starts; return the workers' setting and the user's note.

    Raises:
        ArgumentError: the file is not there, or cannot be used.
    """
    if asked is None:
        asked = os.environ.get("RONDE_FEED") or None
    if asked == "none":
        return "none", ""
    from ronde.loader import FeedSettings, settings_file

    file = settings_file(script) if asked is None else Path(asked)
    if asked is None and not file.is_file():
        return "none", ""
    from ronde.adapt import summarize  # imports torch: only if there are settings

    settings = FeedSettings.load(file)
    return str(file.absolute()), f"feed: {short(file)} ({summarize(settings)})"


def check_folders(**files: Path | None) -> None:
    """Check that every target can be written; ``json=…`` is the file of ``--json``.

    Raises:
        ArgumentError: a file's folder is not there, cannot be written to, or the file is a folder
            itself; a pipe has no writing end.
    """
    for name, path in files.items():
        if path is None:
            continue
        try:
            check_target(path)
        except ArgumentError as error:
            raise ArgumentError(f"--{name} {error}") from None


def write_json(file: Path | None, values: dict[str, Any]) -> None:
    """Write JSON atomically, where a file is given; write to a pipe or a device directly."""
    if file is not None:
        write_answer(file, json.dumps(values, indent=2, default=str) + "\n")


def short(path: Path) -> str:
    """A path relative to the current folder, if it is below."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def discard(_: bytes) -> None:
    """Discard the script's output."""


def exited_early(verb: str, command: list[str], status: int | str) -> str:
    """Explain that a script called ``sys.exit`` itself, usually for missing arguments."""
    script = " ".join(command[:2] if command[0] == "-m" else command[:1])
    return (
        f"{script} ended by itself with exit status {status} before ronde.distribute. Its own "
        f"arguments go after its name: ronde {verb} {script} ARGS…"
    )


def last_lines(log: Path, most: int = 20) -> list[str]:
    """The end of a worker's output."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-most:]
    except OSError:
        return []
    return [f"{line}\n" for line in lines]


def study_environment(study: str, file: Path, options: dict[str, Any]) -> dict[str, str]:
    """Variables of workers that a study examines; its answer goes into ``file``."""
    return {
        "RONDE_STUDY": study,
        "RONDE_STUDY_FILE": str(file),
        "RONDE_STUDY_OPTIONS": json.dumps(options),
        "RONDE_RUNS": "none",
        "RONDE_PROGRESS": "quiet",
        "RONDE_RESUME": "0",
    }


def examine(
    study: str,
    command: list[str],
    workers: int,
    options: dict[str, Any],
    say: Callable[[str], None],
    failed: str,
    load: Callable[[Path], T],
    environment: dict[str, str] | None = None,
) -> T:
    """Run a script's workers up to ``ronde.distribute``, where a study examines it instead of
    training.

    Args:
        study: its name.
        options: of the study.
        say: gets what it is doing.
        failed: that the script ended before the study had an answer, without a full stop.
        load: reads the answer from its file, which is not there where the script ended without
            calling ``distribute``.
        environment: more of the workers' environment.

    Raises:
        RondeError: the script failed before.
        typer.Exit: a signal stopped it.
    """
    from ronde.launch import Job, run_here

    def heard(message: dict[str, Any]) -> None:
        if "study" in message:
            say(str(message["study"]))

    with tempfile.TemporaryDirectory(prefix=f"ronde-{study}-") as place:
        file, folder = Path(place) / "answer.json", Path(place) / "run"
        variables = study_environment(study, file, options) | (environment or {})
        outcome = run_here(Job(command, workers, folder, variables), discard, heard)
        if outcome.interrupted:
            typer.echo(
                "stopped by SIGINT; every process has ended"
                if outcome.status == 130
                else f"{outcome.error}; every process has ended"
            )
            raise typer.Exit(outcome.status)
        # A script that fails after the study has answered has been examined all the same.
        if outcome.status and not file.exists():
            if outcome.exited:  # with a usage text, say: nobody has seen what it printed
                log = folder / "logs" / f"rank-{outcome.rank}.log"
                typer.echo("".join(last_lines(log)), err=True, nl=False)
                raise RondeError(exited_early(study, command, outcome.status))
            if outcome.traceback:
                typer.echo(outcome.traceback.rstrip(), err=True)
            raise RondeError(f"{failed}: {outcome.error or ''}")
        return load(file)
