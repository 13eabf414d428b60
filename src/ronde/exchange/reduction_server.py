"""A server that sums shards of gradients and returns them: ``python -m
ronde.exchange.reduction_server``.

It reads a token from its standard input, prints where it listens as JSON, and serves workers that
know the token until its input ends.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence

import psutil
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
    def __init__(self, token: bytes) -> None:
        self._token = token
        self._sessions: dict[int, _Session] = {}
        self._lock = threading.Lock()

    def serve(self, listening: socket.socket) -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

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
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET
    ]
    return sorted(found, key=lambda a: a.startswith("127."))


def serve_reductions(arguments: Sequence[str] | None = None) -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m ronde.exchange.reduction_server")
    parser.add_argument("--listen", default="0.0.0.0", help="address to listen on")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # each worker's thread sums
    token = sys.stdin.readline().strip().encode()
    listening = socket.create_server((options.listen, 0), backlog=1024)
    port = listening.getsockname()[1]
    addresses = _addresses() if options.listen == "0.0.0.0" else [options.listen]
    print(json.dumps({"places": [f"{a}:{port}" for a in addresses]}), flush=True)
    server = _ReductionServer(token)
    threading.Thread(target=server.serve, args=(listening,), daemon=True).start()
    while sys.stdin.read(1):
        pass
    os._exit(0)  # threads may be in the middle of a sum


if __name__ == "__main__":
    serve_reductions()
