"""The reducer of servers that sum shards of gradients and return them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ronde.exchange.reducer import SHARD_BYTES, Bucket, Members, Reducer
from ronde.plan.reducers import ReducerChoice
from ronde.world import WorldError

__all__ = [
    "CHUNKS_OUT",
    "CHUNK_BYTES",
    "CLOSED",
    "DTYPES_ON_WIRE",
    "GONE",
    "HEADER",
    "HELLO",
    "SUM",
    "Servers",
    "as_memory",
    "receive_into",
    "send_parts",
    "steady",
]

CHUNK_BYTES = 32 << 10
"""A shard travels in chunks: the first sums come back while later chunks are on their way."""

HELLO = struct.Struct("<6s32sIII")  # magic, token, session, rank, workers
HEADER = struct.Struct("<BBIQII")  # kind, type, rank, bucket, chunk, bytes
SUM, GONE = 1, 2
DTYPES_ON_WIRE = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
)
CLOSED = "Connection closed by peer"
"""How a worker's end shows at the others."""

CHUNKS_OUT = 6
"""Chunks that a worker has out at one server. Fewer leave gaps; more than a switch's queue holds
are dropped, and what is dropped stalls every worker."""

_SILENT_MILLISECONDS = 30_000
_sessions = 0


def steady(connection: socket.socket) -> None:
    """Send at once, and notice within half a minute that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 4)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MILLISECONDS)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view``.

    Raises:
        EOFError: the other side closed the connection.
    """
    at = 0
    while at < len(view):
        n = connection.recv_into(view[at:], 0, socket.MSG_WAITALL)
        if not n:
            raise EOFError
        at += n


def send_parts(connection: socket.socket, header: bytes, data: bytes | memoryview) -> None:
    """Send a header and what belongs to it."""
    sent = connection.sendmsg([header, data])
    if sent < len(header):
        connection.sendall(header[sent:])
    connection.sendall(data[max(0, sent - len(header)) :])


def as_memory(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory, as bytes."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


class _Shards:
    """A bucket on its way: one row for each server, which the sums replace."""

    def __init__(self, padded: torch.Tensor, code: int) -> None:
        self.rows = [as_memory(row) for row in padded]
        self.code, self.size = code, len(self.rows[0])
        self.done = threading.Event()
        self.missing = [-(-self.size // CHUNK_BYTES)] * len(self.rows)  # chunks, by server

    def part(self, server: int, chunk: int) -> memoryview:
        start = chunk * CHUNK_BYTES
        return self.rows[server][start : start + CHUNK_BYTES]


class _Server:
    """The connection to one server, and a thread that receives from it."""

    def __init__(self, number: int, at: str, hello: bytes, owner: Servers) -> None:
        self._owner, self._number = owner, number
        self.window = threading.Semaphore(CHUNKS_OUT)
        host, _, places = at.rpartition("=")
        shown = places.replace("|", " or ")
        self.name = owner.name_of(number, f"{host} ({shown})" if host else shown)
        self._socket = self._connect(places)
        self._socket.sendall(hello)
        threading.Thread(target=self._receive, name="exchange", daemon=True).start()

    def _connect(self, places: str) -> socket.socket:
        why = ""
        for place in places.split("|"):
            host, _, port = place.rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), timeout=20)
            except OSError as error:
                why = str(error)
                continue
            connection.settimeout(None)
            steady(connection)
            return connection
        raise WorldError(
            f"rank {self._owner.members.rank} cannot reach {self.name} at {places}: {why}. Open "
            f"the ports between the hosts, or {self._owner.instead}."
        )

    def send(self, bucket: int, chunk: int, shards: _Shards) -> None:
        """Send a chunk, once few of those before it are out."""
        self.window.acquire()
        part = shards.part(self._number, chunk)
        rank = self._owner.members.rank
        header = HEADER.pack(SUM, shards.code, rank, bucket, chunk, len(part))
        try:
            send_parts(self._socket, header, part)
        except OSError:
            self._owner.fail(f"{self.name} is gone: {self._owner.closed}")

    def _receive(self) -> None:
        header = memoryview(bytearray(HEADER.size))
        try:
            while True:
                receive_into(self._socket, header)
                kind, _, rank, bucket, chunk, _ = HEADER.unpack(header)
                if kind == GONE:
                    self._owner.lose(self._number, f"worker {rank} is gone: {CLOSED}")
                    return
                shards = self._owner.under_way[bucket]
                receive_into(self._socket, shards.part(self._number, chunk))
                self.window.release()
                self._owner.returned(bucket, self._number)
        except (EOFError, OSError, KeyError, ValueError):
            self._owner.lose(self._number, f"{self.name} is gone: {self._owner.closed}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._socket.close()


class Servers(Reducer):
    """Servers sum equal shards of each bucket and return them (Herring; BytePS: Jiang et al. 2020).
    On hosts of their own, where ``ronde run --servers`` starts them, a worker sends the gradient
    once and receives it once, half of the ring's bytes for many workers.
    """

    lanes = 4
    closed = "it closed its connection"
    instead = "leave --servers out"

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        global _sessions
        # Servers outlive workers: those that start again must not meet the ones before them.
        session = zlib.crc32(f"{os.environ.get('RONDE_GENERATION')} {_sessions}".encode())
        _sessions += 1  # the same on all workers, which build reducers in the same order
        places = os.environ["RONDE_SERVERS"].split()
        token = os.environ.get("RONDE_SERVERS_TOKEN", "")
        self._connect(choice, members, places, token, session)

    def _connect(
        self,
        choice: ReducerChoice,
        members: Members,
        places: Sequence[str],
        token: str,
        session: int = 0,
    ) -> None:
        super().__init__(choice, members)
        self.bucket_mib = max(choice.values[0], SHARD_BYTES * len(places) / 2**20)
        self.under_way: dict[int, _Shards] = {}
        self._failure: str | None = None
        self._lost: dict[int, str] = {}  # servers from which nothing more comes
        self._changed = threading.Condition()
        hello = HELLO.pack(b"RONDE1", token.encode(), session, members.rank, members.size)
        self._servers: list[_Server] = []
        for number, at in enumerate(places):
            self._servers.append(_Server(number, at, hello, self))
        threading.Thread(target=self._send, name="exchange", daemon=True).start()

    def name_of(self, number: int, place: str) -> str:
        """What errors call a server."""
        return f"reduction server {number + 1} on {place}"

    def _send(self) -> None:
        """Send bucket after bucket, a chunk to each server in turn.

        All workers send in the same order, and no server is far ahead of the others: a sum needs
        the chunk of every worker, and comes back while later chunks are on their way.
        """
        count = len(self._servers)
        for number in itertools.count():
            with self._changed:
                while number not in self.under_way and self._failure is None:
                    self._changed.wait()
                if self._failure is not None:
                    return
                shards = self.under_way[number]
            for chunk in range(-(-shards.size // CHUNK_BYTES)):
                for turn in range(count):
                    if self._failure is not None:
                        return
                    # Workers begin with different servers, so that all do not meet at one.
                    server = (self.members.rank + turn) % count
                    self._servers[server].send(number, chunk, shards)

    def returned(self, number: int, server: int) -> None:
        """Count a chunk that came back."""
        with self._changed:
            shards = self.under_way[number]
            shards.missing[server] -= 1
            if not any(shards.missing):
                del self.under_way[number]
                shards.done.set()

    def lose(self, server: int, why: str) -> None:
        """Note that nothing more comes from a server. A failure only if something is to come: a
        worker that has ended has returned all sums, and others may still be on their way.
        """
        with self._changed:
            self._lost[server] = why
            if any(shards.missing[server] for shards in self.under_way.values()):
                self.fail(why)

    def fail(self, why: str) -> None:
        """Note the first failure, and wake everyone who waits."""
        with self._changed:
            self._failure = self._failure or why
            for shards in self.under_way.values():
                shards.done.set()
            self._changed.notify_all()
        for server in self._servers:
            server.window.release()

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        flat, servers = bucket.flat, len(self._servers)
        if flat.dtype not in DTYPES_ON_WIRE:
            self.fail(f"reducer 'servers' does not know gradients of type {flat.dtype}")
            self._raise_failure()
        n, shard = flat.numel(), -(-flat.numel() // servers)
        here: Any = flat.new_empty(0, device="cpu")
        padded = bucket.where.buffer("padded", here, flat.dtype, servers, shard)
        padded.view(-1)[:n] = flat
        shards = _Shards(padded, DTYPES_ON_WIRE.index(flat.dtype))
        with self._changed:
            self.under_way[bucket.number] = shards
            self._changed.notify_all()
            for why in [*filter(None, [self._failure]), *self._lost.values()][:1]:
                self.fail(why)
        shards.done.wait()
        self._raise_failure()
        flat.copy_(padded.view(-1)[:n])

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise WorldError(f"{self._failure}.", lost_rank=self._failure.endswith(CLOSED))

    def close(self) -> None:
        """See :meth:`Reducer.close`."""
        self.fail("the reducer was closed")
        for server in self._servers:
            server.close()
