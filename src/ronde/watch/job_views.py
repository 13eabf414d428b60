"""Searches, flows, and maps as the live page shows them, read from their folders."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ronde.watch.run_dir import is_recent

__all__ = ["job_kind", "job_row", "job_view"]

_FILES = {"search": "tune.json", "flow": "flow.json", "map": ".map/job.json"}
_Row = dict[str, Any]


def job_kind(folder: Path) -> str:
    """``search``, ``flow``, ``map``, or empty."""
    return next((kind for kind, file in _FILES.items() if (folder / file).is_file()), "")


def job_row(folder: Path, name: str) -> _Row:
    """A row of the list.

    Raises:
        OSError, ValueError, TypeError, LookupError, AttributeError: it cannot be read.
    """
    view = job_view(folder, name)
    return {k: v for k, v in view.items() if k not in ("trials", "steps", "items", "plan")}


def job_view(folder: Path, name: str) -> _Row:
    """All that is shown of a job; raises as :func:`job_row` does."""
    kind = job_kind(folder)
    view: Callable[[Path, str], _Row] = {"search": _search, "flow": _flow, "map": _map}[kind]
    return {"name": name, "kind": kind, **view(folder, name)}


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _search(folder: Path, name: str) -> _Row:
    plan, file = _read(folder / "tune.json"), folder / "result.json"
    result: _Row = {"trials": [], "best": {}, "rungs": [], "ended": ""}
    written = (folder / "tune.json").stat().st_mtime
    if file.is_file():
        result, written = _read(file), file.stat().st_mtime
    ended, rungs = result["ended"], len(result["rungs"])
    status = {"done": "completed", "target": "completed", "budget": "completed"}.get(
        ended, "running" if not ended and is_recent(written) else "stopped"
    )
    trials = []
    for trial in result["trials"]:
        reached = [value for value in trial["results"] if value is not None]
        if rule := trial.get("rule"):
            state = f"stopped by {rule}"
        elif trial["error"]:
            state = "failed"
        elif status == "running" and trial.get("running"):
            state = "running"
        elif rungs and len(reached) >= rungs:
            state = "completed"
        elif status == "running" and not reached:
            state = "waiting"
        else:
            state = "paused" if status == "running" else "stopped early"
        run = f"{name}/trials/{Path(trial['run']).name}"
        trials.append({**trial, "run": run, "results": reached, "state": state})
    best = next((t["run"] for t in trials if t["trial"] == result["best"].get("trial")), "")
    return {
        "status": status,
        "why": ended,
        "running": sum(t["state"] == "running" for t in trials),
        "total": len(trials),
        "failed": sum(t["state"] == "failed" for t in trials),
        "best": best,
        "result": result["best"].get("result"),
        "goal": plan["goal"],
        "written": written,
        "samples": result.get("samples", 0),
        "whole": result.get("whole", 0),
        "rungs": result["rungs"],
        "log": result.get("log", []),
        "plan": plan,
        "trials": trials,
    }


def _flow(folder: Path, name: str) -> _Row:
    file, ledger = folder / "flow.json", folder / "ledger"
    written = file.stat().st_mtime
    alive: dict[str, float] = {}  # step's key -> when it began
    for lease in (ledger / "lease").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            signed = lease.stat().st_mtime
            written = max(written, signed)
            if is_recent(signed):
                began = (ledger / "work" / lease.name / ".began").stat().st_mtime
                alive[lease.name.partition(".")[0]] = began
    steps = []
    for step_name, step in _read(file)["steps"].items():
        state, key = step["state"], step["key"]
        if state in ("running", "waiting") and key in alive:
            state = "running"
        elif state == "running":
            state = "stopped"
        info = {}
        if state in ("done", "kept"):
            info = _read(ledger / "out" / key / ".info")
        work = f"steps/{step_name}/{key}"
        inside = [f"{work}/run", work] if key else []
        seconds = time.time() - alive[key] if state == "running" else info.get("seconds")
        steps.append(
            {
                **step,
                "name": step_name,
                "state": state,
                "seconds": seconds,
                "tries": step["tries"] or info.get("tries", 0),
                "values": {k: v for k, v in info.get("values", {}).items() if _is_number(v)},
                "opens": next((f"{name}/{p}" for p in inside if job_kind(folder / p)), ""),
                "opens_run": next(
                    (f"{name}/{p}" for p in inside if (folder / p / "record.jsonl").is_file()), ""
                ),
            }
        )
    states = [step["state"] for step in steps]
    over = all(state in ("done", "kept", "skipped", "failed", "not run") for state in states)
    if over and "not run" not in states:
        status = "failed" if "failed" in states else "completed"
    elif over:
        status = "failed" if "failed" in states else "stopped"
    else:
        status = "running" if is_recent(written) else "stopped"
    return {
        "status": status,
        "done": sum(state in ("done", "kept", "skipped") for state in states),
        "total": len(steps),
        "failed": states.count("failed"),
        "written": written,
        "steps": steps,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_known_chunks: dict[tuple[str, int], _Row] = {}  # committed: they never change


def _map(folder: Path, name: str) -> _Row:
    import numpy

    root = folder / ".map"
    plan = _read(root / "job.json")
    total, done, bad = len(numpy.load(root / "items.npy", mmap_mode="r")) - 1, 0, 0
    failed: list[_Row] = []
    written = (root / "job.json").stat().st_mtime
    for path in [p for part in ("todo", "lease", "out") for p in (root / part).iterdir()]:
        low, high = map(int, path.name.partition(".")[0].split("-"))
        with contextlib.suppress(OSError):  # it has just moved
            facts = path.stat()
            written = max(written, facts.st_mtime)
            if path.parent.name != "out":
                continue
            # A map may have 100,000 chunks, and the page asks every three seconds.
            info = _known_chunks.get((str(path), facts.st_ino))
            if info is None:
                chunk = _read(path / ".info")
                info = {k: chunk[k] for k in ("divided", "error", "attempts") if k in chunk}
                _known_chunks[str(path), facts.st_ino] = info
            if "divided" not in info:
                done += high - low
            if "error" in info:
                bad += 1
                failed.append({"place": low, **info})
    names: dict[int, str] = {}
    with contextlib.suppress(OSError, ValueError):  # written at the end
        lines = map(json.loads, (folder / "failed.jsonl").read_text().splitlines())
        names = {line["place"]: str(line["item"]) for line in lines}
    stopped = root / "stopped"
    is_alive = is_recent(written)
    status = "completed" if done >= total else "running" if is_alive else "stopped"
    if stopped.is_file():
        status = "failed"
    failed = sorted(failed, key=lambda item: item["place"])[:200]
    return {
        "status": status,
        "why": stopped.read_text() if stopped.is_file() else "",
        "done": done,
        "total": total,
        "failed": bad,
        "written": written,
        "command": " ".join(map(str, plan["command"])),
        "items": [{**item, "item": names.get(item["place"], "")} for item in failed],
    }
