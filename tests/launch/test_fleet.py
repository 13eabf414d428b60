"""What the launcher of several hosts does with agents that are not there."""

from __future__ import annotations

import sys
import time

from ronde.launch.engine import Host
from ronde.launch.fleet import Fleet


class Here:
    """Hosts that are all this one, but for a lost one."""

    name = "here"

    def command(self, host, agent):
        return agent if host.name == "there" else [sys.executable, "-c", "raise SystemExit(3)"]

    def meaning(self, host, status, printed):
        return ""

    def close(self):
        return


def test_a_lost_host_that_refuses_a_call_disturbs_nobody(tmp_path):
    with Fleet([Host("there", 1)], Here()) as fleet:
        fleet.ask([str(tmp_path / "train.py")], {}, None)
        fleet._every = [Host("there", 1), Host("lost", 1)]
        fleet._call()
        (call,) = fleet._coming
        limit = time.monotonic() + 20
        while not call.closed and time.monotonic() < limit:
            time.sleep(0.01)
        assert call.closed
        address, port, _ = fleet._meet()
        assert port and address.startswith("127.")
        assert fleet._coming == []
