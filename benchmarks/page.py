"""The live page in Chromium: seconds from a click to the curve, from the address to the list.

    python benchmarks/page.py --points 100000 --runs 1000

Beside it TensorBoard's server over the same numbers: seconds from its start until it answers with
all runs, and with all points of one. Processor seconds are those of the server and of all processes
of Chromium. Needs the extras ``page`` and ``dev``, and Chromium. The least of several rounds is
shown: other load on the machine makes a round longer, never shorter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import sync_playwright

START = {"type": "start", "time": 1e9, "script": "train.py", "workers": 2, "model": "Net"}
DRAWN = """wanted => new Promise(done => {
  const begin = performance.now();
  for (const cell of document.querySelectorAll("#table td:first-child"))
    if (cell.textContent === "big") cell.click();
  const look = () => charts.get("loss")?.data[0].length === wanted && picked[0] === "big"
    ? done((performance.now() - begin) / 1000) : requestAnimationFrame(look);
  look();
})"""
LISTED = """wanted => new Promise(done => {
  const look = () => rows.length === wanted && document.querySelector("#table tbody tr")
    ? done(performance.now() / 1000) : requestAnimationFrame(look);
  look();
})"""


def steps(count: int) -> Iterator[dict[str, Any]]:
    """Lines of a record."""
    for n in range(1, count + 1):
        yield {"type": "step", "time": 1e9 + n, "step": n, "epoch": 0, "loss": 1 / n, "lr": 0.1,
               "samples": 32 * n}  # fmt: skip


def write_runs(folder: Path, count: int, points: int) -> None:
    """``big`` with all points, and small runs with 20 each."""
    for number in reversed(range(count)):
        name = f"run-{number}" if number else "big"
        (folder / name).mkdir(parents=True)
        start = {**START, "run": name, "arguments": ["--lr", str(number)]}
        lines = [start, *steps(20 if number else points)]
        with open(folder / name / "record.jsonl", "w") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)


def write_events(folder: Path, count: int, points: int) -> None:
    """The same for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    for number in range(count):
        writer = SummaryWriter(folder / (f"run-{number}" if number else "big"))
        for line in steps(20 if number else points):
            writer.add_scalar("loss", line["loss"], line["step"])
        writer.close()


@contextmanager
def server(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that serves, until the block ends."""
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def megabytes(process: subprocess.Popen[str]) -> float:
    """Resident, with its children."""
    whole = psutil.Process(process.pid)
    found = [whole, *whole.children(recursive=True)]
    return sum(p.memory_info().rss for p in found) / 1e6


def processor() -> float:
    """Seconds that all processes of this benchmark have computed."""
    found = psutil.Process().children(recursive=True)
    return sum(p.cpu_times().user + p.cpu_times().system for p in found)


def page_round(browser: Any, folder: Path, runs: int, points: int) -> dict[str, float]:
    """One round: a new server, a new page."""
    words = [sys.executable, "-m", "ronde", "watch", "--page", "--runs", str(folder)]
    with server(words, folder.parent) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[2]
        view = browser.new_page()
        before = processor()
        view.goto(f"{address}#run=run-1")
        listed = view.evaluate(LISTED, runs)
        between = processor()
        drawn = view.evaluate(DRAWN, points)
        after = processor()
        view.close()
        return {
            "listed_s": listed,
            "listed_processor_s": between - before,
            "click_to_curve_s": drawn,
            "click_to_curve_processor_s": after - between,
            "server_mb": megabytes(process),
        }


def tensorboard_round(folder: Path, runs: int, points: int) -> dict[str, float]:
    """One round: a new server, asked until it has all."""
    words = [str(Path(sys.executable).parent / "tensorboard"), "--logdir", str(folder)]
    words += ["--port", "0", "--samples_per_plugin", f"scalars={points}"]
    began = time.monotonic()
    with server(words, folder.parent) as process:
        assert process.stdout is not None
        found = next(filter(None, (re.search(r"http://\S+", line) for line in process.stdout)))
        address = found[0].rstrip("/")
        listed = until(f"{address}/data/runs", runs) - began
        drawn = until(f"{address}/data/plugin/scalars/scalars?run=big&tag=loss", points) - began
        return {"listed_s": listed, "all_points_s": drawn, "server_mb": megabytes(process)}


def until(address: str, count: int) -> float:
    """When the answer has so many entries."""
    while True:
        try:
            with urllib.request.urlopen(address) as answer:
                if len(json.load(answer)) >= count:
                    return time.monotonic()
        except urllib.error.HTTPError:
            pass  # not known yet
        time.sleep(0.05)


def least(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {key: round(min(each[key] for each in rounds), 3) for key in rounds[0]}


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without TensorBoard")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place)
        write_runs(folder / "runs", args.runs, args.points)
        if not args.alone:
            write_events(folder / "events", args.runs, args.points)
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        ronde, board = [], []
        for _ in range(args.rounds):
            ronde.append(page_round(browser, folder / "runs", args.runs, args.points))
            if not args.alone:
                board.append(tensorboard_round(folder / "events", args.runs, args.points))
        browser.close()
    told: dict[str, Any] = {"points": args.points, "runs": args.runs, "load": os.getloadavg()[0]}
    told |= {"page": least(ronde)} | ({"tensorboard": least(board)} if board else {})
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
