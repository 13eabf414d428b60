"""The reducer of servers on hosts of their own, which only sum and return."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import zlib
from typing import Any

import torch

from ronde.exchange.collective import SHARD_BYTES
from ronde.exchange.reducer import Bucket, Members, Reducer
from ronde.plan.reducers import ReducerChoice
from ronde.world import WorldError

__all__ = [
    "CHUNK_BYTES",
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

CHUNK_BYTES = 64 << 10
"""A shard travels in chunks: the first sums come back while later chunks are on their way."""

HELLO = struct.Struct("<6s32sIII")  # magic, token, session, rank, workers
HEADER = struct.Struct("<BBIQII")  # kind, type, rank, bucket, chunk, bytes
SUM, GONE = 1, 2
DTYPES_ON_WIRE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_CONNECT_SECONDS = 20.0
_BUFFER_BYTES = 128 << 10
_SILENT_MILLISECONDS = 30_000
_sessions = 0


def steady(connection: socket.socket) -> None:
    """Send at once, and notice within half a minute that the other host is gone.

    The kernel takes little at a time: on a slow link it would take a whole shard for one server
    while the others wait. With 100 Mbit/s and four workers, this is worth a tenth.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
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
        n = connection.recv_into(view[at:])
        if not n:
            raise EOFError
        at += n


def send_parts(connection: socket.socket, header: bytes, data: memoryview) -> None:
    """Send a header and what belongs to it."""
    sent = connection.sendmsg([header, data])
    if sent < len(header):
        connection.sendall(header[sent:])
    connection.sendall(data[max(0, sent - len(header)) :])


def as_memory(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory, as bytes."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


class _Waiting:
    """Chunks of a bucket that have not come back from a server."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.done = threading.Event()


class _Server:
    """The connection to one server, and a thread that receives from it."""

    def __init__(self, number: int, places: str, hello: bytes, owner: Servers) -> None:
        self._owner = owner
        self.name = f"reduction server {number + 1} at {places.replace('|', ' or ')}"
        self._socket = self._connect(places)
        self._expected: dict[tuple[int, int], tuple[memoryview, _Waiting]] = {}
        self._socket.sendall(hello)
        threading.Thread(target=self._receive, name="exchange", daemon=True).start()

    def _connect(self, places: str) -> socket.socket:
        why = ""
        for place in places.split("|"):
            host, _, port = place.rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
            except OSError as error:
                why = str(error)
                continue
            connection.settimeout(None)
            steady(connection)
            return connection
        raise WorldError(
            f"rank {self._owner.members.rank} cannot reach {self.name}: {why}. Open the ports "
            "between the hosts, or leave --servers out."
        )

    def expect(self, bucket: int, number: int, part: memoryview, waiting: _Waiting) -> None:
        """The sum of a chunk will come, and is written over it."""
        self._expected[bucket, number] = part, waiting

    def send(self, header: bytes, part: memoryview) -> None:
        """Send a chunk."""
        try:
            send_parts(self._socket, header, part)
        except OSError:
            self._owner.fail(f"{self.name} is gone: it takes no more gradients")

    def _receive(self) -> None:
        header = memoryview(bytearray(HEADER.size))
        try:
            while True:
                receive_into(self._socket, header)
                kind, _, rank, bucket, number, _ = HEADER.unpack(header)
                if kind == GONE:
                    # words by which the launcher knows that this is not the cause
                    self._owner.fail(f"worker {rank} is gone: Connection closed by peer")
                    return
                part, waiting = self._expected.pop((bucket, number))
                receive_into(self._socket, part)
                waiting.missing -= 1
                if not waiting.missing:
                    waiting.done.set()
        except (EOFError, OSError, KeyError, ValueError):
            self._owner.fail(f"{self.name} is gone: it closed its connection")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._socket.close()


class Servers(Reducer):
    """Servers on hosts of their own sum equal shards of each bucket and return them: a worker sends
    the gradient once and receives it once, half of the ring's bytes for many workers (Herring;
    BytePS: Jiang et al. 2020). ``ronde run --servers`` starts them.
    """

    lanes = 4

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        global _sessions
        super().__init__(choice, members)
        places = os.environ["RONDE_SERVERS"].split()
        self.bucket_mib = max(choice.values[0], SHARD_BYTES * len(places) / 2**20)
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._waiting: set[_Waiting] = set()
        token = os.environ.get("RONDE_SERVERS_TOKEN", "").encode()
        # Servers outlive workers: those that start again must not meet the ones before them.
        session = zlib.crc32(f"{os.environ.get('RONDE_GENERATION')} {_sessions}".encode())
        hello = HELLO.pack(b"RONDE1", token, session, members.rank, members.size)
        _sessions += 1  # the same on all workers, which build reducers in the same order
        self._servers = [_Server(i, at, hello, self) for i, at in enumerate(places)]
        # One thread for all, so that they advance together: sums come back when all have a chunk.
        self._to_send: queue.SimpleQueue[tuple[_Server, bytes, memoryview] | None]
        self._to_send = queue.SimpleQueue()
        threading.Thread(target=self._send, name="exchange", daemon=True).start()

    def _send(self) -> None:
        while (job := self._to_send.get()) is not None:
            server, header, part = job
            if self._failure is None:
                server.send(header, part)

    def fail(self, why: str) -> None:
        """Note the first failure, and wake everyone who waits for a sum."""
        with self._lock:
            self._failure = self._failure or why
            for waiting in self._waiting:
                waiting.done.set()

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        flat, where, servers = bucket.flat, bucket.where, self._servers
        n, shard = flat.numel(), -(-flat.numel() // len(servers))
        here: Any = flat.new_empty(0, device="cpu")
        padded = where.buffer("padded", here, flat.dtype, len(servers), shard)
        padded.view(-1)[:n] = flat / self.members.size  # a sum of 16-bit gradients may overflow
        if flat.dtype not in DTYPES_ON_WIRE:
            raise WorldError(f"reducer 'servers' does not know gradients of type {flat.dtype}.")
        code, size = DTYPES_ON_WIRE.index(flat.dtype), shard * flat.element_size()
        rows = [as_memory(row) for row in padded]
        chunks = -(-size // CHUNK_BYTES) * len(servers)
        waiting = [_Waiting(chunks // len(servers)) for _ in servers]
        with self._lock:
            self._waiting.update(waiting)
        number = where.number()
        # Workers begin with different servers, so that none of them is met by all at once.
        for chunk, start in enumerate(range(0, size, CHUNK_BYTES)):
            for turn in range(len(servers)):
                i = (self.members.rank + turn) % len(servers)
                part = rows[i][start : start + CHUNK_BYTES]
                header = HEADER.pack(SUM, code, self.members.rank, number, chunk, len(part))
                servers[i].expect(number, chunk, part, waiting[i])
                self._to_send.put((servers[i], header, part))
        for each in waiting:
            if self._failure is None:
                each.done.wait()
        with self._lock:
            self._waiting.difference_update(waiting)
        if self._failure is not None:
            raise WorldError(f"{self._failure}.")
        flat.copy_(padded.view(-1)[:n])

    def close(self) -> None:
        """See :meth:`Reducer.close`."""
        self._to_send.put(None)
        for server in self._servers:
            server.close()
