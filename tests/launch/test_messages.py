"""Messages between the launcher and its agents come out of a pipe as they went in."""

from __future__ import annotations

import os
from pathlib import Path

from ronde.launch.job import Job, Nodes, Outcome
from ronde.launch.messages import (
    EndHang,
    File,
    Out,
    Resources,
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


MESSAGES = [
    StartWorkers("1", JOB, Nodes(1, 2, first=2, total=4), files={"RONDE_PLAN": ("p.yaml", "x: 2")}),
    File("record.jsonl", False, b"\x00\xff\n"),
    EndHang(VERDICT),
    Stop(15, 1.5),
    Out(1, b"\x00\xff\n"),
    Views([RankView(1, "training", reasons=("it swaps",), place=StackPlace("a.py", 1))]),
    Resources({"cpu": [1.0, 2.0, 3.0]}),
    WorkersEnded(Outcome(1, 1, "it hangs", hang=VERDICT)),
    WorkersEnded(Outcome(0)),
]


def test_each_is_a_line_that_is_read_as_it_was_written():
    assert all(to_line(message).count(b"\n") == 1 for message in MESSAGES)
    reads, writes = os.pipe()
    sender = Sender(writes)
    assert all(sender.send(message) for message in MESSAGES)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        assert [from_line(line) for line in pipe] == MESSAGES
