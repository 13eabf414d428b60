"""Plant faults in trainings: each goes on, exact to the sample, or says why it does not.

    sudo python benchmarks/faults.py [--only kill,stop] [--plans replicate,tensor=2] [--speed 20]

Every fault comes at a random step, under every plan. At the end, weights are compared with those of
a training that nothing disturbed, and every sample must have been trained once in each epoch: the
last time that a step was taken counts. No process may be left. ``--speed N`` kills a worker N times
instead and measures the time to the next step, with and without spares; likewise stopped workers.
Faults of hosts need root, ssh and namespaces (``tests/lab.py``); without, they are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from lab import lab, missing  # noqa: E402
from processes import Child, child, ronde  # noqa: E402

JOB = str(Path(__file__).with_name("faults_job.py"))
PLANS = ["replicate", "shard=parameters", "pipeline=2", "tensor=2"]
EPOCHS, SAMPLES, STEPS = 3, 96, 12  # steps of an epoch


class Training:
    """A run of the job and what it wrote."""

    def __init__(self, folder: Path, name: str, plan: str, workers: int = 2, hosts: Any = None):
        self.folder, self.name, self.plan = folder, name, plan
        self.out = folder / name
        self.run = folder / "runs" / name
        self.where = ["-n", str(workers)]
        if hosts is not None:
            named = ",".join(f"{host}:{workers // hosts.count}" for host in hosts.names)
            self.where = ["--hosts", named, "--ssh-config", str(hosts.ssh_config)]

    def line(self, *options: str, pause: float = 0.1) -> list[str]:
        named = ["--name", self.name, "--plan", self.plan, *self.where, *options]
        return ronde("run", "-q", *named, JOB, str(self.out), str(EPOCHS), str(pause))

    def steps(self) -> list[tuple[float, int, int, int, str, list[int]]]:
        """Time, step, rank, process, generation and samples of each step; whole lines only."""
        try:
            lines = Path(f"{self.out}.steps").read_text().split("\n")[:-1]
        except OSError:
            return []
        rows = [line.split() for line in lines]
        return [
            (float(t), int(s), int(r), int(p), g, [*map(int, ids)]) for t, s, r, p, g, *ids in rows
        ]

    def wait(self, step: int, began: Child, seconds: float = 90.0) -> None:
        limit = time.time() + seconds
        while not any(row[1] >= step for row in self.steps()):
            if time.time() > limit or began.process.poll() is not None:
                raise AssertionError(f"no step {step}: {began.stdout}{began.stderr}")
            time.sleep(0.02)

    def worker(self) -> int:
        """A process that has trained last."""
        newest = {rank: pid for _, _, rank, pid, _, _ in self.steps()}
        return random.choice(list(newest.values()))

    def checkpoint(self) -> Path:
        return max((self.run / "checkpoints").glob("step-*"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run / "record.jsonl").read_text().splitlines()
        return [e for line in lines if (e := json.loads(line))["type"] == kind]

    def check(self, weights: dict[str, torch.Tensor], atol: float) -> str:
        """What is wrong; empty if nothing is."""
        found = load_file(self.out)
        worst = max(float((found[n] - w).abs().max()) for n, w in weights.items())
        if worst > atol:
            return f"weights differ by {worst:.1e}"
        taken: dict[int, tuple[str, set[int]]] = {}  # step -> its newest generation, its samples
        for _, step, _, _, generation, ids in self.steps():
            if taken.get(step, ("",))[0] != generation:
                taken[step] = generation, set()
            taken[step][1].update(ids)
        for epoch in range(EPOCHS):
            steps = range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1)
            every = sorted(i for step in steps for i in taken[step][1])
            if every != list(range(SAMPLES)):
                return (
                    f"epoch {epoch + 1} has {len(every)} samples, {len(set(every))} of them apart"
                )
        return ""


Fault = Callable[[Training, Child], None]


def kill(training: Training, began: Child) -> None:
    os.kill(training.worker(), signal.SIGKILL)


def stop(training: Training, began: Child) -> None:
    os.kill(training.worker(), signal.SIGSTOP)


def truncate(training: Training, began: Child) -> None:
    file = max(training.checkpoint().glob("*.safetensors"), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    kill(training, began)


def flip(training: Training, began: Child) -> None:
    file = random.choice(list(training.checkpoint().iterdir()))
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)
    kill(training, began)


def nan(training: Training, began: Child) -> None:
    Path(f"{training.out}.nan").touch()


def leave(training: Training, began: Child) -> None:
    os.kill(began.pid, signal.SIGTERM)


def launcher(training: Training, began: Child) -> None:
    os.kill(began.pid, signal.SIGKILL)


HERE: dict[str, tuple[str, Fault, int]] = {
    "kill": ("kill -9 of a worker", kill, 0),
    "stop": ("SIGSTOP of a worker", stop, 0),
    "truncate": ("newest checkpoint cut in half, kill -9", truncate, 0),
    "flip": ("one bit flipped in the newest checkpoint, kill -9", flip, 0),
    "nan": ("a NaN loss on one rank, once", nan, 0),
    "leave": ("SIGTERM, then --resume", leave, 75),
    "launcher": ("launcher killed, then --resume", launcher, -9),
}
"""Name -> words, what plants it, and the status with which the run ends; it is resumed then."""


def disturbed(training: Training, fault: Fault, status: int, weights: Any) -> dict[str, Any]:
    """Plant one fault and see what comes of it."""
    told: dict[str, Any] = {"fault": "", "plan": training.plan, "ok": False, "seconds": None}
    with child(training.line("--restarts", "3"), training.folder) as began:
        training.wait(random.randint(STEPS // 2, 2 * STEPS), began)
        planted = time.time()
        fault(training, began)
        done = began.done(120)
    if done.returncode != status:
        return {**told, "why": f"status {done.returncode}: {done.stderr[-300:]}"}
    if status:
        with child(training.line("--resume"), training.folder) as began:
            done = began.done(120)
        if done.returncode:
            return {**told, "why": f"resumed: {done.stderr[-300:]}"}
    elif not training.events("restart"):
        return {**told, "why": "no restart was recorded"}
    after = [e["time"] for e in training.events("resume") if e["time"] > planted]
    steps = [when for when, *_ in training.steps() if after and when > after[0]]
    wrong = training.check(weights, 1e-12)
    seconds = round(steps[0] - planted, 2) if steps and not status else None
    return {**told, "ok": not wrong, "why": wrong, "seconds": seconds}


def full_disk(folder: Path, plan: str, weights: Any) -> dict[str, Any]:
    """A full disk: the run says so and ends, its last checkpoint stays, and a resume goes on."""
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        training = Training(small, "full", plan)
        with child(training.line("--restarts", "2"), small) as began:
            training.wait(STEPS, began)
            filler = small / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"0" * 4096)
            done = began.done(120)
        told = {"plan": plan, "seconds": None, "ok": False}
        if done.returncode == 0 or "No space left" not in done.stderr:
            return {**told, "why": f"status {done.returncode}: {done.stderr[-300:]}"}
        filler.unlink()
        with child(training.line("--resume"), small) as began:
            done = began.done(120)
        wrong = training.check(weights, 1e-12) if done.returncode == 0 else done.stderr[-300:]
        return {**told, "ok": not wrong, "why": wrong}
    finally:
        subprocess.run(["umount", "-l", small], check=True)
        small.rmdir()


def on_hosts(folder: Path, hosts: Any, kind: str, plan: str, weights: Any) -> dict[str, Any]:
    """Lose an agent, a host or a cable; 4 workers on 2 hosts go on with what is there."""
    first, second = hosts.names
    training = Training(folder, f"{kind}-{plan}".replace("=", "-"), plan, 4, hosts)
    told: dict[str, Any] = {"plan": plan, "ok": False, "seconds": None}
    with child(training.line("--restarts", "4", pause=0.3), folder) as began:
        training.wait(random.randint(STEPS // 2, STEPS), began)
        planted = time.time()
        if kind == "agent":
            newest = {rank: pid for _, _, rank, pid, _, _ in training.steps()}
            hosts.ssh(second, f"kill -9 $(ps -o ppid= -p {newest[3]})")
        elif kind == "cable":
            hosts.cut(second)
        else:
            hosts.lose(second)
        limit = time.time() + 60
        while "going on with" not in began.stderr and time.time() < limit:
            time.sleep(0.05)
        restarted = time.time()
        while not (later := [s for s in training.steps() if s[0] > restarted]):
            if time.time() > limit:
                break
            time.sleep(0.05)
        if kind == "cable":
            hosts.heal(second)
        elif kind == "host":
            hosts.boot(second)
        if kind != "agent":  # once more, so that the host is taken in again
            hosts.ssh(first, f"kill -9 {later[-1][3]}")
        done = began.done(150)
    if done.returncode:
        return {**told, "why": f"status {done.returncode}: {done.stderr[-400:]}"}
    sizes = [e["workers"] for e in training.events("start")]
    if sizes != ([4, 4] if kind == "agent" else [4, 2, 4]):
        return {**told, "why": f"workers {sizes}: {done.stderr[-400:]}"}
    wrong = training.check(weights, 1e-10)
    return {**told, "ok": not wrong, "why": wrong, "seconds": round(later[0][0] - planted, 2)}


def speed(folder: Path, count: int, plant: Fault, spares: str) -> list[float]:
    """Seconds from a fault to the next step, of ``count`` faults in one run."""
    name = f"speed-{plant.__name__}{spares}"
    training = Training(folder, name, "replicate")
    global EPOCHS
    before, EPOCHS = EPOCHS, 100_000
    line = training.line("--restarts", str(count), spares, pause=0.01)
    EPOCHS = before
    found = []
    with child(line, folder) as began:
        for _ in range(count):
            known = {row[3] for row in training.steps()}
            training.wait(6, began)
            time.sleep(random.uniform(0.5, 1.5))
            planted = time.time()
            plant(training, began)
            seen = {row[3] for row in training.steps()}
            while not (new := [s for s in training.steps()[-50:] if s[3] not in seen]):
                assert time.time() < planted + 60, began.stderr
                time.sleep(0.01)
            found.append(new[0][0] - planted)
            assert known <= seen
        began.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--speed", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random.seed(options.seed)
    names = [*HERE, "full", "agent", "host", "cable"]
    only = options.only.split(",") if options.only else names
    answer: dict[str, Any] = {"matrix": [], "speed": {}}
    with tempfile.TemporaryDirectory(prefix="ronde-faults-") as text:
        folder = Path(text)
        if options.speed:
            for plant, spares in ((kill, "--spares"), (kill, "--no-spares"), (stop, "--spares")):
                if plant.__name__ in only:
                    found = speed(folder, options.speed, plant, spares)
                    answer["speed"][f"{plant.__name__} {spares}"] = found
                    print(
                        f"{plant.__name__} {spares}: {len(found)} faults, to the next step "
                        f"median {statistics.median(found):.2f} s, worst {max(found):.2f} s",
                        flush=True,
                    )
        else:
            _matrix(folder, only, options.plans.split(","), answer["matrix"])
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1))
    sys.exit(any(not row["ok"] for row in answer["matrix"]))


def _matrix(folder: Path, only: list[str], plans: list[str], rows: list[Any]) -> None:
    training = Training(folder, "undisturbed", "replicate")
    with child(training.line(pause=0.0), folder) as began:
        done = began.done(120)
        assert done.returncode == 0, done.stderr
    weights = load_file(training.out)

    def note(words: str, row: dict[str, Any]) -> None:
        rows.append({**row, "fault": words})
        took = f"{row['seconds']} s" if row["seconds"] else ""
        said = "exact" if row["ok"] else f"WRONG: {row['why']}"
        print(f"{words:<52}{row['plan']:<18}{took:<10}{said}", flush=True)

    def guarded(words: str, plan: str, call: Callable[[], dict[str, Any]]) -> None:
        try:
            note(words, call())
        except Exception as error:
            note(words, {"plan": plan, "ok": False, "seconds": None, "why": f"{error}"[-500:]})

    for plan in plans:
        for name, (words, fault, status) in HERE.items():
            if name in only:
                own = Training(folder, f"{name}-{plan}".replace("=", "-"), plan)
                guarded(words, plan, lambda o=own, f=fault, s=status: disturbed(o, f, s, weights))
        if "full" in only and os.geteuid() == 0:
            guarded("disk full, then --resume", plan, lambda p=plan: full_disk(folder, p, weights))
    words = {
        "agent": "agent of a host killed",
        "host": "host lost, back at the next restart (4, 2, 4 workers)",
        "cable": "cable cut and healed (4, 2, 4 workers)",
    }
    if missing() or not set(words) & set(only):
        return
    for plan in plans:
        for kind in words:
            if kind in only:
                with lab(folder / f"lab-{kind}-{plan}", 2) as hosts:
                    guarded(
                        words[kind],
                        plan,
                        lambda h=hosts, k=kind, p=plan: on_hosts(folder, h, k, p, weights),
                    )


if __name__ == "__main__":
    main()
