"""Watch the workers of one node: notice one that is stopped or makes no progress, and say why."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ronde.launch.console import Router
from ronde.watch.hang_judge import (
    GOES_ON,
    STOPPED_SECONDS,
    HangVerdict,
    Limits,
    RankView,
    is_step,
    rate_text,
    waits_for_others,
)
from ronde.watch.process_facts import ProcessFacts, catches, is_stopped, process_facts, reasons
from ronde.watch.stack_place import StackPlace, locate
from ronde.watch.tcp_facts import TcpConnection, connections_of, tcp_connections
from ronde.world.heartbeat import Beat, read_beat

__all__ = ["HangWatch", "WatchedWorker", "is_new"]

_libc = ctypes.CDLL(None, use_errno=True)

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 0.5
_BUSY_CORES = 0.25
_SENT_BYTES = 1000  # over TCP, in a second


class WatchedWorker:
    """What is known of one worker, from look to look."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self._folder = rank, folder
        self.pid = 0
        self.beat: Beat | None = None
        self.since = time.monotonic()
        self.longest: dict[str, float] = {}  # by call; steps, and what is between them, are one
        self.looked = time.monotonic()
        self.stopped = 0.0  # seconds in which this process was awake itself
        self.asked = 0.0
        self.place: StackPlace | None = None
        self.alive = self.since  # the last sign of life
        self.sign = ""
        self.dump = ""
        self.answer: dict[str, Any] = {}
        self._mark: ProcessFacts | None = None  # of the first look since the last progress
        self._fact: ProcessFacts | None = None
        self._pace: list[ProcessFacts] = []  # some seconds apart

    def look(self, now: float) -> None:
        """Read its heartbeat, and whether a signal has stopped it."""
        gone, self.looked = now - self.looked, now
        if gone > 30.0:  # this process did not run: what happened meanwhile is not known
            self.since, self.alive = self.since + gone, self.alive + gone
        beat = read_beat(self._folder / f"heartbeat-{self.rank}")
        if beat is not None and (self.beat is None or beat.pid != self.beat.pid):
            self.longest, self.pid = {}, beat.pid
        if beat is not None and (self.beat is None or beat.ticks != self.beat.ticks):
            if self.beat is not None and (self.beat.steps or is_step(self.beat.doing)):
                kind = _kind(self.beat.doing)
                self.longest[kind] = max(self.longest.get(kind, 0.0), now - self.since)
            self.beat, self.since, self.alive = beat, now, now
            self.place, self.sign, self._mark, self._fact = None, "", None, None
            self.stopped = 0.0  # it ran since the last look
        if not self.pid:
            self.pid = self._first_pid()
        if self.pid and (not self._pace or now - self._pace[-1].time > 5.0):
            self._pace = [*self._pace[-2:], process_facts(self.pid, children=False)]
        passed = min(gone, 1.5 * _LOOK_SECONDS)
        if self.pid and is_stopped(self.pid):
            self.stopped += passed
        else:
            self.stopped = 0.0

    def _first_pid(self) -> int:
        """The process before it has a heartbeat, from the file for its stacks."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder / f"stacks-{self.rank}").read_text().partition("\n")[0])
        return 0

    def examine_stopped(self) -> None:
        """Find out where a process was stopped: it runs on for the moment that this takes."""
        if self.place is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            waking = threading.Timer(0.02, os.kill, [self.pid, signal.SIGCONT])
            waking.start()
            self.dump = _dump(self.pid, self._folder / f"stacks-{self.rank}")
            waking.join()
            os.kill(self.pid, signal.SIGSTOP)
        self.place = locate(self.dump)

    def examine(
        self,
        now: float,
        limit: float,
        tcp: Mapping[int, TcpConnection],
        exchanged: tuple[int, int],
        printed: float,
    ) -> None:
        """Ask where it is, and look for signs of life."""
        if self.stopped or now - self.asked < min(2.0, limit / 4):
            return
        self.asked = now
        fact = process_facts(self.pid, tcp=tcp)
        fact = dataclasses.replace(fact, exchanged=sum(exchanged), arrived=exchanged[1])
        before, place, numbers = self._fact, self.place, _numbers(self.answer)
        self._mark, self._fact = self._mark or fact, fact
        self.dump, children = self.stacks()
        ended = self.beat is not None and self.beat.phase == "ended"
        # a process that is gone has no stack
        self.place = None if ended and not self.dump else locate(self.dump, children)
        if before is None or place is None or self.place is None:
            return
        cuda = bool(self.beat and self.beat.cuda)
        exchanges = self.answer.get("exchanges", ())
        if waits_for_others(self.place, cuda, exchanges):
            sent = _rate(before, fact, "exchanged")
            exchanged_more = exchanges and numbers and numbers != _numbers(self.answer)
            moved = exchanged_more or _way(place) != _way(self.place)
            sign = GOES_ON if moved else "bytes move" if sent > _SENT_BYTES else ""
            if (
                not cuda and _cores(before, fact) > _BUSY_CORES
            ):  # part of a stage, or for another thread
                self.alive = now
        else:
            sign = "it prints" if printed > self.alive else _sign(before, fact)
            sign = sign or ("its stack changes" if place.chain != self.place.chain else "")
        if sign:
            self.alive, self.sign = now, sign

    def stacks(self) -> tuple[str, list[str]]:
        """Its stack, then those of its loading processes; and what its own thread answers."""
        file = self._folder / f"stacks-{self.rank}"
        dumps = [_dump(self.pid, file)]
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True)[:16]:
                dumps.append(_dump(child.pid, file))
        token = f"{time.monotonic_ns()}"
        with contextlib.suppress(OSError):
            descriptor = os.open(self._folder / f"ask-{self.rank}", os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, token.encode())
            os.close(descriptor)
        self.answer = {}
        limit = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < limit:
            with contextlib.suppress(OSError, ValueError):
                said = json.loads((self._folder / f"answer-{self.rank}").read_text())
                if said["token"] == token:
                    self.answer = said
                    break
            if not (self._folder / f"ask-{self.rank}").exists():
                break
            time.sleep(0.02)
        others = self.answer.get("threads", "") if dumps[0] else ""  # the main thread's comes last
        return others + dumps[0], [d for d in dumps[1:] if d]

    def view(self, now: float, folders: tuple[Path, ...]) -> RankView:
        """What is known of it now."""
        beat = self.beat
        mark, fact = self._mark, self._fact
        why: tuple[str, ...] = ()
        rate = 0.0
        if mark is not None and fact is not None and fact.time > mark.time:
            rate = max(fact.arrived - mark.arrived, 0) / (fact.time - mark.time)
            why = reasons(mark, fact, folders)
        elif len(self._pace) > 1:
            why = reasons(self._pace[0], self._pace[-1])
        return RankView(
            self.rank,
            beat.phase if beat else "unwatched",
            beat.doing if beat else "",
            beat.begun if beat else 0,
            beat.step if beat else 0,
            beat.steps if beat else 0,
            now - self.since,
            self.longest.get(_kind(beat.doing if beat else ""), 0.0),
            self.stopped,
            bool(beat and beat.cuda),
            self.sign if now - self.alive < 5.0 else "",
            why,
            self.place,
            tuple(self.answer.get("exchanges", ())),
            self.answer.get("module", ""),
            beat.error if beat else "",
            quiet_seconds=now - max(self.alive, self.since),
            bytes_per_second=rate,
            in_flight=bool(fact and fact.in_flight),
            lost_loader=bool(fact and fact.lost_loader),
            gone=bool(self.pid) and _is_gone(self.pid),
        )


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _kind(doing: str) -> str:
    return "" if not doing or is_step(doing) else doing


def _numbers(answer: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """How far a rank's exchanges are."""
    return [(e["group"], e["number"], e["done"]) for e in answer.get("exchanges", ())]


def _way(place: StackPlace) -> tuple[Any, ...]:
    return place.file, place.line, place.function


def _exchanged(
    tcp: Mapping[int, TcpConnection], pids: Mapping[int, int]
) -> dict[int, tuple[int, int]]:
    """Bytes that each rank has sent to others and received, not those of its other connections on
    this machine.
    """
    owners = {inode: rank for rank, pid in pids.items() for inode in connections_of(pid)}
    ends = {c.ports: inode for inode, c in tcp.items()}
    moved = dict.fromkeys(pids, (0, 0))
    for inode, rank in owners.items():
        if (own := tcp.get(inode)) is not None:
            other = ends.get(own.ports[::-1])
            if other is None or owners.get(other, rank) != rank:
                moved[rank] = moved[rank][0] + own.sent, moved[rank][1] + own.received
    return moved


def _rate(before: ProcessFacts, fact: ProcessFacts, *names: str) -> float:
    """By how much the sum of some facts has grown in a second."""
    grown = sum(getattr(fact, name) - getattr(before, name) for name in names)
    return float(grown) / max(fact.time - before.time, 1e-3)


def _cores(before: ProcessFacts, fact: ProcessFacts) -> float:
    """Cores in use, or waited for."""
    return _rate(before, fact, "cpu_seconds", "delayed")


def _sign(before: ProcessFacts, fact: ProcessFacts) -> str:
    """What a process and its children have done between two moments; empty if nothing."""
    if fact.runs or _cores(before, fact) > _BUSY_CORES:
        return "it uses CPU"
    if (moved := _rate(before, fact, "sent", "received")) > _SENT_BYTES:
        return f"it moves {rate_text(moved)} over the network"
    if _rate(before, fact, "io_bytes") > 1 << 20:
        return "it reads or writes"
    return "it waits for a disk" if fact.waits_for_disk and before.waits_for_disk else ""


def _dump(pid: int, file: Path) -> str:
    """Let faulthandler write a process's stacks; empty if it does not listen to the signal."""
    number = stack_signal()
    if number is None or not catches(pid, number):
        return ""
    try:
        before = file.stat().st_size
        _signal_main_thread(pid, number)
        text, limit = "", time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < limit:
            time.sleep(0.03)
            with file.open(errors="replace") as stream:
                stream.seek(before)
                said = stream.read()
            # the first frame is a module's
            if said == text and said.rstrip().endswith((" in <module>", "...")):
                break
            text = said
        return text
    except OSError:
        return ""


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to a process's first thread: a stopped one takes it before it runs on, where
    any other thread might take it while the first one runs on.
    """
    if hasattr(_libc, "tgkill"):
        if _libc.tgkill(pid, pid, number):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    else:
        os.kill(pid, number)


def stack_signal() -> int | None:
    """The signal on which workers write their stacks, see :mod:`ronde.launch.worker`."""
    first = getattr(signal, "SIGRTMIN", None)
    return None if first is None else int(first) + 7


class HangWatch:
    """Looks at the workers every second and reports, and ends those of a run that hangs.

    Args:
        router: reads what they print; in its folder they keep their heartbeats and stacks.
        ranks: theirs.
        limits: when to look closer.
        folders: on whose disks the run writes.
        port: of the store at which workers meet, whose connections are no exchange.
        foreign: whether the script trains without Ronde, and is watched all the same.
        every: seconds between two reports while all goes on.
        report: called with what is known of the ranks. Who sees those of all nodes judges, and
            calls :meth:`end`.

    Attributes:
        verdict: why it ended them; None if it did not.
    """

    def __init__(
        self,
        router: Router,
        ranks: Sequence[int],
        limits: Limits,
        folders: tuple[Path, ...],
        port: int,
        foreign: bool,
        every: float,
        report: Callable[[list[RankView]], object],
    ) -> None:
        self._workers = [WatchedWorker(rank, router.error_folder) for rank in ranks]
        self._router, self._limits, self._folders = router, limits, folders
        self._port, self._foreign = port, foreign
        self._every, self._report = every, report
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ronde-hangs", daemon=True)
        self.verdict: HangVerdict | None = None

    def __enter__(self) -> HangWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        reported = 0.0
        while not self._over.wait(_LOOK_SECONDS) and self.verdict is None:
            try:
                views, now = self._look(), time.monotonic()
                soon = self._limits.say / 2  # from then on, each look is worth a report
                waits = any(v.idle_seconds >= soon or v.stopped_seconds for v in views)
                if waits or now > reported + self._every:
                    reported = now
                    self._report(views)
            except Exception as error:  # watching never breaks the training
                why = f"hangs are not watched any more ({type(error).__name__}: {error})"
                self._router.say(f"ronde: {why}")
                return

    def _look(self) -> list[RankView]:
        """What is known of each rank now. After half of the limit without progress, their stacks
        too.
        """
        now = time.monotonic()
        for worker in self._workers:
            worker.look(now)
        for worker in self._workers:
            if worker.stopped >= STOPPED_SECONDS:
                worker.examine_stopped()
        active = [w for w in self._workers if not w.beat or w.beat.phase != "ended"]
        active = active or self._workers
        if active and max(now - w.since for w in active) >= self._limits.say / 2:
            tcp = {i: c for i, c in tcp_connections().items() if self._port not in c.ports}
            exchanged = _exchanged(tcp, {w.rank: w.pid for w in self._workers if w.pid})
            # a script that never calls Ronde is left in peace
            watched = self._foreign or any(w.beat for w in self._workers)
            until = math.inf if watched else 2 * self._limits.say
            for worker in self._workers:  # those that have left the loop too: others may wait
                if worker.pid and (worker.beat or now - worker.since < until):
                    printed = self._router.printed.get(worker.rank, 0.0)
                    worker.examine(now, self._limits.say, tcp, exchanged[worker.rank], printed)
        return [w.view(now, self._folders) for w in self._workers]

    def end(self, verdict: HangVerdict) -> None:
        """Write the stacks that were seen to the logs, and end the workers by force: a stopped one,
        or one in an exchange, hears nothing else.
        """
        self.verdict = verdict
        for worker in self._workers:
            if worker.dump:
                text = f"{verdict.sentence}\nThe stack of rank {worker.rank}:\n{worker.dump}"
                self._router.log(worker.rank, f"\n{text}\n")
        for worker in self._workers:
            if worker.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)


def is_new(verdict: HangVerdict, known: Sequence[HangVerdict]) -> bool:
    """Whether nothing was said yet about this rank in this step, or at this place if it pauses so
    long now and then.
    """
    same = [v for v in known if v.rank == verdict.rank]
    usual = verdict.usual and any(v.place == verdict.place for v in same)
    return not usual and all(v.step != verdict.step for v in same)
