"""Rules on a run's files: each fires on the numbers that it is for, once, and on no others; the
same alerts follow however the reading is cut.
"""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from processes import ronde_batch
from record_lines import end, evaluation, resume, start, steps
from ronde.cli.app import app
from ronde.cli.watch import alert_text, notify
from ronde.watch import Alert, RunDir
from ronde.watch.judge import Judge, alert_line
from ronde.watch.rule import MACHINES
from ronde.watch.rules import RULES

pytestmark = pytest.mark.timeout(120)

NAMES = ["0.weight", "0.bias", "2.weight", "4.weight"]
OF_MACHINES = (*MACHINES, "start", "steps")  # test_machine_rules.py
TENSORS = {
    "type": "tensors",
    "step": 1,
    "every": 4,
    "names": NAMES,
    "places": ["net.py:3", "net.py:3", "net.py:5", "net.py:7"],
    "elements": [100, 10, 100, 100],
    "frozen": [False] * 4,
    "layers": ["0", "1", "3", "4"],
    "layer_kinds": ["other", "relu", "tanh", "other"],
    "layer_places": ["net.py:3", "net.py:4", "net.py:6", "net.py:7"],
}


def health(step: int, **values: list) -> dict:
    line = {"type": "health", "step": step, "epoch": 0, "samples": [8 * step - 8, 8 * step]}
    line |= {"gradient": [0.1] * 4, "weight": [1.0] * 4, "update": [1e-3] * 4, "same": [0.0] * 4}
    return line | {"bad_ranks": [], "first_bad": None} | values


def write(path: Path, record: list[dict], lines: list[dict] = ()) -> RunDir:  # type: ignore[assignment]
    path.mkdir(parents=True, exist_ok=True)
    for name, values in (("record", record), ("health", lines)):
        if values:
            text = "".join(json.dumps(v) + "\n" for v in values)
            (path / f"{name}.jsonl").write_text(text)
    return RunDir(path)


def falling(rows: int = 400, seed: int = 0) -> np.ndarray:
    noise = 1 + 0.1 * np.random.default_rng(seed).standard_normal(rows)
    return (2 * np.exp(-np.arange(rows) / 100) + 0.2) * noise


def flat(rows: int = 400) -> np.ndarray:
    return 2.3 + 0.02 * np.random.default_rng(1).standard_normal(rows)


def evaluated(values: list[float], every: int = 40) -> list[dict]:
    return [evaluation(every * i, {"loss": v}) for i, v in enumerate(values, 1)]


def merged(record: list[dict], other: list[dict]) -> list[dict]:
    return sorted([*record, *other], key=lambda e: e.get("step", 0))


MEASURED = [TENSORS, *(health(4 * i) for i in range(1, 40))]


def changed(column: str, index: int, value: float | None, since: int = 100) -> list[dict]:
    lines = json.loads(json.dumps(MEASURED))
    for line in lines[1:]:
        if line["step"] >= since:
            line[column][index] = value
    return lines


def layers(column: str, index: int, value: float) -> list[dict]:
    rows = {"rms": [1.0] * 4, "dead": [0.1] * 4, "saturated": [0.1] * 4}
    rows[column][index] = value
    return [TENSORS, *({"type": "activations", "step": i, **rows} for i in range(1, 11))]


def overflowed(times: int, first: int = 120, every: int = 24) -> list[dict]:
    """Measured steps of a training in fp16, some of which the scaler left out."""
    lines = [health(4 * i, weight=[1.0] * 4) for i in range(1, 100)]
    for line in lines:
        if line["step"] >= first and line["step"] % every == 0 and times:
            line |= {"bad_ranks": [0, 1, 2, 3], "gradient": ["inf"] * 4}
            times -= 1
    return [TENSORS, *lines]


UNEQUAL = "replicas of the model are not equal: 'w' on rank 1"
BATCH = {"type": "inputs", "step": 1, "mean": 0.1, "std": 1.0, "constant": 0.0}
RUNS = {
    "healthy": (steps(falling()), MEASURED, []),
    "flat": (steps(flat()), [], [("loss-flat", None)]),
    "diverges": (steps([2.0, *(9 + flat(150))]), [], [("diverging", None)]),
    "negative": (steps(flat() - 2.3), [], []),
    "two": (merged(steps(flat()), [{**e, "part": "d"} for e in steps(flat())]), [], []),
    "nan": (steps([2.0, float("nan")]), [], [("nan", None)]),
    "fails": ([*steps([2.0]), end(status="failed", error="LossError: the loss is nan")], [])
    + ([("nan", None)],),
    "overfits": (
        merged(steps(falling()), evaluated([1.0, 0.5, 0.6, 0.7, 0.8])),
        [],
        [("overfit", "evaluate/loss")],
    ),
    "overtrains": (
        merged(steps(falling(600)), evaluated([1.0] + [0.5] * 11)),
        [],
        [("overtrained", "evaluate/loss")],
    ),
    "bad": (
        steps(falling()),
        [TENSORS, health(4, bad_ranks=[2], first_bad="2")],
        [("nan", "2")],
    ),
    "explodes": (
        steps(falling()),
        changed("gradient", 2, 1e4),
        [("exploding-gradient", "2.weight")],
    ),
    "vanishes": (steps(falling()), changed("gradient", 0, 0), [("vanishing-gradient", "0.weight")]),
    "bias before a norm": (steps(falling()), changed("gradient", 1, 0), []),
    "kept": (steps(falling()), changed("same", 3, 1), [("unchanged", "4.weight")]),
    "large": (steps(falling()), changed("update", 0, 0.5), [("update-ratio", "0.weight")]),
    "dead": (steps(falling()), layers("dead", 1, 0.9), [("dead-units", "1")]),
    "not a relu": (steps(falling()), layers("dead", 2, 0.9), []),
    "saturated": (steps(falling()), layers("saturated", 2, 0.9), [("saturated", "3")]),
    "small": (steps(falling()), layers("rms", 1, 1e-6), [("initialization", "1")]),
    "zero head": (steps(falling()), layers("rms", 3, 0), []),
    "raw": (steps(falling()), [TENSORS, {**BATCH, "std": 73.0}], [("inputs", "0")]),
    "constant": (steps(falling()), [TENSORS, {**BATCH, "constant": 1.0}], [("inputs", "0")]),
    "one class": (
        steps(falling()),
        [TENSORS, health(4), {"type": "targets", "step": 4, "counts": [9, 600]}],
        [("class-imbalance", None)],
    ),
    "scaler": (steps(falling()), overflowed(6), [("scaler", None)]),
    "scaler that looks for its scale": (steps(falling()), overflowed(10, first=4, every=4), []),
    "replicas": (
        [*steps(falling()), end(status="failed", error=f"WorldError: after step 9, {UNEQUAL}")],
        [],
        [("replicas", None)],
    ),
    "detached": (
        steps(falling()),
        changed("gradient", 2, None),
        [("vanishing-gradient", "2.weight")],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_rule_fires_on_the_numbers_that_it_is_for(name, tmp_path):
    record, lines, expected = RUNS[name]
    fp16 = {"plan": {"precision": "fp16"}} if "scaler" in name else {}
    judge = Judge(write(tmp_path / "big", [start(**fp16), *record], lines))
    judge.look()
    assert [(a.rule, a.tensor) for a in judge.alerts] == expected
    assert not judge.failed
    for alert in judge.alerts:
        assert alert.text and alert.remedy and alert.again.startswith("ronde run ")
        known = dict(zip(TENSORS["layers"], TENSORS["layer_places"], strict=True))
        known |= dict(zip(NAMES, TENSORS["places"], strict=True))
        assert alert.place == known.get(alert.tensor, "")


def test_alerts_are_the_same_however_the_reading_is_cut(tmp_path):
    checkpoint = {"type": "checkpoint", "step": 90, "path": "", "bytes": 1, "seconds": 1.0}
    again = resume(90, time=500.0)
    explodes, kept = changed("gradient", 2, 1e4), changed("same", 3, 1)
    first = [start(), *steps(flat(100)), checkpoint, *steps(flat(100), 101)]
    second = [start(), again, *steps(flat(310), 91), end()]
    later = [{**TENSORS, "step": 91, "start": 500.0}, *(line for line in kept if line["step"] > 90)]
    whole = write(tmp_path / "a", [*first, *second], [*explodes, *later])
    judge = Judge(RunDir(tmp_path / "a"))
    judge.look()
    expected = [alert_line(a) for a in judge.alerts]
    rules = [(a.rule, a.step) for a in judge.alerts]
    assert [r for r, _ in rules] == ["exploding-gradient", "unchanged", "loss-flat"]
    assert judge.alerts[0].again == (
        "ronde run --from a@90 --until 832 --watch=4 --workers 4 train.py --lr 'a b'"
    )
    record, measured = ((whole.path / f"{n}.jsonl").read_bytes() for n in ("record", "health"))
    for seed in range(3):
        choice = random.Random(seed)
        run = write(tmp_path / "cut" / str(seed) / "a", [start()])
        judge, at, written = Judge(run), 0, 0
        while at < len(record):
            at = min(len(record), at + choice.randrange(1, 4000))
            # health is written before the step of its number, and may be far ahead
            seen = [json.loads(x).get("step", 0) for x in record[:at].splitlines()[:-1]]
            resumed = b'"resume"' in record[:at]
            lines = measured.splitlines(keepends=True)
            ahead = len(MEASURED) * resumed + sum(
                json.loads(x)["step"] <= (seen[-1] if seen else 0) + choice.randrange(1, 9)
                for x in (lines[len(MEASURED) :] if resumed else lines[: len(MEASURED)])
            )
            written = max(written, sum(map(len, lines[:ahead])))
            (run.path / "health.jsonl").write_bytes(measured[:written])
            (run.path / "record.jsonl").write_bytes(record[:at])
            judge.look()
        assert [alert_line(a) for a in judge.alerts] == expected


def test_every_rule_has_a_run_on_which_it_fires():
    training = {name for name, rule in RULES.items() if rule.needs not in OF_MACHINES}
    assert {rule for _, _, alerts in RUNS.values() for rule, _ in alerts} == training


def test_the_verb_prints_the_alerts_and_says_so_with_its_status(tmp_path):
    write(tmp_path / "runs" / "big", [start(), *steps(flat(340))])
    write(tmp_path / "runs" / "fine", [start(), *steps(falling())])
    runner = CliRunner()

    def ask(*words: str) -> tuple[int, str]:
        answer = runner.invoke(app, ["watch", *words, "--runs", str(tmp_path / "runs")])
        return answer.exit_code, answer.output

    status, output = ask("big")
    assert status == 1
    assert "alert   loss-flat   step 320, samples 2,552–2,559" in output
    assert "try: a higher learning rate" in output
    assert "look again: ronde run --until 2560 --watch=1 --workers 4 train.py" in output
    assert "rules  ·  340 steps  ·  1 alerts" in output and "no evaluation yet" in output
    assert ask("fine")[0] == 0
    assert ask("big", "--without", "loss-flat")[0] == 0
    assert ask("big", "--set", "loss-flat.steps=1000")[0] == 0
    status, output = ask("big", "--json", "--only", "loss-flat,nan")
    assert [json.loads(line)["rule"] for line in output.splitlines()] == ["loss-flat"]


def test_wrong_arguments_are_refused(tmp_path):
    write(tmp_path / "runs" / "big", [start(), *steps([1.0])])
    (tmp_path / "empty.py").write_text("def other(x): pass\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    cases = {
        "--only loss-flt": "no rule 'loss-flt'. Did you mean loss-flat? There are: nan",
        "--set loss-flat.step=3": "no setting of loss-flat 'step'. Did you mean steps?",
        "--set loss-flat.steps=many": "loss-flat.steps=many: invalid literal",
        "--set loss-flat.steps": "write RULE.KEY=VALUE",
        "--notify ntfy.sh/me": "an address begins with http:// or https://",
        "--rules empty.py": "has no rule: a function whose first argument is 'view'",
        "--rules broken.py": "cannot be run: ZeroDivisionError",
    }
    answers = ronde_batch([["watch", "big", *words.split()] for words in cases], tmp_path)
    for answer, error in zip(answers, cases.values(), strict=True):
        assert answer.returncode == 2 and error in answer.stderr, answer.stderr


def test_rules_of_ones_own_and_one_that_raises(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from ronde.watch import Alert\n\n"
        "def loss_too_high(view, limit=2.0):\n"
        "    if view.loss[-1] > limit:\n"
        "        yield Alert(view.step[-1], f'above {limit:g}', remedy='less')\n\n"
        "def wrong(view):\n    yield 1 / 0\n"
    )
    run = write(tmp_path / "big", [start(), *steps(flat(64))])
    judge = Judge(run, rules_file=path)
    judge.look()
    assert [(a.rule, a.step, a.text, a.remedy) for a in judge.alerts] == [
        ("loss-too-high", 32, "above 2", "less")
    ]
    assert judge.failed == {"wrong": "ZeroDivisionError: division by zero"}
    assert "wrong left out (ZeroDivisionError: division by zero)" in judge.summary()
    silent = Judge(run, rules_file=path, settings={"loss-too-high.limit": "3"})
    assert silent.look() == []


def test_an_alert_is_posted_and_tried_three_times_at_most(monkeypatch):
    statuses, bodies = [503, 500, 200, 404, 503, 503, 503], []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    server = HTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        alert = Alert(3, "the loss is nan", rule="nan", rank=2, values={"a": 1})
        assert notify(url, "big", alert) == ""
        assert len(bodies) == 3
        assert bodies[0]["text"] == f"big: {alert_text(alert)}"
        assert (bodies[0]["rank"], bodies[0]["run"], bodies[0]["values"]) == (2, "big", {"a": 1})
        assert "404" in notify(url, "big", alert) and len(bodies) == 4
        assert "did not take the alert" in notify(url, "big", alert) and len(bodies) == 7
        assert len(pauses) == 4 and min(pauses) > 0  # between two tries
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
