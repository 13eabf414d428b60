"""A server that averages shards of gradients: ``python -m ronde.exchange.reduction_server``, or
threads of a worker.

The process reads a token from its standard input, prints where it listens as JSON, and serves
workers that know the token until its input ends.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ronde.exchange.reducer import wide
from ronde.exchange.servers import (
    CHUNK_BYTES,
    DTYPES_ON_WIRE,
    GONE,
    HEADER,
    HELLO,
    SUM,
    as_memory,
    receive_into,
    send_parts,
    steady,
)
from ronde.world.network import addresses, listen_on

__all__ = ["ReductionServer", "serve_reductions"]

_Out = queue.SimpleQueue[Callable[[], None] | None]


class _Rows:
    """One chunk of all workers, as it arrives."""

    def __init__(self, workers: int, size: int) -> None:
        self.rows = torch.empty(workers, size, dtype=torch.uint8)
        self.missing = workers


class _Session:
    """Workers that average one model's gradients."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.outs: dict[int, tuple[socket.socket, _Out]] = {}
        self.gone: list[int] = []
        self.used: set[str] = set()  # addresses at which they came in
        self.lock = threading.Lock()
        self._chunks: dict[tuple[int, int], _Rows] = {}

    def chunk(self, bucket: int, number: int, size: int) -> _Rows:
        with self.lock:
            if (bucket, number) not in self._chunks:
                self._chunks[bucket, number] = _Rows(self.workers, size)
            return self._chunks[bucket, number]

    def arrived(self, bucket: int, number: int, code: int) -> None:
        """Count a worker's chunk; the last one's thread sums, by rank, and returns it to all."""
        with self.lock:
            chunk = self._chunks[bucket, number]
            chunk.missing -= 1
            if chunk.missing:
                return
            del self._chunks[bucket, number]
        dtype = DTYPES_ON_WIRE[code]
        rows = chunk.rows.view(dtype)
        # Row by row: a chunk is too small for torch to start threads, all of them are not.
        total = rows[0].to(wide(dtype), copy=True)
        for row in rows[1:]:
            total += row
        data = as_memory(total.div_(self.workers).to(dtype))
        with self.lock:  # whoever has a sum may leave: nobody hears of it before the sum
            for rank in self.outs:
                self.tell(rank, HEADER.pack(SUM, code, rank, bucket, number, len(data)), data)

    def tell(self, rank: int, header: bytes, data: bytes | memoryview = b"") -> None:
        """Send to a worker, after what is due before."""
        connection, out = self.outs[rank]
        out.put(partial(send_parts, connection, header, data))

    def lose(self, rank: int) -> None:
        """Tell the others that a worker is gone: its gradients will not come."""
        with self.lock:
            self.gone.append(rank)
            self.outs.pop(rank)[1].put(None)
            for other in self.outs:
                self.tell(other, HEADER.pack(GONE, 0, rank, 0, 0, 0))


class ReductionServer:
    """Averages what workers send that know a token; a thread serves each of them.

    Args:
        listening: sockets at which workers come in, each on another address.
    """

    def __init__(self, token: bytes, listening: Sequence[socket.socket]) -> None:
        self._token = token
        self._sessions: dict[int, _Session] = {}
        self._lock = threading.Lock()
        self._open = set(listening)
        self._listening = {each.getsockname()[0]: each for each in listening}
        for each in listening:
            threading.Thread(target=self._accept, args=(each,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        with listening, contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = listening.accept()
                self._open.add(connection)
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _stay_on(self, used: set[str]) -> None:
        """Listen only where all workers of a session came in: the others come there too."""
        for address in self._listening.keys() - used:
            self._end(self._listening.pop(address))

    def _end(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        one.close()
        self._open.discard(one)

    def flush(self) -> None:
        """Wait until all sums that are due have been sent."""
        sent = threading.Semaphore(0)
        for session in list(self._sessions.values()):
            with session.lock:
                outs = [out for _, out in session.outs.values()]
                for out in outs:
                    out.put(sent.release)
            for _ in outs:
                sent.acquire()

    def close(self) -> None:
        """End all connections, their threads, and the ports."""
        for each in list(self._open):
            self._end(each)

    def _greet(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(EOFError, OSError):
            self._serve(connection)
        self._open.discard(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(20)  # a stranger that says nothing
        hello = memoryview(bytearray(HELLO.size))
        receive_into(connection, hello)
        magic, token, number, rank, workers = HELLO.unpack(hello)
        if magic != b"RONDE1" or not hmac.compare_digest(token, self._token) or rank >= workers:
            return
        connection.settimeout(None)
        steady(connection)
        out: _Out = queue.SimpleQueue()
        with self._lock:
            session = self._sessions.setdefault(number, _Session(workers))
        with session.lock:
            if rank in session.outs or rank in session.gone or workers != session.workers:
                return
            session.outs[rank] = connection, out
            session.used.add(connection.getsockname()[0])
            if len(session.outs) == workers:
                with self._lock:
                    self._stay_on(session.used)
            for lost in session.gone:
                session.tell(rank, HEADER.pack(GONE, 0, lost, 0, 0, 0))
        threading.Thread(target=_send, args=(out,), daemon=True).start()
        try:
            self._read(connection, session, rank)
        finally:
            session.lose(rank)
            with self._lock:
                if len(session.gone) == session.workers:
                    self._sessions.pop(number, None)  # with what is left in it

    def _read(self, connection: socket.socket, session: _Session, rank: int) -> None:
        header = memoryview(bytearray(HEADER.size))
        while True:
            receive_into(connection, header)
            kind, code, _, bucket, number, size = HEADER.unpack(header)
            if kind != SUM or code >= len(DTYPES_ON_WIRE) or not 0 < size <= CHUNK_BYTES:
                raise EOFError
            chunk = session.chunk(bucket, number, size)
            if chunk.rows.shape[1] != size:
                raise EOFError  # workers disagree on a bucket, which Ronde has compared before
            receive_into(connection, as_memory(chunk.rows[rank]))
            session.arrived(bucket, number, code)


def _send(out: _Out) -> None:
    while (job := out.get()) is not None:
        with contextlib.suppress(OSError):  # the thread that reads from it tells
            job()


def _addresses() -> list[str]:
    """This host's but loopback: nothing here says by which one the workers come."""
    all_addresses = [address for _, address in addresses()]
    return [a for a in all_addresses if not a.startswith("127.")] or all_addresses


def serve_reductions(arguments: Sequence[str] | None = None) -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m ronde.exchange.reduction_server")
    parser.add_argument("--listen", help="address to listen on, instead of each of this host's")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # each worker's thread sums
    token = sys.stdin.readline().strip().encode()
    listening = [listen_on(a) for a in ([options.listen] if options.listen else _addresses())]
    places = [each.getsockname()[:2] for each in listening]
    ReductionServer(token, listening)
    print(json.dumps({"places": [f"{host}:{port}" for host, port in places]}), flush=True)
    while sys.stdin.read(1):
        pass
    os._exit(0)  # threads may be in the middle of a sum


if __name__ == "__main__":
    serve_reductions()
