"""Lines of a run's files, as a training writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ronde.watch import RunDir

BEGUN = 1e9


def start(**changes: object) -> dict:
    values = dict.fromkeys(("device", "host", "launcher", "model", "optimizer", "origin"), "")
    values |= dict.fromkeys(("schema", "parameters", "samples", "steps_per_epoch", "threads"), 1)
    values |= {"run": "big", "script": "train.py", "workers": 4, "plan": {}, "versions": {}}
    return {"type": "start", "time": BEGUN, "arguments": ["--lr", "a b"], **values, **changes}


def step(number: int, loss: float = 1.0, **changes: object) -> dict:
    line = {"type": "step", "time": BEGUN + number, "step": number, "epoch": 0}
    return line | {"loss": float(loss), "lr": 0.1, "samples": 8 * number} | changes


def steps(losses: Iterable[float], first: int = 1, **changes: object) -> list[dict]:
    return [step(number, loss, **changes) for number, loss in enumerate(losses, first)]


def resume(number: int, **changes: object) -> dict:
    line = {"type": "resume", "time": BEGUN, "step": number, "epoch": 0, "samples": 8 * number}
    return line | {"checkpoint": "", "workers": 2, "written_by_workers": 2} | changes


def evaluation(number: int, metrics: dict, **changes: object) -> dict:
    line = {"type": "evaluate", "time": BEGUN + number, "step": number, "epoch": 0, "samples": 8}
    return line | {"metrics": metrics} | changes


def end(**changes: object) -> dict:
    done = {"status": "completed", "step": 1, "epoch": 1, "samples": 8, "seconds": 1.0}
    return {"type": "end", "time": 2 * BEGUN, "samples_per_second": None, **done, **changes}


def append(folder: Path, *lines: dict, file: str = "record", tail: str = "") -> RunDir:
    """Append lines to a file of a run, and perhaps a torn one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{file}.jsonl").open("a") as out:
        out.write("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return RunDir(folder)
