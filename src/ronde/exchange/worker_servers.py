"""The reducer of servers on the workers' own hosts."""

from __future__ import annotations

import os
import secrets

from ronde.exchange.reducer import Bucket, Members
from ronde.exchange.reduction_server import ReductionServer
from ronde.exchange.servers import CLOSED, Servers
from ronde.plan.reducers import ReducerChoice
from ronde.world import WorldError, identify, world
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.network import listen_on, own_address

__all__ = ["WorkerServers"]


class WorkerServers(Servers):
    """Every worker is also a server, in threads of its process: it averages an equal shard of each
    bucket. Two messages in sequence whatever N is; the bytes are the ring's.
    """

    closed = CLOSED
    instead = "use another reducer"

    def __init__(self, choice: ReducerChoice, members: Members) -> None:
        me = world()
        token = broadcast_json(me, secrets.token_hex(16))
        toward = identify(os.environ).address or me.host
        address = own_address(toward, os.environ.get("GLOO_SOCKET_IFNAME"))
        try:
            listening = listen_on(address)
        except OSError as error:
            raise WorldError(
                f"rank {me.rank} cannot listen on {address} for reducer 'servers': {error}. Name "
                "the interface that leads to the other hosts: GLOO_SOCKET_IFNAME=<name>."
            ) from error
        self.place = listening.getsockname()[:2]
        self._server = ReductionServer(token.encode(), [listening])
        here = f"{me.host}={self.place[0]}:{self.place[1]}"
        self._connect(choice, members, gather_json(me, here), token)

    def name_of(self, number: int, place: str) -> str:
        """See :meth:`Servers.name_of`."""
        return f"worker {number}"

    def average(self, bucket: Bucket) -> None:
        """See :meth:`Reducer.average`."""
        super().average(bucket)
        self._server.flush()  # others need the sums of a worker that ends after its last step

    def close(self) -> None:
        """See :meth:`Reducer.close`."""
        super().close()
        self._server.close()
