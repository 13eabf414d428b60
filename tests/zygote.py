"""Start Python processes as forks of one that has imported torch and Ronde.

Importing takes a worker two seconds of computing and a launcher one and a half, most trainings of
these tests hardly one. ``Popen`` below starts ``python …`` by a fork of a waiting process; what it
starts does the same for its own workers. Everything else about a process is as usual: its
arguments, variables, folder, streams, session, parent and exit status. With ``RONDE_TEST_ALL=1``,
and where a process needs an interpreter of its own (options of Python, other import paths, a hash
seed), it is a new one.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 15, 36, 37
_OWN_INTERPRETER = ("PYTHON", "LD_", "MALLOC_", "TORCH_", "RONDE_IMPORT")
MARK = "RONDE_TEST_MARK"
"""The variable whose value the descendants of a test's process have in common."""
_IMPORTS = [
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.nn.parallel.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.distributed.launcher.api",
    "ronde",
    "ronde.feed",
    "ronde.checkpoint",
    "ronde.run",
    "ronde.cli",
    "ronde.cli.run",
    "ronde.cli.show",
    "ronde.launch",
    "ronde.parallel.strategy",
    "ronde.loader",
    "ronde.measure",
    "ronde.predict",
    "ronde.profile",
    "ronde.prove",
    "ronde.doctor",
    "ronde.scale",
    "ronde.watch.html",
]

_RONDE = str(Path(sys.executable).with_name("ronde"))
_server: socket.socket | None = None
_lock = threading.Lock()
_plain_popen = subprocess.Popen


def _prctl(option: int, value: object) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve(connection: socket.socket) -> None:
    """Fork a process for each request, until the other end is closed."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 16)
        if not text:
            os._exit(0)
        source, sink = os.pipe()
        child = os.fork()
        if not child:  # ends at once, so that its child becomes the requester's
            between = os.getpid()
            grandchild = os.fork()
            if grandchild:
                os.write(sink, str(grandchild).encode())
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            for own in (source, sink, connection.detach()):
                os.close(own)
            _begin(json.loads(text), descriptors)
        os.waitpid(child, 0)
        connection.send(os.read(source, 64))
        os.close(source)
        os.close(sink)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(request: dict, descriptors: list[int]) -> None:
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 256) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for target, descriptor in zip([0, 1, 2, *request["passed"]], away, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if request["session"]:
        os.setsid()
    _prctl(_PR_SET_PDEATHSIG, 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # an import may have asked for it, under another TMPDIR
    # the variables that /proc shows are the first process's: processes.marked looks at the name
    _prctl(_PR_SET_NAME, os.environ.get(MARK, "python")[:15].encode())
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["before"]:
        module, name, *given = request["before"]
        getattr(importlib.import_module(module), name)(*given)
    arguments: list[str] = request["arguments"]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    if arguments[0] == "-u":
        unbuffered = True
        arguments = arguments[1:]
    _open_streams(unbuffered)
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    for path in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(1, path)
    import numpy
    import torch

    numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    torch.set_num_threads(int(threads))
    sys.orig_argv = [sys.executable, *request["arguments"]]
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if arguments[0] == "-m" or "ronde.jobs.map_worker" in arguments:
        start_server(fork=True)  # for this process's own workers, before it has threads
        subprocess.Popen = Popen  # type: ignore[misc]
        handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        importlib.import_module(handler).Popen = Popen  # it has a name of its own for the class
    if arguments[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = ["-m", *arguments[2:]]
        _end(lambda: runpy._run_module_as_main(arguments[1]))  # type: ignore[attr-defined]
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        sys.argv = arguments
        main.__file__ = arguments[0]
        code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec", dont_inherit=True)
        _end(lambda: exec(code, main.__dict__))


def _open_streams(unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for descriptor, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = open(descriptor, "wb", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        lines = name == "stderr" or os.isatty(descriptor)
        stream = io.TextIOWrapper(
            raw, "utf-8", errors, line_buffering=lines, write_through=unbuffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end(work: Callable[[], object]) -> None:
    """Do the work, and end as Python does."""
    code = 0
    try:
        work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_server(fork: bool = False) -> None:
    """Start the process that waits for requests of this one: a new one, or a fork of this one."""
    global _server
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if fork:
        if not os.fork():
            here.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):  # this process's own would be held open
                os.dup2(nothing, stream)
            os.setsid()
            _wait_for_requests(there, parent)
    else:
        number = there.fileno()
        command = [sys.executable, __file__, str(number), str(parent)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        _plain_popen(
            command,
            pass_fds=[number],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    there.close()
    _server = here
    atexit.register(here.close)


def _wait_for_requests(connection: socket.socket, parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    serve(connection)


def measure_briefly() -> None:
    """Time layers for a second, not for several: tests look at what a plan says, and the few
    that look at how right its times are give a duration of their own.
    """
    if not os.environ.get("RONDE_TEST_ALL"):
        importlib.import_module("ronde.measure.time_units").measure.__kwdefaults__["seconds"] = 0.4


def load() -> None:
    """Import what forks of this process will not have to."""
    for name in _IMPORTS:
        importlib.import_module(name)
    measure_briefly()
    torch = sys.modules["torch"]
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports several hundred modules
    typer = importlib.import_module("typer.testing")  # the first command imports its parser
    typer.CliRunner().invoke(importlib.import_module("ronde.cli.app").app, ["run", "--help"])
    gc.collect()
    gc.freeze()  # or every fork would copy what it looks through


def main() -> None:
    """Import, and wait for requests of the process that started this one."""
    load()
    _wait_for_requests(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


class Popen(subprocess.Popen):
    """``subprocess.Popen`` that forks Python where it can."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:9]
        session, group = rest[-2:]
        environment = dict(os.environ if env is None else env)
        plain = _named(preexec_fn) is not None and not shell and executable is None
        if not plain or group != -1 or not _can_fork(args, environment):
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
        request = {
            "arguments": _arguments(args),
            "folder": os.fspath(cwd or Path.cwd()),
            "environment": environment,
            "session": session,
            "before": _named(preexec_fn),
            "passed": list(pass_fds),
        }
        streams = [
            given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        try:
            self.pid = _forked(request, [*streams, *pass_fds])
        except (BrokenPipeError, ConnectionResetError):
            # a launcher ends all of its descendants with its workers, this server as well
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


def _forked(request: dict, streams: list[int]) -> int:
    """The process that a request has started, a child of this one. One thread at a time."""
    with _lock:
        if _server is None:
            start_server()
        assert _server is not None
        was = ctypes.c_int()
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(_server, [json.dumps(request).encode()], streams)
            return int(_server.recv(64))
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, was.value)


def _named(before: Callable[[], object] | None) -> list | None:
    """What a process does first, as module, name and arguments; None where it has no name."""
    if before is None:
        return []
    function, arguments = before, ()
    if isinstance(before, functools.partial):
        function, arguments = before.func, before.args
    name = getattr(function, "__qualname__", "<")
    return None if "<" in name else [function.__module__, name, *arguments]


def _arguments(args: Sequence[str]) -> list[str]:
    """Those of Python: the command ``ronde`` of this environment is a module."""
    rest = [os.fspath(a) for a in args[1:]]
    return ["-m", "ronde", *rest] if os.fspath(args[0]) == _RONDE else rest


def run(args: list[str], timeout: float, **options) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with the output as text."""
    pipe = subprocess.PIPE
    with Popen(args, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _can_fork(args: object, environment: dict[str, str]) -> bool:
    if not isinstance(args, (list, tuple)) or os.environ.get("RONDE_TEST_ALL") or len(args) < 2:
        return False
    own = {k for k in {*environment, *os.environ} if k.startswith(_OWN_INTERPRETER)}
    own -= {"PYTHONUNBUFFERED", "PYTHONPATH", "PYTHONWARNINGS"}
    own.discard("TORCH_NCCL_ASYNC_ERROR_HANDLING")  # torch's agent sets it for its workers
    if any(environment.get(k) != os.environ.get(k) for k in own):
        return False
    if os.fspath(args[0]) == _RONDE:
        return True
    first = args[2] if args[1] == "-u" else args[1]
    return args[0] == sys.executable and (first == "-m" or not os.fspath(first).startswith("-"))


if __name__ == "__main__":
    main()
