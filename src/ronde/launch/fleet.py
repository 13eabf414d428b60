"""Run workers on hosts: one agent on each, led over its pipes, or in a thread on this machine.

Before anything starts on other hosts, every one says what it is and has. Node 0 listens on its
addresses, the others try them, and the first one that all reach is the meeting point: no host name
is resolved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import re
import resource
import secrets
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ronde.launch import messages as m
from ronde.launch.console import Output
from ronde.launch.engine import Engine, Host
from ronde.launch.facts import Facts, differences, share
from ronde.launch.generation import Generation
from ronde.launch.job import Job, Nodes, Outcome
from ronde.launch.links import SILENCE_SECONDS, HereLink, HostLink, Link
from ronde.launch.mirror import Mirrored, folder_files, send_file
from ronde.launch.restarts import Restarts
from ronde.plan import Plan
from ronde.watch import RunDir
from ronde.world import ArgumentError, WorldError
from ronde.world.whole_file import AGAIN

__all__ = ["Fleet", "environment_for"]

_ANSWER_SECONDS = 25.0  # a host that is off is named within 30 s; ssh gives up after 8
_WAIT_SECONDS = 1.0
_STOP_SECONDS = 2.5  # agents give workers 1.5 s, then end themselves
_CALL_SECONDS = 5.0  # from one call to lost hosts to the next, while the others train

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


A = TypeVar("A", bound=m.Message)


class _Interrupted(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        self.number = number


class _Signals:
    """What signals to this process mean while it leads a run, in the main thread.

    Args:
        here: whether the workers are on this machine only.

    Attributes:
        leaves: whether SIGTERM and SIGUSR1 ask the workers to save and leave.
        asked: the signal that asked them; 0: none did.
    """

    def __init__(self, here: bool) -> None:
        self._here = here
        self._handlers: dict[int, Any] = {}
        self._urged = threading.Event()
        self._order: m.Message | None = None
        self.leaves, self.asked = False, 0

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                self._handlers[number] = signal.signal(number, self._interrupt)
            self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._warn)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Cleaning up is short: it is not interrupted half-way."""
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)

    def _interrupt(self, number: int, _: object) -> None:
        if number != signal.SIGTERM or not self.leaves or self.asked:
            raise _Interrupted(number)
        self._ask(number)

    def _warn(self, number: int, _: object) -> None:
        """A scheduler's warning."""
        if self.leaves:
            self._ask(number)
        else:
            self.pass_on(m.Warn())

    def _ask(self, number: int) -> None:
        self.asked = self.asked or number
        self.pass_on(self.leave())

    def leave(self) -> m.Leave:
        """The order that asks the workers. On hosts, SIGTERM waits until they know how to leave."""
        return m.Leave(self.asked if self._here else signal.SIGUSR1)

    def pass_on(self, order: m.Message | None) -> None:
        """Let the pinging thread give an order to all: this one may hold a link's lock."""
        self._order = order
        self._urged.set()

    def wait(self, seconds: float) -> m.Message | None:
        """The pinging thread's wait for such an order."""
        if not self._urged.wait(None if self._here else seconds):
            return None
        self._urged.clear()
        return self._order

    def text(self) -> str:
        """Who asked the workers to leave."""
        return f"asked to leave by {signal.Signals(self.asked).name}" if self.asked else ""


class Fleet:
    """Agents on hosts, from the first question to the last answer.

    Args:
        hosts: node 0 first.
        engine: what starts the agents; None: a thread of this process is the only one.
        python: the interpreter on the hosts; None: as here.
        say: called with a line about each phase.
        nodes: this machine among others on which the same is started, without an engine.

    Example::

        with Fleet(parse_hosts("a:2,b:2"), Ssh()) as fleet:
            facts = fleet.ask(["train.py"], {}, None)
            outcome = fleet.run(job, [2, 2], output)
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        engine: Engine | None,
        python: str | None = None,
        say: Callable[[str], None] = lambda _: None,
        nodes: Nodes | None = None,
    ) -> None:
        self._hosts, self._engine, self._say, self._nodes = list(hosts), engine, say, nodes
        self._python = python or sys.executable
        self._every = list(hosts)  # those that are lost, too
        self._links: list[Link] = []
        self._coming: list[Link] = []  # agents of lost hosts, for the next generation
        self._called = 0.0
        self._warm: dict[str, int] = {}  # workers of hosts that import torch before they answer
        self._source: Link | None = None  # whose run directory the one here follows
        self._hello: m.Hello | None = None
        self._longest = SILENCE_SECONDS
        self._answers: queue.Queue[tuple[Link, m.Message]] = queue.Queue()
        self._token: Path | None = None
        self._receiver: Mirrored | None = None
        self._output: Output | None = None
        self._generation: Generation | None = None
        self._signals = _Signals(here=engine is None)
        self._done = threading.Event()
        self.facts: dict[str, Facts] = {}

    def __enter__(self) -> Fleet:
        self._signals.__enter__()
        try:
            _allow_files(4 * len(self._hosts))  # that the link to a host has open
            for host in self._hosts:
                self._links.append(self._link(host))
        except BaseException:
            self.__exit__()
            raise
        threading.Thread(target=self._ping, daemon=True).start()
        return self

    def _link(self, host: Host) -> Link:
        if self._engine is None:
            return HereLink(host, self._arrived)
        return HostLink(host, self._arrived, self._engine, self._python)

    def __exit__(self, *_: object) -> None:
        self._signals.ignore()
        self._done.set()
        self._signals.pass_on(None)
        every = [*self._links, *self._coming]
        for link in every:
            link.order(m.End())
        # one limit for all: hosts end side by side
        limit = time.monotonic() + _STOP_SECONDS
        for link in every:
            link.close(max(0.1, limit - time.monotonic()))
        if self._token is not None:
            self._token.unlink(missing_ok=True)
        if self._receiver is not None:
            self._receiver.close()
        if self._engine is not None:
            self._engine.close()
        self._signals.__exit__()

    def _arrived(self, link: Link, answer: m.Message) -> None:
        """Take an answer, in its link's thread: what workers write goes on its way at once, so that
        one who writes faster than that is slowed down.
        """
        output = self._output
        if isinstance(answer, m.Progress):
            if "leave" in answer.message:  # one was asked: the others are too
                for each in self._links:
                    each.order(m.Leave())
            if output is not None:
                output.message(answer.rank, answer.message)
        elif isinstance(answer, m.Out | m.Log):
            if output is not None:
                take = output.out if isinstance(answer, m.Out) else output.log
                take(answer.rank, answer.data)
        elif isinstance(answer, m.File | m.Gone | m.Settled):
            if self._receiver is not None:
                self._receiver.take(answer)
        else:
            self._answers.put((link, answer))

    def _ping(self) -> None:
        pinged = 0.0
        while not self._done.is_set():
            # ten looks at a silent host before it is given up
            order = self._signals.wait(self._longest / 10)
            pings = time.monotonic() > pinged + 2.5
            pinged = time.monotonic() if pings else pinged
            away = [link for link in (*self._links, *self._coming) if isinstance(link, HostLink)]
            for link in away:
                if pings:
                    link.ping()
                link.look(self._longest, away)
            if order is not None:
                for each in self._links:
                    each.order(order)

    def _each(
        self, links: Sequence[Link], order: m.Message, kind: type[A]
    ) -> dict[str, tuple[A, float]]:
        """Give hosts an order: one answer of a kind from each, and when it came; all problems at
        once.

        Raises:
            WorldError: hosts that did not come up, refused or did not answer.
        """
        for link in links:
            link.order(order)
        answers: dict[str, tuple[A, float]] = {}
        problems: dict[str, str] = {}
        limit = time.monotonic() + _ANSWER_SECONDS
        while len(answers.keys() | problems) < len(links):
            try:
                link, answer = self._answers.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                late = f"no answer within {_ANSWER_SECONDS:.0f} s"
                for each in links:
                    if each.host.name not in answers:
                        problems.setdefault(each.host.name, each.meaning(255) or late)
                break
            name = link.host.name
            if link not in self._links:
                self._answered(link, answer)  # a lost host was called, and is still lost
            elif isinstance(answer, kind):
                answers[name] = answer, time.time()
            elif isinstance(answer, m.Refused):
                problems[name] = answer.why
            elif isinstance(answer, m.Closed):
                problems.setdefault(name, link.why(answer.status))
        if problems:
            places = {host.name: i for i, host in enumerate(self._hosts)}
            lines = [f"{h}: {problems[h]}" for h in sorted(problems, key=places.__getitem__)]
            raise WorldError("\n".join([*lines, "Nothing was started."]))
        return answers

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
        token = None if self._token is None else str(self._token.absolute())
        folder = str(Path.cwd())
        self._hello = m.Hello(folder, list(command), dict(environment), token, SILENCE_SECONDS)
        answers = self._each(self._links, self._hello, m.Told)
        for link in self._links:
            answer, received = answers[link.host.name]
            link.facts = {**answer.facts, "received": received}
        self.facts = {link.host.name: link.facts or {} for link in self._links}
        if lines := differences(self.facts, command):
            raise WorldError("\n".join(["the hosts differ:", *lines, "Nothing was started."]))
        return self.facts

    def keep(self, count: int) -> None:
        """Let all hosts but the first ``count`` go."""
        for link in self._links[count:]:
            link.order(m.End())
            link.close(_STOP_SECONDS)
        del self._links[count:], self._hosts[count:]

    def _meet(self) -> tuple[str, int, dict[str, str]]:
        """Choose the meeting point: address and port on node 0, and the address by which each host
        reaches it.
        """
        first, *others = self._links
        ((listening, _),) = self._each([first], m.Listen(), m.Listening).values()
        ports = dict(listening.ports)
        # loopback leads nowhere but for agents on one machine
        away = [a for a in ports if not a.startswith("127.") or not others]
        answers = self._each(others, m.Reach([(a, ports[a]) for a in away]), m.Reached)
        reached = {name: answer.by for name, (answer, _) in answers.items()}
        for address in ports:
            if all(address in by for by in reached.values()) and (
                others or address.startswith("127.")
            ):
                own = {name: by[address] for name, by in reached.items()}
                return address, ports[address], own
        worst = [name for name, by in reached.items() if not by] or list(reached)
        raise WorldError(
            f"{', '.join(worst)}: cannot connect to {first.host.name} on "
            f"{', '.join(away) or 'any address'}. Open the "
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
        self._signals.leaves, self._output = job.leaves, output
        if job.restarts and job.spares:
            self._warm = dict(zip((link.host.name for link in self._links), counts, strict=True))
        if job.restarts:
            self._longest = 1.0  # others go on without a host: to be wrong costs a restart
        try:
            outcome = self._run(job, counts, output, restarts, least)
        except _Interrupted as caught:
            outcome = self._stop(caught.number)
        finally:
            self._output = None
        return dataclasses.replace(outcome, seconds=time.monotonic() - start)

    def _run(
        self,
        job: Job,
        counts: Sequence[int],
        output: Output,
        restarts: Restarts | None,
        least: int,
    ) -> Outcome:
        """The generations, one after the other; how the last one ended."""
        while True:
            own = restarts.begin() if restarts else {}
            environment = {**job.environment, **own}
            now = dataclasses.replace(job, environment=environment, workers=sum(counts))
            generation = self._start(now, counts, restarts)
            if isinstance(generation, Outcome):
                outcome, grows = generation, ""
            else:
                grows = self._attend(generation, job)
                outcome = self._reasoned(generation.outcome())
            if outcome.again and grows and restarts and not (self._signals.asked or outcome.paused):
                restarts.grow(grows)
                outcome = dataclasses.replace(outcome, error="the hosts have changed")
            elif not restarts or not restarts.goes_on(outcome):
                return outcome
            if self._engine is not None:
                counts = self._regroup(job, least)
            if self._signals.asked:
                return Outcome(AGAIN, error=self._signals.text(), again=True, interrupted=True)
            if not counts:
                error = f"{outcome.error}; fewer workers than --min-workers {least} are left"
                return Outcome(1, error=error)
            if self._engine is not None:
                _tell_hosts([link.host.name for link in self._links], counts, output, restarts)

    def _reasoned(self, outcome: Outcome) -> Outcome:
        """The outcome, with what the launcher and the engine know of its reason."""
        if self._engine is None:
            return outcome
        if outcome.again:  # the run ends if it was asked to leave, and goes on if only a host was
            error = self._signals.text() or outcome.error
            return dataclasses.replace(outcome, error=error, interrupted=bool(self._signals.asked))
        # an engine that ends a run may signal its agents before it signals this process
        return self._with_reason(outcome) if outcome.interrupted else outcome

    def _start(
        self, job: Job, counts: Sequence[int], restarts: Restarts | None
    ) -> Generation | Outcome:
        """Start one generation of workers on the hosts that there are; an outcome if they cannot
        meet any more.
        """
        run_id = uuid.uuid4().hex if self._nodes is None else "ronde"
        if self._engine is None:
            nodes, own = self._nodes or Nodes(), {}
            if self._nodes is None:  # launchers of several hosts have no secret in common
                own["RONDE_SECRET"] = secrets.token_hex(32)
            here = dataclasses.replace(job, environment={**job.environment, **own})
            runs = [(self._links[0], m.StartWorkers(run_id, here, nodes))]
        else:
            try:
                runs = list(self._runs(job, counts, run_id))
            except WorldError as error:
                if restarts is None or not restarts.generation:
                    raise
                return Outcome(1, error=str(error).replace("Nothing was started.", "").strip())
        self._generation = Generation(
            self._links,
            job,
            run_id,
            runs[0][1].nodes.total_of(job),
            self._output,
            self._receiver is None,
        )
        for link, run in runs:
            link.order(run)
        if self._signals.asked:  # before the hosts knew of this generation
            self._signals.pass_on(dataclasses.replace(self._signals.leave(), id=run_id))
        return self._generation

    def _runs(
        self, job: Job, counts: Sequence[int], run_id: str
    ) -> Iterator[tuple[Link, m.StartWorkers]]:
        """What each host is to run."""
        address, port, own = self._meet()
        shared = all(self.facts[link.host.name]["sees"] for link in self._links)
        environment = {**job.environment, "RONDE_SECRET": secrets.token_hex(32)}
        if not os.environ.get("TORCH_CPP_LOG_LEVEL"):
            environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hosts need no names
        if job.directory is not None:
            job = dataclasses.replace(job, directory=job.directory.absolute())
            if not shared:
                environment["RONDE_RUN_DIR_SHARED"] = "0"
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        first = 0
        for node, (link, count) in enumerate(zip(self._links, counts, strict=True)):
            sees = bool(self.facts[link.host.name]["sees"])
            mirrored = node == 0 and job.directory is not None and not sees
            if mirrored and job.directory is not None:
                self._receiver = Mirrored(job.directory)
                # the node of rank 0 before this generation has all of it
                if link is not self._source:
                    _send_directory(link, job.directory)
            if node == 0:
                self._source = link
            link.address = own.get(link.host.name, address)
            there = dataclasses.replace(job, workers=count, environment=environment)
            yield (
                link,
                m.StartWorkers(
                    run_id,
                    there,
                    Nodes(node, len(counts), address, port, first=first, total=job.workers),
                    link.address,
                    mirrored,
                    sees,
                    _contents(environment),
                    link.host.name,
                ),
            )
            first += count

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
                back = [link for link in self._coming if link.facts is not None]
                self._coming = [link for link in self._coming if link not in back]
                self.facts |= {link.host.name: link.facts or {} for link in back}
                self._links += back
                counts = self._shares(job, least)
            if counts or self._signals.asked or time.monotonic() > begun + 60.0:
                break
            with contextlib.suppress(queue.Empty):
                self._answered(*self._answers.get(timeout=_WAIT_SECONDS))
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
        usable = _usable(job, self._links)
        if usable < max(least, 1):
            return []
        counts = share([link.host for link in self._links], self.facts, usable)
        return counts[: sum(1 for n in counts if n)]

    def _back(self, job: Job) -> str:
        """A lost host that is there again, and with which the plan can have more workers."""
        links = [link for link in self._links if not link.closed]
        back = [link for link in self._coming if link.facts is not None and not link.closed]
        if not back or len(links) < len(self._links):  # one is lost now: that restarts, too
            return ""
        more = _usable(job, [*links, *back]) > _usable(job, links)
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
                    assert self._hello is not None
                    warm = self._warm.get(host.name, 0)
                    link.order(dataclasses.replace(self._hello, warm=warm))
                    self._coming.append(link)

    def _answered(self, link: Link, answer: m.Message) -> None:
        """Take what an agent says that is not among those that run."""
        if link not in self._coming:
            return
        if isinstance(answer, m.Told) and self._hello is not None:
            link.facts = {**answer.facts, "received": time.time()}
            facts = {each.host.name: each.facts for each in (*self._links, link) if each.facts}
            if differences(facts, self._hello.command):  # it has come back as another one
                self._every = [host for host in self._every if host.name != link.host.name]
                self._coming.remove(link)
                link.close(0.1)
        elif isinstance(answer, m.Closed | m.Refused):
            self._coming.remove(link)
            link.close(0.1)

    def _attend(self, generation: Generation, job: Job) -> str:
        """Attend to a generation until every node has ended; call lost hosts meanwhile. Returns the
        host that is there again, for whose sake the workers were asked to leave, if there is one.
        """
        short, grows, asked = generation.workers < job.workers, "", 0.0
        while not generation.is_over:
            if short and time.monotonic() > self._called + _CALL_SECONDS:
                self._call()
            if short and not generation.ended and time.monotonic() > asked + _WAIT_SECONDS:
                asked = time.monotonic()
                grows = grows or self._back(job)
                if grows:  # again and again: workers may not know yet how to leave
                    for link in self._links:
                        link.order(m.Leave())
            try:
                link, answer = self._answers.get(timeout=_WAIT_SECONDS)
            except queue.Empty:
                generation.look()
                continue
            if link in self._links:
                generation.take(link, answer)
            else:
                self._answered(link, answer)  # it has come back, for the next generation
        return grows

    def _stop(self, number: int) -> Outcome:
        """End every worker after a signal to the launcher; a second one does not wait."""
        here = self._engine is None
        error = f"stopped by {signal.Signals(number).name}"
        outcome = Outcome(128 + number, error=error, interrupted=True)
        # by name: an agent may be about to start it
        begun = "" if self._generation is None else self._generation.id
        stop = m.Stop(number, 10.0, begun) if here else m.Stop(signal.SIGINT, 1.5, begun)
        limit = time.monotonic() + (stop.seconds if here else 0.0) + _STOP_SECONDS
        try:
            for link in self._links:
                link.order(stop)
            open_ones = set(self._links)
            while open_ones and (left := limit - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    link, answer = self._answers.get(timeout=left)
                    if isinstance(answer, m.WorkersEnded | m.Closed | m.Refused | m.Failed):
                        open_ones.discard(link)
        except _Interrupted:
            for link in self._links:
                link.order(dataclasses.replace(stop, seconds=0.0))
        if self._generation is not None:
            self._generation.record()
        return self._with_reason(outcome) if number == signal.SIGTERM else outcome

    def _with_reason(self, outcome: Outcome) -> Outcome:
        """Say why the engine ends its commands, where it does: a time limit, say; and which host
        was told.
        """
        for link in self._links:
            if meant := link.meaning(0):
                why = f"{outcome.error} ({link.host.name}: {meant.rstrip('.')})"
                return dataclasses.replace(outcome, error=why)
        return outcome


def _allow_files(more: int) -> None:
    """Allow this process as many more open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + more if hard == resource.RLIM_INFINITY else min(soft + more, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _usable(job: Job, links: Sequence[Link]) -> int:
    """How many workers the plan can have on these hosts."""
    facts = {link.host.name: link.facts or {} for link in links}
    together = 1
    if job.directory is not None and (file := RunDir(job.directory).plan).is_file():
        plan = Plan.load(file)
        together = plan.pipeline * plan.tensor
    there = sum(share([link.host for link in links], facts))
    return min(job.workers, there) // together * together


def _tell_hosts(
    names: Sequence[str], counts: Sequence[int], output: Output, restarts: Restarts
) -> None:
    """Say on which hosts the run goes on."""
    pairs = list(zip(names, counts, strict=True))
    output.name([f"[{h} {r}] " for r, h in enumerate(h for h, n in pairs for _ in range(n))])
    shown, plural = ", ".join(f"{h}:{n}" for h, n in pairs), "s" if sum(counts) > 1 else ""
    restarts.say(f"going on with {sum(counts)} worker{plural} on {shown}")


def _send_directory(link: Link, directory: Path) -> None:
    """Send a run that goes on to a node that does not share its directory."""
    names = folder_files(directory)
    link.order(m.Known(str(directory), names))
    for name in names:
        send_file(directory, name, link.order)


def _contents(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Variable -> name and text of the file here that it means."""
    files: dict[str, tuple[str, str]] = {}
    for name in _SENT:
        path = Path(environment.get(name) or "none")
        if path.is_absolute() and path.is_file():
            files[name] = path.name, path.read_text()
    return files
