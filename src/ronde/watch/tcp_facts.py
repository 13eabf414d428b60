"""What the kernel says about TCP connections: bytes that arrived, and when a peer was heard."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TcpConnection", "connections_of", "heard_seconds", "tcp_connections"]

_SOCK_DIAG, _BY_FAMILY, _DUMP = 4, 20, 0x301
_DONE, _ERROR = 3, 2
_ESTABLISHED, _INFO = 1 << 1, 2
_RETRANSMITS = 1  # the timer that runs while sent bytes are not acknowledged


@dataclass(frozen=True)
class TcpConnection:
    """An established connection.

    Attributes:
        ports: its own and the peer's.
        peer: the peer's address.
        sent: bytes that the peer has acknowledged so far.
        received: bytes that came so far.
        in_flight: whether sent bytes are not acknowledged yet. A peer that does not read is not
            that.
        heard_seconds: since anything came from the peer.
    """

    ports: tuple[int, int]
    peer: str
    sent: int
    received: int
    in_flight: bool
    heard_seconds: float


def tcp_connections() -> dict[int, TcpConnection]:
    """The connections of this network namespace, by inode; empty where the kernel does not say."""
    connections: dict[int, TcpConnection] = {}
    if not hasattr(socket, "AF_NETLINK"):
        return connections
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link,
    ):
        link.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, _INFO, _ESTABLISHED)
            # Header of a netlink message: its length, type, flags, number, and port.
            link.send(struct.pack("=IHHII", 16 + len(asked), _BY_FAMILY, _DUMP, 1, 0) + asked)
            kind = 0
            while kind not in (_DONE, _ERROR):
                data = link.recv(1 << 18)
                while data and kind not in (_DONE, _ERROR):
                    length, kind = struct.unpack_from("=IH", data)
                    if kind == _BY_FAMILY:
                        connections |= _connection(data[16:length])
                    data = data[(length + 3) & ~3 :]
    return connections


def _connection(message: bytes) -> dict[int, TcpConnection]:
    """Of an ``inet_diag_msg``, whose attributes follow it."""
    family, timer = message[0], message[2]
    ports = struct.unpack_from("!HH", message, 4)
    address = message[24 : 28 if family == socket.AF_INET else 40]
    (inode,) = struct.unpack_from("=I", message, 68)
    at = 72
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INFO and length >= 4 + 136:  # tcp_info of Linux 4.2 and later
            heard = min(struct.unpack_from("=II", message, at + 4 + 52))  # of data, of an answer
            sent, received = struct.unpack_from("=QQ", message, at + 4 + 120)
            peer = socket.inet_ntop(family, address).removeprefix("::ffff:")
            return {
                inode: TcpConnection(
                    ports, peer, sent, received, timer == _RETRANSMITS, heard / 1000
                )
            }
        at += max((length + 3) & ~3, 4)
    return {}


def connections_of(pid: int) -> set[int]:
    """Inodes of the sockets that a process holds."""
    inodes = set()
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                name = str(file.readlink())
                if name.startswith("socket:["):
                    inodes.add(int(name[8:-1]))
    return inodes


def heard_seconds(peer: str, connections: Iterable[TcpConnection]) -> float:
    """For how long nothing has come from a peer, over any connection; infinite without one."""
    return min((c.heard_seconds for c in connections if c.peer == peer), default=float("inf"))
