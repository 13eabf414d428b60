"""What the launcher of several hosts does with agents that are not there."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from types import SimpleNamespace

from ronde.launch import driver
from ronde.launch.engine import Host
from ronde.launch.fleet import Fleet
from ronde.launch.links import HostLink
from ronde.launch.messages import IsHeard


def test_a_slow_driver_is_told_until_it_has_places(tmp_path, monkeypatch, capfd):
    """Ray and Spark take up to two minutes; this one waits until it was told of twice."""
    lines = [
        "def main():",
        "    import sys, time",
        "    sys.stdin.readline()",
        f"    while not open({str(tmp_path / 'go')!r}).read(): time.sleep(0.01)",
        '    print(\'{"hosts": [["a", 2, 0]]}\', flush=True)',
        "    sys.stdin.read()",
    ]
    (tmp_path / "slow_driver.py").write_text("\n".join(lines))
    (tmp_path / "go").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(driver, "_SAY_SECONDS", 0.01)
    said = []

    def say(*words, file):
        said.append(words[0])
        (tmp_path / "go").write_text("go" if len(said) > 1 else "")

    monkeypatch.setattr(driver, "print", say, raising=False)
    engine = driver.Driven("Ray", "slow_driver", "ray", "json", {}, None)
    engine.close()
    assert engine.hosts == [Host("a", 2)]
    assert len(said) > 1 and all(line.startswith("ronde: Ray is starting, for ") for line in said)


def test_a_relay_ends_when_its_place_is_lost():
    """Though nothing is sent there any more, which would fail."""
    ends, relay = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, relay:
        node = socket.create_connection(server.getsockname())
        link, _ = server.accept()
        places = SimpleNamespace(links={0: link}, streams={0: link.makefile("rb")})
        system = SimpleNamespace(environment=lambda _: {}, lost=lambda _: "node 3 is gone")
        threading.Thread(target=driver._join, args=(ends, places, system), daemon=True).start()
        del ends, link
        relay.sendall(json.dumps({"place": 0, "argv": ["x"]}).encode() + b"\n")
        assert json.loads(node.makefile("rb").readline())["argv"] == ["x"]
        node.shutdown(socket.SHUT_RDWR)
        node.close()
        relay.settimeout(60)
        assert relay.makefile("rb").read() == b"\nronde lost it: node 3 is gone\n"
    printed = "ronde lost it: node 3 is gone\nTraceback: broken pipe"
    assert driver.Driven.meaning(SimpleNamespace(), Host("a"), 255, printed) == "node 3 is gone"


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
        limit = time.monotonic() + 60
        while not call.closed and time.monotonic() < limit:
            time.sleep(0.01)
        assert call.closed
        address, port, _ = fleet._meet()
        assert port and address.startswith("127.")
        assert fleet._coming == []


def test_a_silent_host_that_others_hear_is_not_lost():
    """Its link may carry too much: what comes from it at all says that it is there."""
    asked, killed = [], []

    def link(address: str) -> SimpleNamespace:
        given = {"_asked": 0.0, "_asked_first": 0.0, "_heard": {}, "closed": False}
        return SimpleNamespace(address=address, order=asked.append, **given)

    silent, *others = link("10.0.0.1"), link("10.0.0.2"), link("10.0.0.3")
    silent._is_heard = lambda others: HostLink._is_heard(silent, others)
    silent._child = SimpleNamespace(kill=lambda: killed.append(silent))

    def lost(seconds: float) -> bool:
        silent._silence = SimpleNamespace(seconds=lambda: seconds, longest=0.0)
        silent._silent = ""
        killed.clear()
        HostLink.look(silent, 1.0, [silent, *others])
        return bool(killed)

    assert not lost(1.2) and asked == [IsHeard("10.0.0.1")] * 2
    assert not lost(1.3)  # no answer yet
    now = time.monotonic()
    others[0]._heard["10.0.0.1"] = now, 5.0
    assert not lost(1.3)  # the other one may have heard it
    others[1]._heard["10.0.0.1"] = now, 0.1
    assert not lost(3.0)
    others[1]._heard["10.0.0.1"] = now, 1.5
    assert lost(3.0)
    others[1]._heard["10.0.0.1"] = now, 0.1
    assert lost(10.0)
    silent.address = ""  # no worker of it
    assert lost(1.2)
