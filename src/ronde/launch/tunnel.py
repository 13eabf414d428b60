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
import subprocess
import sys
import threading
from typing import Any

__all__ = ["run_agent"]

_PART_BYTES = 1 << 16


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
    # a machine that is switched off closes nothing
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
    try:
        agent = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=link.fileno(),
            stderr=link.fileno(),
            start_new_session=True,
        )
    except OSError as error:
        link.sendall(f"{argv[0]}: not found ({error.strerror})\n".encode())
        link.shutdown(socket.SHUT_WR)
        return 127
    assert agent.stdin is not None
    stdin = agent.stdin

    def feed() -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := orders.read1(_PART_BYTES):
                stdin.write(data)
                stdin.flush()
        with contextlib.suppress(OSError):
            stdin.close()  # the agent ends what it started
        try:
            agent.wait(3.0)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)

    threading.Thread(target=feed, daemon=True).start()
    status = int(agent.wait())
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)
    return status if status >= 0 else 128 - status  # as a shell tells a signal


def _relay(path: str, place: str, argv: list[str]) -> None:
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    link.sendall(json.dumps({"place": int(place), "argv": argv}).encode() + b"\n")

    def feed() -> None:
        with contextlib.suppress(OSError):  # the place is lost: its end says so
            while data := os.read(0, _PART_BYTES):
                link.sendall(data)
            link.shutdown(socket.SHUT_WR)

    threading.Thread(target=feed, daemon=True).start()
    while data := link.recv(_PART_BYTES):
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(1, rest) :]


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        _relay(sys.argv[1], sys.argv[2], sys.argv[3:])
    os._exit(255)
