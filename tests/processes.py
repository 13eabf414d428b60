"""Start real processes under a hard time limit, collect what they say, and see that none of them is
left behind.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

import zygote

TESTS = Path(__file__).parent
PATHS = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
"""``PYTHONPATH`` of a process that uses these helpers, and this checkout's Ronde."""

_MARK = zygote.MARK


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Variables for a child: one thread, the CPU, a mark by which its descendants are found. None
    takes a variable away.
    """
    values = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RONDE_DEVICE": "cpu",
        _MARK: uuid.uuid4().hex,
        **(extra or {}),
    }
    return {k: v for k, v in values.items() if v is not None}


def marked(mark: str) -> list[psutil.Process]:
    """Every process that inherited the mark, wherever its parent has gone."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and (process.environ().get(_MARK) == mark or process.name() == mark[:15])
            ):
                found.append(process)
    return found


def assert_gone(mark: str, within: float = 15.0) -> None:
    """No process with the mark is left (after ``within`` seconds at most); what is, is killed and
    named.
    """
    limit = time.monotonic() + within
    while (left := marked(mark)) and time.monotonic() < limit:
        time.sleep(0.05)
    names = []
    for process in left:
        with suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())}")
            process.kill()
    psutil.wait_procs(left, timeout=5)
    assert not names, "left behind:\n" + "\n".join(names)


class Child:
    """A process in a session of its own. Its output goes to files: a grandchild that holds them
    open blocks nobody.
    """

    def __init__(
        self, args: Sequence[str], cwd: Path, env: Mapping[str, str], fork: bool = False
    ) -> None:
        self.args = list(args)
        self.mark = env[_MARK]
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = (zygote.Popen if fork else subprocess.Popen)(
            self.args,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self, file) -> str:
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), size, 0).decode(errors="replace")

    @property
    def stdout(self) -> str:
        return self._read(self._out)

    @property
    def stderr(self) -> str:
        return self._read(self._err)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait_for(self, text: str, timeout: float) -> None:
        """Until ``text`` stands in its standard output."""
        limit = time.monotonic() + timeout
        while text not in self.stdout:
            if self.process.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"never said {text!r}:\n{self.stdout}\n{self.stderr}")
            time.sleep(0.02)

    def done(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Its end; killed with all that it started where that takes longer than ``timeout``."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            output = f"{self.stdout}\n{self.stderr}"
            with suppress(AssertionError):
                assert_gone(self.mark, 0)
            raise AssertionError(
                f"{shlex.join(self.args)} took longer than {timeout} s:\n{output}"
            ) from None
        result = subprocess.CompletedProcess(
            self.args, self.process.returncode, self.stdout, self.stderr
        )
        self._out.close()
        self._err.close()
        return result


@contextmanager
def child(
    args: Sequence[str],
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
    fork: bool = False,
):
    """A running process; at the end of the block nothing that it started is left."""
    started = Child(args, cwd, environment(env), fork)
    try:
        yield started
    finally:
        started.kill() if started.process.poll() is None else None
        assert_gone(started.mark)


def python(
    args: Sequence[str],
    cwd: Path,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
):
    """``python ARGS…`` to its end: a fork where it can be, see ``zygote.py``."""
    with child([sys.executable, *args], cwd, env, fork=True) as started:
        return started.done(timeout)


def ronde(*args: str) -> list[str]:
    """The command line of ``ronde ARGS…``."""
    return [sys.executable, "-m", "ronde", *args]


def ronde_run(
    args: Sequence[str],
    cwd: Path,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
):
    """``ronde ARGS…`` to its end."""
    return python(["-m", "ronde", *args], cwd, timeout, env)


def ronde_batch(
    commands: Sequence[Sequence[str]],
    cwd: Path,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
):
    """Many command lines that start no workers, each in a process of its own: they share one import
    of torch, by fork.
    """
    done = python([__file__, json.dumps([list(c) for c in commands])], cwd, timeout, env)
    assert done.returncode == 0, done.stderr
    return [
        subprocess.CompletedProcess(c, *answer)
        for c, answer in zip(commands, json.loads(done.stdout), strict=True)
    ]


def _fork_each(commands: list[list[str]]) -> None:
    import ronde.checkpoint
    import ronde.cli

    answers = []
    for command in commands:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.argv = ["ronde", *command]
                try:
                    ronde.cli.main()
                except SystemExit as end:
                    sys.stdout.flush()
                    os._exit(
                        end.code if isinstance(end.code, int) else 0 if end.code is None else 1
                    )
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(99)
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            texts = [
                os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0).decode() for f in (out, err)
            ]
            answers.append([os.waitstatus_to_exitcode(status), *texts])
    print(json.dumps(answers))


def forked(
    script: Path, workers: int | str, *arguments: object, imports: Sequence[str] = ()
) -> list[str]:
    """The command line of a script's ranks as forks of one process, in a world or, as in ``"1,2"``,
    in several: see ``forked.py``.
    """
    runner = Path(__file__).with_name("forked.py")
    return [
        sys.executable,
        str(runner),
        "-n",
        str(workers),
        "-i",
        ",".join(imports),
        str(script),
        *map(str, arguments),
    ]


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher sets that follows torch's convention."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    return {**{k: str(v) for k, v in names.items()}, "MASTER_ADDR": "127.0.0.1"}


def start_ranks(
    n: int,
    script: Path,
    args: Sequence[str] = (),
    cwd: Path | None = None,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    variables: Sequence[Mapping[str, str]] | None = None,
):
    """Start ``n`` plain processes of one script under one parent of their own, as ``mpirun`` would,
    and wait for all.

    Args:
        variables: what each rank's environment says; by default RANK, WORLD_SIZE … and a free port.

    Returns:
        list: a CompletedProcess per rank.
    """
    folder = cwd or script.parent
    port = free_port()
    variables = [rank_variables(r, n, port) for r in range(n)] if variables is None else variables
    with tempfile.TemporaryDirectory() as outputs:
        # No subshells: the ranks of an MPI have one parent in common.
        lines = []
        for rank in range(n):
            words = [
                "env",
                *(f"{k}={v}" for k, v in variables[rank].items()),
                sys.executable,
                "-u",
                str(script),
                *args,
            ]
            o, e = (shlex.quote(f"{outputs}/{rank}.{kind}") for kind in ("out", "err"))
            lines.append(f"{shlex.join(words)} >{o} 2>{e} & p{rank}=$!")
        lines += [
            f"wait $p{rank}; echo $? >{shlex.quote(f'{outputs}/{rank}.status')}"
            for rank in range(n)
        ]
        with child(["sh", "-c", "\n".join(lines)], folder, env) as parent:
            try:
                parent.done(timeout)
            except AssertionError as error:
                told = "\n".join(
                    f"--- {p.name}\n{p.read_text()}" for p in sorted(Path(outputs).iterdir())
                )
                raise AssertionError(f"{error}\n{told}") from None
        read = Path(outputs)
        return [
            subprocess.CompletedProcess(
                [str(script), *args],
                int((read / f"{rank}.status").read_text()),
                (read / f"{rank}.out").read_text(),
                (read / f"{rank}.err").read_text(),
            )
            for rank in range(n)
        ]


if __name__ == "__main__":
    _fork_each(json.loads(sys.argv[1]))
