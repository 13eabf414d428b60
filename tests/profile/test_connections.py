"""What reads without opening a file is named: HTTP, sockets, databases, child processes. Threads of
a library count for the stage that waits for them.
"""

from __future__ import annotations

import http.client
import http.server
import socket
import sqlite3
import ssl  # noqa: F401 - its sockets are looked for
import subprocess
import threading
import time
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from ronde.profile.probe import Probe
from ronde.profile.shared_counters import read_board, read_durations

WAIT = 0.02


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(WAIT)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"done")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def _urlopen(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as reply:
        return reply.read()


def _client(port):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/")
    with connection.getresponse() as reply:
        return reply.read()


def _socket(port):
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"GET / HTTP/1.0\r\n\r\n")
        data = b""
        while part := one.recv(100):
            data += part
    return data[-4:]


def _sqlite(_):
    connection = sqlite3.connect(":memory:")
    connection.create_function("slow", 1, lambda x: time.sleep(WAIT) or x)
    assert isinstance(connection, sqlite3.Connection)
    with connection:
        (one,) = connection.execute("SELECT slow('done')").fetchone()
    for row in connection.cursor().execute("SELECT 'done'"):
        assert row == ("done",)
    connection.close()
    return one.encode()


KEPT = sqlite3.connect(":memory:", check_same_thread=False)
KEPT.create_function("slow", 1, lambda x: time.sleep(WAIT) or x)


def _child(_):
    return subprocess.run(["sh", "-c", f"sleep {WAIT}; printf done"], capture_output=True).stdout


class _Made:
    """A data set; its answers are compared with those without a probe."""

    def __init__(self, make, port, kept=None):
        self.make, self.port, self.kept = make, port, kept

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.make(self.port) if self.kept is None else self.query()

    def query(self):
        with self.kept:
            return self.kept.execute("SELECT slow('done')").fetchone()[0].encode()


@pytest.mark.parametrize(
    ("make", "stage", "through"),
    [
        (_urlopen, "read", "HTTP"),
        (_client, "read", "HTTP"),
        (_socket, "read", "a socket"),
        (_sqlite, "read", "sqlite3"),
        (None, "read", "sqlite3"),  # a connection that was opened before
        (_child, "subprocess", None),
    ],
)
def test_what_is_not_a_file_is_named_as_what_it_is(port, make, stage, through):
    data = _Made(make, port, KEPT if make is None else None)
    probe = Probe(None, remove={"read"})
    watched, _ = probe.attach(data, list)
    assert [watched[i] for i in range(4)] == [b"done"] * 4
    times = probe.times()
    probe.uninstall()
    # it waits for most of its time, and is never answered from an earlier sample
    assert times[stage].wall_seconds > 3.9 * WAIT and not times[stage].removable
    assert times[stage].cpu_seconds < times[stage].wall_seconds
    if through is not None:
        assert times["read"].through[through] > 0.9 * times["read"].wall_seconds
    assert data[0] == b"done" and data.kept in (None, KEPT)
    assert sqlite3.connect.__module__ != "ronde.profile.sqlite_hooks"


def _burn(seconds):
    end = time.thread_time() + seconds
    data = bytes(60_000)
    while time.thread_time() < end:
        zlib.crc32(data)


def test_the_cpu_time_of_a_librarys_threads_is_the_stages(tmp_path):
    board = tmp_path / "board"
    with ThreadPoolExecutor(2) as pool:
        data = _Made(lambda _: [f.result() for f in [pool.submit(_burn, 0.01)] * 2] or b"", 0)
        probe = Probe(board)
        watched, _ = probe.attach(data, list)
        for i in range(4):
            watched[i]
        probe.uninstall()
    # what the pool computed, and not only what the waiting thread did
    assert read_board(board)["python"].cpu_seconds > 0.9 * 4 * 0.01
    durations = read_durations(board)
    assert sum(n for n, _ in durations) == 3  # the first one may open files
    assert 0.01 * 3 <= sum(s for _, s in durations) <= read_board(board)["python"].wall_seconds
