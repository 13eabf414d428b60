"""A process in which ``ronde prove`` runs the script again and again: torch is imported once, each
run is a fork of it.

Started by :mod:`ronde.prove.process_pool`. A line of JSON on standard input asks for a run, two on
standard output answer: the process that has begun, and how it ended.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

__all__ = ["run_pool_worker"]

_WAIT_SECONDS = 10.0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _as_main(command: list[str]) -> None:
    """Run a script or a module as ``__main__``."""
    if command[0] == "-m":
        import runpy

        sys.argv = command[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    path = command[0]
    sys.argv = list(command)
    sys.path.insert(0, str(Path(path).resolve().parent))
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    # Without this file's own ``from __future__ import``: a script's annotations stay what they are.
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _shown(error: BaseException) -> str:
    """The traceback from the script's first frame on."""
    frames = traceback.TracebackException.from_exception(error)
    frames.stack = traceback.StackSummary.from_list(
        [f for f in frames.stack if Path(f.filename).parent != Path(__file__).parent]
    )
    return "".join(frames.format())


def _others_are_done(folder: Path, rank: int, size: int) -> None:
    """No worker ends while another may still be reading from it."""
    (folder / f"done-{rank}").touch()
    limit = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < limit and not all(
        (folder / f"done-{r}").exists() for r in range(size)
    ):
        time.sleep(0.002)


def _run(job: dict[str, Any]) -> None:
    """In the child: one run of the script, watched."""
    from ronde.prove.float64 import install_recorder
    from ronde.prove.recorder import Settings

    _die_with_parent()
    rank, size = int(job["rank"]), int(job["size"])
    output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    os.environ.update(job["env"])
    folder = Path(job["settings"]["folder"])
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config.setdefault("tempdir", str(folder))  # of loading processes, which are not ended in order
    watch = install_recorder(Settings(**job["settings"]), rank)
    code, error = 0, None
    try:
        _as_main(job["command"])
    except SystemExit as ended:
        if ended.code not in (None, 0):
            code, error = (
                1,
                {
                    "type": "SystemExit",
                    "text": f"it ended with sys.exit({ended.code!r})",
                    "trace": "",
                },
            )
    except BaseException as failed:
        code, error = (
            1,
            {
                "type": type(failed).__name__,
                "text": str(failed),
                "trace": _shown(failed),
                "phase": watch.phase,
            },
        )
    if error is not None and watch.ended_with(f"{error['type']}: {error['text']}"):
        code, error = 0, None
    if error is not None:
        (folder / f"error-{rank}.json").write_text(json.dumps({**error, "time": time.time_ns()}))
    else:
        try:
            watch.finish()
        except Exception:
            traceback.print_exc()
            code = 1
        _others_are_done(folder, rank, size)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_pool_worker() -> None:
    """Serve runs until standard input ends."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    import ronde.prove.float64  # noqa: F401

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports several hundred modules
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _run(job)
            except BaseException:
                traceback.print_exc()
            os._exit(3)
        answers.write(json.dumps({"run": job["run"], "pid": child}) + "\n")
        _, status = os.waitpid(child, 0)
        answers.write(
            json.dumps({"run": job["run"], "status": os.waitstatus_to_exitcode(status)}) + "\n"
        )


if __name__ == "__main__":
    run_pool_worker()
