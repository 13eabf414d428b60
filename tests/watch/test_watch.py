"""The run seen from outside: what is recorded comes back, whatever the file has been through; and
watching breaks nothing.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console

import record_lines
from ronde import ArgumentError, CheckpointError
from ronde.cli.uploads import claim_with_uploads
from ronde.run.group import open_run_dir
from ronde.watch import (
    EVENTS,
    Alert,
    Bar,
    BestFound,
    Checkpointed,
    Epoch,
    Evaluated,
    HangFound,
    Lines,
    Logged,
    LossChecked,
    NonFiniteStep,
    Record,
    Restarted,
    RunDir,
    Silent,
    Started,
    StepRecorded,
    Warned,
    Watcher,
    check_name,
    claim_run_dir,
    curve,
    curves,
    latest,
    read,
    recorded,
    script_stem,
    summarise,
)
from ronde.watch.record import Event, event_of
from ronde.world import world
from ronde.world.units import clock


def started(time: float = 1.0) -> Event:
    return event_of(record_lines.start(time=time, workers=2))


def step(n: int, epoch: int = 0, loss: float | None = None) -> Event:
    loss = 1.0 / n if loss is None else loss
    return event_of(record_lines.step(n, loss, epoch=epoch, samples=16 * n, time=float(n)))


def resumed(at: int, epoch: int) -> Event:
    return event_of(record_lines.resume(at, epoch=epoch, time=50.0))


def ended(time: float, status: str = "completed", error: str | None = None) -> Event:
    line = record_lines.end(time=time, status=status, error=error, step=8, epoch=2, samples=128)
    return event_of(line)


EVERY = [
    started(),
    step(1),
    StepRecorded(step=2, epoch=0, loss=math.nan, lr=0.1, samples=32, time=2.0),
    Epoch(epoch=0, step=4, samples=64, samples_per_second=None, time=3.0),
    Evaluated(
        step=4, epoch=0, samples=10, metrics={"loss": 0.5, "accuracy": 1, "ä": [1, 2]}, time=4.0
    ),
    Logged(step=4, epoch=0, values={"x": 0.1, "text": "zwei\nzeilen\u2028"}, time=5.0),
    Checkpointed(step=4, path="checkpoints/step-000000004", bytes=10, seconds=0.1, time=6.0),
    BestFound(step=4, epoch=0, metric="loss", value=0.5, path="checkpoints/best", time=6.5),
    NonFiniteStep(step=3, epoch=0, what="loss", action="skip", ranks=[1], samples=[5, 2], time=6.7),
    Warned(text="careful", time=7.0),
    LossChecked(step=1, kind="mean", time=7.5),
    Restarted(generation=1, reason="rank 1: killed", rank=1, time=7.7),
    HangFound(sentence="Rank 1 …", rank=1, step=3, place="a.py:4", waiting=[0], time=7.7),
    Alert(3, "loss 9", rule="high", samples=[0, 7], values={"loss": 9.0}, time=7.8),
    resumed(4, 1),
    ended(9.0, "failed", "boom"),
]


def test_every_event_comes_back(tmp_path):
    assert {type(e) for e in EVERY} == set(EVENTS.values())
    record = Record(tmp_path / "deep" / "record.jsonl")
    record.write(*EVERY[:5])
    record.close()
    record.write(*EVERY[5:])  # opened again, after what is there
    events = read(record.path)
    # repr: nan is not nan
    assert [type(e) for e in events] == [type(e) for e in EVERY] and repr(events) == repr(EVERY)
    lines = record.path.read_text().splitlines()
    assert len(lines) == len(EVERY) and json.loads(lines[0])["type"] == "start"
    record.close()


def write_lines(path: Path, *values) -> Path:
    path.write_text(
        "".join(
            v if isinstance(v, str) else json.dumps({"type": v.type, **v.__dict__}) + "\n"
            for v in values
        )
    )
    return path


def test_a_cut_last_line_and_what_is_not_known_are_passed_over(tmp_path):
    path = tmp_path / "record.jsonl"
    good = [started(), step(1), step(2)]
    whole = write_lines(path, *good, step(3)).read_text()
    last = whole.rstrip("\n").rindex("\n") + 1
    for cut in range(last, len(whole) - 1):
        path.write_text(whole[:cut])
        assert read(path) == good, whole[last:cut]
    later = {**json.loads(whole.splitlines()[1]), "invented": 3}
    write_lines(
        path,
        good[0],
        '{"type": "of a later version", "x": 1}\n',
        json.dumps(later) + "\n",
        "\n",
        "3\n",
        '{"type": "step"}\n',
        step(2),
    )
    # unknown types, unknown fields, lines that are nothing, fields that are missing
    assert read(path) == good
    path.write_bytes(b"\xff\xfe\n" + whole.encode())
    assert read(path) == [*good, step(3)]  # a bad block on the disk is one line lost, not all
    path.write_text("")
    assert read(path) == []


def test_what_is_appended_to_a_cut_line_is_not_lost(tmp_path):
    """A run was killed in the middle of a line and is resumed: its start and the launcher's end
    must be read.
    """
    path = write_lines(tmp_path / "record.jsonl", started(), step(1), '{"type": "step", "st')
    record = Record(path)
    record.write(started(time=9.0), step(2))
    record.close()
    assert read(path) == [started(), step(1), started(time=9.0), step(2)]


def test_a_resume_voids_what_came_after_it(tmp_path):
    before = [
        started(),
        *(step(n, (n - 1) // 4) for n in range(1, 11)),
        Epoch(epoch=0, step=4, samples=64, samples_per_second=1.0, time=1.0),
    ]
    before += [Epoch(epoch=1, step=8, samples=128, samples_per_second=1.0, time=1.0)]
    before += [Evaluated(step=s, epoch=0, samples=1, metrics={}, time=1.0) for s in (4, 8)]
    before += [Logged(step=s, epoch=0, values={}, time=1.0) for s in (6, 7)]
    again = [started(time=40.0), resumed(6, 1), *(step(n, 1, loss=9.0) for n in (7, 8))]
    events = read(write_lines(tmp_path / "r", *before, *again))
    steps = [e for e in events if isinstance(e, StepRecorded)]
    assert [e.step for e in steps] == list(range(1, 9)) and [e.loss for e in steps][-2:] == [
        9.0,
        9.0,
    ]
    assert [e.epoch for e in events if isinstance(e, Epoch)] == [0]
    assert [e.step for e in events if isinstance(e, Evaluated)] == [4] and [
        e.step for e in events if isinstance(e, Logged)
    ] == [6]
    assert sum(isinstance(e, Started) for e in events) == 2  # both beginnings stay
    twice = read(write_lines(tmp_path / "r", *before, *again, resumed(2, 0), step(3, 0, loss=7.0)))
    assert [e.loss for e in twice if isinstance(e, StepRecorded)] == [1.0, 0.5, 7.0]


def run_with(path: Path, *events) -> RunDir:
    path.mkdir()
    write_lines(path / "record.jsonl", *events)
    return RunDir(path)


def test_summary(tmp_path):
    assert summarise(RunDir(tmp_path)).status == "empty"
    warned = [Warned(text="w"), Warned(text="w")]
    whole = [started(), *(step(n) for n in range(1, 9)), *warned, ended(20.0)]
    done = summarise(run_with(tmp_path / "a", *whole))
    assert (done.status, done.step, done.epoch) == ("completed", 8, 2)
    assert (done.samples, done.loss) == (128, 0.125)
    assert done.warnings == ["w"] and len(done.curve) == 8 and done.to_dict()["workers"] == 2
    json.dumps(done.to_dict())
    failure = [started(), step(1), ended(5.0, "failed", "boom")]
    failed = summarise(run_with(tmp_path / "b", *failure))
    assert (failed.status, failed.error) == ("failed", "boom")
    # Resumed after that end, and killed: an end of before says nothing of it.
    stopped = run_with(tmp_path / "c", *failure, started(time=30.0), resumed(1, 0), step(2))
    resumed_run = summarise(stopped)
    assert (resumed_run.status, resumed_run.error, resumed_run.step) == ("running", None, 2)
    again = run_with(tmp_path / "e", started(1.0), ended(5.0), started(30.0), ended(37.0))
    assert summarise(again).seconds == 11.0  # of both parts, without what was between them
    os.utime(stopped.record, (1.0, 1.0))
    assert summarise(stopped).status == "stopped"
    torn = summarise(run_with(tmp_path / "d", '{"type": "sta'))
    assert torn.start is None and torn.step == 0


# -- the curve -------------------------------------------------------------------------


def dots(line: str) -> set[int]:
    return {i for i, c in enumerate(line.partition("│")[2]) if 0x2800 < ord(c) < 0x2900}


def test_a_curve_is_drawn():
    flat = {name: [(n, y) for n in range(10)] for name, y in (("A", 0.0), ("B", 1.0))}
    both = curves(flat, 40, 8).splitlines()
    assert [line.count("A") for line in both] == [0] * 7 + [3, 0, 0]
    assert [line.count("B") for line in both] == [3] + [0] * 9
    assert curves({"A": [(0, 1.0)], "B": []}) == ""
    falling = curve([(n, 10.0 - n) for n in range(10)], width=40, height=8).splitlines()
    assert len(falling) == 10
    rows = [dots(line) for line in falling[:8]]
    # from the upper left to the lower right
    assert all(rows) and all(max(a) <= max(b) for a, b in itertools.pairwise(rows))
    assert min(rows[0]) <= 1 and max(rows[-1]) >= 38
    rising = curve([(n, n) for n in range(10)], width=40, height=8).splitlines()
    # the measure can tell them apart
    assert min(dots(rising[7])) <= 1 and max(dots(rising[0])) >= 38
    assert (
        falling[0].lstrip().startswith("10 ")
        and falling[7].lstrip().startswith("1 ")
        and "loss" in falling[8]
    )
    assert falling[9].split() == ["0", "9", "step"]
    assert len({len(line) for line in falling[:9]}) == 1


# -- the run directory -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../x", "", "-a", "a/b", ".hidden", "..", "a b", "a\n", "/tmp/x", "ä", "a\x00"]
)
def test_names_that_are_no_folder_names_are_refused(tmp_path, name):
    with pytest.raises(ArgumentError, match="is not a name for a run"):
        check_name(name)
    for resume in (False, True):
        with pytest.raises(ArgumentError):
            claim_run_dir(tmp_path / "runs", name, "s", resume)
    assert [p for p in tmp_path.rglob("*") if p != tmp_path / "runs"] == []


def test_a_second_training_gets_no_directory_of_another_run(tmp_path, monkeypatch):
    second = tmp_path / "big.2"
    (second / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"big\.2 is the second training of an earlier run"):
        claim_with_uploads(None, tmp_path, "big", "s", False, print)
    assert not (tmp_path / "big").exists()
    (second / "logs").mkdir()  # by a launcher, for a run of this name
    claim_with_uploads(None, tmp_path, "big", "s", False, print)
    monkeypatch.setenv("RONDE_RUN_DIR", str(tmp_path / "big"))
    monkeypatch.setattr("ronde.run.group._groups", 1)
    with pytest.raises(CheckpointError, match=r"big\.2 belongs to another run, and training 2 of"):
        open_run_dir(world(), None)


def test_claim(tmp_path):
    runs = tmp_path / "runs"
    for removed in ("gpt-2", "gpt-3"):  # and its second training was not
        (runs / f"{removed}.2").mkdir(parents=True)
    assert [claim_run_dir(runs, None, "gpt", False).name for _ in range(3)] == [
        "gpt-1",
        "gpt-4",
        "gpt-5",
    ]
    assert claim_run_dir(runs, None, "other", False).name == "other-1"
    named = claim_run_dir(runs, "big.run_1", "gpt", False)
    # empty still: nothing is lost
    assert (
        named.path == runs / "big.run_1" and claim_run_dir(runs, "big.run_1", "gpt", False) == named
    )
    (named.path / "x").write_text("mine")
    with pytest.raises(
        CheckpointError,
        match=r"big\.run_1 exists already\. Continue it with --resume, choose another --name",
    ):
        claim_run_dir(runs, "big.run_1", "gpt", False)
    assert (named.path / "x").read_text() == "mine"
    (runs / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists already"):
        claim_run_dir(runs, "file", "gpt", False)
    with pytest.raises(CheckpointError, match=r"nothing to resume: .*nope does not exist"):
        claim_run_dir(runs, "nope", "gpt", True)
    with pytest.raises(CheckpointError, match="nothing to resume: no run of 'gpt'"):
        claim_run_dir(runs, None, "gpt", True)  # none of them has begun
    for name in ("gpt-1", "gpt-2", "gpt-large-9"):
        (runs / name).mkdir(exist_ok=True)
        (runs / name / "record.jsonl").write_text("")
    for when, name in enumerate(("gpt-2", "gpt-1", "gpt-large-9")):
        os.utime(runs / name / "record.jsonl", (when, when))
    # the last of this script's, not of one with a longer name
    assert claim_run_dir(runs, None, "gpt", True).name == "gpt-1"
    assert latest(runs).name == "gpt-large-9" and latest(tmp_path / "none") is None
    (tmp_path / "blocked").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be made"):
        claim_run_dir(tmp_path / "blocked", None, "gpt", False)


@pytest.mark.parametrize(
    ("script", "stem"),
    [
        ("gpt.py", "gpt"),
        ("a/gpt.py", "gpt"),
        ("examples/gpt/train.py", "gpt"),
        ("train.py", "train"),
        ("my.pkg", "my.pkg"),
        ("ö!.py", "run"),
    ],
)
def test_script_stem(script, stem):
    assert script_stem(script) == stem
    check_name(f"{stem}-1")


# -- watching breaks nothing -----------------------------------------------------------


def watch(watcher: Watcher, steps: int = 5) -> None:
    for n in range(1, steps + 1):
        watcher.step(n, 0, torch.tensor(1.0 / n), 0.1, 16 * n, 16)


def test_losses_are_read_late_and_recorded_in_order(tmp_path):
    watcher = Watcher(Record(tmp_path / "r"), Silent(), True)
    watch(watcher, 300)
    watcher.event(Warned(text="after them"))
    watch(watcher, 2)
    watcher.close()
    events = read(tmp_path / "r")
    assert [e.step for e in events[:300]] == list(range(1, 301))
    assert isinstance(events[300], Warned) and len(events) == 303
    assert events[6].loss == pytest.approx(1 / 7)
    shown = [n for n in range(1, 20_021) if recorded(n)]
    assert shown[999:1003] == [1000, 1010, 1020, 1030] and shown[-2:] == [19_900, 20_000]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_under_the_record_is_told_once(capsys):
    watcher = Watcher(Record(Path("/dev/full")), Silent(), True)
    for _ in range(3):
        watch(watcher)
        watcher.flush()
        watcher.event(Warned(text="x"))
    watcher.close()
    said = capsys.readouterr().err
    assert (
        watcher.failures >= 3
        and said.count("recording or showing this run failed") == 1
        and "No space left" in said
        and "training continues" in said
    )


class Closed(Lines):
    """Shows on a terminal that has gone away."""

    def __init__(self, file: io.TextIOBase) -> None:
        super().__init__(0.0)
        self.file = file

    def update(self, state):
        print(state, file=self.file, flush=True)

    def say(self, text):
        print(text, file=self.file, flush=True)

    def close(self):
        self.file.flush()


def test_a_display_that_fails_is_told_once_and_the_record_goes_on(tmp_path, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w")
    watcher = Watcher(Record(tmp_path / "r"), Closed(file), True)
    watch(watcher, 4)
    watcher.say("hello")
    watcher.close()
    assert (
        watcher.failures >= 5
        and capsys.readouterr().err.count("recording or showing this run failed (BrokenPipeError")
        == 1
    )
    assert [e.step for e in read(tmp_path / "r")] == [1, 2, 3, 4]
    with pytest.raises(BrokenPipeError):
        file.close()


def test_other_ranks_write_nothing(tmp_path):
    watcher = Watcher(None, Silent(), False)
    watch(watcher)
    watcher.event(Warned(text="x"))
    watcher.close()
    assert watcher.failures == 0


def test_displays(capsys):
    state = {"epoch": 1, "epochs": 3, "step": 12, "steps": 30, "loss": 0.25}
    state |= {"samples_per_second": 1234.5, "seconds_left": 75.0}
    Lines().update(state)
    line = "epoch 2/3  step 12/30  loss 0.2500  1,234 samples/s  1:15 left\n"
    assert capsys.readouterr().out == line
    Lines().update(dict.fromkeys(state) | {"epoch": 0, "step": 1})
    assert capsys.readouterr().out == "epoch 1  step 1\n"
    drawn = io.StringIO()
    bar = Bar(Console(file=drawn, force_terminal=True, width=100))
    bar.update(state)
    bar.say("a [line] of the script")
    bar.update({"close": True})
    bar.close()
    assert all(text in drawn.getvalue() for text in ("12/30", "━", "a [line] of the script"))
    clocks = {-1: "0:00", 0: "0:00", 75: "1:15", 3600: "1:00:00", 90061: "25:01:01"}
    assert {seconds: clock(seconds) for seconds in clocks} == clocks


def test_evaluations_have_names(tmp_path, monkeypatch, capsys):
    """In the printed line, the record, TensorBoard, ``ronde show``, and the summary."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.data import TensorDataset

    import ronde
    from ronde.cli import main

    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ronde.distribute(
        model,
        optimizer,
        data,
        loss=torch.nn.functional.mse_loss,
        batch_size=4,
        name="named",
        tensorboard=True,
    )
    for name in ("", 3):
        with pytest.raises(ArgumentError, match="expected a text"):
            run.evaluate(data, name=name)
    scores = []
    for _ in run.epochs(2):
        for batch in run.batches():
            run.step(batch)
        scores = [run.evaluate(data), run.evaluate(data, name="test")]
    said = capsys.readouterr().out + capsys.readouterr().err
    assert "epoch 2  step 4  test  loss" in said and "epoch 2  step 4  evaluate  loss" in said
    summary = summarise(RunDir(tmp_path / "named"))
    assert summary.evaluations == {"evaluate": scores[0], "test": scores[1]}
    assert summary.to_dict()["evaluation"] == scores[1]
    monkeypatch.setattr("sys.argv", ["ronde", "show", "named", "--runs", str(tmp_path), "--json"])
    with suppress(SystemExit):
        main()
    series = json.loads(capsys.readouterr().out)["series"]
    assert [step for step, _ in series["test/loss"]] == [2.0, 4.0]
    assert series["evaluate/loss"][-1][1] == scores[0]["loss"]
    events = EventAccumulator(str(tmp_path / "named" / "tensorboard")).Reload()
    assert {"test/loss", "evaluate/loss"} <= set(events.Tags()["scalars"])
    older = tmp_path / "older.jsonl"
    older.write_text(
        '{"type": "evaluate", "time": 0.0, "step": 1, "epoch": 0, "samples": 4, "metrics": {}}\n'
    )
    assert read(older)[0].name == "evaluate"
