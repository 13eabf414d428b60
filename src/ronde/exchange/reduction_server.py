"""A server that sums shards of gradients and returns them: ``python -m
ronde.exchange.reduction_server``.

It reads a token from its standard input, prints where it listens as JSON, and serves workers that
know the token until its input ends.
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
from collections.abc import Sequence

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

__all__ = ["serve_reductions"]


class _Rows:
    """One chunk of all workers, as it arrives."""

    def __init__(self, workers: int, size: int) -> None:
        self.rows = torch.empty(workers, size, dtype=torch.uint8)
        self.missing = workers


class _Session:
    """Workers that average one model's gradients."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.outs: dict[int, queue.SimpleQueue[tuple[bytes, memoryview]]] = {}
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
        total = chunk.rows.view(dtype).sum(0, dtype=wide(dtype)).to(dtype)
        data = as_memory(total)
        for rank, out in self.outs.items():
            out.put((HEADER.pack(SUM, code, rank, bucket, number, len(data)), data))

    def lose(self, rank: int) -> None:
        """Tell the others that a worker is gone: its gradients will not come."""
        with self.lock:
            self.gone.append(rank)
            for other, out in self.outs.items():
                if other not in self.gone:
                    out.put((HEADER.pack(GONE, 0, rank, 0, 0, 0), memoryview(b"")))


class _ReductionServer:
    def __init__(self, token: bytes, listening: Sequence[socket.socket]) -> None:
        self._token = token
        self._sessions: dict[int, _Session] = {}
        self._lock = threading.Lock()
        self._listening = {each.getsockname()[0]: each for each in listening}
        for each in listening:
            threading.Thread(target=self._serve, args=(each,), daemon=True).start()

    def _serve(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _stay_on(self, used: set[str]) -> None:
        """Listen only where all workers of a session came in: the others come there too."""
        for address in self._listening.keys() - used:
            listening = self._listening.pop(address)
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listening.close()

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(20)  # a stranger that says nothing
        hello = memoryview(bytearray(HELLO.size))
        try:
            receive_into(connection, hello)
        except (EOFError, OSError):
            connection.close()
            return
        magic, token, number, rank, workers = HELLO.unpack(hello)
        if magic != b"RONDE1" or not hmac.compare_digest(token, self._token) or rank >= workers:
            connection.close()
            return
        connection.settimeout(None)
        steady(connection)
        out: queue.SimpleQueue[tuple[bytes, memoryview]] = queue.SimpleQueue()
        with self._lock:
            session = self._sessions.setdefault(number, _Session(workers))
        with session.lock:
            if rank in session.outs or workers != session.workers:
                connection.close()
                return
            session.outs[rank] = out
            session.used.add(connection.getsockname()[0])
            if len(session.outs) == workers:
                with self._lock:
                    self._stay_on(session.used)
            for lost in session.gone:
                out.put((HEADER.pack(GONE, 0, lost, 0, 0, 0), memoryview(b"")))
        threading.Thread(target=_send, args=(connection, out), daemon=True).start()
        try:
            self._read(connection, session, rank)
        except (EOFError, OSError):
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


def _send(connection: socket.socket, out: queue.SimpleQueue[tuple[bytes, memoryview]]) -> None:
    try:
        while True:
            header, data = out.get()
            send_parts(connection, header, data)
    except OSError:
        return  # the thread that reads from it tells


def _addresses() -> list[str]:
    """This host's but loopback: nothing here says by which one the workers come."""
    found = [address for _, address in addresses()]
    return [a for a in found if not a.startswith("127.")] or found


def serve_reductions(arguments: Sequence[str] | None = None) -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m ronde.exchange.reduction_server")
    parser.add_argument("--listen", help="address to listen on, instead of each of this host's")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # each worker's thread sums
    token = sys.stdin.readline().strip().encode()
    listening = [listen_on(a) for a in ([options.listen] if options.listen else _addresses())]
    places = [each.getsockname()[:2] for each in listening]
    _ReductionServer(token, listening)
    print(json.dumps({"places": [f"{host}:{port}" for host, port in places]}), flush=True)
    while sys.stdin.read(1):
        pass
    os._exit(0)  # threads may be in the middle of a sum


if __name__ == "__main__":
    serve_reductions()
