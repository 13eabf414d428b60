"""Messages between the launcher and its agents come out of a pipe as they went in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ronde.launch.job import Job, Nodes, Outcome
from ronde.launch.messages import (
    EndHang,
    File,
    Out,
    Sender,
    StartWorkers,
    Stop,
    Views,
    WorkersEnded,
    from_line,
    to_line,
)
from ronde.watch.hang_judge import HangVerdict, RankView
from ronde.watch.stack_place import StackPlace

VERDICT = HangVerdict("rank 1 hangs", 1, 3, "train.py:4", (0, 2))
JOB = Job(["train.py", "ä"], 2, Path("/runs/x"), {"A": "1"}, True, 60.0)


@pytest.mark.parametrize(
    "order",
    [
        StartWorkers(
            "1",
            JOB,
            Nodes(1, 2, first=2, total=4),
            files={"RONDE_PLAN": ("plan.yaml", "pipeline: 2")},
        ),
        File("record.jsonl", False, b"\x00\xff\n"),
        EndHang(VERDICT),
        Stop(15, 1.5),
    ],
    ids=lambda order: type(order).__name__,
)
def test_orders(order):
    line = to_line(order)
    assert line.count(b"\n") == 1 and from_line(line) == order


def test_answers():
    view = RankView(1, "training", reasons=("it swaps",), place=StackPlace("a.py", 1))
    answers = [
        Out(1, b"\x00\xff\n"),
        Views([view]),
        WorkersEnded(Outcome(1, 1, "it hangs", hang=VERDICT)),
        WorkersEnded(Outcome(0)),
    ]
    reads, writes = os.pipe()
    sender = Sender(writes)
    assert all(sender.send(answer) for answer in answers)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        assert [from_line(line) for line in pipe] == answers
