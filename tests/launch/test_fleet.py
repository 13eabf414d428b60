"""What the launcher of several hosts does with agents that are not there."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ronde.launch import driver
from ronde.launch.engine import Host
from ronde.launch.links import HostLink
from ronde.launch.messages import MARKER, Hello, from_line, to_line


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
    monkeypatch.setattr(driver, "SAY_SECONDS", 0.01)
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
        threading.Thread(target=driver.join_relay, args=(ends, places, system), daemon=True).start()
        del ends, link
        relay.sendall(json.dumps({"place": 0, "argv": ["x"]}).encode() + b"\n")
        assert json.loads(node.makefile("rb").readline())["argv"] == ["x"]
        node.shutdown(socket.SHUT_RDWR)
        node.close()
        relay.settimeout(60)
        assert relay.makefile("rb").read() == b"\nronde lost it: node 3 is gone\n"
    printed = "ronde lost it: node 3 is gone\nTraceback: broken pipe"
    assert driver.Driven.meaning(SimpleNamespace(), Host("a"), 255, printed) == "node 3 is gone"


def test_what_an_agent_prints_comes_between_its_answers():
    """Ray and Spark give an agent one stream: what it prints must not be lost, nor cut an answer."""
    words = [sys.executable, "-P", "-u", "-m", "ronde.launch.agent"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as agent:
        agent.stdin.write(to_line(Hello(".", ["-m", "json"], {}, None, silence=1.0)))
        agent.stdin.flush()
        said = agent.stdout.read()  # until it gives its launcher up
    answer, printed = said.partition(MARKER)[2].splitlines()
    assert from_line(answer).facts["sees"] is False
    assert printed.startswith(b"ronde: nothing came from the launcher for 1 s")


AGENT = """
import sys, time
from ronde.launch.messages import MARKER, Alive, Heard, IsHeard, Ping, from_line, to_line
sys.stdout.buffer.write(MARKER + to_line(Alive()) + to_line(Ping()))
for line in sys.stdin.buffer:
    order = from_line(line)
    if isinstance(order, IsHeard) and sys.argv[1] != "silent":
        sys.stdout.buffer.write(to_line(Heard(order.address, float(sys.argv[1]))))
"""


class Stubs:
    """Agents that are called by what they do: silent, or so many seconds since they heard it."""

    name = "here"

    def command(self, host, agent):
        return [agent[0], "-u", "-c", AGENT, host.name]

    def meaning(self, host, status, printed):
        return ""


@pytest.mark.parametrize(("heard", "lost"), [(("5", "0.1"), False), (("5", "1.5"), True)])
def test_a_silent_host_that_others_hear_is_not_lost(heard, lost):
    """Its link may carry too much: what comes from it at all says that it is there."""
    up = threading.Semaphore(0)
    links = [
        HostLink(Host(name), lambda *_: up.release(), Stubs(), sys.executable)
        for name in ("silent", *heard)
    ]
    silent = links[0]
    silent.address = "10.0.0.1"
    try:
        assert all(up.acquire(timeout=60) for _ in links)  # silence counts from then on
        looks, limit = 0, time.monotonic() + 60
        while not silent.closed and looks < (10**6 if lost else 60) and time.monotonic() < limit:
            looks += 1
            silent.look(0.5, links)
            time.sleep(0.05)
        assert silent.closed == lost
        assert not lost or "nothing came from it for " in silent.why(-9)
    finally:
        for link in links:
            link.close(1.0)
