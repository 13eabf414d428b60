"""``ronde horovodrun``: horovodrun's command line, carried out by ``ronde run --horovod``."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from ronde.cli.options import app, argument, verb
from ronde.world import ArgumentError

_LOCAL = ("localhost", "127.0.0.1")
_VARIABLES = {  # option -> variable of the bridge
    "timeline-filename": "HOROVOD_TIMELINE",
    "stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "reset-limit": "HOROVOD_ELASTIC_RESET_LIMIT",
}
_FLAGS = {
    "timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    "no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
}
_IGNORED_FLAGS = (
    "disable-cache verbose gloo mpi jsrun tcp autotune no-autotune hierarchical-allreduce "
    "no-hierarchical-allreduce hierarchical-allgather no-hierarchical-allgather torus-allreduce "
    "no-torus-allreduce no-timeline-mark-cycles stall-check mpi-threads-disable "
    "no-mpi-threads-disable log-with-timestamp log-without-timestamp log-hide-timestamp "
    "no-log-hide-timestamp prefix-output-with-timestamp"
)
_IGNORED_VALUES = (
    "min-np min-num-proc max-np max-num-proc slots-per-host elastic-timeout start-timeout "
    "blacklist-cooldown-range output-filename cycle-time-ms cache-capacity autotune-log-file "
    "autotune-warmup-samples autotune-steps-per-sample autotune-bayes-opt-max-samples "
    "autotune-gaussian-process-noise mpi-args binding-args num-nccl-streams thread-affinity "
    "gloo-timeout-seconds log-level"
)
_SILENT = ("verbose", "gloo", "stall-check", "no-autotune", "no-timeline-mark-cycles")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"horovodrun: {message}.")


def _parser() -> _Parser:
    parser = _Parser("horovodrun", add_help=False, allow_abbrev=False)
    parser.add_argument("-np", "--num-proc", dest="workers", type=int)
    parser.add_argument("-H", "--hosts")
    parser.add_argument("-hostfile", "--hostfile")
    parser.add_argument("-p", "--ssh-port", dest="port")
    parser.add_argument("-i", "--ssh-identity-file", dest="identity")
    parser.add_argument("-x", dest="pass_on", action="append", default=[])
    parser.add_argument("--network-interfaces", "--network-interface", dest="interfaces")
    parser.add_argument("--fusion-threshold-mb", dest="fusion", type=float)
    parser.add_argument("--config-file", dest="config")
    parser.add_argument("--host-discovery-script", dest="discovery")
    for name in (*_VARIABLES, *_IGNORED_VALUES.split()):
        parser.add_argument(f"--{name}", dest=name)
    for name in (*_FLAGS, *_IGNORED_FLAGS.split()):
        parser.add_argument(f"--{name}", dest=name, action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def translate(words: list[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Read horovodrun's command line.

    Returns:
        tuple: arguments for ``ronde run``, variables for the workers, and the options that have no
        meaning here.

    Raises:
        ArgumentError: an option is unknown or cannot be carried out, or the command is no Python.

    Example:
        >>> translate(["-np", "2", "--cycle-time-ms", "5", "python", "train.py"])
        (['--horovod', '--output', 'all', '--workers', '2', 'train.py'], {}, ['--cycle-time-ms'])
    """
    given = vars(_parser().parse_args(words))
    for key, option in (("config", "--config-file"), ("discovery", "--host-discovery-script")):
        if given[key]:
            raise ArgumentError(
                f"horovodrun {option}: not supported. Give its options on the command line; hosts "
                "with -H or --hostfile."
            )
    variables = {_VARIABLES[k]: given[k] for k in _VARIABLES if given[k] is not None}
    variables.update(value for k, value in _FLAGS.items() if given[k])
    if "HOROVOD_TIMELINE" in variables and variables["HOROVOD_TIMELINE"] != "DYNAMIC":
        # Workers may change their folder before they open it.
        variables["HOROVOD_TIMELINE"] = str(Path(variables["HOROVOD_TIMELINE"]).absolute())
    if given["fusion"] is not None:
        variables["HOROVOD_FUSION_THRESHOLD"] = str(int(given["fusion"] * 1024 * 1024))
    if given["interfaces"]:
        variables["GLOO_SOCKET_IFNAME"] = variables["NCCL_SOCKET_IFNAME"] = given["interfaces"]
    for item in given["pass_on"]:
        name, equals, value = item.partition("=")
        variables[name] = value if equals else os.environ.get(name, "")
    ignored = [
        f"--{k}"
        for k in (*_IGNORED_FLAGS.split(), *_IGNORED_VALUES.split())
        if given[k] and k not in _SILENT
    ]
    arguments = ["--horovod", "--output", "all"]
    workers = given["workers"] or given["min-np"] or given["min-num-proc"]
    if workers is not None:
        arguments += ["--workers", str(workers)]
    hosts = given["hosts"]
    # -H localhost:4 is how Horovod's own examples name this machine: no ssh is needed.
    if hosts and all(item.partition(":")[0] in _LOCAL for item in hosts.split(",")):
        if workers is None:
            slots = sum(int(item.partition(":")[2] or 1) for item in hosts.split(","))
            arguments += ["--workers", str(slots)]
        hosts = None
    elsewhere = bool(hosts or given["hostfile"])
    limit = given["reset-limit"]
    if limit is not None and not elsewhere and os.environ.get("RONDE_RUNS") != "none":
        arguments += ["--restarts", str(limit)]
    for option, value in (("--hosts", hosts), ("--hostfile", given["hostfile"])):
        if value:
            arguments += [option, value]
    if elsewhere:
        for name in variables:
            arguments += ["--env", name]
        if given["port"] or given["identity"]:
            arguments += ["--ssh-config", _ssh_config(given["port"], given["identity"])]
    return [*arguments, *_script(given["command"])], variables, ignored


def _ssh_config(port: str | None, identity: str | None) -> str:
    """A configuration with this port and key, and the user's own for the rest."""
    lines = [f"Port {port}"] if port else []
    lines += [f"IdentityFile {Path(identity).absolute()}"] if identity else []
    with tempfile.NamedTemporaryFile("w", prefix="ronde-ssh-", delete=False) as file:
        file.write("Host *\n" + "".join(f"  {line}\n" for line in lines))
        file.write("Include ~/.ssh/config\n")
    return file.name


def _script(command: list[str]) -> list[str]:
    """``ronde run``'s words for a command: workers run with this Python."""
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise ArgumentError("horovodrun: no command given, for example python train.py.")
    program = Path(command[0]).name
    if program.startswith("python"):
        rest = command[1:]
        while rest and rest[0] in ("-u", "-B"):
            rest = rest[1:]
        if rest and (rest[0] == "-m" or not rest[0].startswith("-")):
            return rest
    elif program in ("pytest", "py.test"):
        return ["-m", "pytest", *command[1:]]
    elif program.endswith(".py"):
        return command
    raise ArgumentError(
        f"horovodrun: cannot start {' '.join(command)!r}. Expected python SCRIPT, python -m "
        "MODULE, pytest, or a file that ends with .py."
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The words of ``ronde horovodrun``: it reads its options itself."""

    arguments: list[str] | None = argument(
        "[OPTIONS] COMMAND [ARGS]...", "Options of horovodrun, and the command.", default=None
    )


@verb(app, "horovodrun")
def _horovodrun(options: Options) -> None:
    """Start a Horovod script with horovodrun's options; those without a meaning here are
    named and ignored.

    Examples:

    ```sh
    ronde horovodrun -np 4 python train.py            on this machine
    ronde horovodrun -np 8 -H a:4,b:4 python train.py  on two, over ssh
    ```
    """
    words = options.arguments or []
    if words[0] in ("-cb", "--check-build"):
        typer.echo("ronde.horovod: PyTorch, over gloo and NCCL. No MPI, TensorFlow, or MXNet.")
        return
    arguments, variables, ignored = translate(words)
    if ignored:
        typer.echo(f"note: no meaning here, ignored: {', '.join(ignored)}", err=True)
    os.environ.update(variables)
    try:
        # without standalone mode an Exit is returned, not raised
        if status := app(["run", *arguments], prog_name="ronde", standalone_mode=False):
            raise typer.Exit(status)
    finally:
        if "--ssh-config" in arguments:
            Path(arguments[arguments.index("--ssh-config") + 1]).unlink(missing_ok=True)
