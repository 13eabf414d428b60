"""``ronde tune``: asks for trials, trains them rung by rung, and stops those that fall behind.

All state is in files: ``tune.json`` says what was asked, ``trials.jsonl`` which values each trial
has, and the trials' own records how far they are. Killed at any moment, a second start goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.jobs.child_process import last_line
from ronde.jobs.halving import (
    Bracket,
    Results,
    best_of,
    brackets_of,
    is_open,
    promoted,
    rungs_between,
)
from ronde.jobs.space import (
    Values,
    draw_random,
    draw_with_optuna,
    grid_values,
    log_names,
    read_space,
)
from ronde.jobs.trials import (
    HOPELESS,
    Goal,
    TrialProcess,
    TrialProgress,
    argument_words,
    progress_of,
    trial_name,
)
from ronde.watch import RunDir
from ronde.world import ArgumentError, RondeError
from ronde.world.whole_file import write_whole

__all__ = ["Tuned", "Tuner", "TunePlan", "load_plan"]

LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class TunePlan:
    """What is searched, and how.

    Attributes:
        command: the script and its own arguments.
        space: as ``--space`` gives it.
        goal: as ``--goal`` gives it.
        trials: how many.
        method: one of :data:`ronde.jobs.halving.METHODS`.
        least: the first rung, as samples or epochs (``1ep``).
        most: how long a trial trains; empty: to the end of the script.
        eta: one in so many goes on.
        seed: of the search.
        style: how a value becomes an argument; empty: ``--NAME VALUE``.
        batch: how many trials are asked for at once, where results decide.
        warm: folders of earlier searches.
        on_rule: ``stop`` ends trials at :data:`ronde.jobs.trials.HOPELESS`; ``ignore`` does not.
        keep: ``best`` removes the checkpoints of trials that were stopped; ``all`` keeps them.
    """

    command: Sequence[str]
    space: Sequence[str]
    goal: str
    trials: int
    method: str = "random"
    least: str = ""
    most: str = ""
    eta: float = 3.0
    seed: int = 0
    style: str = ""
    batch: int = 1
    warm: Sequence[str] = ()
    keep: str = "best"
    on_rule: str = "ignore"


@dataclass(frozen=True)
class Tuned:
    """What a search has found.

    Attributes:
        best: its number, values, result, and run; empty before there is a result.
        trials: of each: number, values, results by rung, samples, error, the rule that ended it,
            and whether it trains now.
        samples: trained, over all trials.
        whole: those that all trials together would have trained.
        ended: why it ended: ``done``, ``target``, ``budget``, or ``stopped``; empty: not yet.
        log: values that are drawn on a log scale.
    """

    best: Mapping[str, Any]
    trials: Sequence[Mapping[str, Any]]
    rungs: Sequence[int]
    samples: int
    whole: int
    ended: str
    log: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def load_plan(folder: Path) -> TunePlan:
    """The plan of a search that has begun.

    Raises:
        ArgumentError: there is none.
    """
    try:
        return TunePlan(**json.loads((folder / "tune.json").read_text()))
    except FileNotFoundError:
        raise ArgumentError(f"{folder} holds no search.") from None


@dataclass
class _Running:
    process: TrialProcess
    devices: list[int]


class Tuner:
    """One search.

    Args:
        folder: of the search.
        plan: what is searched.
        devices: how many there are for all trials.
        workers: of each trial, at first.
        grows: whether trials get more workers when devices are free and it pays.
        gpus: whether devices are GPUs; else cores.
        target: a result that is good enough.
        seconds: a budget of time.
        samples: a budget of samples.
        tell: called with a line about each change.
    """

    def __init__(
        self,
        folder: Path,
        plan: TunePlan,
        devices: int,
        workers: int = 1,
        *,
        grows: bool = True,
        gpus: bool = False,
        target: float | None = None,
        seconds: float | None = None,
        samples: int | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.folder, self.plan, self.tell = folder, plan, tell
        self.runs = folder / "trials"
        self._hopeless = HOPELESS if plan.on_rule == "stop" else ()
        self._goal, self._space = Goal.parse(plan.goal), read_space(plan.space)
        self._devices, self._workers = list(range(devices)), workers
        self._grows, self._gpus = grows, gpus
        self._limits = target, seconds, samples
        self._grid = grid_values(self._space) if plan.method == "grid" else []
        self._count = min(len(self._grid) or plan.trials, plan.trials)
        self._lines: list[dict[str, Any]] = []
        self._progress: dict[int, TrialProgress] = {}
        self._running: dict[int, _Running] = {}
        # Ends without progress, of each trial: a killed one may be tried far more often.
        self._tries: Counter[tuple[int, bool]] = Counter()  # by trial, and whether it was killed
        self._rungs: tuple[int, ...] = ()
        self._asked_to_stop = False
        self._lock = -1
        self._shown: object = None
        self._signed = 0.0

    def stop(self, *_: object) -> None:
        """Let all trials save and leave: for a signal."""
        self._asked_to_stop = True

    def run(self) -> Tuned:
        """Search until all is done, or a limit is reached.

        Raises:
            RondeError: another process searches here, or a trial cannot be started.
        """
        self._begin()
        began = time.monotonic()
        why = "done"
        try:
            while True:
                self._collect()
                if self._asked_to_stop:
                    why = "stopped"
                    break
                if limit := self._limit_reached(time.monotonic() - began):
                    why = limit
                    break
                if not self._start() and not self._running:
                    break
                self._show()
                time.sleep(LOOK_SECONDS)
        finally:
            for running in self._running.values():
                running.process.leave()
            for running in self._running.values():
                running.process.wait()
        for number in self._running:
            self._look(number)
        self._running.clear()
        tuned = self._result(why)
        self._save(tuned)
        return tuned

    def _show(self) -> None:
        """Keep ``result.json`` as the search is now, and its time of change as a sign of life."""
        state = self._asked, tuple(self._running), tuple(self._progress.values())
        if state != self._shown:
            self._shown = state
            with contextlib.suppress(OSError):  # what is shown ends no search
                self._save(self._result(""))
        elif time.monotonic() - self._signed > 5:
            self._signed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.folder / "result.json")

    def _save(self, tuned: Tuned) -> None:
        write_whole(self.folder / "result.json", json.dumps(tuned.to_dict(), indent=1) + "\n")
        self._signed = time.monotonic()

    def _begin(self) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # the kernel lets it go with the process, whatever ends it
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RondeError(f"another process searches in {self.folder} already.") from None
        file = self.folder / "trials.jsonl"
        if file.exists():
            for text in file.read_text().splitlines():
                try:
                    self._lines.append(json.loads(text))
                except ValueError:
                    break  # the last line of a search that was killed
            whole = "".join(json.dumps(line) + "\n" for line in self._lines)
            write_whole(file, whole, durable=True)
        for number in range(self._asked):
            self._look(number)

    @property
    def _asked(self) -> int:
        return sum("values" in line for line in self._lines)

    def values(self, number: int) -> Values:
        """Those of a trial."""
        return next(dict(e["values"]) for e in self._lines if e["trial"] == number)

    def _write(self, line: dict[str, Any]) -> None:
        """Before it is acted on: a second start does the same."""
        with open(self.folder / "trials.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._lines.append(line)

    def _run_dir(self, number: int) -> RunDir:
        return RunDir(self.runs / trial_name(number))

    def _look(self, number: int) -> None:
        run = self._run_dir(number)
        self._progress[number] = progress_of(run, self._goal, self._rungs, self._hopeless)

    @property
    def _results(self) -> Results:
        return {number: p.results for number, p in self._progress.items() if p.results}

    def _collect(self) -> None:
        """See which trials have ended, and what they have reached."""
        for number, running in list(self._running.items()):
            status = running.process.ended()
            if status is None:
                continue
            before = self._progress.get(number, TrialProgress())
            self._look(number)
            now = self._progress[number]
            del self._running[number]
            self._devices = sorted([*self._devices, *running.devices])
            came_further = len(now.results) > len(before.results) or now.samples > before.samples
            was_killed = status < 0
            self._tries[number, was_killed] += 1
            if came_further:
                self._tries[number, True] = self._tries[number, False] = 0
            # what is killed, by hand or where memory is short, may do better the next time
            most = 30 if was_killed else 3
            if self._tries[number, was_killed] >= most or (status == 2 and not now.begun):
                log = self.runs / f"{trial_name(number)}.log"
                raise RondeError(
                    f"trial {trial_name(number)} ends with status {status} and comes no further: "
                    f"{last_line(log)} Its output: {log}."
                )
            self._tell_reached(number, before, now)

    def _tell_reached(self, number: int, before: TrialProgress, now: TrialProgress) -> None:
        name = trial_name(number)
        if now.error and not now.rule and not before.error:
            self.tell(f" {name}  failed: {now.error.splitlines()[0][:100]}")
        if now.rule and not before.rule:
            self.tell(f" {name}  {now.samples:,} samples  ended by a rule: {now.rule}")
        for rung in range(len(before.results), len(now.results)):
            value = now.results[rung]
            if value is not None:
                at = f"  {self._rungs[rung]:,} samples" if self._rungs[rung] < _WHOLE else ""
                self.tell(f" {name}{at}  {self._goal.metric} {value:.5g}")
        if now.metrics and not now.error and not any(v is not None for v in now.results):
            goal = self._goal
            if not any(m.startswith(f"{goal.metric}@{goal.evaluation}") for m in now.metrics):
                raise ArgumentError(
                    f"--goal {self.plan.goal}: the script's evaluations have "
                    f"{', '.join(sorted(now.metrics))}."
                )

    def _limit_reached(self, passed: float) -> str:
        target, seconds, samples = self._limits
        if target is not None:
            sign = 1 if self._goal.maximize else -1
            reached = [v for results in self._results.values() for v in results if v is not None]
            if any(sign * v >= sign * target for v in reached):
                return "target"
        if seconds is not None and passed >= seconds:
            return "budget"
        trained = sum(p.samples for p in self._progress.values())
        return "budget" if samples is not None and trained >= samples else ""

    def _start(self) -> bool:
        """Start what can be started. Whether anything is to be done still."""
        if not self._rungs and not self._find_rungs():
            return True
        wanted = self._wanted()
        for number, rung in wanted:
            if number in self._running:
                continue
            workers = self._workers_for(len(wanted))
            if len(self._devices) < workers:
                break  # later trials wait too, or the first ones would never get several devices
            self._launch(number, rung, workers)
        return bool(wanted)

    def _find_rungs(self) -> bool:
        """Turn epochs into samples: the first trial knows how long one is."""
        plan = self.plan
        size = 0
        if "ep" in plan.most + plan.least:
            self._ask(0)
            size = self._progress[0].epoch_samples
            if not size:
                if 0 not in self._running:
                    self._launch(0, -1, self._workers)
                return False
        most = _samples(plan.most, size, "--max") if plan.most else _WHOLE
        kind = plan.method.rpartition("+")[2]
        if kind in ("halving", "hyperband", "asha"):
            # one epoch, or two halvings by three
            least = _samples(plan.least, size, "--min") if plan.least else size or most // 9
            self._rungs = rungs_between(min(least, most), most, plan.eta)
        else:
            self._rungs = (most,)
        for number in range(self._asked):
            self._look(number)
        return True

    def _brackets(self) -> list[Bracket]:
        plan, last = self.plan, len(self._rungs) - 1
        if plan.method == "bayes":  # trials that are asked for together know the same results
            starts = range(0, self._count, plan.batch)
            ends = [min(start + plan.batch, self._count) for start in starts]
            parts = [tuple(range(*part)) for part in zip(starts, ends, strict=True)]
            return [Bracket(part, self._rungs, last) for part in parts]
        return brackets_of(plan.method, self._count, self._rungs, plan.eta)

    def _wanted(self) -> list[tuple[int, int]]:
        """Trials that are to reach a rung now, and that rung; asks for new ones."""
        plan, kind = self.plan, self.plan.method.rpartition("+")[2]
        if kind == "asha":
            return self._wanted_asha()
        wanted: list[tuple[int, int]] = []
        results = self._results
        for bracket in self._brackets():
            # Optuna decides about a bracket by the results of all before it: else the order in
            # which they come, and so the number of devices, would decide too.
            if bracket.trials[-1] >= self._asked:
                if plan.method.startswith("bayes") and wanted:
                    break
                self._ask(bracket.trials[-1])
            alive, rung = bracket.alive(results, plan.eta, self._goal.maximize)
            if plan.keep == "best":
                for trial in set(bracket.trials) - set(alive):
                    shutil.rmtree(self._run_dir(trial).checkpoints, ignore_errors=True)
            if rung < len(bracket.rungs):
                wanted += [(t, rung) for t in alive if is_open(results, t, rung)]
        return wanted

    def _wanted_asha(self) -> list[tuple[int, int]]:
        (bracket,) = self._brackets()
        decided = [(e["trial"], e["rung"]) for e in self._lines if "rung" in e]
        results = self._results
        open_ones = [(t, r) for t, r in decided if is_open(results, t, r)]
        # as many decisions as can begin now: later ones will know more results
        slots = len(self._devices) // self._workers + len(self._running)
        while len(open_ones) < slots:
            running = dict(open_ones)
            more = promoted(results, bracket, running, self.plan.eta, self._goal.maximize)
            if more is None:
                break
            self._ask(more[0])
            self._write({"trial": more[0], "rung": more[1]})
            open_ones.append(more)
        return open_ones

    def _ask(self, last: int) -> None:
        """Ask for values of trials, up to one."""
        while self._asked <= last:
            number = self._asked
            if self._grid:
                values = self._grid[number]
            elif self.plan.method.startswith("bayes"):
                known = 0
                if number:  # trial 0 may be asked for before the rungs are known
                    known = next(b.trials[0] for b in self._brackets() if number in b.trials)
                earlier = self._earlier(known)
                values = draw_with_optuna(
                    self._space, self.plan.seed, number, earlier, self._goal.maximize
                )
            else:
                values = draw_random(self._space, self.plan.seed, number)
            self._write({"trial": number, "values": values})
            self._progress[number] = TrialProgress()

    def _earlier(self, known: int) -> list[tuple[Values, float | None]]:
        """What is known: results of earlier searches, then of this one's first trials; the values
        of the others.
        """
        pairs: list[tuple[Values, float | None]] = []
        for folder in self.plan.warm:
            result = json.loads((Path(folder) / "result.json").read_text())
            for trial in result["trials"]:
                results = [v for v in trial["results"] if v is not None]
                pairs += [(trial["values"], results[-1])] if results else []
        for number in range(self._asked):
            results = [v for v in self._progress[number].results if v is not None]
            if number >= known:
                pairs.append((self.values(number), None))
            elif results:
                pairs.append((self.values(number), results[-1]))
        return pairs

    def _workers_for(self, wanted: int) -> int:
        workers = self._workers
        total = len(self._devices) + sum(len(r.devices) for r in self._running.values())
        while self._grows and 2 * workers * wanted <= total and self._pays(workers):
            workers *= 2
        return workers

    def _pays(self, workers: int) -> bool:
        """Whether twice the workers are worth it, by what was measured; unknown: try it."""
        rates: dict[int, list[float]] = {}
        for progress in self._progress.values():
            for count, rate in progress.rate:
                rates.setdefault(count, []).append(rate)
        if workers not in rates or 2 * workers not in rates:
            return True
        # a median: the first epoch of a trial also pays for its start
        less, more = (statistics.median(rates[n]) for n in (workers, 2 * workers))
        return more >= 1.2 * less  # of samples per second

    def _launch(self, number: int, rung: int, workers: int) -> None:
        devices, self._devices = self._devices[:workers], self._devices[workers:]
        if rung < 0:
            until = "1"  # its record then knows how long an epoch is
        else:
            until = f"{self._rungs[rung]}@evaluate" if self._rungs[rung] < _WHOLE else ""
        words = argument_words(self.values(number), self.plan.style)
        resume = self._progress[number].begun
        run = self._run_dir(number)
        if run.path.exists() and not resume:  # it ended before its first checkpoint
            shutil.rmtree(run.path)
        process = TrialProcess(
            self.runs, trial_name(number), [*self.plan.command, *words], until, devices,
            self._gpus, resume, self._hopeless,
        )  # fmt: skip
        self._running[number] = _Running(process, devices)

    def _result(self, why: str) -> Tuned:
        trials: list[dict[str, Any]] = []
        for number in range(self._asked):
            progress = self._progress[number]
            trials.append(
                {
                    "trial": number,
                    "run": str(self._run_dir(number).path),
                    "values": self.values(number),
                    "results": list(progress.results),
                    "samples": progress.samples,
                    "error": progress.error,
                    "rule": progress.rule,
                    "running": number in self._running,
                }
            )
        best: dict[str, Any] = {}
        for rung in reversed(range(len(self._rungs))):
            if order := best_of(self._results, range(self._asked), rung, self._goal.maximize):
                results = self._progress[order[0]].results
                best = {**trials[order[0]], "result": results[rung]}
                break
        longest = max((p.samples for p in self._progress.values()), default=0)
        most = self._rungs[-1] if self._rungs and self._rungs[-1] < _WHOLE else longest
        samples = sum(p.samples for p in self._progress.values())
        log = [] if self._grid else log_names(self._space)
        return Tuned(best, trials, self._rungs, samples, most * self._count, why, log)


_WHOLE = 1 << 62  # samples: to the end of the script


def _samples(text: str, epoch: int, option: str) -> int:
    number = text.removesuffix("ep")
    try:
        count = float(number) * (epoch if text.endswith("ep") else 1)
    except ValueError:
        count = 0.0
    if count < 1:
        raise ArgumentError(f"{option} {text}: expected samples, as 50000, or epochs, as 9ep.")
    return round(count)
