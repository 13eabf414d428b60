"""Addresses of this host, and sockets that listen on one of them, never on all."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

__all__ = ["addresses", "listen_on", "meeting_address", "own_address"]


def addresses() -> list[tuple[str, str]]:
    """Interface and IPv4 address, loopback last; the one that ssh came in by first."""
    import psutil  # most workers do without

    pairs = [
        (name, each.address)
        for name, several in psutil.net_if_addrs().items()
        for each in several
        if each.family == socket.AF_INET
    ]
    by_ssh = (os.environ.get("SSH_CONNECTION") or "").split()[2:3]
    return sorted(
        pairs,
        key=lambda f: (f[1].startswith("127."), f[1] not in by_ssh, f[0].startswith("docker")),
    )


def listen_on(address: str, port: int = 0, backlog: int = 1024) -> socket.socket:
    """A socket that listens on one address of this host; port 0: on a free one.

    Raises:
        OSError: the port is taken, or the address is not this host's.
        ValueError: it is no address, or means all of this host.
    """
    if ipaddress.ip_address(address).is_unspecified:
        raise ValueError(f"{address} is not one address: it means all of this host")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _resolved(name: str) -> list[str]:
    """The addresses of a name, IPv4 first; none where it does not resolve (yet)."""
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted(dict.fromkeys(str(each[4][0]) for each in infos), key=lambda a: ":" in a)


def own_address(toward: str, interface: str | None = None) -> str:
    """By which address other hosts reach this one: that of the interface, or of the way to a host.

    Args:
        toward: a host, which may be this one.
        interface: the network interface that leads to the others, where it is known, as
            ``GLOO_SOCKET_IFNAME`` names it.
    """
    own, name = addresses(), (interface or "").split(",")[0]
    if name in dict(own):
        return dict(own)[name]
    targets = [a for a in _resolved(toward) if ":" not in a and not _is_loopback(a)]
    for target in (*targets, "192.0.2.1"):  # of no host: the default route
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            return str(probe.getsockname()[0])
    return next((address for _, address in own), "127.0.0.1")


def meeting_address(
    name: str, together: bool | None, serves: bool, interface: str | None = None
) -> str:
    """Where this rank meets rank 0, which listens on one address.

    Args:
        name: the host of rank 0, as the launcher names it.
        together: whether all ranks are on this machine; None where the launcher does not say.
        serves: whether this is rank 0.
        interface: the network interface that leads to the other hosts, where it is known.
    """
    if together:
        return "127.0.0.1"
    resolved = _resolved(name)
    local = bool(resolved) and all(map(_is_loopback, resolved))
    if local and together is None:
        return resolved[0]
    # With other hosts, a name of loopback (Debian's 127.0.1.1, a pod's localhost) is rank 0's own
    # host: the ranks beside it go where it listens.
    if not serves and not local:
        return name
    import psutil

    every = {a.address for several in psutil.net_if_addrs().values() for a in several}
    mine = (a for a in resolved if a in every and not _is_loopback(a))
    return next(mine, None) or own_address(name, interface)
