"""Trackers get each point of the record once, whatever dies in between."""

from __future__ import annotations

import http.server
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
import urllib.request
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from processes import child, free_port, python, ronde, ronde_batch, ronde_run
from record_lines import append, end, evaluation, resume
from record_lines import start as line_of_start
from record_lines import step as line_of_step
from ronde.watch import RunDir
from ronde.watch.sinks import Sending, send_record
from ronde.watch.trackers import TensorBoard, points_of
from ronde.world import ArgumentError, RondeError

NAME = 'evaluate/a "b" \\'
_TRAINING = """
import torch, ronde
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=torch.nn.functional.mse_loss, batch_size=16)
for epoch in run.epochs(3):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(data)
    run.log({"temperature": 0.5 * epoch, "loss": 7.0})
"""


def step(number: int, loss: float | None = None) -> dict:
    return line_of_step(number, random.Random(number).random() if loss is None else loss)


def start() -> dict:
    return line_of_start(plan={"batch_size": 8}, arguments=["--lr", "1"])


def evaluated(number: int) -> dict:
    return evaluation(number, {'a "b" \\': 0.25, "worst": math.nan, "names": ["text"]})


def write(run: RunDir, *events: dict, tail: str = "") -> None:
    append(run.path, *events, tail=tail)


@pytest.fixture
def run(tmp_path) -> RunDir:
    (tmp_path / "r").mkdir()
    return RunDir(tmp_path / "r")


def refuse(text: str) -> None:
    raise AssertionError(text)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {t: [(e.step, e.value) for e in events.Scalars(t)] for t in events.Tags()["scalars"]}


def float32(value: float) -> float:
    import numpy

    return float(numpy.float32(value))


def test_tensorboard_reads_each_point_once_after_kills_and_a_resume(run):
    write(run, start(), *(step(s) for s in range(1, 2001)), evaluated(2000))
    moments = random.Random(5)
    for part in range(2):  # killed in the middle, wherever that is
        killed = Sending(run, ["tensorboard"], refuse)
        limit = time.monotonic() + 60
        place = run.path / ".sink-tensorboard"
        at = place.stat().st_mtime_ns if place.exists() else 0
        while (not place.exists() or place.stat().st_mtime_ns == at) and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(moments.random() * 0.5)
        for pid in killed.pids:
            os.kill(pid, signal.SIGKILL)
        killed.close()
        write(
            run, *(step(s) for s in range(2001 + 50 * part, 2051 + 50 * part)), tail='{"type": "st'
        )
        with run.record.open("rb+") as file:  # the torn line is completed by its writer
            file.truncate(file.seek(0, 2) - len('{"type": "st'))
    send_record(run, "tensorboard", refuse)
    wanted = [(s, float32(step(s)["loss"])) for s in range(1, 2101)]
    assert scalars(run.path / "tensorboard")["loss"] == wanted
    write(run, resume(1500), *(step(s, loss=2.0) for s in range(1501, 1511)))
    send_record(run, "tensorboard", refuse)
    send_record(run, "tensorboard", refuse)
    curves = scalars(run.path / "tensorboard")
    assert curves["loss"] == wanted[:1500] + [(s, 2.0) for s in range(1501, 1511)]
    assert curves["evaluate/worst"] == [], "the evaluation at step 2000 is void"


def test_tensorboard_on_a_full_disk_has_each_point_once(run):
    note = {"id": "0"}
    board = TensorBoard(run, "", note)
    lines = [(n, step(n)) for n in range(1, 9)]
    board.send(lines[:4])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (note["bytes"] + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            board.send(lines[4:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    board.send(lines[4:])
    board.close()
    assert [n for n, _ in scalars(run.path / "tensorboard")["loss"]] == list(range(1, 9))


def test_a_later_run_of_the_record_and_own_names_are_told_apart():
    assert points_of({**step(3, 0.5), "part": "critic"}) == {"critic/loss": 0.5, "critic/lr": 0.1}
    own = {"type": "log", "step": 3, "values": {"loss": 1, "text": "x", "flag": True}}
    assert points_of(own) == {"log/loss": 1.0}
    assert points_of({"type": "log", "values": {"a": 1}}) == points_of({"type": "end"}) == {}


class StandIn(http.server.BaseHTTPRequestHandler):
    """The five calls of MLflow's interface that Ronde uses, with a fault each time one is planned:
    ``refuse`` (nothing is kept) or ``lose`` (all is kept, the answer is lost).
    """

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        call = self.path.rpartition("mlflow/")[2]
        fault = state["faults"].pop(0) if state["faults"] else ""
        state["calls"].append(call)
        if fault == "refuse":
            self.send_error(503)
            return
        answer: dict = {}
        if call == "experiments/create":
            if state["experiment"]:
                self.answer(400, {"error_code": "RESOURCE_ALREADY_EXISTS"})
                return
            state["experiment"] = True
            answer = {"experiment_id": "1"}
        elif call == "experiments/search":
            answer = {"experiments": [{"experiment_id": "1"}]}
        elif call == "runs/search":
            wanted = re.search(r"= '(\w+)'", body["filter"])[1]
            answer = {"runs": [r for r in state["runs"] if r["tags"]["ronde.id"] == wanted]}
        elif call == "runs/create":
            tags = {t["key"]: t["value"] for t in body["tags"]}
            state["runs"].append({"info": {"run_id": "x"}, "tags": tags, "metrics": []})
            answer = {"run": state["runs"][-1]}
        elif call == "runs/log-batch":
            assert len(body["metrics"]) <= 1000 and len(body["tags"]) <= 100
            state["runs"][0]["metrics"] += body["metrics"]
            state["runs"][0]["tags"] |= {t["key"]: t["value"] for t in body["tags"]}
        elif call == "runs/update":
            state["runs"][0]["status"] = body["status"]
        for tracked in [answer.get("run"), *answer.get("runs", ())]:
            if tracked:
                tags = [{"key": k, "value": v} for k, v in tracked["tags"].items()]
                tracked["data"] = {"tags": tags}
        if fault == "lose":
            self.close_connection = True
            return
        self.answer(200, answer)

    def answer(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def mlflow():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.state = {"faults": [], "calls": [], "runs": [], "experiment": False}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.state, f"mlflow:http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def losses(metrics: list[dict]) -> list[tuple[int, float]]:
    return [(m["step"], m["value"]) for m in metrics if m["key"] == "loss"]


def test_mlflow_that_refuses_or_loses_answers_has_each_point_once(run, mlflow):
    state, target = mlflow
    record = [start(), *(step(s) for s in range(1, 700)), evaluated(699)]
    write(run, *record, end(status="failed", step=699))
    state["faults"] = ["", "lose", "", "", "lose", "refuse"]  # of the search, the first values, …
    said: list[str] = []
    for _ in range(4):  # each gives up after three tries, and the next goes on
        try:
            send_record(run, target, said.append)
            break
        except RondeError as error:
            assert "sends the rest later" in str(error)
    assert len(state["runs"]) == 1 and state["runs"][0]["status"] == "FAILED"
    tracked = state["runs"][0]
    assert losses(tracked["metrics"]) == [(s, step(s)["loss"]) for s in range(1, 700)]
    evaluations = [m for m in tracked["metrics"] if m["key"].startswith("evaluate/")]
    assert [m["value"] for m in evaluations] == [0.25, "NaN"]
    assert tracked["tags"]["ronde.arguments"] == "--lr 1"
    assert tracked["tags"]["ronde.plan.batch_size"] == "8"
    assert said and "nothing is lost" in said[0]
    before = len(state["calls"])
    send_record(run, target, refuse)
    assert len(state["calls"]) == before, "nothing is new, and nobody is asked"


@pytest.mark.skipif(shutil.which("mlflow") is None, reason="no mlflow on the path")
def test_a_real_mlflow_server_that_is_killed(run):
    port = free_port()
    args = f"mlflow server --port {port} --workers 1 --backend-store-uri".split()
    args += [f"sqlite:///{run.path}/m.db", "--default-artifact-root", str(run.path / "artifacts")]
    target = f"mlflow:http://127.0.0.1:{port}"

    def ask(path: str, **body: object) -> dict:
        url = f"http://127.0.0.1:{port}/api/2.0/mlflow/{path}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=20))

    said: list[str] = []
    over = threading.Event()
    write(run, start(), *(step(s) for s in range(1, 101)))
    send = partial(send_record, run, target, said.append, over=over.is_set)
    sending = threading.Thread(target=send, daemon=True)
    sending.start()

    def until_has(count: int) -> list[dict]:
        limit = time.monotonic() + 60
        points: list[dict] = []
        while len(points) < count and time.monotonic() < limit:
            time.sleep(0.2)
            try:
                experiment = ask("experiments/get-by-name?experiment_name=ronde")["experiment"]
                (mine,) = ask("runs/search", experiment_ids=[experiment["experiment_id"]])["runs"]
                history = f"metrics/get-history?run_id={mine['info']['run_id']}&metric_key=loss"
                points = ask(history)["metrics"]
            except (OSError, KeyError):
                continue
        return points

    with child(args, run.path, {"TMPDIR": str(run.path)}):
        until_has(100)
    write(run, *(step(s) for s in range(101, 201)))
    with child(args, run.path, {"TMPDIR": str(run.path)}):
        points = until_has(200)
        over.set()
        sending.join(30)
    assert not sending.is_alive() and "answers again" in said[-1]
    assert sorted((m["step"], m["value"]) for m in points) == [
        (s, step(s)["loss"]) for s in range(1, 201)
    ]


# LevelDB's log format behind seven bytes; in a process of its own, as the package leaves folders
_ROWS = """
import json, pathlib, sys
from wandb.proto.wandb_internal_pb2 import Record
for file in sorted(pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record, part = Record.FromString(part), b""
            if record.WhichOneof("record_type") == "history":
                print(json.dumps({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}))
"""


@pytest.mark.skipif(find_spec("wandb") is None, reason="no wandb")
def test_wandb_offline_has_each_point_once(run, tmp_path):
    (tmp_path / "temporary").mkdir()
    env = {"WANDB_MODE": "offline", "TMPDIR": str(tmp_path / "temporary")}
    command = ["-m", "ronde", "watch", str(run.path), "--to", "wandb"]
    write(run, start(), *(step(s) for s in range(1, 51)), evaluated(50))
    assert python(command, run.path, env=env).returncode == 0
    write(run, *(step(s) for s in range(51, 61)))
    assert python(command, run.path, env=env).returncode == 0
    read = python(["-c", _ROWS, str(run.path)], run.path, env=env)
    rows = [json.loads(line) for line in read.stdout.splitlines()]
    assert [(r["step"], r["loss"]) for r in rows if "loss" in r] == [
        (s, step(s)["loss"]) for s in range(1, 61)
    ]
    counters = [r["_step"] for r in rows]
    assert counters == sorted(set(counters)), "the tracker ignores a line that it has"


def test_prometheus_gets_the_newest_values(run):
    hang = {"type": "hang", "time": 1e9, "sentence": "x", "step": 2, "slow": True}
    write(run, start(), step(1), step(2, 0.125), evaluated(2), hang)
    port = free_port()
    command = ronde("watch", str(run.path), "--follow", "--to", f"prometheus:{port}")
    with child(command, run.path) as served:
        wanted = 'ronde_value{run="r",name="loss"} 0.125'
        limit, text = time.monotonic() + 30, ""
        while wanted not in text and time.monotonic() < limit:
            time.sleep(0.05)
            try:
                answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
                text = answer.read().decode()
            except OSError:
                continue
        lines = text.splitlines()
        listening = psutil.Process(served.pid).net_connections()
        assert {c.laddr.ip for c in listening if c.status == "LISTEN"} == {"127.0.0.1"}
        assert 'ronde_running{run="r"} 1.0' in lines and 'ronde_hangs_total{run="r"} 1' in lines
        assert 'ronde_value{run="r",name="evaluate/a \\"b\\" \\\\"} 0.25' in lines
        assert {wanted, 'ronde_value{run="r",name="evaluate/worst"} NaN'} <= set(lines)
        form = r'# TYPE \w+ (gauge|counter)|\w+\{run="r"(,name="(\\.|[^"\\])*")?\} \S+'
        assert all(re.fullmatch(form, line) for line in lines)
        write(run, end(step=2))
        assert served.done(30).returncode == 0


def test_ronde_run_sends_while_it_trains_and_a_dead_tracker_costs_nothing(tmp_path):
    (tmp_path / "train.py").write_text(_TRAINING)
    dead = f"mlflow:http://127.0.0.1:{free_port()}"
    done = ronde_run(
        ["run", "--workers", "1", "--name", "n", "--tensorboard", "--to", dead, "train.py"],
        tmp_path,
        env={"RONDE_RUNS": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert (
        "mlflow does not answer" in done.stderr
        and f"'ronde watch n --to {dead}' sends the rest later" in done.stderr
    )
    wanted: dict[str, list[tuple[int, float]]] = {}
    for line in (tmp_path / "n" / "record.jsonl").read_text().splitlines():
        event = json.loads(line)
        for name, value in points_of(event).items():
            wanted.setdefault(name, []).append((event["step"], float32(value)))
    assert len(wanted["loss"]) == 12 and wanted["log/loss"][-1] == (12, 7.0)
    assert scalars(tmp_path / "n" / "tensorboard") == wanted


def test_wrong_targets_are_refused(run):
    for target, text in {
        "neptune": "expected tensorboard",
        "prometheus": "expected tensorboard",
        "prometheus:x": "expected tensorboard",
        "mlflow:ftp://x": "needs a server",
    }.items():
        write(run, start())
        with pytest.raises(ArgumentError, match=text):
            send_record(run, target, refuse)
    (run.path / ".sink-tensorboard").write_text("{")
    with pytest.raises(RondeError, match=r"damaged\. Remove it"):
        send_record(run, "tensorboard", refuse)
    (run.path / ".sink-tensorboard").write_text(json.dumps({"offset": 10**6}))
    with pytest.raises(RondeError, match="it is another one"):
        send_record(run, "tensorboard", refuse)
    commands = {
        "Add --follow": ["watch", str(run.path), "--to", "prometheus:1"],
        "--to neptune: expected": ["run", "--workers", "1", "--to", "neptune", "t.py"],
        "--runs none keeps nothing": ["run", "--runs", "none", "--tensorboard", "t.py"],
        "--port is that of --page": ["watch", "--port", "80"],
    }
    (run.path / "t.py").write_text("")
    done = ronde_batch(list(commands.values()), run.path)
    for text, answer in zip(commands, done, strict=True):
        assert answer.returncode == 2 and text in " ".join(answer.stderr.split()), answer.stderr
