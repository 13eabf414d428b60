"""Serve the live page: all runs of a folder, in a browser. Read only, on loopback only.

The server keeps no state but a cache of the list. A browser gets whole lines of a run's files; the
``id`` of each message says how many bytes of each file it has, so a reconnect loses and repeats
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ronde.watch.job_views import job_kind, job_row, job_view
from ronde.watch.run_dir import RunDir, check_name, is_recent
from ronde.world import ArgumentError

__all__ = ["application", "serve_page"]

_PORT = 8765
_FILES = Path(__file__).parent / "page_files"
_STREAMED = ("record", "health", "resources")  # .jsonl
_HEAD_BYTES, _TAIL_BYTES = 32 << 10, 64 << 10
_LOG_TAIL_BYTES, _BLOCK_BYTES = 32 << 10, 4 << 20
_NUMBERS = {int, float}
_STEP_GROUPS = ("time", "step", "loss", "lr", "samples")
_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?"
# A step's line as a record has it. All at once, 100,000 take 0.27 s of processor time to read and
# write again; by way of JSON 0.6 s.
_STEP_LINE = re.compile(
    rf'(?m)^\{{"type": "step", "time": ({_NUMBER}), "step": (\d+), "epoch": \d+, '
    rf'"loss": ({_NUMBER}|NaN|-?Infinity), "lr": ({_NUMBER}), "samples": (\d+)\}}\n'.encode()
)
_NOT_FINITE = re.compile("NaN|-?Infinity")
_LOOK_SECONDS, _SIGN_SECONDS = 0.5, 15.0
_STEP = ("step", "loss", "lr", "samples", "time")
_DAMAGED = TypeError, ValueError, AttributeError, LookupError
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def _finite(value: Any) -> Any:
    """The value as strict JSON has it: numbers that are not finite become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def _parsed(lines: list[bytes]) -> list[Any]:
    """The value of each line; None for one that is no JSON."""
    with contextlib.suppress(ValueError, RecursionError):  # at once: four times as fast
        values = json.loads(b"[" + b",".join(lines) + b"]")
        if len(values) == len(lines):
            return list(values)
    values = []
    for line in lines:
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError):
            values.append(None)
    return values


def _columns(steps: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Steps in columns; those without all numbers are left out."""
    if any({type(e.get(k)) for e in steps} - _NUMBERS for k in _STEP):
        steps = [e for e in steps if all(type(e.get(k)) in _NUMBERS for k in _STEP)]
    columns = {k: [e[k] for e in steps] for k in _STEP}
    for name, column in columns.items():
        if not all(map(math.isfinite, column)):
            columns[name] = [v if math.isfinite(v) else None for v in column]
    return columns


def _pack(path: Path, offset: int) -> tuple[int, str]:
    """Whole lines after ``offset`` as the JSON of one message, steps in columns; the offset after
    them. A resume begins a message: columns lose its place among the steps.
    """
    size = _BLOCK_BYTES
    with path.open("rb") as file:
        while True:
            file.seek(offset)
            block = file.read(size)
            whole = block[: block.rfind(b"\n") + 1]
            if whole or len(block) < size:
                break
            size *= 2  # one long line
    more, first = len(block) == size, whole.find(b'{"type": "step"')
    cut = whole.find(b'\n{"type": "resume"', first) if first >= 0 else -1
    if cut >= 0:
        whole, more = whole[: cut + 1], True
    texts = _STEP_LINE.split(whole)  # the lines between steps, and five numbers of each step
    events, steps = _sorted_out(b"".join(texts[::6]))
    if steps.get("", {}).get("step"):  # some are written in another way: keep their order
        texts = [b""]
        events, steps = _sorted_out(whole)
    packed = {part: json.dumps(columns, separators=(",", ":")) for part, columns in steps.items()}
    if len(texts) > 1:
        columns = {k: b",".join(texts[n::6]).decode() for n, k in enumerate(_STEP_GROUPS, 1)}
        columns["loss"] = _NOT_FINITE.sub("null", columns["loss"])
        packed[""] = "{" + ",".join(f'"{k}":[{column}]' for k, column in columns.items()) + "}"
    shown = ",".join(f"{json.dumps(part)}:{columns}" for part, columns in packed.items())
    rest = json.dumps({"events": _finite(events), "more": more}, separators=(",", ":"))
    return offset + len(whole), f'{{"steps":{{{shown}}},{rest[1:]}'


def _sorted_out(text: bytes) -> tuple[list[dict[str, Any]], dict[str, dict[str, list[Any]]]]:
    """The events of some lines, and their steps in columns, by part."""
    lines = [e for e in _parsed(text.split(b"\n")[:-1]) if isinstance(e, dict)]
    steps: dict[str, list[dict[str, Any]]] = {}
    for event in lines:
        if event.get("type") == "step":
            steps.setdefault(str(event.get("part") or ""), []).append(event)
    events = [event for event in lines if event.get("type") != "step"]
    return events, {part: _columns(of) for part, of in steps.items()}


def _offsets(text: str) -> dict[str, int]:
    """``"run/record:120,run/health:0"`` -> bytes that the browser has, by run and file."""
    offsets = {}
    for part in filter(None, text.split(",")):
        key, _, offset = part.partition(":")
        if not offset.isdecimal():
            raise HTTPException(400, "not an id of this page")
        offsets[key] = int(offset)
    return offsets


async def _messages(runs: list[tuple[str, RunDir]], offsets: dict[str, int]) -> AsyncIterator[str]:
    inodes: dict[str, int] = {}
    yield "retry: 500\n\n"
    silent = 0.0
    while True:
        sent = False
        for (name, run), file in itertools.product(runs, _STREAMED):
            key, path = f"{name}/{file}", run.path / f"{file}.jsonl"
            try:
                facts = path.stat()
            except OSError:
                continue
            message, packed = {"run": name, "file": file}, "{}"
            # A run of the same name has a new file: what the browser has is of the old one.
            replaced = inodes.setdefault(key, facts.st_ino) != facts.st_ino
            if replaced or facts.st_size < offsets.get(key, 0):
                inodes[key], offsets[key] = facts.st_ino, 0
                message["reset"] = "yes"  # another run of that name
            before = offsets.get(key, 0)
            if facts.st_size > before:
                with contextlib.suppress(OSError):
                    offsets[key], packed = await asyncio.to_thread(_pack, path, before)
            if offsets.get(key, 0) > before or "reset" in message:
                sent = True
                at = ",".join(f"{k}:{v}" for k, v in offsets.items())
                yield f"id: {at}\ndata: [{json.dumps(message)},{packed}]\n\n"
        if sent:
            silent = 0.0
            continue
        await asyncio.sleep(_LOOK_SECONDS)
        # A comment now and then: proxies close connections that say nothing.
        silent += _LOOK_SECONDS
        if silent >= _SIGN_SECONDS:
            silent = 0.0
            yield ": alive\n\n"


def _both_ends(path: Path) -> list[dict[str, Any]]:
    """The events at the beginning and at the end of a record, whatever its length."""
    with path.open("rb") as file:
        data = file.read(_HEAD_BYTES)
        size = os.fstat(file.fileno()).st_size
        if size > len(data):
            file.seek(max(len(data), size - _TAIL_BYTES))
            data += b"\n" + file.read()
    events = []
    lines = data.split(b"\n")
    steps = [k for k, line in enumerate(lines) if line.startswith(b'{"type": "step"')]
    for k in steps[:-20]:  # the last one tells all; a few more, as runs may share the record
        lines[k] = b""
    for line in filter(None, lines):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict) and not value.get("part"):
                events.append(value)
    return events


def _about(run: RunDir, name: str) -> dict[str, Any]:
    """A row of the list. It costs the same for every length of the record."""
    of: dict[str, list[dict[str, Any]]] = {}
    for event in _both_ends(run.record):
        of.setdefault(str(event.get("type")), []).append(event)
    last = {kind: events[-1] for kind, events in of.items()}
    start, end, step = (last.get(k, {}) for k in ("start", "end", "step"))
    if end and end.get("time", 0) < start.get("time", 0):
        end = {}  # it was resumed after that end
    return {
        "name": name,
        "start": _finite({k: v for k, v in start.items() if k not in ("type", "proof", "schema")}),
        "status": end.get("status"),
        "error": end.get("error"),
        "step": end.get("step") or step.get("step", 0),
        "samples": step.get("samples", 0),
        "loss": _finite(step.get("loss")),
        "evaluation": _finite(last.get("evaluate", {}).get("metrics")),
    }


def _alerts(path: Path, offset: int) -> tuple[int, int]:
    """How many alerts stand after an offset, without parsing; the offset after the last line."""
    count = 0
    with path.open("rb") as file:
        file.seek(offset)
        while whole := file.read(_BLOCK_BYTES).rpartition(b"\n")[0]:
            count += (b"\n" + whole).count(b'\n{"type": "alert"')
            offset += len(whole) + 1
            file.seek(offset)
    return count, offset


class _Pages:
    """What the routes answer."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._rows: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._alerts: dict[str, tuple[int, int, int]] = {}  # inode, offset, alerts before it

    def _folder(self, name: str) -> Path:
        """Of a run or job, which may be inside another one: ``search/trials/t003``."""
        try:
            for part in name.split("/"):
                check_name(part)
        except ArgumentError:
            raise HTTPException(404, "no such run") from None
        return self._runs / name

    def _run(self, name: str) -> tuple[str, RunDir]:
        run = RunDir(self._folder(name))
        if not run.record.is_file():
            raise HTTPException(404, "no such run")
        return name, run

    def page(self, request: Request) -> Response:
        return FileResponse(_FILES / "index.html")

    def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ("page.js", "jobs.js", "page.css", "uPlot.js", "uPlot.css", "icon.svg"):
            raise HTTPException(404)
        return FileResponse(_FILES / name)

    def _row(self, name: str) -> dict[str, Any]:
        """A run's row.

        Raises:
            OSError: it has no record.
        """
        run = RunDir(self._runs / name)
        facts = run.record.stat()
        key = facts.st_mtime_ns, facts.st_size
        if self._rows.get(name, ((), {}))[0] != key:
            inode, offset, alerts = self._alerts.get(name, (0, 0, 0))
            if inode != facts.st_ino or facts.st_size < offset:
                offset = alerts = 0  # another run of that name
            more, offset = _alerts(run.record, offset)
            self._alerts[name] = facts.st_ino, offset, alerts + more
            try:
                about = _about(run, name)
            except _DAMAGED as error:
                about = {"name": name, "status": "unreadable", "error": str(error)}
            self._rows[name] = key, {**about, "alerts": alerts + more}
        row = dict(self._rows[name][1], written=facts.st_mtime)
        row["status"] = row["status"] or ("running" if is_recent(facts.st_mtime) else "stopped")
        return row

    def _rows_of(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        for name in names:
            with contextlib.suppress(OSError):
                yield self._row(name)

    def list(self, request: Request) -> Response:
        rows, jobs = [], []
        for path in self._runs.iterdir() if self._runs.is_dir() else ():
            with contextlib.suppress(OSError, ArgumentError):
                check_name(path.name)
                if (path / "record.jsonl").exists():
                    rows.append(self._row(path.name))
                elif kind := job_kind(path):
                    try:
                        jobs.append(job_row(path, path.name))
                    except _DAMAGED as error:
                        about = {"name": path.name, "kind": kind, "why": str(error)}
                        jobs.append({**about, "status": "unreadable", "written": 0})
        for listed in rows, jobs:
            listed.sort(key=lambda row: row["written"], reverse=True)
        answer = {"folder": str(self._runs), "now": time.time(), "runs": rows, "jobs": jobs}
        return JSONResponse(_finite(answer))

    def job(self, request: Request) -> Response:
        name = request.path_params["name"]
        folder = self._folder(name)
        if not job_kind(folder):
            raise HTTPException(404, "no such search, flow, or map")
        try:
            view = job_view(folder, name)
        except (OSError, *_DAMAGED) as error:
            raise HTTPException(500, f"it cannot be read: {error}") from None
        runs = [trial["run"] for trial in view.get("trials", ())]
        runs += [step["opens_run"] for step in view.get("steps", ()) if step["opens_run"]]
        return JSONResponse(_finite({**view, "runs": [*self._rows_of(runs)]}))

    async def events(self, request: Request) -> Response:
        names = request.query_params.getlist("run")[:12]
        last = request.headers.get("last-event-id") or request.query_params.get("from", "")
        wanted = {f"{name}/{file}" for name in names for file in _STREAMED}
        offsets = {k: v for k, v in _offsets(last).items() if k in wanted}
        messages = _messages([self._run(name) for name in names], offsets)
        return StreamingResponse(messages, media_type="text/event-stream")

    def logs(self, request: Request) -> Response:
        run = self._run(request.path_params["name"])[1]
        names = sorted(p.name for p in run.logs.glob("*.log")) if run.logs.is_dir() else []
        names.sort(key=lambda n: int("".join(filter(str.isdecimal, n)) or 0))
        asked = request.query_params.get("file") or next(iter(names), "")
        if asked and asked not in names:
            raise HTTPException(404, "no such log")
        text, size = b"", 0
        if asked:
            with (run.logs / asked).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _LOG_TAIL_BYTES))
                text = file.read(_LOG_TAIL_BYTES)
        facts = {"files": names, "file": asked, "cut": size > _LOG_TAIL_BYTES}
        return JSONResponse({**facts, "text": text.decode(errors="replace")})


class _Keyed:
    """Lets in who has the key, from the URL or from the cookie that it left; adds the headers."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._key = app, key
        # ports of a host share their cookies
        self._cookie = "ronde-" + hashlib.sha256(key.encode()).hexdigest()[:12]

    async def __call__(
        self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        given = request.query_params.get("key", "")
        key = given or request.cookies.get(self._cookie, "")
        headers = dict(_HEADERS)
        app = self._app
        # In constant time: how long a refusal takes tells nothing about the key.
        if not secrets.compare_digest(key.encode(), self._key.encode()):
            app = Response(
                "Open the whole link that 'ronde watch --page' prints: it has the key.\n", 403
            )
        elif given:
            headers["set-cookie"] = f"{self._cookie}={given}; HttpOnly; SameSite=Strict; Path=/"

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(k.encode(), v.encode()) for k, v in headers.items()]
                kept = [h for h in message["headers"] if h[0].decode() not in headers]
                message = {**message, "headers": kept + own}
            await send(message)

        await app(scope, receive, sent)


def application(runs: Path, key: str) -> Starlette:
    """The page of the runs in a folder, as an ASGI application."""
    pages = _Pages(runs)
    return Starlette(
        routes=[
            Route("/", pages.page),
            Route("/files/{name}", pages.file),
            Route("/runs", pages.list),
            Route("/events", pages.events),
            Route("/runs/{name:path}/logs", pages.logs),
            Route("/jobs/{name:path}", pages.job),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(_Keyed, key=key),
        ],
    )


def _key(runs: Path) -> str:
    """The key of a folder: kept in it, for its owner only, so that a page survives its server."""
    path = runs / ".page-key"
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(16))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor) as file:
            facts = os.fstat(descriptor)
            text = file.read(100)
            if facts.st_uid == os.getuid() and not facts.st_mode & 0o077 and len(text) == 32:
                return text
    return secrets.token_hex(16)


def serve_page(runs: Path, port: int | None = None, name: str | None = None) -> None:
    """Serve the page until Ctrl-C. Prints its address first.

    Args:
        runs: the folder of the runs.
        port: on 127.0.0.1; None takes 8765, or a free one if that is taken.
        name: the run that the page opens with.

    Raises:
        ArgumentError: the port is taken.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", _PORT if port is None else port))
    except OSError as error:
        if port is not None:
            raise ArgumentError(
                f"--port {port} cannot be used ({error.strerror}). Choose another one, or leave "
                "it out."
            ) from None
        listening.bind(("127.0.0.1", 0))
    listening.listen()
    key, port = _key(runs), listening.getsockname()[1]
    opened = f"#run={name}" if name else ""
    print(
        f"page on http://127.0.0.1:{port}/?key={key}{opened}   Ctrl-C ends the page, not the "
        f"training.\nfrom elsewhere: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}",
        flush=True,
    )
    config = uvicorn.Config(
        application(runs, key),
        log_level="critical",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,  # a stream never ends by itself
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
