"""The first code of each worker process: sets it up, then runs the user's script as ``__main__``.

Started by path as ``python worker.py SCRIPT [ARGS…]`` or ``… -m MODULE [ARGS…]``. It imports
nothing of Ronde, so Ctrl-C works from the first moment and the script pays for no unused import.
"""

from __future__ import annotations

import os
import signal

# until the script runs, there is nothing to clean up
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import atexit
import contextlib
import faulthandler
import json
import multiprocessing.process
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

__all__ = ["main", "show_stacks"]

_MARK = "\x1e"  # ronde.watch.MARK
_STUDIES = {
    "plan": ("ronde.measure.planner", "install_gauge"),
    "doctor": ("ronde.doctor.doctor", "install_doctor"),
    "scale": ("ronde.scale.meter", "install_meter"),
    "explain": ("ronde.clarify.explain", "install_explainer"),
    "ship": ("ronde.ship.exporter", "install_exporter"),
    "baseline": ("ronde.measure.baseline", "install_baseline"),
}
"""What examines a script, by the value of ``RONDE_STUDY``: a module and its function."""


def _die_with_launcher() -> None:
    """End when the launcher is killed, instead of training on as torchrun's orphans do."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    launcher = os.environ.get("RONDE_LAUNCHER_PID")
    if launcher and os.getppid() != int(launcher):
        os._exit(1)  # it died before the call above


def _formatted(error: BaseException) -> str:
    """The traceback as plain Python would print it, without this file's frames."""
    frames = traceback.TracebackException.from_exception(error)
    for part in (frames, *_chain(frames)):
        part.stack = traceback.StackSummary.from_list(
            [
                f
                for f in part.stack
                if f.filename != __file__ and not f.filename.startswith("<frozen")
            ]
        )
    return "".join(frames.format())


def show_stacks() -> None:
    """Write the main thread's stack to a file of the launcher's when it asks, with a signal that no
    script uses. It works in the middle of an exchange, and under the interpreter's lock.

    A signal cannot read the stacks of other threads, which go on running: that crashed one time
    in five. The heartbeat's thread tells them.
    """
    folder, first = os.environ.get("RONDE_WATCH_DIR"), getattr(signal, "SIGRTMIN", None)
    if folder is None or first is None:
        return
    with contextlib.suppress(OSError):
        file = open(Path(folder) / f"stacks-{os.environ['RANK']}", "w")  # noqa: SIM115
        print(os.getpid(), file=file, flush=True)
        faulthandler.register(int(first) + 7, file, all_threads=False)  # ronde.launch.hang_watch


def _report(error: BaseException) -> None:
    """Report the failure to the agent, with nanoseconds, so that the first rank is known."""
    now = time.time_ns()
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    said = ""
    # no traceback needed: argparse, for example, has printed the problem
    if isinstance(error, SystemExit):
        said = (
            error.code
            if isinstance(error.code, str)
            else f"it ended by itself with exit status {error.code}{_where(error)}"
        )
    exited = isinstance(error, SystemExit) and not isinstance(error.code, str)
    extra = {
        "py_callstack": "" if said else _formatted(error),
        "timestamp": str(now // 10**9),
        "time_ns": now,
        "exited": exited,
        "consequence": _is_consequence(error),
    }
    body = {"message": {"message": said or f"{type(error).__name__}: {error}", "extraInfo": extra}}
    temporary = f"{file}.writing"
    Path(temporary).write_text(json.dumps(body))
    Path(temporary).rename(file)


def _is_consequence(error: BaseException) -> bool:
    """Whether a rank raises this because another one has gone. Errors of gloo have no class of
    their own; they begin with the place in its source.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    gloo = "RuntimeError" in kinds and "/gloo/" in str(error)
    # the last two are TensorFlow's
    lost = {"DistError", "ConnectionError", "UnavailableError", "AbortedError"}
    return gloo or getattr(error, "lost_rank", bool(kinds & lost))


def _where(error: BaseException) -> str:
    """The last line of the script itself in an error's traceback."""
    lines = [
        f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == sys.argv[0]
    ]
    return f" ({Path(sys.argv[0]).name}, line {lines[-1]})" if lines else ""


def _chain(error: traceback.TracebackException) -> list[traceback.TracebackException]:
    causes = []
    while (following := error.__cause__ or error.__context__) is not None:
        causes.append(following)
        error = following
    return causes


class _NoMpi:
    """Refuses ``from mpi4py import MPI``, whose world would have one process."""

    def find_spec(self, name: str, *_: object) -> None:
        """Find nothing."""
        if name == "mpi4py.MPI":
            size = os.environ["WORLD_SIZE"]
            raise ImportError(
                f"mpi4py would see a world of 1, and this run has {size} workers. Start it with "
                "ronde run --mpi-world."
            )


def _to_log(text: str) -> None:
    """Write to this rank's log only: the launcher shows just the traceback of the first failure."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.environ.get("RONDE_LAUNCHER_PID"):
        os.write(1, (_MARK + json.dumps({"log": text}) + "\n").encode())
    else:
        print(text, file=sys.stderr, end="")


def _run_script(path: str) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    sys.path[0] = str(Path(path).resolve().parent)
    # dont_inherit: this file's ``from __future__ import`` must not change a script's annotations.
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _share_folder() -> None:
    """Put the sockets of loading processes into the launcher's folder, which is always removed.

    By default each worker makes its own folder, and leaves it behind when a signal ends it.
    """
    if (errors := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
        config.setdefault("tempdir", str(Path(errors).parent))


def main() -> None:
    """Run the script or module named on the command line."""
    _die_with_launcher()
    faulthandler.enable(all_threads=True)
    show_stacks()
    _share_folder()
    arguments = sys.argv[1:]
    try:
        if os.environ.get("RONDE_STUDY") in _STUDIES:
            import importlib

            module, install = _STUDIES[os.environ["RONDE_STUDY"]]
            getattr(importlib.import_module(module), install)()
        if os.environ.get("RONDE_HOROVOD"):
            import importlib

            importlib.import_module("ronde.horovod.alias").install()
        if os.environ.get("WORLD_SIZE", "1") != "1" and "RONDE_MPI_WORLD" not in os.environ:
            sys.meta_path.insert(0, _NoMpi())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if arguments[0] == "-m":
            import runpy

            sys.argv = arguments[1:]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            _run_script(arguments[0])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code:
            _report(error)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        _end(code)
    except KeyboardInterrupt:
        os._exit(130)  # the launcher says it once, for all
    except BaseException as error:
        if (noting := sys.modules.get("ronde.run.step")) is not None:
            noting.note_place(error)
        _report(error)
        sys.last_value = error
        _to_log(_formatted(error))
        if (saving := sys.modules.get("ronde.checkpoint.background")) is not None:
            saving.wait_for_saves(30.0)
        # Exit handlers write the rest of the record and end loading processes. They must not wait
        # forever for ranks that are gone.
        last = threading.Timer(5.0, os._exit, [1])
        last.daemon = True
        last.start()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _end(0)


def _end(code: int) -> None:
    """End as multiprocessing's children do: join threads, run exit handlers, skip interpreter
    shutdown.

    A gloo thread that releases its last exchange while Python finalizes aborts the process (one run
    in ten with torch 2.13, also without Ronde).
    """
    if code == 0 and (errors := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        with contextlib.suppress(OSError):
            Path(errors).with_suffix(".ended").touch()  # not by os._exit(0) of the script's own
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if os.environ.pop("RONDE_SPARES", None):
        _die_with_launcher()
        import importlib.util

        # by path: its package would import the whole launcher
        spec = importlib.util.spec_from_file_location(
            "spares", Path(__file__).with_name("spares.py")
        )
        assert spec is not None and spec.loader is not None
        spares = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(spares)
        spares.main(main)
    main()
