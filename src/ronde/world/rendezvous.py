"""Ranks meet over the store before an exchange, and learn who went on to something else.

A gloo or NCCL exchange that one rank enters alone waits for minutes, or pairs with another one. A
meeting costs each rank the same few messages to the store on any number of ranks: the last one that
comes says that all are here. Steps do not meet: a rank counts them, and a thread publishes the
count once a second for ranks that wait.
"""

from __future__ import annotations

import atexit
import hmac
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from ronde.world.errors import RondeError, WorldError
from ronde.world.heartbeat import heartbeat
from ronde.world.identity import World, ranks_text

__all__ = ["LateError", "Rendezvous", "counted", "rendezvous", "store_client"]

_ENDED = "ended its script"

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=RondeError)


def _signed(key: str, text: str) -> str:
    """A value of the store with the run's secret in its digest: the store itself asks nobody who
    he is. Without a secret (under other launchers) the digest only shows damage.
    """
    secret = os.environ.get("RONDE_SECRET", "").encode()
    where = f"{os.environ.get('RONDE_GENERATION', '')} {key} "
    return hmac.digest(secret, (where + text).encode(), "sha256").hex() + text


def _verified(key: str, value: bytes) -> Any:
    """The JSON value that :func:`_signed` signed under this key.

    Raises:
        WorldError: it was written by somebody else.
    """
    text = value[64:].decode(errors="replace")  # hexadecimal digits of a SHA-256
    if not hmac.compare_digest(_signed(key, text).encode(), value):
        raise WorldError(
            f"the value {key!r} in the store where ranks meet does not come from this run: another "
            "program writes to its port. Run on a network that you trust, and see docs/security.md."
        )
    return json.loads(text)


def store_client(prefix: str, store: Any = None) -> Any:
    """A client of its own: a blocking call of another user of the store holds that one's lock.

    Args:
        prefix: of its keys.
        store: of whose server; None for that of torch.distributed.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    client: Any = PrefixStore(prefix, store or _get_default_store())
    return client.clone()


class LateError(WorldError):
    """A rank did not come to a meeting in time; it may still come, and finds what was asked for."""


class Rendezvous:
    """This process's place in the sequence of calls that all ranks make.

    Args:
        me: this worker.
        store: where ranks meet; None for that of torch.distributed.

    Attributes:
        begun: how many calls of the whole world have begun: the same sequence on every rank.
        heartbeat: says the same to the launcher, which finds out when nothing goes on.
    """

    def __init__(self, me: World, store: Any = None) -> None:
        self.me = me
        self.heartbeat = heartbeat(me.rank)
        self.heartbeat.answer(me.device.type == "cuda")
        self.begun = 0
        self.doing = ""
        self._met: dict[tuple[int, ...], int] = {}
        self._pid = os.getpid()
        self._published: tuple[int, str] | None = None
        self._last: tuple[list[str], int] = [], 0  # who says that they left the last meeting
        self._stopped = threading.Event()
        if me.size > 1:
            self._store = store_client("ronde/rendezvous", store)
            self._lock = threading.Lock()
            self._thread = threading.Thread(target=self._publish_often, daemon=True)
            self._thread.start()
            atexit.register(self._stop)

    @property
    def doing(self) -> str:
        """The call under way, as the script writes it; empty in the script's own code."""
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing = what
        self.heartbeat.doing(what, self.begun)

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, _signed(key, json.dumps(value)))

    def _values(self, keys: Sequence[str]) -> list[Any]:
        values = self._store.multi_get(list(keys))
        return [_verified(key, value) for key, value in zip(keys, values, strict=True)]

    # -- what this rank does, for others -----------------------------------------------

    def _publish(self) -> None:
        now = (self.begun, self.doing)
        if now != self._published:
            self._published = now
            with self._lock:
                self._put(f"at/{self.me.rank}", now)

    def _publish_often(self) -> None:
        with suppress(RuntimeError):  # the store has gone: so has the world
            while not self._stopped.wait(1.0):
                self._publish()

    def _stop(self) -> None:
        if self._pid != os.getpid():  # a fork, such as a loading process
            return
        self._stopped.set()
        self._thread.join()
        self.doing = _ENDED
        with suppress(RuntimeError):
            self._publish()
            # Rank 0 may hold the store: others must have read what they met for.
            keys, n = self._last
            limit = time.monotonic() + 2.0
            while keys and self.me.is_main and time.monotonic() < limit:
                if self._store.check(keys) and min(self._values(keys)) >= n:
                    break
                time.sleep(0.005)

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Count a call of the whole world, under way within the block."""
        self.begun += 1
        before, self.doing = self.doing, what
        try:
            yield
        finally:
            self.doing = before

    # -- meeting -----------------------------------------------------------------------

    def meet(
        self,
        what: str,
        facts: Any = None,
        *,
        ranks: Sequence[int] | None = None,
        advice: str = "",
        at_most_seconds: float = math.inf,
        within: bool = False,
    ) -> list[Any]:
        """Wait until all ranks have called the same; returns their ``facts``, in rank order.

        A rank that is merely late is waited for. After five seconds a line says which.

        Args:
            what: the call, as the script writes it.
            facts: anything JSON holds.
            ranks: who meets; None for all.
            advice: what to do if others do something else.
            at_most_seconds: how long to wait for a rank that is merely late.
            within: a call of the whole world is under way, and the ranks meet in its beginning: one
                that has begun it and does not come within seconds has gone on in it.

        Raises:
            WorldError: a rank called something else, went on to a later call, or ended.
            LateError: a rank did not come within ``at_most_seconds``.
        """
        everyone = tuple(range(self.me.size))
        chosen = everyone if ranks is None else tuple(ranks)
        if len(chosen) == 1:
            return [json.loads(json.dumps(facts))]
        n = self._met[chosen] = self._met.get(chosen, 0) + 1
        name = "all" if chosen == everyone else ",".join(map(str, chosen))
        before, self.doing = self.doing, what
        try:
            own = f"{name}/{n}/{self.me.rank}"
            with self._lock:
                self._put(own, [what, facts, advice])
                if self._store.add(f"{name}/{n}/here", 1) == len(chosen):
                    self._store.set(f"{name}/{n}/all", "1")
            # After the key: a rank that has begun this call, and has no key, began another one.
            past = self.begun - within
            if chosen == everyone:
                self.begun += 1
            self._publish()
            looks = 5 if within else 1  # it may still be on its way
            gone = self._wait(what, chosen, f"{name}/{n}", past, advice, at_most_seconds, looks)
            if gone is not None:
                # Others never came. A script that catches the error may meet them here next time.
                with suppress(RuntimeError), self._lock:
                    self._store.delete_key(own)
                    self._store.add(f"{name}/{n}/here", -1)
                self._met[chosen], self.begun = n - 1, past + within
                raise self.refuse(gone)
            with self._lock:
                notes = self._values([f"{name}/{n}/{rank}" for rank in chosen])
                # Everyone is here, so everyone has left the meeting before last.
                self._store.delete_key(f"{name}/{n - 2}/{self.me.rank}")
                for key in ("here", "all", "gone") if self.me.rank == chosen[0] else ():
                    self._store.delete_key(f"{name}/{n - 2}/{key}")
                self._put(f"{name}/left/{self.me.rank}", n)
            self._last = [f"{name}/left/{rank}" for rank in chosen], n
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise WorldError(
                f"rank {self.me.rank} called {what}, and the store where ranks meet is gone: rank "
                "0 or the launcher has ended."
            ) from error
        finally:
            self.doing = before
        self._check(chosen, notes)
        return [facts for _, facts, _ in notes]

    def _wait(
        self,
        what: str,
        chosen: Sequence[int],
        meeting: str,
        past: int,
        advice: str,
        at_most_seconds: float,
        looks: int,
    ) -> WorldError | None:
        """None once all are here, or the error that one never will be, as ``looks`` looks tell."""
        at = chosen.index(self.me.rank)
        # what each finds of the eight after it, all others read
        mine = {*(*chosen, *chosen)[at + 1 : at + 9]}
        start = looked = time.monotonic()
        say_at, pause = start + 5.0, 0.0002
        while True:
            with self._lock:
                if self._store.check([f"{meeting}/all"]):
                    return None
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
            now = time.monotonic()
            if now - looked < 0.5:
                continue
            looked = now
            with self._lock:
                is_known = self._store.check([f"{meeting}/gone"])
                known = {int(self._store.get(f"{meeting}/gone"))} if is_known else set()
            for rank in self._missing(meeting, mine | known):
                gone = self._look(rank, what, f"{meeting}/{rank}", past, advice)
                if gone is not None:
                    looks -= 1
                    if looks <= 0:
                        with self._lock:
                            self._store.set(f"{meeting}/gone", str(rank))
                        return gone
                    break
            if now - start > at_most_seconds or now > say_at:
                if not (missing := self._missing(meeting, chosen)):
                    continue  # between two checks the last one came, or one gave up
                if now - start > at_most_seconds:
                    raise LateError(f"{ranks_text(missing)} did not call {what}.")
                say_at = now + 60.0
                print(
                    f"ronde: rank {self.me.rank} has waited {now - start:.0f} s for "
                    f"{ranks_text(missing)} to call {what}.",
                    file=sys.stderr,
                    flush=True,
                )

    def _missing(self, meeting: str, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that have not come."""
        with self._lock:
            return [r for r in sorted(ranks) if not self._store.check([f"{meeting}/{r}"])]

    def _look(self, rank: int, what: str, key: str, past: int, advice: str) -> WorldError | None:
        """The error that a rank which has not come never will."""
        with self._lock:
            if not self._store.check([f"at/{rank}"]):
                return None
            ((begun, doing),) = self._values([f"at/{rank}"])
            if self._store.check([key]):
                return None  # it came meanwhile
        if doing == _ENDED or begun > past:
            went = f"{doing}" if doing == _ENDED else f"went on to {doing or 'later calls'}"
            return WorldError(
                f"rank {self.me.rank} called {what}, and rank {rank} {went}. {advice or _ADVICE}",
                lost_rank=doing == _ENDED,
            )
        return None

    def _check(self, ranks: Sequence[int], notes: Sequence[Sequence[Any]]) -> None:
        calls: dict[str, list[int]] = {}
        for rank, (what, _, _) in zip(ranks, notes, strict=True):
            calls.setdefault(what, []).append(rank)
        if len(calls) > 1:
            said = "; ".join(f"{ranks_text(who)} called {what}" for what, who in calls.items())
            advice = next((a for _, _, a in notes if a), _ADVICE)
            raise self.refuse(WorldError(f"{said}. {advice}"))

    # -- errors ------------------------------------------------------------------------

    def refuse(self, error: E) -> E:
        """Publish an error that is about to be raised: ranks that wait in an exchange name it,
        once the exchange breaks.
        """
        if self.me.size > 1:
            with suppress(RuntimeError), self._lock:
                self._put("refused", [self.begun, str(error)])
        return error

    def explain(self, error: RuntimeError) -> RuntimeError:
        """The error that made another rank leave, if an exchange broke because of it."""
        if self.me.size == 1 or isinstance(error, RondeError):
            return error
        with suppress(RuntimeError), self._lock:
            if self._store.check(["refused"]):
                ((begun, text),) = self._values(["refused"])
                if abs(self.begun - begun) <= 2:
                    return WorldError(text)
            for rank in range(self.me.size):
                if rank != self.me.rank and self._store.check([f"at/{rank}"]):
                    ((_, doing),) = self._values([f"at/{rank}"])
                    if doing == _ENDED:
                        return WorldError(
                            f"rank {self.me.rank} is in {self.doing}, and rank {rank} {_ENDED}. "
                            f"{_ADVICE}",
                            lost_rank=True,
                        )
        return error


_ADVICE = (
    "Every rank must make the same calls, in the same order: look for what depends on the rank."
)
_made: Rendezvous | None = None


def rendezvous(me: World) -> Rendezvous:
    """This process's rendezvous, made once. Call it on every rank, after ``connect``."""
    global _made
    if _made is None or _made.me != me:
        _made = Rendezvous(me)
    return _made


class _Meets(Protocol):
    _rendezvous: Rendezvous


M = TypeVar("M", bound=_Meets)


def counted(
    what: str,
) -> Callable[[Callable[Concatenate[M, P], R]], Callable[Concatenate[M, P], R]]:
    """Decorator of a method that all ranks call together: counts it, and names broken exchanges."""

    def decorate(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        @wraps(method)
        def call(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
            # In each step: without the property, and what it calls.
            meeting, before = self._rendezvous, self._rendezvous._doing
            meeting.begun = begun = meeting.begun + 1
            meeting._doing = what
            meeting.heartbeat.doing(what, begun)
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                meeting.heartbeat.failed(error)  # the script may catch it, and do something else
                if isinstance(error, RondeError):
                    meeting.refuse(error)  # others may wait in an exchange
                if not isinstance(error, RuntimeError):
                    raise
                explained = meeting.explain(error)
                if explained is error:
                    raise
                raise explained from None  # gloo only says that a connection is closed
            finally:
                meeting._doing = before
                meeting.heartbeat.doing(before, meeting.begun)

        return call  # type: ignore[return-value]  # a method: self is positional

    return decorate
