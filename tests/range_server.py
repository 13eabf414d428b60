"""A web server on loopback that knows range requests, and can be told to misbehave."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server:
    """What a running server saw, and how it shall behave.

    Attributes:
        url: of the folder that it serves.
        gather: hold each range request back until so many are waiting (or 10 s have passed).
        fail: answer so many of the next range requests with status 503.
        ranges: whether it knows range requests.
        most: the most range requests that were waiting together.
        asked: ``(path, first byte, last byte)`` of each range request.
    """

    def __init__(self) -> None:
        self.url = ""
        self.gather = 0
        self.fail = 0
        self.ranges = True
        self.most = 0
        self.asked: list[tuple[str, int, int]] = []
        self.waiting = 0
        self.changed = threading.Condition()

    def enter(self) -> bool:
        """A range request has come; gives whether it is to fail."""
        with self.changed:
            if self.fail > 0:
                self.fail -= 1
                return True
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.gather, timeout=10)
            self.waiting -= 1
            return False


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder while the block runs."""
    server = Server()

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, directory=str(folder), **kwargs)

        def log_message(self, *args) -> None:
            pass

        def do_GET(self) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            path = Path(self.translate_path(self.path))
            if asked is None or not server.ranges or not path.is_file():
                super().do_GET()
                return
            if server.enter():
                self.send_error(503)
                return
            data = path.read_bytes()
            first, last = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            server.asked.append((path.name, first, last))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            self.send_header("Content-Length", str(max(0, last - first + 1)))
            self.end_headers()
            self.wfile.write(data[first : last + 1])

        def end_headers(self) -> None:
            if server.ranges:
                self.send_header("Accept-Ranges", "bytes")
            super().end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(
            target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join(10)
