"""One generation of workers on all hosts: judge what their agents tell, and how it ended."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ronde.launch import messages as m
from ronde.launch.console import Output
from ronde.launch.hang_watch import is_new
from ronde.launch.job import Job, Outcome
from ronde.launch.links import Link
from ronde.watch import HangFound, RunDir, append_events
from ronde.watch.hang_judge import HangVerdict, Limits, RankView, judge_foreign, judge_hang
from ronde.watch.health_record import RESOURCES
from ronde.watch.record import JsonLines

__all__ = ["Generation"]


class Generation:
    """One generation of workers. The first host that fails ends the others.

    Args:
        links: the agents that run it.
        job: what they run.
        run_id: its name for the agents.
        total: workers of all nodes, those that another launcher leads too.
        output: takes sentences about slow ranks.
        writes: whether the run's record is written here, and not mirrored.

    Attributes:
        id: its name.
        ended: link -> how its workers ended.
    """

    def __init__(
        self,
        links: Sequence[Link],
        job: Job,
        run_id: str,
        total: int,
        output: Output | None,
        writes: bool,
    ) -> None:
        self._links, self._job, self.id, self._total = list(links), job, run_id, total
        self._output, self._writes = output, writes
        self._limits = None if job.hang_timeout is None else Limits(job.hang_timeout)
        self._ranks: dict[Link, tuple[float, Sequence[RankView]]] = {}
        self._judged = 0.0
        self._slow: list[HangVerdict] = []
        self._unwritten: list[HangVerdict] = []
        self._hang: HangVerdict | None = None
        directory = job.directory
        self._resources = None if directory is None else JsonLines(directory / RESOURCES)
        self.ended: dict[Link, Outcome] = {}

    @property
    def workers(self) -> int:
        """How many there are."""
        return self._job.workers

    @property
    def is_over(self) -> bool:
        """Whether every node has ended."""
        return len(self.ended) == len(self._links)

    def look(self) -> None:
        """Nothing has come for a while: note agents that are gone without a word."""
        for link in self._links:
            if link.closed and link not in self.ended:
                self.take(link, m.Closed(255))

    def take(self, link: Link, answer: m.Message) -> None:
        """Take an agent's answer.

        Raises:
            BaseException: what an agent in this process has raised.
        """
        if isinstance(answer, m.Failed):
            raise answer.error
        if isinstance(answer, m.Views):
            self._judge(link, answer.views)
        elif isinstance(answer, m.Resources):
            self._keep(link, answer.used)
        elif isinstance(answer, m.WorkersEnded):
            self._note(link, answer.outcome)
        elif isinstance(answer, m.Refused):
            self._note(link, Outcome(1, error=f"host {link.host.name} is lost: {answer.why}"))
        elif isinstance(answer, m.Closed) and link not in self.ended:
            why = link.why(answer.status)
            self._note(link, Outcome(1, error=f"host {link.host.name} is lost: {why}"))

    def _keep(self, link: Link, used: Mapping[str, Any]) -> None:
        """Write what the workers of a host use."""
        host = link.host.name or socket.gethostname()
        if self._resources is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the run
                self._resources.write([{"type": "resources", "host": host, **used}])

    def _note(self, link: Link, outcome: Outcome) -> None:
        # who leaves was asked to, as all were: the others may still be saving
        fails = bool(outcome.status) and not outcome.again
        if fails and not any(o.status and not o.again for o in self.ended.values()):
            seconds = 0.0 if self._job.restarts else 1.5  # to end by themselves
            for other in self._links:
                if other is not link:
                    other.order(m.Stop(signal.SIGINT, seconds, self.id))
        self.ended.setdefault(link, outcome)

    def _judge(self, link: Link, views: Sequence[RankView]) -> None:
        """Judge from what all nodes say of their ranks: say that one is slow, or end a hang."""
        if self._limits is None or self._hang is not None:
            return
        now = time.monotonic()
        self._ranks[link] = now, views
        if now < self._judged + 0.5:  # however many hosts report
            return
        self._judged = now
        each = self._ranks.values()
        # two reports of an agent: what is older says nothing of now
        fresh = [v for at, views in each if now - at < 4.0 for v in views]
        judge = judge_hang if self._job.tensorflow is None else judge_foreign
        verdict = judge(fresh, self._limits, self._total)
        if verdict is not None and not verdict.slow:
            self._hang = verdict
            for other in self._links:
                other.order(m.EndHang(verdict))
        elif verdict is not None and is_new(verdict, self._slow):
            self._slow.append(verdict)
            self._unwritten.append(verdict)
            if self._output is not None:
                self._output.out(0, f"warning: {verdict.sentence}\n".encode())
        if self._writes:
            self.record()

    def record(self) -> None:
        """Write what was found about slow ranks to the record, if there is one yet."""
        directory = None if self._job.directory is None else RunDir(self._job.directory)
        if directory is None or not self._unwritten or not directory.record.is_file():
            return
        names = ("sentence", "rank", "step", "place", "slow")
        events = [
            HangFound(**{name: getattr(each, name) for name in names}, waiting=list(each.waiting))
            for each in self._unwritten
        ]
        with contextlib.suppress(OSError):  # a full disk must not end the run
            append_events(directory.record, *events)
        self._unwritten.clear()

    def outcome(self) -> Outcome:
        """How the generation ended, when every node has."""
        if self._resources is not None:
            self._resources.close()
        failed = [o for o in self.ended.values() if o.status and not o.interrupted]
        if not failed:
            failed = [o for o in self.ended.values() if o.status]
        if not failed:
            self.record()
            return Outcome(0, left=any(o.left for o in self.ended.values()))
        # the first to fail, but rather one that did not fail because another was gone
        worst = min(failed, key=lambda o: (o.again, o.consequence))
        self._unwritten += [worst.hang] if worst.hang else []
        self.record()
        return worst
