"""The two ends of an agent's pipes where another system starts it: one on the node, one here.

Run as a script, it is this end: it joins its standard streams to a connection of the driver. The
node's end is :func:`run_agent`, which Ray and Spark carry to their nodes by value: it may use the
standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

__all__ = ["LOST", "frames", "packed", "run_agent"]

_HEAD = ">BI"  # a Struct cannot be pickled
_PART = 1 << 16
_STOP_SECONDS = 3.0
_EXIT = 0  # kinds 1 and 2 are standard output and error
LOST = 255
"""The status of a relay whose node, or the way to it, is gone."""


def packed(kind: int, data: bytes) -> bytes:
    """One frame of an agent's output."""
    return struct.pack(_HEAD, kind, len(data)) + data


def frames(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Frames until the stream ends; one that is cut off is dropped."""
    with contextlib.suppress(OSError):
        while len(head := stream.read(struct.calcsize(_HEAD))) == struct.calcsize(_HEAD):
            kind, size = struct.unpack(_HEAD, head)
            if len(data := stream.read(size)) < size:
                return
            yield kind, data


def _copy(descriptor: int, send: Any) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(descriptor, _PART):
            send(data)


def run_agent(address: str, port: int, token: str, hello: dict[str, Any]) -> int:
    """On a node: connect to the driver, run the agent it asks for, and carry its pipes.

    Args:
        address: of the driver, with its ``port``.
        token: its secret, which shows that this is a node of the run.
        hello: what the driver should know of this place; ``place`` is its number.

    Returns:
        int: the agent's exit status; 0 where none was asked for.
    """
    try:
        link = socket.create_connection((address, port), 10.0)
    except OSError as error:
        raise ConnectionError(
            f"{socket.gethostname()} cannot reach the launcher at {address}:{port} "
            f"({error.strerror or error}). Open the ports between them."
        ) from None
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.sendall(json.dumps({**hello, "token": token}).encode() + b"\n")
    orders = link.makefile("rb")
    asked = orders.readline()
    if not asked:
        return 0
    order = json.loads(asked)
    argv = [order["argv"][0] or sys.executable, *order["argv"][1:]]
    # set by the system for its own worker, not for ours
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment.update(order.get("environment", {}))
    lock = threading.Lock()

    def send(kind: int, data: bytes) -> None:
        with lock:
            link.sendall(packed(kind, data))

    try:
        agent = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        send(2, f"{argv[0]}: not found ({error.strerror})\n".encode())
        send(_EXIT, b"127")
        return 127
    assert agent.stdin is not None and agent.stdout is not None and agent.stderr is not None
    stdin, out, err = agent.stdin, agent.stdout.fileno(), agent.stderr.fileno()

    def feed() -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := orders.read1(_PART):
                stdin.write(data)
                stdin.flush()
        with contextlib.suppress(OSError):
            stdin.close()  # the agent ends what it started
        try:
            agent.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)

    threading.Thread(target=feed, daemon=True).start()
    readers = [
        threading.Thread(target=_copy, args=(descriptor, lambda d, k=kind: send(k, d)), daemon=True)
        for kind, descriptor in ((1, out), (2, err))
    ]
    for reader in readers:
        reader.start()
    status = int(agent.wait())
    for reader in readers:
        reader.join(1.0)  # what the agent started may hold them open
    with contextlib.suppress(OSError):
        send(_EXIT, str(status if status >= 0 else 128 - status).encode())
        link.shutdown(socket.SHUT_WR)
    return status


def _relay(path: str, place: str, argv: list[str]) -> int:
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    link.sendall(json.dumps({"place": int(place), "argv": argv}).encode() + b"\n")

    def feed() -> None:
        _copy(0, link.sendall)
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_WR)

    threading.Thread(target=feed, daemon=True).start()
    for kind, data in frames(link.makefile("rb")):
        if kind == _EXIT:
            return int(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(kind, rest) :]
    return LOST


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os._exit(_relay(sys.argv[1], sys.argv[2], sys.argv[3:]))
    os._exit(LOST)
