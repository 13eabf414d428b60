"""The trackers that get a run's record: TensorBoard, MLflow, Weights & Biases, Prometheus."""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ronde.watch.run_dir import RunDir
from ronde.world import ArgumentError, RondeError

__all__ = ["TRACKERS", "Lines", "Tracker", "points_of"]


Lines = list[tuple[int, dict[str, Any]]]
"""Offsets after lines of the record, and their events."""


class Tracker(Protocol):
    """A tracker. ``note`` is what its file keeps beside the offset; `send` may change it."""

    def send(self, lines: Lines) -> None:
        """Hand events over, all or none as far as later ones can tell.

        Raises:
            OSError: the tracker cannot be reached; it gets the same lines again.
        """

    def close(self) -> None:
        """Finish."""


def points_of(event: dict[str, Any]) -> dict[str, float]:
    """An event's numbers by name: ``loss`` and ``lr`` of a step, ``NAME/METRIC`` of an evaluation,
    the script's own names of ``run.log``; below ``PART/`` for a further run of the record.

    Example:
        >>> points_of({"type": "evaluate", "step": 4, "name": "test", "metrics": {"loss": 0.5}})
        {'test/loss': 0.5}
    """
    kind, part = event.get("type"), event.get("part")
    values: dict[str, Any] = {}
    if kind == "step":
        values = {name: event.get(name) for name in ("loss", "lr")}
    elif kind == "evaluate":
        name = event.get("name") or "evaluate"
        values = {f"{name}/{k}": v for k, v in (event.get("metrics") or {}).items()}
    elif kind == "log":
        own = event.get("values") or {}
        values = {f"log/{k}" if k in ("loss", "lr") else k: v for k, v in own.items()}
    prefix = f"{part}/" if part else ""
    if not isinstance(event.get("step"), int):
        return {}
    return {
        prefix + k: float(v)
        for k, v in values.items()
        if isinstance(v, int | float) and not isinstance(v, bool)
    }


class TensorBoard:
    """Appends to one event file, cut first to the bytes that belong to the offset."""

    def __init__(self, run: RunDir, place: str, note: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._writer = RecordWriter
        folder = Path(place) / run.name if place else run.path / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._note = note
        self._file = (folder / f"events.out.tfevents.0.{note['id']}").open("ab", buffering=0)
        if not note.setdefault("bytes", 0):
            self._append([Event(wall_time=time.time(), file_version="brain.Event:2")])

    def _append(self, events: Iterable[Any]) -> None:
        made = io.BytesIO()
        records = self._writer(made)
        for event in events:
            records.write(event.SerializeToString())
        # A kill, or a full disk, may have left points behind the offset, which come again.
        self._file.truncate(self._note["bytes"])
        data = made.getvalue()
        while data:
            data = data[self._file.write(data) :]
        self._note["bytes"] += made.tell()

    def send(self, lines: Lines) -> None:
        """See :class:`Tracker`."""
        self._append(self._events(lines))

    def _events(self, lines: Lines) -> Iterator[Any]:
        for _, event in lines:
            at = event.get("time", 0.0)
            if event.get("type") == "resume":  # readers drop the points from that step on
                begun = self._session(status=self._session.START)
                yield self._event(wall_time=at, step=event["step"] + 1, session_log=begun)
            for name, value in points_of(event).items():
                point = self._summary(value=[self._summary.Value(tag=name, simple_value=value)])
                yield self._event(wall_time=at, step=event["step"], summary=point)

    def close(self) -> None:
        """See :class:`Tracker`."""
        self._file.close()


class MLflow:
    """A run on an MLflow server, over its REST API. A tag of the run keeps the offset, too: it is
    right where an answer was lost.
    """

    def __init__(self, run: RunDir, place: str, note: dict[str, Any]) -> None:
        self._uri = (place or os.environ.get("MLFLOW_TRACKING_URI", "")).rstrip("/")
        self._note, self._name = note, run.name
        self._run = ""
        self._sent = 0  # offset that the server knows

    def _call(self, path: str, **body: Any) -> dict[str, Any]:
        import urllib.error
        import urllib.request
        from base64 import b64encode

        headers = {"Content-Type": "application/json"}
        user, word = (os.environ.get(f"MLFLOW_TRACKING_{n}") for n in ("USERNAME", "PASSWORD"))
        if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
        elif user is not None:
            headers["Authorization"] = f"Basic {b64encode(f'{user}:{word}'.encode()).decode()}"
        url, data = f"{self._uri}/api/2.0/mlflow/{path}", json.dumps(body).encode()
        try:
            request = urllib.request.Request(url, data, headers)
            with urllib.request.urlopen(request, timeout=10.0) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            # The server understood and refuses: trying again would not help.
            if error.code < 500 and error.code not in (408, 429):
                raise RondeError(f"MLflow refuses {path} ({error.code}): {text}") from None
            raise OSError(f"{path}: status {error.code}") from None
        except (ValueError, http.client.HTTPException) as error:
            raise OSError(f"{path}: {error}") from None

    def _open(self) -> None:
        """Find the run and what it has, or make it. A tag tells a run that was made by a call whose
        answer was lost.
        """
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ronde")
        try:
            experiment = self._call("experiments/create", name=name)["experiment_id"]
        except RondeError as error:
            if "RESOURCE_ALREADY_EXISTS" not in str(error):
                raise
            known = self._call("experiments/search", max_results=1, filter=f"name = '{name}'")
            experiment = known["experiments"][0]["experiment_id"]
        mine = f"tags.`ronde.id` = '{self._note['id']}'"
        runs = self._call("runs/search", experiment_ids=[experiment], filter=mine).get("runs")
        if not runs:
            begun = {"run_name": self._name, "start_time": int(time.time() * 1000)}
            tags = [{"key": "ronde.id", "value": self._note["id"]}]
            made = self._call("runs/create", experiment_id=experiment, tags=tags, **begun)
            runs = [made["run"]]
        tagged = {t["key"]: t["value"] for t in runs[0]["data"].get("tags", ())}
        self._sent = int(tagged.get("ronde.offset", 0))
        self._run = str(runs[0]["info"]["run_id"])

    def send(self, lines: Lines) -> None:
        """See :class:`Tracker`."""
        if not self._run:
            self._open()
        try:
            for some in _portions([line for line in lines if line[0] > self._sent]):
                self._send(some)
        except OSError:
            self._run = ""  # what of it has arrived, the server knows
            raise

    def _send(self, lines: Lines) -> None:
        metrics: list[dict[str, Any]] = []
        status: dict[str, Any] | None = None
        tags: dict[str, Any] = {"offset": lines[-1][0]}
        for _, event in lines:
            kind, when = event["type"], int(event.get("time", 0) * 1000)
            if kind == "start" and not event.get("part"):
                tags |= _facts(event)
                status = {"status": "RUNNING"}
            elif kind == "end" and not event.get("part"):
                ended = {"completed": "FINISHED", "failed": "FAILED"}.get(event["status"], "KILLED")
                status = {"status": ended, "end_time": when}
            for name, value in points_of(event).items():
                at = {"timestamp": when, "step": event["step"]}
                metrics.append(
                    {"key": re.sub(r"[^\w./: -]", "_", name), "value": _json(value), **at}
                )
        named = [{"key": f"ronde.{k}", "value": str(v)[:5000]} for k, v in tags.items()]
        self._call("runs/log-batch", run_id=self._run, metrics=metrics, tags=named)
        self._sent = lines[-1][0]
        if status is not None:
            self._call("runs/update", run_id=self._run, **status)

    def close(self) -> None:
        """See :class:`Tracker`."""


def _portions(lines: Lines) -> Iterator[Lines]:
    """Lines for calls of at most 1,000 values each, as MLflow takes them."""
    some: Lines = []
    count = 0
    for line in lines:
        more = len(points_of(line[1]))
        if some and count + more > 1000:
            yield some
            some, count = [], 0
        some.append(line)
        count += more
    if some:
        yield some


def _facts(start: dict[str, Any]) -> dict[str, Any]:
    """What a start says about a run, by name."""
    plain = ("script", "model", "parameters", "optimizer", "workers", "device", "host")
    facts: dict[str, Any] = {k: start[k] for k in plain if k in start}
    facts |= {f"plan.{k}": v for k, v in (start.get("plan") or {}).items()}
    facts |= {f"git.{k}": v for k, v in (start.get("git") or {}).items()}
    return facts | {"arguments": " ".join(map(str, start.get("arguments") or ()))}


def _json(value: float) -> float | str:
    """A number as protobuf's JSON has it."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


class WandB:
    """A run of Weights & Biases, through its package. Its own counter of steps is the offset in the
    record, so that it ignores lines that it gets twice; curves are drawn over ``step``.
    """

    def __init__(self, run: RunDir, place: str, note: dict[str, Any]) -> None:
        import wandb

        project = place or os.environ.get("WANDB_PROJECT", "ronde")
        # Output is the launcher's: wandb captures none of it.
        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(
                project=project,
                name=run.name,
                id=note["id"],
                resume="allow",
                dir=str(run.path),
                settings=settings,
            )
        except wandb.errors.CommError as error:
            raise OSError(str(error)) from None
        except wandb.errors.Error as error:
            raise RondeError(f"Weights & Biases: {error}") from None
        self._run.define_metric("*", step_metric="step")

    def send(self, lines: Lines) -> None:
        """See :class:`Tracker`."""
        for offset, event in lines:
            if event["type"] == "start" and not event.get("part"):
                self._run.config.update(_facts(event), allow_val_change=True)
            if points := points_of(event):
                self._run.log({**points, "step": event["step"]}, step=offset)

    def close(self) -> None:
        """See :class:`Tracker`."""
        self._run.finish()


class Prometheus:
    """Tells the newest values to who asks on 127.0.0.1, in Prometheus' text format."""

    def __init__(self, run: RunDir, place: str, note: dict[str, Any]) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        self._run, self._values = run.name, {"step": 0.0, "samples": 0.0, "running": 0.0}
        self._counts = {"alert": 0, "hang": 0, "restart": 0}
        self._named: dict[str, float] = {}
        sink = self

        class _Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = sink.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", int(place)), _Answer)
        except (OSError, OverflowError) as error:
            raise ArgumentError(f"--to prometheus:{place}: {error}.") from None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def text(self) -> str:
        """What a scrape gets."""

        def label(text: str) -> str:
            for sign, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
                text = text.replace(sign, written)
            return f'"{text}"'

        run = f"run={label(self._run)}"
        rows = [(f"ronde_{k}", "gauge", f"{{{run}}}", v) for k, v in self._values.items()]
        rows += [(f"ronde_{k}s_total", "counter", f"{{{run}}}", v) for k, v in self._counts.items()]
        # A copy: a scrape comes in another thread.
        for name, value in list(self._named.items()):
            rows.append(("ronde_value", "gauge", f"{{{run},name={label(name)}}}", value))
        lines, metric = [], ""
        for name, kind, labels, value in rows:
            if name != metric:
                lines.append(f"# TYPE {name} {kind}")
            metric = name
            shown = f"{value:+}".capitalize() if math.isinf(value) else repr(value)
            lines.append(f"{name}{labels} {'NaN' if math.isnan(value) else shown}")
        return "\n".join(lines) + "\n"

    def send(self, lines: Lines) -> None:
        """See :class:`Tracker`."""
        for _, event in lines:
            kind, whole = event["type"], not event.get("part")
            if kind in self._counts:
                self._counts[kind] += 1
            if kind in ("start", "end") and whole:
                self._values["running"] = float(kind == "start")
            if kind in ("step", "resume") and whole:
                self._values |= {k: float(event[k]) for k in ("step", "samples") if k in event}
            self._named.update(points_of(event))

    def close(self) -> None:
        """See :class:`Tracker`."""
        self._server.shutdown()
        self._server.server_close()


TRACKERS: dict[str, tuple[Callable[[RunDir, str, dict[str, Any]], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, ""),
    "wandb": (WandB, "wandb"),
    "prometheus": (Prometheus, ""),
}
"""Kind of a target -> its class, and the package that it needs."""
