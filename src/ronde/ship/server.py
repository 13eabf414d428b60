"""A small server of a bundle's model: JSON over HTTP, with limits."""

from __future__ import annotations

import io
import json
import math
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ronde.ship.captures import Capture
from ronde.ship.runtime import ShippedModel
from ronde.world import ArgumentError

__all__ = ["serve_model"]

_MOST_BYTES = 16 << 20
_MOST_REQUESTS = 32  # at a time: each may hold 16 MB, and what JSON makes of them
PATIENCE_SECONDS = 10.0  # for a slow client


class _Deadline(socket.SocketIO):
    """Reads a socket up to a point in time, however many reads it takes."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "r")
        self._connection, self.end = connection, 0.0

    def readinto(self, buffer: Any) -> int | None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return super().readinto(buffer)


def serve_model(
    model: ShippedModel,
    port: int = 8080,
    host: str = "127.0.0.1",
    capture: Capture | None = None,
) -> ThreadingHTTPServer:
    """A server that is ready: call its ``serve_forever``.

    ``POST /predict`` with ``{"inputs": {name: [[…], …]}}``, or ``{"rows": [{column: value}, …]}``
    where the bundle has a recipe, gives ``{"outputs": [[…], …]}``. ``GET /health`` gives the
    bundle's serial number. A request may have 16 MB.

    Raises:
        ArgumentError: the address or port cannot be bound.
    """
    places = threading.BoundedSemaphore(_MOST_REQUESTS)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = PATIENCE_SECONDS

        def setup(self) -> None:
            super().setup()
            self._raw = _Deadline(self.connection)
            self.rfile = io.BufferedReader(self._raw)

        def handle_one_request(self) -> None:
            self._raw.end = time.monotonic() + PATIENCE_SECONDS  # for the request's first line
            super().handle_one_request()

        def parse_request(self) -> bool:
            self._raw.end = time.monotonic() + PATIENCE_SECONDS  # for its headers and its body
            return super().parse_request()

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, status: int, values: dict[str, Any]) -> None:
            body = json.dumps(_finite(values)).encode()
            self.connection.settimeout(PATIENCE_SECONDS)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status != 200:
                self.close_connection = True
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(200, {"status": "ok", "serial": model.bundle.serial})
            else:
                self._answer(404, {"error": "there are POST /predict and GET /health."})

        def do_POST(self) -> None:
            if self.path != "/predict":
                self._answer(404, {"error": "there are POST /predict and GET /health."})
                return
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                self._answer(411, {"error": "Content-Length is missing, or no number."})
            elif len(length) > 12 or int(length) > _MOST_BYTES:
                self._answer(413, {"error": f"a request may have {_MOST_BYTES >> 20} MB."})
            elif not places.acquire(blocking=False):
                self._answer(503, {"error": f"{_MOST_REQUESTS} requests are under way."})
            else:
                try:
                    body = self._body(int(length))
                    if body is None:
                        self._answer(408, {"error": "the request came too slowly."})
                    else:
                        self._predict(body)
                finally:
                    places.release()

        def _body(self, length: int) -> bytes | None:
            """A request's body; None if not all of it came in time."""
            try:
                body = self.rfile.read(length)
            except TimeoutError:
                return None
            return body if len(body) == length else None

        def _predict(self, body: bytes) -> None:
            try:
                start = time.perf_counter()
                values = json.loads(body)
                if isinstance(values, dict) and "rows" in values:
                    inputs: Any = model.prepare_rows(list(values["rows"]))
                else:
                    given = values["inputs"] if isinstance(values, dict) else values
                    inputs = model.named(given)
                outputs = model.predict(inputs)
            except Exception as error:  # whatever a client makes up, it gets an answer
                self._answer(400, {"error": str(error)[:300]})
            else:
                answer = [o.tolist() for o in outputs]
                self._answer(200, {"outputs": answer})
                if capture:
                    seconds = time.perf_counter() - start
                    plain = {n: getattr(v, "tolist", lambda v=v: v)() for n, v in inputs.items()}
                    capture.write(model.bundle.serial, plain, answer, seconds)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that hung up is none of the server's errors

    try:
        return Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise ArgumentError(
            f"{host}:{port} cannot be served: {error}. 0 is any free port."
        ) from None


def _finite(value: Any) -> Any:
    """A value whose numbers are JSON's: null in the place of NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return value
