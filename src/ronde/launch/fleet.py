"""Run workers on several hosts: one agent on each, led over its pipes.

Before anything starts, every host says what it is and has. Node 0 listens on its addresses, the
others try them, and the first one that all reach is the meeting point: no host name is resolved.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.launch.console import Output
from ronde.launch.engine import Engine, Host
from ronde.launch.facts import Facts, differences, share
from ronde.launch.frames import MARKER, Pipe, Silence, receive
from ronde.launch.hang_watch import is_new, record_hangs
from ronde.launch.mirror import Mirrored, folder_files
from ronde.launch.node import Job, Outcome
from ronde.launch.restarts import Restarts
from ronde.plan import Plan
from ronde.watch import RunDir
from ronde.watch.hang_judge import HangVerdict, Limits, RankView, judge_hang
from ronde.watch.slow_rank import SlowRanks
from ronde.world import ArgumentError, WorldError
from ronde.world.fence import AGAIN

__all__ = ["Fleet", "environment_for"]

_ANSWER_SECONDS = 25.0
_SILENCE_SECONDS = 10.0
_SHORT_SILENCE_SECONDS = 1.0  # where others go on without a host: to be wrong costs a restart
_USUAL_SILENCES = 4  # but this many times the longest silence that ended: hosts and networks differ
_HEARD_SECONDS = 1.0  # a host from which others heard something since then is not lost
_ASK_SECONDS = 0.25
_PING_SECONDS = 1.0
_LOOK_SECONDS = 0.1
_STOP_SECONDS = 2.5
_FRESH_SECONDS = 4.0
_COME_BACK_SECONDS = 60.0
_CALL_SECONDS = 5.0  # from one call to lost hosts to the next, while the others train
_LINES = 60  # the long words of mpirun follow those of ssh
_PART = 3 << 20

_SENT = ("RONDE_PLAN", "RONDE_FEED")  # variables that may name a file here
_PASSED = re.compile(
    r"(RONDE|TORCH|TORCHINDUCTOR|PYTORCH|NCCL|GLOO|OMP|MKL|CUDA|HF|TRANSFORMERS|TOKENIZERS|FI)_\w+"
    r"|PYTHON(PATH|HASHSEED|WARNINGS|OPTIMIZE)|LANG|LC_\w+|TZ"
)
"""Environment variables that reach the workers on other hosts; ``--env`` adds further ones."""
_OWN = re.compile(r"RONDE_(LAUNCHER.*|RUN_DIR|GENERATION|SECRET)")


def environment_for(names: Sequence[str]) -> dict[str, str]:
    """The variables that go to other hosts: the allow-list, and these.

    Raises:
        ArgumentError: one is not set here.
    """
    for name in names:
        if name not in os.environ:
            raise ArgumentError(f"--env {name}: it is not set here.")
    return {
        k: v
        for k, v in os.environ.items()
        if k in names or (_PASSED.fullmatch(k) and not _OWN.fullmatch(k))
    }


class _Link:
    """One host's agent: its process, what it sent, and how it ended."""

    def __init__(
        self, host: Host, argv: list[str], arrived: Callable[[_Link, dict[str, Any], bytes], None]
    ) -> None:
        self.host = host
        self._arrived = arrived
        self.printed: list[str] = []
        self.up = False
        self.closed = False
        self.facts: Facts | None = None
        self.silent = ""
        self._silence: Silence | None = None
        self.address = ""  # of its workers
        self.asked, self.asked_first = 0.0, 0.0  # when others were asked whether they hear it
        self.heard: dict[str, tuple[float, float]] = {}  # address -> when it answered, seconds
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes to the launcher alone
            )
        except OSError as error:
            raise ArgumentError(f"{argv[0]} cannot be started: {error}") from None
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def order(self, order: str, **values: Any) -> None:
        """Send an order; one that cannot be sent any more is told by the end of the output."""
        assert self.process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps({"order": order, **values}).encode() + b"\n")
            self.process.stdin.flush()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.printed = [*self.printed[-_LINES:], line.decode(errors="replace").rstrip()]

    def _read(self) -> None:
        assert self.process.stdout is not None
        pipe = Pipe(self.process.stdout.fileno(), closefd=False)
        stream = io.BufferedReader(pipe)
        seen = b""
        while not seen.endswith(MARKER) and (byte := stream.read(1)):
            seen += byte
        self.up = seen.endswith(MARKER)
        if not self.up:
            self.printed += seen.decode(errors="replace").splitlines()[-_LINES:]
        while self.up and (frame := receive(stream)) is not None:
            if frame[0]["kind"] == "heard":
                self.heard[frame[0]["address"]] = time.monotonic(), frame[0]["seconds"]
            elif frame[0]["kind"] != "alive":
                self._arrived(self, *frame)
            elif self._silence is None:  # from now on it shows that it lives, four times a second
                self._silence = Silence(pipe)
        self._errors.join(2.0)
        status = self.process.wait()
        self.closed = True
        self._arrived(self, {"kind": "closed", "status": status}, b"")

    def ping(self) -> None:
        """Show that the launcher lives, unless an order is on its way: then that does."""
        assert self.process.stdin is not None
        if self._lock.acquire(blocking=False):
            with contextlib.suppress(OSError, ValueError):
                self.process.stdin.write(b'{"order": "ping"}\n')
                self.process.stdin.flush()
            self._lock.release()

    def look(self, longest: float) -> float:
        """For how many seconds nothing has come from the agent; 0 if that is not too long."""
        if self._silence is None or self.silent:
            return 0.0
        seconds = self._silence.seconds()
        usual = _USUAL_SILENCES * self._silence.longest
        if seconds < min(max(longest, usual), _SILENCE_SECONDS):
            self.asked_first = 0.0
            return 0.0
        return seconds

    def give_up(self, seconds: float) -> None:
        """Give the agent up, from which nothing has come for so long."""
        self.silent = (
            f"nothing came from it for {seconds:.1f} s. Its network or the machine itself "
            "is down, or it is too busy to answer"
        )
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # mpirun starts others

    def close(self, seconds: float) -> None:
        """End the process, by force after some seconds."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()


class _Interrupted(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        self.number = number


class Fleet:
    """Agents on several hosts, from the first question to the last answer.

    Args:
        hosts: node 0 first.
        engine: what starts the agents.
        python: the interpreter on the hosts; None: as here.
        say: called with a line about each phase.

    Example::

        with Fleet(parse_hosts("a:2,b:2"), Ssh()) as fleet:
            facts = fleet.ask(["train.py"], {}, None)
            outcome = fleet.run(job, output)
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        engine: Engine,
        python: str | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._hosts, self._engine, self._say = list(hosts), engine, say
        self._every = list(hosts)  # those that are lost, too
        self._coming: list[_Link] = []  # agents of lost hosts, for the next generation
        self._short, self._called = False, 0.0
        self._warm: dict[str, int] = {}  # workers of hosts that import torch before they answer
        self._wanted: Job | None = None
        self._grows = ""  # the host for whose sake the workers were asked to leave
        self._source: _Link | None = None  # whose run directory the one here follows
        self._hello: dict[str, Any] = {}
        self._leaves, self._longest = False, _SILENCE_SECONDS
        self._asked = 0  # the signal that asked the run to leave
        self._python = python or sys.executable
        self._frames: queue.Queue[tuple[_Link, dict[str, Any], bytes]] = queue.Queue()
        self._links: list[_Link] = []
        self._token: Path | None = None
        self._receiver: Mirrored | None = None
        self._ranks: dict[str, tuple[float, list[RankView]]] = {}
        self._pace = SlowRanks(0, 0.0)
        self._slow: list[HangVerdict] = []
        self._hang: HangVerdict | None = None
        self._handlers: dict[int, Any] = {}
        self._done = threading.Event()
        self._warned = threading.Event()  # wakes the pinging thread
        self._order = ""  # what it passes on
        self.facts: dict[str, Facts] = {}

    def __enter__(self) -> Fleet:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._interrupt)
        self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._warn)
        try:
            for host in self._hosts:
                self._links.append(self._link(host))
        except BaseException:
            self.__exit__()
            raise
        threading.Thread(target=self._ping, daemon=True).start()
        return self

    def _link(self, host: Host) -> _Link:
        agent = [self._python, "-P", "-u", "-m", "ronde.launch.agent"]
        argv = self._engine.command(host, agent)
        return _Link(host, argv, lambda *f: self._frames.put(f))

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._warned.set()
        every = [*self._links, *self._coming]
        for link in every:
            link.order("end")
        limit = time.monotonic() + _STOP_SECONDS
        for link in every:
            link.close(max(0.1, limit - time.monotonic()))
        if self._token is not None:
            self._token.unlink(missing_ok=True)
        if self._receiver is not None:
            self._receiver.close()
        self._engine.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _: object) -> None:
        if number != signal.SIGTERM or not self._leaves or self._asked:
            raise _Interrupted(number)
        self._pass_on("leave", number)

    def _warn(self, number: int, _: object) -> None:
        """A scheduler's warning."""
        self._pass_on("leave" if self._leaves else "warn", number)

    def _pass_on(self, order: str, number: int) -> None:
        """Let the pinging thread give an order to all: this one may hold a link's lock."""
        if order == "leave":
            self._asked = number
        self._order = order
        self._warned.set()

    def _ping(self) -> None:
        pinged = 0.0
        while not self._done.is_set():
            order = ""
            if self._warned.wait(_LOOK_SECONDS):
                self._warned.clear()
                order = self._order
            pings = time.monotonic() > pinged + _PING_SECONDS
            pinged = time.monotonic() if pings else pinged
            for link in [*self._links, *self._coming]:
                if pings:
                    link.ping()
                if (silent := link.look(self._longest)) and not self._is_heard(link, silent):
                    link.give_up(silent)
                if order:
                    link.order(order)

    def _is_heard(self, link: _Link, silent: float) -> bool:
        """Whether a host whose agent is silent may be there: its link may carry too much. The
        kernels of other hosts know when something came from it; they are asked.
        """
        others = [o for o in self._links if o is not link and not o.closed]
        if silent >= _SILENCE_SECONDS or not link.address or not others:
            return False
        now = time.monotonic()
        if now - link.asked >= _ASK_SECONDS:
            link.asked, link.asked_first = now, link.asked_first or now
            for other in others:
                other.order("heard", address=link.address)
        told = [o.heard.get(link.address, (0.0, 0.0)) for o in others]
        return any(at < link.asked_first or ago < _HEARD_SECONDS for at, ago in told)

    def _answers(self, kind: str) -> dict[str, dict[str, Any]]:
        """One frame of a kind from each host that is asked; all problems at once.

        Raises:
            WorldError: hosts that did not come up, refused or did not answer.
        """
        found: dict[str, dict[str, Any]] = {}
        problems: dict[str, str] = {}
        limit = time.monotonic() + _ANSWER_SECONDS
        while len(found) + len(problems) < len(self._links):
            try:
                link, frame, _ = self._frames.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                late = f"no answer within {_ANSWER_SECONDS:.0f} s"
                for each in self._links:
                    if each.host.name not in found:
                        meant = self._engine.meaning(each.host, 255, "\n".join(each.printed))
                        problems.setdefault(each.host.name, meant or late)
                break
            name = link.host.name
            if frame["kind"] == kind:
                found[name] = {**frame, "received": time.time()}
            elif frame["kind"] == "refused":
                problems[name] = frame["why"]
            elif frame["kind"] == "closed":
                problems.setdefault(name, self._why(link, int(frame["status"])))
        if problems:
            order = {host.name: i for i, host in enumerate(self._hosts)}
            told = [f"{h}: {problems[h]}" for h in sorted(problems, key=order.__getitem__)]
            raise WorldError("\n".join([*told, "Nothing was started."]))
        return found

    def _why(self, link: _Link, status: int) -> str:
        if link.silent:
            return link.silent
        printed = "\n".join(line for line in link.printed if line.strip())
        if meant := self._engine.meaning(link.host, status, printed):
            return meant
        for package in ("ronde", "torch"):
            if f"No module named '{package}" in printed or f"No module named {package}" in printed:
                return (
                    f"{package} is not installed for {self._python} there. Install it, or name "
                    "another Python with --python."
                )
        if status == 127 or (self._python in printed and "not found" in printed):
            return f"there is no {self._python}. Name the Python there with --python."
        lines = [line for line in printed.splitlines() if line.strip("-")]
        last = lines[-1] if lines else "it said nothing"
        return f"{self._engine.name} ended with status {status}: {last}"

    def ask(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path | None
    ) -> dict[str, Facts]:
        """Ask every host what it is and has.

        Args:
            command: the workers' command.
            environment: what the hosts get of this environment.
            directory: the run directory here.

        Returns:
            dict[str, Facts]: host -> facts.

        Raises:
            WorldError: a host cannot take part, or hosts differ in what must be alike.
        """
        self._say("asking " + ", ".join(h.name for h in self._hosts))
        if directory is not None:
            self._token = directory / f".here-{secrets.token_hex(8)}"
            self._token.touch()
        self._hello = {
            "folder": str(Path.cwd()),
            "command": list(command),
            "environment": dict(environment),
            "token": None if self._token is None else str(self._token.absolute()),
            "silence": _SILENCE_SECONDS,
        }
        for link in self._links:
            link.order("hello", **self._hello)
        answers = self._answers("facts")
        for link in self._links:
            answer = answers[link.host.name]
            link.facts = {**answer["facts"], "received": answer["received"]}
        self.facts = {link.host.name: link.facts or {} for link in self._links}
        if lines := differences(self.facts, command):
            raise WorldError("\n".join(["the hosts differ:", *lines, "Nothing was started."]))
        return self.facts

    def keep(self, count: int) -> None:
        """Let all hosts but the first ``count`` go."""
        for link in self._links[count:]:
            link.order("end")
            link.close(_STOP_SECONDS)
        del self._links[count:], self._hosts[count:]

    def _meet(self) -> tuple[str, int, dict[str, str]]:
        """Choose the meeting point: address and port on node 0, and the address by which each host
        reaches it.
        """
        first, *others = self._links
        first.order("listen")
        ports: dict[str, int] = {}
        limit = time.monotonic() + _ANSWER_SECONDS
        waiting: set[str] = {first.host.name}
        reached: dict[str, dict[str, str]] = {}
        while waiting:
            try:
                link, frame, _ = self._frames.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                raise WorldError(f"{', '.join(waiting)}: no answer. Nothing was started.") from None
            if link not in self._links:
                self._answered(link, frame)  # a lost host was called, and is still lost
                continue
            name = link.host.name
            if frame["kind"] == "closed":
                raise WorldError(
                    f"{name}: {self._why(link, frame['status'])}. Nothing was started."
                )
            if frame["kind"] == "listening":
                ports = dict(map(tuple, frame["ports"]))
                # loopback leads nowhere but for agents on one machine
                away = [a for a in ports if not a.startswith("127.") or not others]
                for other in others:
                    other.order("reach", candidates=[[a, ports[a]] for a in away])
                waiting |= {other.host.name for other in others}
            if frame["kind"] == "reached":
                reached[name] = frame["by"]
            waiting.discard(name)
        for address in ports:
            if all(address in by for by in reached.values()) and (
                others or address.startswith("127.")
            ):
                own = {name: by[address] for name, by in reached.items()}
                return address, ports[address], own
        worst = [name for name, by in reached.items() if not by] or list(reached)
        raise WorldError(
            f"{', '.join(worst)}: cannot connect to {first.host.name} on "
            f"{', '.join(a for a in ports if not a.startswith('127.')) or 'any address'}. Open the "
            "ports between the hosts (a firewall may close them). Nothing was started."
        )

    def run(
        self,
        job: Job,
        counts: Sequence[int],
        output: Output,
        restarts: Restarts | None = None,
        least: int = 1,
    ) -> Outcome:
        """Start the workers and return when all have ended.

        Args:
            job: what to run; its ``workers`` is the number on all hosts.
            counts: how many on each host.
            output: takes what they print.
            restarts: how often they are started again, on the hosts that are there then.
            least: with how few workers at least.
        """
        start = time.monotonic()
        self._leaves, self._wanted = job.leaves, job
        if job.restarts and job.spares:
            self._warm = dict(zip((link.host.name for link in self._links), counts, strict=True))
        if job.restarts:
            self._longest = _SHORT_SILENCE_SECONDS
        try:
            while True:
                own = restarts.begin() if restarts else {}
                environment = {**job.environment, **own}
                now = dataclasses.replace(job, environment=environment, workers=sum(counts))
                outcome = self._generation(now, counts, output, restarts)
                if outcome.again and self._grows and restarts and not self._asked:
                    restarts.grow(self._grows)
                    outcome = dataclasses.replace(outcome, error="the hosts have changed")
                else:
                    if outcome.again:
                        outcome = self._after_leaving(outcome)
                    if restarts is None or not restarts.goes_on(outcome, lambda: self._asked):
                        return _with_seconds(outcome, time.monotonic() - start)
                counts = self._regroup(job, least)
                self._short = sum(counts) < job.workers
                if self._asked:
                    return Outcome(AGAIN, error=self._leaving(), again=True, interrupted=True)
                if not counts:
                    told = f"{outcome.error}; fewer workers than --min-workers {least} are left"
                    return Outcome(1, error=told, seconds=time.monotonic() - start)
                names = [link.host.name for link in self._links]
                pairs = zip(names, counts, strict=True)
                output.name(
                    [f"[{h} {r}] " for r, h in enumerate(h for h, n in pairs for _ in range(n))]
                )
                shown = ", ".join(f"{h}:{n}" for h, n in zip(names, counts, strict=True))
                plural = "s" if sum(counts) > 1 else ""
                restarts.say(f"going on with {sum(counts)} worker{plural} on {shown}")
        except _Interrupted as caught:
            return self._stop(caught.number, output, start)

    def _leaving(self) -> str:
        return f"asked to leave by {signal.Signals(self._asked).name}" if self._asked else ""

    def _after_leaving(self, outcome: Outcome) -> Outcome:
        """Workers have left: the run ends if it was asked to, and goes on if only a host was."""
        if self._asked:
            return dataclasses.replace(outcome, error=self._leaving(), interrupted=True)
        return dataclasses.replace(outcome, interrupted=False)

    def _generation(
        self, job: Job, counts: Sequence[int], output: Output, restarts: Restarts | None
    ) -> Outcome:
        """Run one generation of workers on the hosts that there are."""
        start = time.monotonic()
        try:
            address, port, own = self._meet()
        except WorldError as error:
            if restarts is None or not restarts.generation:
                raise
            return Outcome(1, error=str(error).replace(" Nothing was started.", ""))
        shared = all(self.facts[link.host.name]["sees"] for link in self._links)
        environment = {**job.environment, "RONDE_SECRET": secrets.token_hex(32)}
        if not os.environ.get("TORCH_CPP_LOG_LEVEL"):
            environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hosts need no names
        if job.directory is not None and not shared:
            environment["RONDE_RUN_DIR_SHARED"] = "0"
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        first, run_id = 0, uuid.uuid4().hex
        for node, (link, count) in enumerate(zip(self._links, counts, strict=True)):
            sees = bool(self.facts[link.host.name]["sees"])
            mirrored = node == 0 and job.directory is not None and not sees
            if mirrored and job.directory is not None:
                self._receiver = Mirrored(job.directory)
                if link is not self._source:
                    self._send_directory(link, job.directory)
            if node == 0:
                self._source = link
            link.order(
                "run",
                command=job.command,
                workers=count,
                first=first,
                total=job.workers,
                rank=node,
                count=len(counts),
                address=address,
                port=port,
                own=own.get(link.host.name, address),
                id=run_id,
                directory=None if job.directory is None else str(job.directory.absolute()),
                mirror=mirrored,
                sees=sees,
                hang_timeout=job.hang_timeout,
                restarts=job.restarts,
                spares=job.spares,
                environment=environment,
                files=_contents(environment),
            )
            link.address = own.get(link.host.name, address)
            first += count
        limits = None if job.hang_timeout is None else Limits(job.hang_timeout)
        self._ranks, self._slow, self._hang = {}, [], None
        self._pace = SlowRanks(job.workers, limits.say if limits else 0.0)
        outcome = self._watch(output, start, run_id, job, limits)
        slow = [dataclasses.asdict(each) for each in self._slow]
        record_hangs(job.directory, [*slow, outcome.hang])
        return dataclasses.replace(outcome, slow=slow)

    def _regroup(self, job: Job, least: int) -> list[int]:
        """Gather the hosts that are there, those too that have come back, and share the workers
        out. Returns how many each gets; empty if they are too few.
        """
        for link in self._links:
            if link.closed:
                link.close(0.1)
        begun = time.monotonic()
        self._call()
        while True:
            counts = self._shares(job, least)
            if sum(counts) < job.workers:
                self._take_in()
                counts = self._shares(job, least)
            if counts or self._asked or time.monotonic() > begun + _COME_BACK_SECONDS:
                break
            with contextlib.suppress(queue.Empty):
                link, frame, _ = self._frames.get(timeout=_PING_SECONDS)
                self._answered(link, frame)
            if time.monotonic() > self._called + _CALL_SECONDS:
                self._call()
        unused = self._links[len(counts) :] if counts else []
        self._links = self._links[: len(counts)] if counts else self._links
        self._coming += unused  # they wait, and are there at the next restart
        self._hosts = [link.host for link in self._links]
        return counts

    def _shares(self, job: Job, least: int) -> list[int]:
        self._links = [link for link in self._links if not link.closed]
        order = {host.name: place for place, host in enumerate(self._every)}
        self._links.sort(key=lambda link: order[link.host.name])
        usable = self._usable(job, self._links)
        if usable < max(least, 1):
            return []
        counts = share([link.host for link in self._links], self.facts, str(usable))
        return counts[: sum(1 for n in counts if n)]

    def _usable(self, job: Job, links: Sequence[_Link]) -> int:
        """How many workers the plan can have on these hosts."""
        facts = {link.host.name: link.facts or {} for link in links}
        together = 1
        if job.directory is not None and (file := RunDir(job.directory).plan).is_file():
            plan = Plan.load(file)
            together = plan.pipeline * plan.tensor
        there = sum(share([link.host for link in links], facts, "auto"))
        return min(job.workers, there) // together * together

    def _back(self) -> str:
        """A lost host that is there again, and with which the plan can have more workers."""
        job = self._wanted
        assert job is not None
        links = [link for link in self._links if not link.closed]
        back = [link for link in self._coming if link.facts is not None and not link.closed]
        if not back or len(links) < len(self._links):  # one is lost now: that restarts, too
            return ""
        more = self._usable(job, [*links, *back]) > self._usable(job, links)
        return back[0].host.name if more else ""

    def _call(self) -> None:
        """Ask lost hosts whether they are there again."""
        self._called = time.monotonic()
        there = {link.host.name for link in (*self._links, *self._coming)}
        for host in self._every:
            if host.name not in there:
                with contextlib.suppress(ArgumentError, WorldError):  # its engine has lost it, too
                    link = self._link(host)
                    # it answers when it has imported torch: until then, the others train
                    link.order("hello", **self._hello, warm=self._warm.get(host.name, 0))
                    self._coming.append(link)

    def _take_in(self) -> None:
        """Take in hosts that were lost, or not needed, and are there."""
        for link in [link for link in self._coming if link.facts is not None]:
            self._coming.remove(link)
            self.facts[link.host.name] = link.facts or {}
            self._links.append(link)

    def _answered(self, link: _Link, frame: dict[str, Any]) -> None:
        """Take what an agent says that is not among those that run."""
        if link not in self._coming:
            return
        if frame["kind"] == "facts":
            link.facts = {**frame["facts"], "received": time.time()}
            facts = {each.host.name: each.facts for each in (*self._links, link) if each.facts}
            if differences(facts, self._hello["command"]):  # it has come back as another one
                self._every = [host for host in self._every if host.name != link.host.name]
                self._coming.remove(link)
                link.close(0.1)
        elif frame["kind"] in ("closed", "refused"):
            self._coming.remove(link)
            link.close(0.1)

    def _send_directory(self, link: _Link, directory: Path) -> None:
        """Send a run that goes on to a node that does not share its directory."""
        path, names = str(directory.absolute()), folder_files(directory)
        link.order("known", directory=path, names=names)
        for name in names:
            first = True
            with (directory / name).open("rb") as file:
                while (data := file.read(_PART)) or first:
                    text = base64.b64encode(data).decode()
                    link.order("files", directory=path, name=name, data=text, first=first)
                    first = False

    def _take(
        self,
        frame: dict[str, Any],
        data: bytes,
        output: Output,
    ) -> None:
        kind, receiver = frame["kind"], self._receiver
        if kind == "out":
            output.out(frame["rank"], data)
        elif kind == "log":
            output.log(frame["rank"], data)
        elif kind == "message":
            if "leave" in frame["message"]:  # one was asked: the others are too
                for link in self._links:
                    link.order("leave")
            output.message(frame["rank"], frame["message"])
        elif receiver is not None:
            if kind == "file":
                receiver.file(frame["name"], frame["first"], data)
            elif kind == "gone":
                receiver.gone(frame["name"])
            elif kind == "settled":
                receiver.settled()

    def _judge(self, link: _Link, frame: dict[str, Any], limits: Limits, size: int) -> str:
        """Judge from what all nodes say of their ranks. Returns a sentence about a slow rank; a
        hang is ended.
        """
        host, now = link.host.name, time.monotonic()
        views = [dataclasses.replace(RankView.from_dict(v), host=host) for v in frame["views"]]
        self._ranks[host] = now, views
        fresh = [
            v for at, views in self._ranks.values() if now - at < _FRESH_SECONDS for v in views
        ]
        verdict = judge_hang(fresh, limits, size) if self._hang is None else None
        if verdict is None and self._hang is None:
            verdict = self._pace.look(now, [v for _, views in self._ranks.values() for v in views])
        if verdict is None:
            return ""
        if verdict.slow:
            if not is_new(verdict, self._slow):
                return ""
            self._slow.append(verdict)
            return f"warning: {verdict.sentence}\n"
        self._hang = verdict
        for each in self._links:
            each.order("hang", verdict=dataclasses.asdict(verdict))
        return ""

    def _watch(
        self,
        output: Output,
        start: float,
        run_id: str,
        job: Job,
        limits: Limits | None,
    ) -> Outcome:
        """Pass on what comes until every node has ended; the first that fails ends the others."""
        ended: dict[str, Outcome] = {}
        self._grows, asked = "", 0.0
        while len(ended) < len(self._links):
            if self._short and time.monotonic() > self._called + _CALL_SECONDS:
                self._call()
            if self._short and not ended and time.monotonic() > asked + _PING_SECONDS:
                asked = time.monotonic()
                self._grows = self._grows or self._back()
                if self._grows:  # again and again: workers may not know yet how to leave
                    for link in self._links:
                        link.order("leave")
            try:
                link, frame, data = self._frames.get(timeout=_PING_SECONDS)
            except queue.Empty:
                gone = [e for e in self._links if e.closed and e.host.name not in ended]
                if not gone:
                    continue
                link, frame, data = gone[0], {"kind": "closed", "status": 255}, b""
            name = link.host.name
            if link not in self._links:
                self._answered(link, frame)  # it has come back, for the next generation
                continue
            if frame["kind"] == "ranks" and limits is not None:
                if told := self._judge(link, frame, limits, job.workers):
                    output.out(0, told.encode())
                continue
            if frame["kind"] == "outcome":
                outcome = Outcome(**frame["outcome"])
            elif frame["kind"] in ("closed", "refused") and name not in ended:
                why = (
                    frame["why"]
                    if frame["kind"] == "refused"
                    else self._why(link, int(frame["status"]))
                )
                outcome = Outcome(1, error=f"host {name} is lost: {why}")
            else:
                self._take(frame, data, output)
                continue
            # who leaves was asked to, as all were: the others may still be saving
            fails = bool(outcome.status) and not outcome.again
            if fails and not any(o.status and not o.again for o in ended.values()):
                for other in self._links:
                    if other is not link:
                        other.order("stop", id=run_id, at_once=job.restarts)
            ended.setdefault(name, outcome)
        failed = [o for o in ended.values() if o.status and not o.interrupted]
        if not failed:
            failed = [o for o in ended.values() if o.status]
        if any(o.again for o in ended.values()) and all(o.again or not o.status for o in failed):
            failed = [o for o in failed if o.again]
        seconds = time.monotonic() - start
        if failed:
            # the first to fail, but rather one that did not fail because another was gone
            worst = min(failed, key=lambda o: (o.again, o.consequence))
            worst = _with_seconds(worst, seconds)
            # an engine that ends a run may signal its agents before it signals this process
            return self._with_reason(worst) if worst.interrupted and not worst.again else worst
        left = ", ".join(o.left for o in ended.values() if o.left)
        return Outcome(0, left=left, seconds=seconds)

    def _stop(self, number: int, output: Output, start: float) -> Outcome:
        """End every worker after a signal to the launcher; a second one does not wait."""
        if self._wanted is not None:
            slow = [dataclasses.asdict(each) for each in self._slow]
            record_hangs(self._wanted.directory, slow)
        told = Outcome(
            128 + number,
            error=f"stopped by {signal.Signals(number).name}",
            interrupted=True,
            seconds=time.monotonic() - start,
        )
        try:
            for link in self._links:
                link.order("stop")
            open_ones = {link.host.name for link in self._links}
            limit = time.monotonic() + _STOP_SECONDS
            while open_ones and (left := limit - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    link, frame, data = self._frames.get(timeout=left)
                    if frame["kind"] in ("outcome", "closed", "refused"):
                        open_ones.discard(link.host.name)
                    else:
                        self._take(frame, data, output)
        except _Interrupted:
            pass
        return self._with_reason(told) if number == signal.SIGTERM else told

    def _with_reason(self, outcome: Outcome) -> Outcome:
        """Say why the engine ends its commands, where it does: a time limit, say; and which host
        was told.
        """
        for link in self._links:
            if meant := self._engine.meaning(link.host, 0, "\n".join(link.printed)):
                why = f"{outcome.error} ({link.host.name}: {meant.rstrip('.')})"
                return dataclasses.replace(outcome, error=why)
        return outcome


def _contents(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Variable -> name and text of the file here that it means."""
    found = {}
    for name in _SENT:
        path = Path(environment.get(name) or "none")
        if path.is_absolute() and path.is_file():
            found[name] = [path.name, path.read_text()]
    return found


def _with_seconds(outcome: Outcome, seconds: float) -> Outcome:
    return dataclasses.replace(outcome, seconds=seconds)
