"""Does the doctor tell the truth? A fault planted in exactly one place, measured by plain loops and
diagnosed by ``ronde doctor``.

The accelerator takes a fixed time (as MLPerf Storage has it). The truth: torch's own loop, without
Ronde but in the environment that its workers get (how OpenMP's threads wait), with the fault and
without it; lost points = what the fault took from the rate, in hundredths of the synthetic rate.
The doctor sees the faulty script only.

    python benchmarks/doctor_truth.py                       all cases, some 40 minutes on two quiet
    cores python benchmarks/doctor_truth.py --only delay-decode   cases whose name holds this; with
    --merge they replace those in the results python benchmarks/doctor_truth.py --sample 8
    every n-th, eight of them
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doctor_job import Spec, write_images, write_real
from ronde.world.cores import openmp_waits, threads_per_worker

_HERE = Path(__file__).parent
_JOB = _HERE / "doctor_job.py"


def cases() -> dict[str, tuple[Spec, str]]:
    """Name -> what is planted, and the stage that must be named (empty: healthy)."""
    found: dict[str, tuple[Spec, str]] = {}

    def add(name: str, stage: str, **spec: Any) -> None:
        found[name] = (Spec(**spec), stage)

    for where in ("read", "decode", "augment", "parse", "python"):
        add(f"delay-{where}", where, fault="delay", where=where, ms=6)
        add(f"burn-{where}", where, fault="burn", where=where, ms=3.5, step_ms=20)
    add("delay-collate", "collate", fault="delay", where="collate", ms=100)
    add("burn-collate", "collate", fault="burn", where="collate", ms=55, step_ms=20)
    add("delay-read-mild", "read", fault="delay", where="read", ms=4.5)
    add("delay-augment-severe", "augment", fault="delay", where="augment", ms=15)
    for where in ("decode", "augment", "python", "collate"):
        add(
            f"gil-{where}",
            where,
            fault="gil",
            where=where,
            ms=55 if where == "collate" else 3.5,
            step_ms=20,
        )
    for where in ("read", "decode", "augment", "python"):
        add(f"inside-delay-{where}", where, fault="delay", where=where, ms=1.2, loaders=0)
    add("inside-delay-collate", "collate", fault="delay", where="collate", ms=20, loaders=0)
    add("inside-burn-decode", "decode", fault="burn", where="decode", ms=1.5, loaders=0)
    add("inside-gil-python", "python", fault="gil", where="python", ms=1.5, loaders=0)
    add("bandwidth", "read", fault="bandwidth", where="read", ms=3.2)
    add("bandwidth-4-loaders", "read", fault="bandwidth", where="read", ms=4, loaders=4)
    add("pickle", "transport", fault="pickle", where="transport", ms=110)
    add(
        "large-samples", "transport", fault="large", where="transport", payload=48 << 20, step_ms=20
    )
    add("delay-copy", "copy", fault="delay", where="copy", ms=20)
    add("burn-copy", "copy", fault="burn", where="copy", ms=20)
    add("block-copy", "copy", fault="block", where="copy", ms=20)
    add("inside-delay-copy", "copy", fault="delay", where="copy", ms=15, loaders=0)
    add(
        "threads-augment",
        "oversubscription",
        fault="threads",
        where="augment",
        ms=1.8,
        threads=2,
        step_ms=20,
    )
    add(
        "threads-collate",
        "oversubscription",
        fault="threads",
        where="collate",
        ms=28,
        threads=2,
        step_ms=20,
    )
    add(
        "neighbour-decode",
        "neighbour",
        fault="burn",
        where="decode",
        ms=3,
        loaders=3,
        busy_ms=30,
        step_ms=30,
    )
    add(
        "neighbour-augment",
        "neighbour",
        fault="gil",
        where="augment",
        ms=3,
        loaders=3,
        busy_ms=30,
        step_ms=30,
    )
    add("plain-transform", "augment", kind="plain", fault="delay", where="augment", ms=6)
    add("plain-collate", "collate", kind="plain", fault="delay", where="collate", ms=100)
    add("plain-python", "python", kind="plain", fault="gil", where="python", ms=4, step_ms=20)
    add("plain-decode", "decode", kind="plain", fault="images", where="decode", ms=960, step_ms=20)
    add("two-delay-read", "read", fault="delay", where="read", ms=3.5, loaders=1, workers=2)
    add("two-delay-decode", "decode", fault="delay", where="decode", ms=3.5, loaders=1, workers=2)
    add("two-delay-copy", "copy", fault="delay", where="copy", ms=20, loaders=1, workers=2)
    add(
        "two-delay-python-inside",
        "python",
        fault="delay",
        where="python",
        ms=1.2,
        loaders=0,
        workers=2,
    )
    add(
        "straggler-step",
        "straggler",
        fault="slow_step",
        where="step",
        ms=15,
        rank=1,
        loaders=1,
        workers=2,
    )
    add(
        "straggler-step-severe",
        "straggler",
        fault="slow_step",
        where="step",
        ms=40,
        rank=0,
        loaders=1,
        workers=2,
    )
    add(
        "straggler-loader",
        "straggler",
        fault="delay",
        where="decode",
        ms=3.5,
        rank=1,
        loaders=1,
        workers=2,
    )
    add(
        "straggler-loader-inside",
        "straggler",
        fault="delay",
        where="read",
        ms=1.5,
        rank=0,
        loaders=0,
        workers=2,
    )
    add("exchange", "exchange", fault="exchange", where="exchange", ms=15, loaders=1, workers=2)
    add(
        "exchange-severe",
        "exchange",
        fault="exchange",
        where="exchange",
        ms=45,
        loaders=1,
        workers=2,
    )
    for name, stage, ms in (
        ("sqlite", "read", 6),  # thousands of rows to look at
        ("http", "read", 7),
        ("connection_kept", "read", 7),
        ("parquet", "read", 30),  # columns
        ("child", "subprocess", 6),
        ("wait", "python", 6),
        ("own_lock", "python", 3.5),
        ("shared_lock", "python", 3.5),
        ("tail", "python", 250),
        ("tail_read", "read", 250),
        ("pool", "python", 6),
    ):
        add(f"real-{name}", stage, kind="real", fault=name, where=name, ms=ms)
    for name, stage, ms in (("http", "read", 4), ("wait", "python", 4)):
        few = {"loaders": 1, "workers": 2}
        add(f"real-two-{name}", stage, kind="real", fault=name, where=name, ms=ms, **few)
    add("real-inside-http", "read", kind="real", fault="http", where="http", ms=2, loaders=0)
    for where in ("one_by_one", "at_once"):
        spec = {"kind": "real", "fault": "sampler", "where": where, "samples": 1024}
        add(f"sampler-{where}", "sampler", ms=1.0, **spec)
    add("healthy", "", loaders=2)
    add("healthy-inside", "", loaders=0)
    add("healthy-plain", "", kind="plain", loaders=2)
    add("healthy-two", "", loaders=1, workers=2)
    return found


def plain(spec: Spec, folder: str) -> dict[str, float]:
    """Rates of a plain loop."""
    job = [str(_JOB), "plain", json.dumps(dataclasses.asdict(spec))]
    if spec.workers > 1:
        job = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(spec.workers),
            "--standalone",
            *job,
        ]
    done = subprocess.run(
        [sys.executable, *job],
        capture_output=True,
        text=True,
        timeout=300,
        # How threads wait is told by the environment: with GNU OpenMP's own setting, two loaders
        # with a thread for each of two cores have found a pace between 41 and 421 samples/s,
        # another one in every process.
        env={
            **os.environ,
            "DOCTOR_FOLDER": folder,
            "OMP_NUM_THREADS": "1",
            **openmp_waits(spec.workers, threads_per_worker(spec.workers)),
        },
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"the plain loop failed:\n{done.stdout}\n{done.stderr}")


def truth(spec: Spec, folder: str) -> dict[str, float]:
    """Rates with the fault and without it, one right after the other, and what it took."""
    none = dataclasses.replace(spec, fault="", where="", ms=0.0, rank=-1, payload=0)
    if spec.fault == "sampler":  # whole epochs, with a sampler that does not compute
        none = dataclasses.replace(spec, ms=0.0)
    sound = plain(none, folder)
    # Threads that wait for the same cores find a pace, and in another process another one; few slow
    # samples fall differently on loaders in each: the middle of three.
    times = 3 if spec.fault in ("threads", "parquet", "tail") else 1
    faulty = (
        sorted((plain(spec, folder) for _ in range(times)), key=lambda r: r["real"])[times // 2]
        if spec.fault
        else sound
    )
    # what a sampler takes is told as a share of each epoch
    ceiling = sound["real"] if spec.fault == "sampler" else sound["synthetic"]
    return {
        "with": faulty["real"],
        "without": sound["real"],
        "ceiling": ceiling,
        "points": 100 * (sound["real"] - faulty["real"]) / ceiling,
    }


def diagnose(spec: Spec, folder: str, seconds: float, to: int = 32) -> dict[str, Any]:
    """What the doctor says, for up to so many devices on this node."""
    out = Path(folder) / "doctor.json"
    out.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "ronde",
        "doctor",
        "--workers",
        str(spec.workers),
        "--seconds",
        str(seconds),
        *("--to", str(to), "--nodes", "1"),
        "--json",
        str(out),
        str(_JOB),
    ]
    done = subprocess.run(
        [*command, "ronde", json.dumps(dataclasses.asdict(spec))],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "DOCTOR_FOLDER": folder, "RONDE_DEVICE": "cpu"},
    )
    if not out.exists():
        return {"error": f"{done.stdout}\n{done.stderr}"}
    values = json.loads(out.read_text())
    cause = (values["cause"] or {}).get("stage", "")
    shown = done.stdout
    values["agrees"] = (
        ("NO VERDICT" in shown) == bool(values["refused"])
        and ("  healthy" in shown) == values["healthy"]
        and (not cause or values["refused"] or f"{values['cause']['points']:.0f}" in shown)
        and bool(values["prescriptions"]) == ("PRESCRIBE" in shown)
        # what the exchange or a straggler loses is not for the input to mend
        and not (cause == "exchange" and values["prescriptions"])
        and all(
            (r["capacity_samples_per_second"] or 1e99)
            >= values["samples_per_second"]["real"] * 0.99
            for r in values["stages"]
        )
    )
    return values


@contextlib.contextmanager
def server() -> Iterator[None]:
    """A local HTTP server in a process of its own, as the cases find it."""
    command = [sys.executable, str(_JOB), "serve", "{}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        os.environ["DOCTOR_HTTP"] = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        try:
            yield
        finally:
            process.terminate()


def points_of(values: dict[str, Any], stage: str) -> float:
    """Lost points that the doctor gives a stage."""
    if stage == "sampler":
        return 100 * float((values["order"] or {}).get("share", 0.0))
    if stage == "exchange":
        return float(values["exchange_points"])
    if stage == "straggler":
        return float((values["straggler"] or {}).get("points", 0.0))
    if stage == "neighbour":
        return float((values["neighbour"] or {}).get("points", 0.0))
    return float(next((s["lost_points"] for s in values["stages"] if s["name"] == stage), 0.0))


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The rows with their summary; in the file, unless they are only some of all."""
    if options.merge:
        fresh = {r["case"]: r for r in rows}
        rows = [
            fresh.pop(r["case"], r) for r in json.loads(options.out.read_text())["cases"]
        ] + list(fresh.values())
    planted = [r for r in rows if r["stage"]]
    healthy = [r for r in rows if not r["stage"]]
    summary = {
        "planted": len(planted),
        "named": sum(r["right"] for r in planted),
        "within_5_points": sum(r["right"] and abs(r.get("error_points", 99)) <= 5 for r in planted),
        "healthy": len(healthy),
        "false_alarms": sum(not r["right"] and r.get("said") != "refused" for r in healthy),
        "refused": sum(r.get("said") == "refused" for r in rows),
        "mean_error_points": sum(abs(r.get("error_points", 0.0)) for r in planted)
        / max(1, len(planted)),
    }
    results = {"summary": summary, "cases": rows}
    if options.merge or not (options.only or options.sample):
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def main() -> None:
    """Run, print a line for each case, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="cases whose name holds one of these, with commas between them"
    )
    parser.add_argument("--sample", type=int, default=0, help="so many cases, spread over all")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each diagnosis")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="with --only: put these cases' rows in the place of their old ones",
    )
    parser.add_argument("--out", type=Path, default=_HERE / "results" / "doctor_truth.json")
    options = parser.parse_args()
    chosen = {
        n: c
        for n, c in cases().items()
        if not options.only or any(w in n for w in options.only.split(","))
    }
    if options.sample and options.sample < len(chosen):
        names = list(chosen)
        chosen = {
            names[i * len(names) // options.sample]: chosen[names[i * len(names) // options.sample]]
            for i in range(options.sample)
        }
    rows = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="doctor-truth-"))
        for size in {64, *(int(s.ms) for s, _ in chosen.values() if s.fault == "images")}:
            write_images(str(Path(folder) / f"images-{size}"), size)
        if any(s.kind == "real" for s, _ in chosen.values()):
            write_real(folder)
            stack.enter_context(server())
        for name, (spec, stage) in chosen.items():
            start = time.monotonic()
            found = truth(spec, folder)
            values = diagnose(spec, folder, options.seconds)
            row: dict[str, Any] = {"case": name, "stage": stage, "truth": found}
            if "error" in values:
                row |= {"error": values["error"], "right": False}
            else:
                cause = (values["cause"] or {}).get("stage", "")
                said = "refused" if values["refused"] else "" if values["healthy"] else cause
                row |= {
                    "said": said,
                    "right": said == stage and values["agrees"],
                    "agrees": values["agrees"],
                    "points": points_of(values, stage) if stage else 100 * values["gap"],
                    "gap": values["gap"],
                    "refused": values["refused"],
                    "stages": {s["name"]: round(s["lost_points"], 1) for s in values["stages"]},
                    "neighbour": values["neighbour"],
                    "straggler": values["straggler"],
                    "exchange_points": values["exchange_points"],
                    "arms": {
                        a: [round(r, 1) for r in x["samples_per_second"]]
                        for a, x in values["arms"].items()
                    },
                    "measured_seconds": values["measured_seconds"],
                }
                row["error_points"] = row["points"] - found["points"] if stage else 0.0
            row["seconds"] = time.monotonic() - start
            rows.append(row)
            write(rows, options)  # after each: a run that is broken off has measured something
            if "error" in row:
                print(f"{name:<26} FAILED {row['error'][-400:]}", flush=True)
            else:
                mark = (
                    "ok  "
                    if row["right"] and abs(row["error_points"]) <= 5
                    else "FAR "
                    if row["right"]
                    else "WRONG"
                )
                print(
                    f"{mark:<6}{name:<26}{stage or 'healthy':<18}said "
                    f"{row['said'] or 'healthy':<18}points {row['points']:5.1f}  truth "
                    f"{found['points']:5.1f}  ({found['with']:.0f} of "
                    f"{found['without']:.0f}, ceiling {found['ceiling']:.0f})  "
                    f"{row['seconds']:.0f} s",
                    flush=True,
                )
    print(json.dumps(write(rows, options)["summary"]))


if __name__ == "__main__":
    main()
