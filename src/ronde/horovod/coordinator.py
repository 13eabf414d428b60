"""Rank 0's coordinator: pairs the operations of all ranks by name, checks them, and orders them.

Every rank announces an operation as one JSON line. Once all ranks of its process set have announced
it, the coordinator compares what they announced and tells each rank to run it. All ranks receive
these orders in one sequence, so their exchanges cannot cross.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ronde.horovod.chrome_trace import ChromeTrace
from ronde.world.identity import ranks_text
from ronde.world.network import listen_on

__all__ = ["Coordinator", "Key", "describe"]

Key = tuple[int, str, str]
"""Process set, kind of operation, name."""

_RAGGED = ("allgather", "alltoall")  # kinds whose first dimension may differ among ranks
_WORDS = {
    "shape": "shape",
    "dtype": "data type",
    "root": "root rank",
    "op": "reduction",
    "names": "list of parameters",
}


def describe(key: Key) -> str:
    """An operation in words: ``allreduce 'loss'``."""
    return f"{key[1]} {key[2]!r}"


@dataclass
class _Pending:
    """An operation that some ranks have announced."""

    since: float
    metas: dict[int, dict[str, Any]] = field(default_factory=dict)
    warned: bool = False


class Coordinator(threading.Thread):
    """The thread on rank 0 that all ranks talk to.

    Args:
        size: how many ranks there are.
        token: what each rank must say first, so that a stranger's connection is closed.
        address: where to listen, on a free port.
        warn_seconds: name the missing ranks after this time; 0 never does.
        abort_seconds: let the operation fail after this time; 0 never does.
        trace: receives the times of negotiation.
    """

    def __init__(
        self,
        size: int,
        token: str,
        address: str,
        warn_seconds: float,
        abort_seconds: float,
        trace: ChromeTrace,
    ) -> None:
        super().__init__(name="horovod-coordinator", daemon=True)
        self._size, self._token, self._trace = size, token, trace
        self._warn_seconds, self._abort_seconds = warn_seconds, abort_seconds
        self._listener = listen_on(address, backlog=size)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._sockets: dict[int, socket.socket] = {}
        self._incoming: dict[socket.socket, bytearray] = {}
        self._outgoing: dict[socket.socket, bytearray] = {}
        self._sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._pending: dict[Key, _Pending] = {}
        self._joined: list[int] = []  # in this order: the last one is what join() returns
        self._left: dict[int, str] = {}  # rank -> why
        self._aborted: dict[Key, tuple[str, set[int]]] = {}

    def run(self) -> None:
        """Serve until every rank has left."""
        while len(self._left) < self._size:
            events = self._selector.select(1.0)  # stalls are looked for at least once a second
            for entry, mask in events:
                sock = entry.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                    continue
                if mask & selectors.EVENT_WRITE:
                    self._flush(sock)
                if mask & selectors.EVENT_READ:
                    self._receive(sock)
            self._look_for_stalls()
        for sock in self._incoming:  # the last goodbyes may still wait here
            sock.setblocking(True)
            sock.settimeout(1.0)
            with suppress(OSError):
                sock.sendall(self._outgoing[sock])
            sock.close()
        self._listener.close()
        self._selector.close()

    # ------------------------------------------------------------------ connections

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # orders are small and urgent
        self._incoming[sock], self._outgoing[sock] = bytearray(), bytearray()
        self._selector.register(sock, selectors.EVENT_READ)

    def _rank_of(self, sock: socket.socket) -> int | None:
        return next((r for r, s in self._sockets.items() if s is sock), None)

    def _close(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._incoming[sock], self._outgoing[sock]
        sock.close()

    def _receive(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        rank = self._rank_of(sock)
        if not data:
            self._close(sock)
            if rank is not None:
                del self._sockets[rank]
                if rank not in self._left:
                    self._leave(rank, "ended")
            return
        buffer = self._incoming[sock]
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if rank is None:
                rank = self._greet(sock, line)
                if rank is None:
                    return
            else:
                self._handle(rank, json.loads(line))
        if rank is None and len(buffer) > 4096:  # a stranger may send without an end
            self._close(sock)

    def _greet(self, sock: socket.socket, line: bytes) -> int | None:
        with suppress(ValueError, KeyError, TypeError):
            hello = json.loads(line)
            if hmac.compare_digest(str(hello["token"]), self._token):
                rank = int(hello["rank"])
                self._sockets[rank] = sock
                return rank
        self._close(sock)
        return None

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        sock = self._sockets.get(rank)
        if sock is None:
            return
        waiting = self._outgoing[sock]
        waiting += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._flush(sock)

    def _flush(self, sock: socket.socket) -> None:
        """Send what the socket takes: waiting for one rank would keep orders from the others."""
        waiting = self._outgoing[sock]
        try:
            del waiting[: sock.send(waiting)]
        except BlockingIOError:
            pass
        except OSError:
            waiting.clear()  # reading it tells that the rank has ended
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        self._selector.modify(sock, mask)

    # ------------------------------------------------------------------ operations

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        if "do" in message:
            self._announce(rank, tuple(message["do"]), message["meta"])
        elif "join" in message:
            self._joined.append(rank)
            for key in list(self._pending):
                self._settle(key)
            self._end_join()
        elif "bye" in message:
            self._leave(rank, "shut down")
            self._send(rank, {"bye": True})

    def _announce(self, rank: int, key: Key, meta: dict[str, Any]) -> None:
        if key in self._aborted:  # it comes late: the others have this error already
            text, late = self._aborted[key]
            late.discard(rank)
            if not late:
                del self._aborted[key]
            self._send(rank, {"error": text, "of": key})
            return
        if key not in self._pending:
            self._pending[key] = _Pending(time.monotonic())
            self._trace.mark_cycle()
            self._trace.begin(f"{key[1]}.{key[2]}", f"NEGOTIATE_{key[1].upper()}")
        self._pending[key].metas[rank] = meta
        self._settle(key)

    def _retract(self, rank: int, key: Key) -> None:
        if key in self._pending:
            self._pending[key].metas.pop(rank, None)
            if not self._pending[key].metas:
                self._drop(key)

    def _members(self, key: Key) -> tuple[int, ...]:
        return self._sets.get(key[0], ())

    def _settle(self, key: Key) -> None:
        """Order the operation to run once every member has announced it, or joined."""
        metas = self._pending[key].metas
        absent = [r for r in self._members(key) if r not in metas]
        if gone := [r for r in absent if r in self._left]:
            self._fail(key, f"{describe(key)} cannot complete: {self._ranks_left(gone)}.")
            return
        if any(r not in self._joined for r in absent):
            return
        if (error := self._objection(key, metas, absent)) is not None:
            self._fail(key, error)
            return
        self._drop(key)
        order: dict[str, Any] = {"go": key}
        if any("each" in meta for meta in metas.values()):
            order["each"] = [metas[r]["each"] if r in metas else None for r in self._members(key)]
        if key[1] == "add":
            order["id"] = self._next_set
            self._sets[self._next_set] = tuple(next(iter(metas.values()))["ranks"])
            self._next_set += 1
        elif key[1] == "remove":
            self._sets.pop(next(iter(metas.values()))["id"], None)
        for r in metas:
            self._send(r, order)
        if key[1] == "allreduce":
            for r in absent:  # who has joined makes zeros, and needs their shapes
                self._send(r, {**order, "meta": next(iter(metas.values()))})

    def _drop(self, key: Key) -> None:
        del self._pending[key]
        self._trace.end(f"{key[1]}.{key[2]}")

    def _fail(self, key: Key, error: str) -> None:
        ranks = list(self._pending[key].metas)
        self._drop(key)
        for r in ranks:
            self._send(r, {"error": error, "of": key})

    def _objection(
        self, key: Key, metas: dict[int, dict[str, Any]], absent: list[int]
    ) -> str | None:
        """Why the operation cannot run: ranks disagree, or some have joined."""
        ranks = sorted(metas)
        if key[1] in _RAGGED:
            checked = {r: {**m, "shape": [s[1:] for s in m["shape"]]} for r, m in metas.items()}
        else:
            checked = metas
        for name in checked[ranks[0]]:
            if name == "each":
                continue
            values = {r: checked[r].get(name) for r in ranks}
            if all(v == values[ranks[0]] for v in values.values()):
                continue
            return _disagreement(key, name, values, metas[ranks[0]].get("names"))
        if not absent or key[1] == "layout":
            return None
        if key[1] != "allreduce":
            return (
                f"{describe(key)} cannot run because {ranks_text(sorted(absent))} called "
                "hvd.join(): only allreduce can go on without a rank. Call it before the join, or "
                "after all ranks have joined."
            )
        if metas[ranks[0]]["op"] not in ("Average", "Sum"):
            return (
                f"{describe(key)} cannot take the {metas[ranks[0]]['op']} over zeros, which "
                f"{ranks_text(sorted(absent))} would contribute after hvd.join(). Use Sum or "
                "Average."
            )
        return None

    # ------------------------------------------------------------------ ranks that stay away

    def _ranks_left(self, ranks: list[int]) -> str:
        """Who has left, and how: ``rank 1 has ended; ranks 0, 2 have shut down``."""
        whys = {why: [r for r in ranks if self._left[r] == why] for why in ("ended", "shut down")}
        return "; ".join(
            f"{ranks_text(some)} {'has' if len(some) == 1 else 'have'} {why}"
            for why, some in whys.items()
            if some
        )

    def _leave(self, rank: int, why: str) -> None:
        self._left[rank] = why
        if rank in self._joined:
            self._joined.remove(rank)
        # First all that it announced: settling one would else order it to a rank that is gone.
        for key in list(self._pending):
            self._retract(rank, key)
        for key in list(self._pending):
            self._settle(key)
        for r in self._joined:
            self._send(
                r, {"joined": None, "error": f"hvd.join() cannot end: rank {rank} has {why}."}
            )
        self._joined.clear()

    def _end_join(self) -> None:
        if len(self._joined) == self._size:
            last = self._joined[-1]
            self._joined.clear()
            for r in range(self._size):
                self._send(r, {"joined": last})

    def _look_for_stalls(self) -> None:
        now = time.monotonic()
        for key, pending in list(self._pending.items()):
            seconds = now - pending.since
            if not pending.warned and 0 < self._warn_seconds < seconds:
                pending.warned = True
                print(f"[ronde.horovod] {self._stall(key, seconds)}", file=sys.stderr, flush=True)
            if 0 < self._abort_seconds < seconds:
                text = (
                    f"{self._stall(key, seconds)} It was stopped; "
                    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS sets the limit, 0 removes it."
                )
                late = {r for r in self._members(key) if r not in pending.metas}
                self._aborted[key] = (text, late)
                self._fail(key, text)

    def _stall(self, key: Key, seconds: float) -> str:
        here = self._pending[key].metas
        missing = [r for r in self._members(key) if r not in here and r not in self._joined]
        return (
            f"Stalled: {describe(key)} waits for {ranks_text(missing)} since {seconds:.0f} s. "
            f"Announced by {ranks_text(sorted(here))}."
        )


def _disagreement(
    key: Key, name: str, values: dict[int, Any], names: list[str] | None = None
) -> str:
    """Name the tensor, and what each rank has: the first item that differs, of lists."""
    whose = "its"
    lists = [v for v in values.values() if isinstance(v, list)]
    if len(lists) == len(values) and len({len(v) for v in lists}) == 1 and name != "ranks":
        at = next(i for i in range(len(lists[0])) if any(v[i] != lists[0][i] for v in lists))
        values = {r: v[at] for r, v in values.items()}
        if len(lists[0]) > 1:
            whose = f"the {_name_of(at, names)}'s"
    said: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        said.setdefault(json.dumps(value), []).append(rank)
    parts = "; ".join(f"{ranks_text(ranks)}: {value}" for value, ranks in said.items())
    return (
        f"{describe(key)}: the ranks disagree on {whose} {_WORDS.get(name, name)}: {parts}. Every "
        "rank of a process set must give the same."
    )


def _name_of(at: int, names: list[str] | None) -> str:
    return f"parameter {names[at]!r}" if names and at < len(names) else f"tensor {at}"
