"""Plant faults in trainings: each goes on, exact to the sample, or says why it does not.

    sudo python benchmarks/faults.py [--only kill,stop] [--plans replicate,tensor=2]
    sudo python benchmarks/faults.py --speed 20 | --soak 30 | --cost 5

Every fault comes at a random step, under every plan. At the end, weights are compared with those of
a training that nothing disturbed, and every sample must have been trained once in each epoch: the
last time that a step was taken counts. No process may be left. ``--speed N`` plants each fault N
times instead and measures the time to the next step; ``--soak`` plants a random one every 30
seconds in 4 workers on 2 hosts; ``--cost`` compares runs with ``--restarts`` and without, and with
hangs watched and not.
Faults of hosts need root, ssh and namespaces (``tests/lab.py``); without, they are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from faults_job import Samples, parts  # noqa: E402
from lab import lab, missing  # noqa: E402
from processes import Child, child, ronde  # noqa: E402
from ronde.world.heartbeat import Heartbeat, read_beat  # noqa: E402

JOB = str(Path(__file__).with_name("faults_job.py"))
PLANS = ["replicate", "shard=parameters", "pipeline=2", "tensor=2"]
EPOCHS, SAMPLES, STEPS = 2, 96, 12  # steps of an epoch
COST_SECONDS = 10.0


class Step(NamedTuple):
    """A line of the job's log."""

    when: float
    step: int
    rank: int
    pid: int
    generation: str
    ids: list[int]


class Training:
    """A run of the job and what it wrote."""

    def __init__(self, folder: Path, name: str, plan: str, workers: int = 2, hosts: Any = None):
        self.folder, self.name, self.plan = folder, name, plan
        self.out = folder / name
        self.run = folder / "runs" / name
        self.where = ["-n", str(workers)]
        self._rows: list[Step] = []
        self._generations: dict[str, None] = {}  # in the order in which they began
        self._read = 0
        if hosts is not None:
            named = ",".join(f"{host}:{workers // hosts.count}" for host in hosts.names)
            self.where = ["--hosts", named, "--ssh-config", str(hosts.ssh_config)]

    def line(
        self, *options: str, pause: float = 0.1, epochs: int = EPOCHS, on_nan: str = "error"
    ) -> list[str]:
        named = ["--name", self.name, "--plan", self.plan, *self.where, *options]
        return ronde("run", "-q", *named, JOB, str(self.out), str(epochs), str(pause), on_nan)

    def steps(self) -> list[Step]:
        """Every step that was taken, as far as it is known by now."""
        with suppress(OSError), open(f"{self.out}.steps") as file:
            file.seek(self._read)
            whole = file.read().rpartition("\n")[0]
            self._read += len(whole) + 1 if whole else 0
            for t, s, r, p, g, *ids in map(str.split, whole.splitlines()):
                self._rows.append(Step(float(t), int(s), int(r), int(p), g, [*map(int, ids)]))
                self._generations[g] = None
        return self._rows

    def newest(self) -> dict[int, Step]:
        """Rank -> the last step of those that have begun last: where a cable is healed, one of an
        older generation may end the step that it was in.
        """
        rows, last = self.steps()[-50:], next(reversed(self._generations), "")
        return {row.rank: row for row in rows if row.generation == last}

    def taken(self) -> dict[int, list[int]]:
        """Step -> its samples, of the last generation that took it."""
        found: dict[int, tuple[str, set[int]]] = {}
        for row in self.steps():
            if found.get(row.step, ("",))[0] != row.generation:
                found[row.step] = row.generation, set()
            found[row.step][1].update(row.ids)
        return {step: sorted(ids) for step, (_, ids) in found.items()}

    def wait(self, step: int, began: Child, seconds: float = 90.0) -> None:
        limit = time.time() + seconds
        while not any(row.step >= step for row in self.steps()[-50:]):
            if time.time() > limit or began.process.poll() is not None:
                raise AssertionError(f"no step {step}: {began.stdout}{began.stderr}")
            time.sleep(0.02)

    def worker(self) -> int:
        """A process that has trained last."""
        return random.choice([row.pid for row in self.newest().values()])

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
        taken = self.taken()
        for epoch in range(EPOCHS):
            steps = range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1)
            every = sorted(i for step in steps for i in taken[step])
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
    Path(f"{training.out}.nan-once").touch()


def bit(training: Training, began: Child) -> None:
    Path(f"{training.out}.bit").touch()


def leave(training: Training, began: Child) -> None:
    os.kill(began.pid, signal.SIGTERM)


def launcher(training: Training, began: Child) -> None:
    os.kill(began.pid, signal.SIGKILL)


def nothing(training: Training, began: Child) -> None:
    """The fault is in the data."""


class Case(NamedTuple):
    """A fault on one machine."""

    words: str
    plant: Fault
    status: int = 0  # with which the run ends; it is resumed then
    says: str = ""  # what it says, or what the record has
    on_nan: str = "error"
    sizes: tuple[int, int] = (2, 2)  # workers, and workers after the resume
    bad: int = 0  # the step whose loss is NaN, each time that it comes
    replicas: bool = False  # whether only replicas can notice it
    restarts: int | None = 1


DAMAGE = "is not a whole checkpoint"
LEFT = "asked to leave by SIGTERM: it has left after step"
HERE = {
    "kill": Case("kill -9 of a worker", kill, says=r"killed by signal 9 \(SIGKILL\)"),
    "stop": Case("SIGSTOP of a worker", stop, says=r"a signal \(SIGSTOP\) has stopped it"),
    "truncate": Case("newest checkpoint cut in half, kill -9", truncate, says=DAMAGE),
    "flip": Case("a bit flipped in the newest checkpoint, kill -9", flip, says=DAMAGE),
    "bit": Case(
        "a bit flipped in a replica's weights",
        bit,
        says=r"rank 1\b.*(0\.weight|0\.bias)|(0\.weight|0\.bias).*rank 1\b",
        replicas=True,
    ),
    "nan": Case("a NaN loss on one rank, once", nan, says="the loss is nan"),
    "skip": Case(
        "a NaN batch, on_nan=skip", nothing, says='"skip"', on_nan="skip", bad=17, restarts=0
    ),
    "leave": Case("SIGTERM, then --resume", leave, 75, LEFT),
    "shrink": Case("3 workers, SIGTERM, --resume with 2", leave, 75, LEFT, sizes=(3, 2)),
    "grow": Case("2 workers, SIGTERM, --resume with 3", leave, 75, LEFT, sizes=(2, 3)),
    "launcher": Case("launcher killed, then --resume", launcher, -9),
}


def sized(plan: str, workers: int) -> str:
    """The plan for another number of workers."""
    return plan.replace("=2", f"={workers}")


def disturbed(training: Training, case: Case, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Plant one fault and see what comes of it."""
    plan, (before, after) = training.plan, case.sizes
    told: dict[str, Any] = {"fault": "", "plan": plan, "ok": False, "seconds": None}
    if case.bad:
        Path(f"{training.out}.nan").write_text(str(case.bad))
    training.plan, training.where = sized(plan, before), ["-n", str(before)]
    line = training.line("--restarts", "3", on_nan=case.on_nan)
    # the damaged checkpoint is the one to go on from, and no newer copy in memory
    given = {"RONDE_MEMORY_COPIES": "0"} if case.says == DAMAGE else {}
    with child(line, training.folder, given, fork=True) as began:
        training.wait(random.randint(11, 18), began)  # two checkpoints are there
        planted = time.time()
        case.plant(training, began)
        done = began.done(120)
    said = done.stderr + (training.run / "record.jsonl").read_text()
    if done.returncode != case.status:
        return {**told, "why": f"status {done.returncode}: {done.stderr[-500:]}"}
    if not re.search(case.says, said):
        return {**told, "why": f"did not say {case.says!r}: {done.stderr[-500:]}"}
    if case.status:
        training.plan, training.where = sized(plan, after), ["-n", str(after)]
        again = training.line("--restarts", "1", "--resume", pause=0.0)  # a warm start
        with child(again, training.folder, fork=True) as began:
            done = began.done(120)
        if done.returncode:
            return {**told, "why": f"resumed: {done.stderr[-500:]}"}
    elif len(training.events("restart")) != case.restarts:
        return {**told, "why": f"{len(training.events('restart'))} restarts: {done.stderr[-500:]}"}
    resumed = [e["time"] for e in training.events("resume") if e["time"] > planted]
    steps = [row.when for row in training.steps() if resumed and row.when > resumed[0]]
    wrong = training.check(weights, 1e-12 if before == after else 1e-10)
    seconds = round(steps[0] - planted, 2) if steps and not case.status else None
    return {**told, "ok": not wrong, "why": wrong, "seconds": seconds}


def without(order: dict[int, list[int]], step: int) -> dict[str, torch.Tensor]:
    """Weights after a plain loop over the same samples that leaves one step out."""
    model, optimizer, loss = parts()
    data = Samples()
    for at in sorted(order):
        if at != step:
            _, x, y = torch.utils.data.default_collate([data[i] for i in order[at]])
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return dict(model.state_dict())


def full_disk(folder: Path, plan: str, weights: Any) -> dict[str, Any]:
    """A full disk: the run says so and ends, its last checkpoint stays, and a resume goes on."""
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        training = Training(small, "full", plan)
        with child(training.line("--restarts", "2"), small, fork=True) as began:
            training.wait(STEPS, began)
            filler = small / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"0" * 4096)
            done = began.done(120)
        told = {"plan": plan, "seconds": None, "ok": False}
        if done.returncode == 0 or "No space left" not in done.stderr:  # though under -q
            return {**told, "why": f"status {done.returncode}: {done.stderr[-300:]}"}
        filler.unlink()
        again = training.line("--restarts", "1", "--resume", pause=0.0)
        with child(again, small, fork=True) as began:
            done = began.done(120)
        wrong = training.check(weights, 1e-12) if done.returncode == 0 else done.stderr[-300:]
        return {**told, "ok": not wrong, "why": wrong}
    finally:
        subprocess.run(["umount", "-l", small], check=True)
        small.rmdir()


def on_hosts(folder: Path, hosts: Any, kind: str, plan: str, weights: Any) -> dict[str, Any]:
    """Lose an agent, a host or a cable; 4 workers on 2 hosts go on with what is there."""
    second = hosts.names[1]
    training = Training(folder, f"{kind}-{plan}".replace("=", "-"), plan, 4, hosts)
    told: dict[str, Any] = {"plan": plan, "ok": False, "seconds": None}
    with child(training.line("--restarts", "1", pause=0.7), folder) as began:
        training.wait(random.randint(STEPS // 2, STEPS), began)
        planted = time.time()
        if kind == "agent":
            hosts.ssh(second, f"kill -9 $(ps -o ppid= -p {training.newest()[3].pid})")
        elif kind == "cable":
            hosts.cut(second)
        else:
            hosts.lose(second)
        Path(f"{training.out}.pause").write_text("2")  # the host is back before the end
        limit = time.time() + 60
        while "going on with" not in began.stderr and time.time() < limit:
            time.sleep(0.05)
        restarted = time.time()
        while not (later := [s for s in training.steps() if s.when > restarted]):
            if time.time() > limit:
                break
            time.sleep(0.05)
        if kind == "cable":
            hosts.heal(second)
        elif kind == "host":
            hosts.boot(second)
        while len(training.newest()) < 4 and began.process.poll() is None and time.time() < limit:
            time.sleep(0.1)
        Path(f"{training.out}.pause").write_text("0")
        done = began.done(90)
    if done.returncode:
        return {**told, "why": f"status {done.returncode}: {done.stderr[-400:]}"}
    sizes = [e["workers"] for e in training.events("start")]
    if sizes != [4, 2, 4]:
        return {**told, "why": f"workers {sizes}: {done.stderr[-400:]}"}
    wrong = training.check(weights, 1e-10)
    return {**told, "ok": not wrong, "why": wrong, "seconds": round(later[0].when - planted, 2)}


def speed(folder: Path, count: int, plant: Fault, spares: str) -> list[float]:
    """Seconds from a fault to the next step, of ``count`` faults in one run."""
    name = f"speed-{plant.__name__}{spares}"
    training = Training(folder, name, "replicate")
    line = training.line("--restarts", str(count), spares, pause=0.01, epochs=100_000)
    found = []
    with child(line, folder) as began:
        for _ in range(count):
            training.wait(6, began)
            time.sleep(random.uniform(0.5, 1.5))
            planted = time.time()
            plant(training, began)
            found.append(_after(training, planted, began) - planted)
        began.kill()
    return found


def _after(training: Training, when: float, began: Child, seconds: float = 60.0) -> float:
    """When the first step of a new generation was taken after a time."""
    before = {row.generation for row in training.steps()[-200:] if row.when <= when}
    while time.time() < when + seconds and began.process.poll() is None:
        for row in training.steps()[-200:]:
            if row.when > when and row.generation not in before:
                return row.when
        time.sleep(0.02)
    raise AssertionError(f"no step in {seconds} s:\n{began.stderr[-2000:]}")


def _agents(hosts: Any) -> list[psutil.Process]:
    """The agents on hosts."""
    found = []
    for name in hosts.names:
        with suppress(psutil.Error):
            for process in psutil.Process(hosts.pids[name]).children(recursive=True):
                words = process.cmdline()
                if "ronde.launch.agent" in words and words[0] == sys.executable:
                    found.append(process)
    return found


def _workers(agents: list[psutil.Process]) -> list[psutil.Process]:
    """Their workers, under the process ids of this machine, which are others than their own."""
    found = []
    for agent in agents:
        for process in agent.children():
            with suppress(OSError, psutil.Error):  # the warm process has a socket there
                if Path(f"/proc/{process.pid}/fd/0").readlink() == Path(os.devnull):
                    found.append(process)
    return found


def _plant(kind: str, hosts: Any, victim: str, agents: list[psutil.Process]) -> None:
    """A fault of a worker, an agent, a host or its cable."""
    if kind == "kill":
        random.choice(_workers(agents)).kill()
    elif kind == "stop":
        random.choice(_workers(agents)).suspend()
    elif kind == "agent":
        random.choice(agents).kill()
    elif kind == "host":
        hosts.lose(victim)
    else:
        hosts.cut(victim)


def _mend(kind: str, hosts: Any, victim: str) -> None:
    """What a fault took is there again."""
    if kind == "host":
        hosts.boot(victim)
    elif kind == "cable":
        hosts.heal(victim)


def _whole(training: Training, began: Child) -> None:
    """Until all 4 workers train: a host may be on its way back."""
    limit = time.time() + 90
    while len(training.newest()) < 4:
        assert time.time() < limit and began.process.poll() is None, began.stderr
        time.sleep(0.1)


def _until_gone(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)


def speed_of_hosts(folder: Path, hosts: Any, kind: str, count: int) -> list[float]:
    """Seconds from a fault on one of two hosts to the next step; all workers are there again
    before the next one.
    """
    training = Training(folder, f"speed-hosts-{kind}", "replicate", 4, hosts)
    line = training.line("--restarts", str(count), pause=0.05, epochs=100_000)
    found = []
    with child(line, folder) as began:
        training.wait(1, began)
        for _ in range(count):
            _whole(training, began)
            time.sleep(random.uniform(0.5, 1.5))
            victim, agents = random.choice(hosts.names), _agents(hosts)
            planted = time.time()
            _plant(kind, hosts, victim, agents)
            found.append(_after(training, planted, began) - planted)
            _mend(kind, hosts, victim)
        began.kill()
    return found


def ends(folder: Path, count: int, kind: str, hosts: Any = None) -> list[float]:
    """Seconds from the end of a launcher, or of an agent, until none of its workers is alive."""
    found = []
    for number in range(count):
        name = f"ends-{kind}-{'hosts' if hosts else 'here'}-{number}"
        training = Training(folder, name, "replicate", 4 if hosts else 2, hosts)
        line = training.line("--restarts", "1", pause=0.05, epochs=100_000)
        with child(line, folder, fork=hosts is None) as began:
            training.wait(random.randint(2, 8), began)
            agents = _agents(hosts) if hosts else []
            if kind == "agent":
                victim = random.choice(agents)
                workers = _workers([victim])
            else:
                victim = psutil.Process(began.pid)
                workers = _workers(agents) if hosts else victim.children()
            assert workers
            planted = time.time()
            victim.kill()
            _until_gone(workers)
            found.append(time.time() - planted)
            began.kill()
    return found


def _spent(began: Child) -> float:
    """Seconds of the processors that a launcher and its workers have used."""
    launcher = psutil.Process(began.pid)
    return sum(sum(p.cpu_times()[:2]) for p in (launcher, *launcher.children()))


def cost(folder: Path, pairs: int, more: list[str], less: list[str]) -> list[tuple[float, float]]:
    """Steps a second with some options, as a part of those with others, and processor time a step
    likewise; nothing fails.
    """
    found = []
    for number in range(pairs):
        rates, works = {}, {}
        for given in random.sample([True, False], 2):
            training = Training(folder, f"cost{more[0]}-{number}-{given}", "replicate")
            line = training.line(*(more if given else less), pause=0.0, epochs=100_000)
            with child(line, folder, {"SAVE_EVERY": "100000"}, fork=True) as began:
                training.wait(300, began)
                first, step, spent = time.time(), _last(training), _spent(began)
                time.sleep(COST_SECONDS)
                steps, seconds = _last(training) - step, time.time() - first
                rates[given], works[given] = steps / seconds, (_spent(began) - spent) / steps
                began.kill()
        found.append((rates[True] / rates[False], works[True] / works[False]))
    return found


def _last(training: Training) -> int:
    return training.steps()[-1].step


def watching(folder: Path, rounds: int) -> list[tuple[float, float, float]]:
    """What watching for hangs costs, by its parts: milliseconds of a step, processor time of the
    launcher in a second, less that of one that does not watch, and of the heartbeat in a step.

    Parts can be measured where their sum disappears in the noise of a rate.
    """
    beat, count = Heartbeat(None, 0), 20_000
    start = time.perf_counter()
    for number in range(count):
        beat.doing("run.step()", number)
        beat.doing("", number)
        beat.stepped(number, 0.001)
    each = (time.perf_counter() - start) / (3 * count)
    found = []
    for number in range(rounds):
        spent, steps, ticks = {}, 0, 0
        for hang in ("0", "10"):
            training = Training(folder, f"watching-{number}-{hang}", "replicate")
            line = training.line("--hang-timeout", hang, pause=0.0, epochs=100_000)
            with child(line, folder, {"SAVE_EVERY": "100000"}, fork=True) as began:
                training.wait(300, began)
                launcher, worker = psutil.Process(began.pid), psutil.Process(training.worker())
                maps = (Path(each.path) for each in worker.memory_maps())
                file = next(path for path in maps if path.name.startswith("heartbeat-"))
                first, before = read_beat(file), sum(launcher.cpu_times()[:2])
                time.sleep(COST_SECONDS)
                last, after = read_beat(file), sum(launcher.cpu_times()[:2])
                began.kill()
            spent[hang] = (after - before) / COST_SECONDS
            steps, ticks = last.steps - first.steps, last.ticks - first.ticks
        step = COST_SECONDS / steps
        found.append((1e3 * step, spent["10"] - spent["0"], each * ticks / steps / step))
    return found


def _apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - value).abs().max()) for name, value in b.items())


def soak(
    folder: Path, hosts: Any, minutes: float, every: float, plan: str, only: str
) -> dict[str, Any]:
    """A random fault every so many seconds; 4 workers on 2 hosts, a checkpoint every 2 steps."""
    often, option = {"SAVE_EVERY": "2"}, ["--env", "SAVE_EVERY"]
    kinds = only.split(",") if only else ["kill", "agent", "host", "stop", "cable"]
    calm = Training(folder, "calm", plan, 4, hosts)
    rates = []

    def undisturbed() -> None:
        words = ["--restarts", "1", *option, *(["--resume"] if rates else [])]
        with child(calm.line(*words, epochs=100_000), folder, often) as began:
            calm.wait(len(calm.taken()) + 20, began)
            time.sleep(min(60.0, 15.0 * minutes))
            rows = [row for row in calm.steps() if row.generation == calm.steps()[-1].generation]
            rates.append((rows[-1].step - rows[20].step) / (rows[-1].when - rows[20].when))

    undisturbed()
    training = Training(folder, "soak", plan, 4, hosts)
    lost: dict[str, list[float]] = {kind: [] for kind in kinds}
    looks: list[tuple[float, int, int, int, int]] = []
    marks: list[tuple[float, int, str]] = []  # time, step, fault
    line = training.line("--restarts", "100000", *option, epochs=100_000)
    with child(line, folder, often) as began:
        training.wait(1, began)
        start = training.steps()[0].when
        launcher = psutil.Process(began.pid)
        while (left := start + 60 * minutes - time.time()) > every:
            time.sleep(random.uniform(0.7, 1.3) * every - (time.time() - start) % 1)
            _whole(training, began)
            agents = [agent for agent in _agents(hosts) if agent.is_running()]
            looks.append(
                (
                    round(time.time() - start),
                    launcher.memory_info().rss >> 10,
                    launcher.num_fds(),
                    max((agent.memory_info().rss >> 10 for agent in agents), default=0),
                    max((agent.num_fds() for agent in agents), default=0),
                )
            )
            kind = random.choice(kinds)
            victim = random.choice(hosts.names)
            planted = time.time()
            marks.append((planted, max(row.step for row in training.newest().values()), kind))
            _plant(kind, hosts, victim, agents)
            took = _after(training, planted, began) - planted
            lost[kind].append(round(took, 2))
            _mend(kind, hosts, victim)
            told = f"{time.time() - start:6.0f} s: {kind:<6}{took:6.2f} s, "
            print(f"{told}{looks[-1]}", flush=True)
        time.sleep(max(0.0, left))
        seconds = time.time() - start
        os.kill(began.pid, signal.SIGTERM)
        done = began.done(60)
    print(done.stderr, flush=True)
    assert done.returncode == 75
    taken = training.taken()
    last = max(taken)
    undisturbed()
    # The same steps, undisturbed, and the disturbed run to the same end. In thousands of steps, the
    # rounding of another number of workers grows: two undisturbed runs differ as well.
    epochs = last // STEPS + 1
    plain, alone = (Training(folder, f"plain-{n}", "replicate", n) for n in (2, 1))
    training.where = plain.where
    for each, more in ((plain, []), (alone, []), (training, ["--resume"])):
        words = each.line(*more, pause=0.0, epochs=epochs)
        with child(words, folder, {"SAVE_EVERY": "100000"}) as began:
            done = began.done(600)
            assert done.returncode == 0, done.stderr[-2000:]
    wanted = plain.taken()
    rate = statistics.mean(rates)
    parts: dict[str, list[float]] = {}  # fault -> seconds that it and its like have cost
    for (begun, first, kind), (ended, second, _) in itertools.pairwise(marks):
        parts.setdefault(kind, []).append(ended - begun - (second - first) / rate)
    had = training.taken()
    order = sum(ids != had.get(step) for step, ids in wanted.items())
    weights = load_file(plain.out)
    return {
        "plan": plan,
        "minutes": minutes,
        "faults": sum(map(len, lost.values())),
        "seconds to the next step": lost,
        "steps": last,
        "steps a second, undisturbed": rates,
        "part of the undisturbed run's samples": last / (seconds * rate),
        "seconds that one costs": {kind: statistics.mean(cost) for kind, cost in parts.items()},
        "steps whose samples differ": order,
        "largest difference of a weight": _apart(load_file(training.out), weights),
        "the same, of undisturbed runs on 1 and 2 workers": _apart(load_file(alone.out), weights),
        "looks": looks,
        "restarts": len(training.events("restart")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--speed", type=int, default=0)
    parser.add_argument("--cost", type=int, default=0, metavar="PAIRS")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random.seed(options.seed)
    names = [*HERE, "full", "agent", "host", "cable"]
    only = options.only.split(",") if options.only else names
    answer: dict[str, Any] = {"matrix": [], "speed": {}}
    with tempfile.TemporaryDirectory(prefix="ronde-faults-") as text:
        folder = Path(text)
        if options.soak:
            with lab(folder / "lab", 2) as hosts:
                plan = options.plans.split(",")[0]
                given = (options.soak, options.every, plan, options.only)
                answer["soak"] = soak(folder, hosts, *given)
            print(json.dumps(answer["soak"], indent=1), flush=True)
        elif options.cost:
            for name, more, less in (
                ("--restarts", ["--restarts", "3"], []),
                ("watching for hangs", ["--hang-timeout", "10"], ["--hang-timeout", "0"]),
            ):
                answer[f"cost of {name}"] = found = cost(folder, options.cost, more, less)
                for what, ratios in zip(
                    ("rate", "processor time"), zip(*found, strict=True), strict=True
                ):
                    print(
                        f"with {name}: {statistics.median(ratios):.4f} of the {what} without "
                        f"({', '.join(f'{each:.3f}' for each in sorted(ratios))})",
                        flush=True,
                    )
            answer["watching"] = parts_of_it = watching(folder, options.cost)
            step, launcher, beats = map(statistics.median, zip(*parts_of_it, strict=True))
            print(
                f"watching for hangs, by parts: the launcher uses {launcher:.2%} of a core, and "
                f"heartbeats {beats:.3%} of a step of {step:.1f} ms",
                flush=True,
            )
        elif options.speed:
            _speeds(folder, options.speed, options.only, answer["speed"])
        else:
            _matrix(folder, only, options.plans.split(","), answer["matrix"])
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1))
    sys.exit(any(not row["ok"] for row in answer["matrix"]))


def _speeds(folder: Path, count: int, only: str, answer: dict[str, Any]) -> None:
    calls: dict[str, Callable[[Any], list[float]]] = {
        "kill": lambda _: speed(folder, count, kill, "--spares"),
        "kill without spares": lambda _: speed(folder, count, kill, "--no-spares"),
        "stop": lambda _: speed(folder, count, stop, "--spares"),
        "launcher ends": lambda _: ends(folder, count, "launcher"),
        **{
            f"{kind} on hosts": lambda hosts, k=kind: speed_of_hosts(folder, hosts, k, count)
            for kind in ("kill", "agent", "host", "cable")
        },
        "launcher on hosts ends": lambda hosts: ends(folder, count, "launcher", hosts),
        "agent on hosts ends": lambda hosts: ends(folder, count, "agent", hosts),
    }
    for name, call in calls.items():
        if only and name not in only.split(","):
            continue
        if "on hosts" not in name:
            found = call(None)
        elif missing():
            continue
        else:
            with lab(folder / f"lab-{name.replace(' ', '-')}", 2) as hosts:
                found = call(hosts)
        answer[name] = found
        print(
            f"{name}: {len(found)} times, median {statistics.median(found):.2f} s, "
            f"worst {max(found):.2f} s",
            flush=True,
        )


def _matrix(folder: Path, only: list[str], plans: list[str], rows: list[Any]) -> None:
    training = Training(folder, "undisturbed", "replicate")
    with child(training.line(pause=0.0), folder, fork=True) as began:
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
        for name, case in HERE.items():
            if name in only and not (case.replicas and plan != "replicate"):
                own = Training(folder, f"{name}-{plan}".replace("=", "-"), plan)
                wanted = without(training.taken(), case.bad) if case.bad else weights
                guarded(case.words, plan, lambda o=own, c=case, w=wanted: disturbed(o, c, w))
        if "full" in only and os.geteuid() == 0:
            guarded("disk full, then --resume", plan, lambda p=plan: full_disk(folder, p, weights))
    words = {
        "agent": "agent of a host killed (4, 2, 4 workers)",
        "host": "host lost, and back (4, 2, 4 workers)",
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
