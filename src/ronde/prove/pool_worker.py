"""A process of ``ronde prove`` that imports torch once, and forks for each worker of a run.

:mod:`ronde.prove.process_pool` starts it. A line of JSON on standard input asks for a worker. Two
lines on standard output answer: the process that starts, and how it ended.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import select
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

from ronde.world.processes import end_with_parent

__all__ = ["run_pool_worker"]

_POLL_SECONDS = 0.02  # between two looks for runs that have ended; a run takes a second or more


def _run_as_main(command: list[str]) -> None:
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
    # dont_inherit: this file's ``from __future__`` must not change the script's annotations
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _traceback(error: BaseException) -> str:
    """The traceback from the script's first frame on."""
    frames = traceback.TracebackException.from_exception(error)
    here = Path(__file__).parent
    script = [f for f in frames.stack if Path(f.filename).parent != here]
    frames.stack = traceback.StackSummary.from_list(script)
    return "".join(frames.format())


def _wait_for_others(folder: Path, rank: int, size: int) -> None:
    """No worker ends while another may still read from it."""
    (folder / f"done-{rank}").touch()
    limit = time.monotonic() + 10.0  # seconds
    files = [folder / f"done-{r}" for r in range(size)]
    while time.monotonic() < limit and not all(file.exists() for file in files):
        time.sleep(0.002)


def _call_script(command: list[str]) -> dict[str, Any] | None:
    """Run the script; its error, if any."""
    try:
        _run_as_main(command)
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        return {"type": "SystemExit", "text": f"it ended with sys.exit({end.code!r})", "trace": ""}
    except BaseException as failure:
        return {"type": type(failure).__name__, "text": str(failure), "trace": _traceback(failure)}
    return None


def _run(job: dict[str, Any]) -> None:
    """In the child: one recorded run of the script."""
    from ronde.prove.experiment import Settings
    from ronde.prove.float64 import install_recorder

    end_with_parent()
    rank, size = int(job["rank"]), int(job["size"])
    output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    os.environ.update(job["env"])
    folder = Path(job["settings"]["folder"])
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config.setdefault("tempdir", str(folder))  # for loading processes, which may be killed
    recorder = install_recorder(Settings(**job["settings"]), rank)
    code = 0
    error = _call_script(job["command"])
    if error is not None and not recorder.excuses(f"{error['type']}: {error['text']}"):
        code = 1
        (folder / f"error-{rank}.json").write_text(json.dumps({**error, "time": time.time_ns()}))
    else:
        try:
            recorder.finish()
        except Exception:
            traceback.print_exc()
            code = 1
        _wait_for_others(folder, rank, size)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_pool_worker() -> None:
    """Fork for each run that standard input asks for, until it ends."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)
    import torch

    import ronde.prove.float64  # noqa: F401

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports several hundred modules
    places: dict[int, int] = {}  # of the runs under way, by their process

    def answer(**values: int) -> None:
        os.write(answers, json.dumps(values).encode() + b"\n")

    answer(ready=1)
    asked = b""
    while True:
        if select.select([0], [], [], _POLL_SECONDS if places else None)[0]:
            if not (data := os.read(0, 1 << 16)):
                return
            *lines, asked = (asked + data).split(b"\n")
            for job in map(json.loads, lines):
                child = os.fork()
                if not child:
                    _run_forked(job)
                places[child] = job["place"]
                answer(place=job["place"], pid=child)
        for child in list(places):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                answer(place=places.pop(child), status=os.waitstatus_to_exitcode(status))


def _run_forked(job: dict[str, Any]) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(job)
    except BaseException:
        traceback.print_exc()
    os._exit(3)


if __name__ == "__main__":
    run_pool_worker()
