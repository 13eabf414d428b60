"""Measure a script's own training with and without parts of its input pipeline.

``ronde doctor`` starts the script with a :class:`Doctor` attached: it measures at the end of
``distribute``, rank 0 writes the result where the command reads it, and the processes end.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ronde.adapt import apply_settings
from ronde.data import Pipeline
from ronde.doctor.loop_trial import LoopTrial, ScriptTime, TimedLoop
from ronde.doctor.prescribe import Facts, Remedy, is_crowded, outlook, prescriptions, remedies
from ronde.doctor.verdict import Measurements, TimedStage, ceiling_shares, judge
from ronde.introspect import (
    NO_TENSORS,
    SavedState,
    describe_open,
    nested_datasets,
    preserve_state,
    shares_within,
)
from ronde.loader import FeedSettings
from ronde.measure import Arm, ArmResult, Bench
from ronde.measure.study import load_study, report_progress, study_target, write_study
from ronde.run import hooks
from ronde.world import RondeError, usable_cores
from ronde.world.consensus import broadcast_json, gather_json

if TYPE_CHECKING:
    from ronde.plan import Plan
    from ronde.run import Run
    from ronde.run.callback import EvaluationResult, StepView
    from ronde.run.parts import Parts

_PYTHON_SHARE = 0.05  # of the loaders' time: less of it is not looked into
_READ_NOTHING = ("augment", "collate")  # whatever these wait for, it is not storage


def install_doctor() -> None:
    """Attach a doctor to this process if ``RONDE_STUDY=doctor``."""
    hooks.observer = Doctor(*study_target())


class Doctor(hooks.Observer):
    """Examines the run before its first step, lets the script take some steps to time its own loop,
    writes the result on rank 0, and exits.
    """

    def __init__(self, options: dict[str, Any], file: Path) -> None:
        self.options = options
        self.file = file
        self.trial: LoopTrial | None = None
        self.clock = ScriptTime()
        self.loop_type = partial(TimedLoop, self.clock)
        self._paused = 0.0, False

    def on_ready(self, run: Run, plan: Plan) -> None:
        """See :class:`Observer`."""
        values = examine(run, self.options, report_progress if run.is_main else _silent)

        def write(answer: dict[str, Any]) -> None:
            if run.is_main:
                write_study(self.file, answer)

        if values["refused"] or self.options.get("verify"):
            write(values)
            raise SystemExit(0)
        if run.is_main:
            report_progress("taking steps of the script's own loop")
        self.trial = LoopTrial(run, self.clock, values, write)

    def before_passes(self, step: StepView) -> None:
        """See :class:`Callback`."""
        self.clock.enter()

    def before_backward(self, step: StepView) -> None:
        """See :class:`Callback`."""
        self.clock.owns_passes = True

    def step_ended(self, step: StepView) -> None:
        """See :class:`Callback`."""
        if self.trial is not None:
            self.trial.step_ended(step)
        self.clock.leave()

    def before_save(self, parts: Parts) -> None:
        """See :class:`Callback`. The script does not evaluate or save in each step."""
        self._paused = self.clock.pause()

    def after_save(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        self.clock.resume(self._paused)

    def evaluation_started(self, parts: Parts) -> None:
        """See :class:`Callback`."""
        self._paused = self.clock.pause()

    def evaluated(self, parts: Parts, result: EvaluationResult) -> None:
        """See :class:`Callback`."""
        self.clock.resume(self._paused)


def _silent(_: str) -> None:
    return None


def load_doctor(file: Path) -> dict[str, Any]:
    """Read a :class:`Doctor`'s result.

    Raises:
        RondeError: the script ended without calling ``distribute``.
    """
    return load_study(file, "examine")


class _Clock:
    """The remaining time budget, the same on every rank."""

    def __init__(self, run: Run, seconds: float) -> None:
        self._me = run.port.world
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._start = time.monotonic()

    def left(self) -> float:
        """Remaining seconds. A collective."""
        return float(broadcast_json(self._me, self._end - time.monotonic()))

    def extend(self, seconds: float) -> None:
        """Add seconds to the budget."""
        self._end += seconds

    def passed(self) -> float:
        """Elapsed seconds. A collective."""
        return float(broadcast_json(self._me, time.monotonic() - self._start))


class _Study:
    """One examination; every rank runs the same."""

    def __init__(
        self, run: Run, bench: Bench, options: Mapping[str, Any], tell: Callable[[str], None]
    ) -> None:
        self.run = run
        self.bench = bench
        self.tell = tell
        seconds = float(options.get("seconds") or 60.0)
        bench.patience = 0.15 * seconds
        self.rounds = int(options.get("rounds") or 3)
        self.window = min(max(seconds / 40, 0.35 if seconds >= 5 else 0.1), 2.5)
        self.grace = 0.15 * seconds  # beyond the budget, for trying remedies
        self.patience = seconds  # once more so long, if the machine is too noisy for a verdict
        self.clock = _Clock(run, seconds)
        self.per_round: list[dict[str, float]] = []
        self.results: dict[str, list[ArmResult]] = {}
        self.alone: list[tuple[float, ...]] = []
        self.waits: list[tuple[float, ...]] = []
        self.timed: ArmResult | None = None
        self.collate_seconds: float | None = None
        self.costs: dict[str, float] = {}
        # (loaders of all workers, samples per second), without training
        self.sweep: list[tuple[int, float]] = []
        self.sweep_ended = True  # it reached the wanted rate, or a limit
        self.scope = "shared"  # of the limit that the sweep ended at

    # -- measuring ---------------------------------------------------------------------

    def measure(self, name: str, arm: Arm, into: dict[str, float] | None) -> ArmResult:
        """Measure one window, and how long that took."""
        before = self.clock.passed()
        result = self.bench.window(arm, self.window)
        self.costs[name] = self.clock.passed() - before
        self.results.setdefault(name, []).append(result)
        if into is not None:
            into[name] = result.samples_per_second
        if name == "alone":
            self.alone.append(result.per_rank)
        if name == "real":
            self.waits.append(result.wait_seconds)
        return result

    def round(self, arms: Mapping[str, Arm], backwards: bool) -> None:
        """Measure every arm once."""
        into: dict[str, float] = {}
        for name in reversed(list(arms)) if backwards else list(arms):
            self.tell(f"round {len(self.per_round) + 1}: {_WORDS.get(name, name)}")
            self.measure(name, arms[name], into)
        into.pop("alone", None)
        self.per_round.append(into)

    def time_stages(self) -> None:
        """Time each stage once, where samples are read."""
        self.tell("timing the stages")
        self.timed = self.measure("timed", Arm("real", timed=True), None)

    def basic_arms(self) -> dict[str, Arm]:
        """Measure the ceiling and the real rate."""
        arms = {"synthetic": Arm("synthetic"), "real": Arm("real")}
        if self.bench.can_be_alone:
            arms["alone"] = Arm("alone")
        return arms

    def promising_arms(self) -> dict[str, Arm]:
        """Arms worth adding, most promising first."""
        assert self.timed is not None
        executor = self.bench.executor
        stages = [s for s in self.stages() if s.where == "loading"]
        total = sum(s.wall_seconds for s in stages)
        python = sum(s.wall_seconds for s in stages if s.name == "python")
        arms: dict[str, Arm] = {}
        # Time that no stage explains is lost between the processes, or in Python.
        if executor == "processes" or (total and python / total >= _PYTHON_SHARE):
            arms["replayed"] = Arm("real", samples=True)
        if executor == "processes" and self.timed.other_threads > 0.10:
            arms["limited"] = Arm("real", settings=FeedSettings(threads=1))
        if executor != "none":
            arms["beside"] = Arm("beside")
        return arms

    def stages(self) -> list[TimedStage]:
        """Stage times of the loaders and of the step."""
        assert self.timed is not None
        by_rank = self.timed.stages
        stages = []
        for name in dict.fromkeys(n for rank in by_rank for n in rank):
            times = [rank[name] for rank in by_rank if name in rank]
            walls = tuple(rank[name].wall_seconds if name in rank else 0.0 for rank in by_rank)
            stages.append(
                TimedStage(
                    name,
                    "loading",
                    statistics.fmean(t.cpu_seconds for t in times),
                    statistics.fmean(t.wall_seconds for t in times),
                    walls,
                    statistics.fmean(t.bytes for t in times),
                )
            )
        if self.bench.executor == "threads":
            # a thread's own clock leaves out the threads that a library starts for it
            steps = statistics.median(r.cpu_seconds for r in self.results["synthetic"])
            stages = with_library_threads(stages, self.timed.cpu_seconds - steps, steps)
        names = {s.name for s in stages}
        per_rank = self.bench.batch_samples / self.run.world_size
        for name, t in self.timed.in_step.items():
            if name not in names:
                cpu, wall = t.cpu_seconds / per_rank, t.wall_seconds / per_rank
                stages.append(TimedStage(name, "step", cpu, wall))
        return stages

    def blocks(self) -> dict[str, float]:
        """Seconds of a step spent in ``with stage(…)`` blocks, which the ceiling includes."""
        assert self.timed is not None
        blocks, times = self.bench.in_step.blocks, self.timed.in_step
        return {name: t.wall_seconds for name, t in times.items() if name in blocks}

    def time_collate(self) -> None:
        """Time collation in this process, without the loading processes' shared memory."""
        taken = self.run.port.data
        stages = [s for s in self.stages() if s.where == "loading"]
        total = sum(s.wall_seconds for s in stages)
        collate = next((s for s in stages if s.name == "collate"), None)
        if self.bench.executor != "processes" or collate is None or not total:
            return
        if collate.wall_seconds / total < _PYTHON_SHARE:
            return
        n = max(1, min(32, self.bench.batch_samples // self.run.world_size))
        ids = taken.order.ids(self.run.state.epoch, 0, n).tolist()
        dataset: Any = taken.dataset
        spent = []
        try:
            many = getattr(dataset, "__getitems__", None)
            samples = many(ids) if many is not None else [dataset[i] for i in ids]
            for _ in range(4):
                start = time.thread_time()
                taken.settings.collate(list(samples))
                spent.append(time.thread_time() - start)
        except Exception:
            return  # a bad sample, which the training may skip
        self.collate_seconds = min(spent[1:]) / len(ids)

    # -- what it comes to --------------------------------------------------------------

    def seen(self) -> Measurements:
        """All measurements."""
        assert self.timed is not None
        synthetic, real = self.results["synthetic"], self.results["real"]
        alone = self.results.get("loading")
        waits = {
            name: min(r.usual_wait_seconds for r in results)
            for name, results in self.results.items()
        }
        return Measurements(
            workers=self.run.world_size,
            loaders=self.bench.loaders,
            executor=self.bench.executor,
            cores=usable_cores(),
            batch=self.bench.batch_samples,
            rounds=tuple(self.per_round),
            stages=tuple(self.stages()),
            alone=tuple(self.alone),
            waits=tuple(self.waits),
            arm_waits=waits,
            step_seconds=statistics.median(r.step_seconds for r in synthetic),
            real_step_seconds=statistics.median(r.step_seconds for r in real),
            collate_seconds=self.collate_seconds,
            loading=alone[-1].samples_per_second if alone else None,
            startup_seconds=statistics.median(r.first_batch_seconds for r in real),
            block_seconds=self.blocks(),
            order=self.order(),
            queued=self.timed.queued,
        )

    def order(self) -> dict[str, float] | None:
        """The sampler's time at the start of each epoch, which no window has; None if small."""
        draws = self.bench.draw_seconds
        if draws is None:
            return None
        rate = statistics.median(r.samples_per_second for r in self.results["real"])
        share = draws / (draws + self.run.port.data.order.epoch_samples / rate)
        # of an epoch: less is not worth a line
        if share < 0.02:
            return None
        return {"seconds": draws, "share": share}

    def reach_verdict(self) -> dict[str, Any]:
        """Measure until the result is clear or the time is over."""
        self.tell("reading batches to recycle")
        assert self.bench.batches
        self.time_stages()
        basic_arms = self.basic_arms()
        self.round(basic_arms, False)
        arms: dict[str, Arm] = {}
        wanted = self.rounds
        while True:
            verdict = judge(self.seen())
            done = len(self.per_round)
            if not arms and (verdict["gap"] > 0.03 or verdict["gap_low"] > 0.02):
                arms = self.promising_arms()
            price = sum(self.costs.get(n, 3 * self.window) for n in (*basic_arms, *arms))
            if done >= max(2, wanted):
                if self._is_clear(verdict, price):
                    break
                wanted = done + 1  # one more round, to see whether it settles
            left = self.clock.left()
            if done >= 2 and left < 0.7 * price:
                if verdict["refused"] is None or not self.patience:
                    break
                self.clock.extend(self.patience)
                left, self.patience = left + self.patience, 0.0
            self.round({**basic_arms, **self._affordable(arms, basic_arms, left)}, done % 2 == 1)
        if not verdict["healthy"]:
            self.time_collate()
            self.tell("loading alone")
            self.measure("loading", Arm("loading"), None)
            verdict = judge(self.seen())
        return verdict

    def _is_clear(self, verdict: dict[str, Any], price: float) -> bool:
        """Whether another round, which takes ``price`` seconds, would add little. A collective."""
        # trying remedies may need this share of the budget
        done, room = len(self.per_round), 0.4 * self.clock.seconds
        if verdict["refused"] is not None and done < 4 * self.rounds:
            return False
        if not self._is_wide(verdict) or done >= 2 * self.rounds:
            return True
        return self.clock.left() < price + room

    def _is_wide(self, verdict: dict[str, Any]) -> bool:
        """Whether windows of the real training differ enough to justify another round."""
        real = ceiling_shares(self.seen(), "real")
        # of the ceiling
        return not verdict["healthy"] and max(real) - min(real) > 0.06

    def _affordable(
        self, arms: Mapping[str, Arm], basic_arms: Mapping[str, Arm], left: float
    ) -> dict[str, Arm]:
        """The arms that fit into the remaining time, most promising first; at least two."""
        rounds = max(1, self.rounds - len(self.per_round))
        left = left / rounds - sum(self.costs.get(n, 0.0) for n in basic_arms)
        chosen: dict[str, Arm] = {}
        for name, arm in arms.items():
            cost = self.costs.get(name, 3 * self.window)
            begun = any(name in r for r in self.per_round)
            if begun or left >= cost or len(chosen) < (3 if left > 0 else 2):
                chosen[name] = arm
                left -= cost
        return chosen

    # -- what would help ---------------------------------------------------------------

    def facts(self, sick: bool) -> Facts:
        """What remedies depend on; ``sick`` also inspects samples for what the dataset allows."""
        facts = self._known_facts()
        if sick and not self.bench.is_stream:
            facts = self._sampled_facts(facts)
        values = broadcast_json(self.run.port.world, dataclasses.asdict(facts))
        values["loading_sweep"] = tuple((int(n), float(r)) for n, r in values["loading_sweep"])
        return Facts(**values)

    def _known_facts(self) -> Facts:
        """The facts that need no look at a sample."""
        run, taken = self.run, self.run.port.data
        stream = self.bench.is_stream
        read = next((s for s in self.stages() if s.name == "read"), None)
        cuda, local = run.device.type == "cuda", run.port.world.local_size
        if cuda:
            devices = torch.cuda.device_count()
        else:
            devices = usable_cores() // max(1, torch.get_num_threads())
        return Facts(
            workers=run.world_size,
            loaders=self.bench.loaders,
            executor=self.bench.executor,
            cores=usable_cores(),
            devices_per_node=max(1, devices, local),
            cuda=cuda,
            sample_bytes=read.bytes if read is not None else 0.0,
            samples=taken.order.n,
            memory_bytes=float(psutil.virtual_memory().available),
            pipeline=isinstance(taken.dataset, Pipeline),
            step_cpu_seconds=statistics.median(r.cpu_seconds for r in self.results["synthetic"]),
            queued=self.timed.queued if self.timed is not None else 0.0,
            loading_sweep=tuple(self.sweep),
            scope=self.scope,
            stream=stream,
            held="" if stream else describe_open(taken.dataset) or "",
        )

    def _sampled_facts(self, facts: Facts) -> Facts:
        """Add the facts that a few samples show."""
        from ronde.adapt import dataset_facts

        self.tell("looking at what the data set does")
        dataset = self.run.port.data.dataset
        each = sum(s.wall_seconds for s in self.stages() if s.where == "loading")
        # A pool of threads that the first sample opens here would hang every process forked later.
        with SavedState(*nested_datasets(dataset), largest=NO_TENSORS):
            seen = dataset_facts(dataset, min(16, max(4, int(1.0 / max(each, 1e-6)))))
            opens = "" if seen.error else self._opened()
        if seen.error:
            return facts
        return dataclasses.replace(
            facts,
            decoder=seen.decoder,
            decoders=seen.decoders,
            same_pixels=seen.same_pixels,
            kept_bytes=seen.kept_bytes,
            sample_bytes=seen.read_bytes or facts.sample_bytes,
            opens=opens,
        )

    def _opened(self) -> str:
        """What the dataset opens with its first sample, or ""."""
        taken = self.run.port.data
        with preserve_state(taken.dataset):
            try:
                taken.dataset[int(taken.order.ids(self.run.state.epoch, 0, 1)[0])]
            except Exception:  # a bad sample, which the training may skip
                return ""
            return describe_open(taken.dataset) or ""

    def find_plateau(self, values: Mapping[str, Any], to: int) -> None:
        """Add loaders, without training, until they reach what ``to`` devices need.

        Two well-fed devices say nothing about storage that sixteen will share. If samples never
        wait, the cores decide, which follows from the CPU time per sample.
        """
        if not self._may_wait_for_storage():
            return
        workers, loaders = self.run.world_size, self.bench.loaders
        wanted = 1.1 * to * values["samples_per_second"]["synthetic"] / workers
        if "loading" not in self.results:
            self.tell("loading alone")
            self.measure("loading", Arm("loading"), None)
        rate = self.results["loading"][-1].samples_per_second
        self.sweep = [(workers * max(1, loaders), rate)]
        more = 2 * max(1, loaders)
        if not loaders and any(self._refusals(FeedSettings(workers=more))):
            self.sweep_ended = rate >= wanted
            return
        while rate < wanted and workers * more <= 64:
            self.tell(f"loading alone, {more} loaders each: what {to} devices want")
            arm = Arm("loading", settings=FeedSettings(workers=more))
            now = self.measure("loading more", arm, None).samples_per_second
            self.sweep.append((workers * more, now))
            if now < 1.1 * rate:
                self.sweep_ended = not is_crowded(self.sweep)
                if self.sweep_ended:
                    self.scope = self._whose_limit(more, max(rate, now))
                return
            rate, more = now, 2 * more
        self.sweep_ended = rate >= wanted

    def _whose_limit(self, loaders: int, rate: float) -> str:
        """Whose limit so many loaders of each worker met: all workers' (``shared``), each worker's
        ``own``, or ``unknown``.

        With two workers or more, those of rank 0 load alone: what is shared is theirs then. Threads
        of one worker may wait for its lock, which processes do not.
        """
        workers = self.run.world_size
        settings = FeedSettings(workers=loaders)
        if workers > 1:
            self.tell("loading alone, the first worker only")
            arm = Arm("loading", settings=settings, first_only=True)
            alone = self.measure("loading one", arm, None).samples_per_second
            return "shared" if alone > math.sqrt(workers) * rate else "own"
        shares = shares_within(self.run.port.data.dataset)
        if self.bench.executor == "processes":
            return "unknown" if shares else "shared"
        settings = FeedSettings(workers=loaders, executor="processes")
        if any(self._refusals(settings)):
            return "unknown"
        self.tell("loading alone, in processes")
        processes = self.measure("loading processes", Arm("loading", settings=settings), None)
        # noise does not lift a rate by a third: a lock held the threads back
        if processes.samples_per_second > 1.3 * rate:
            return "own"
        return "unknown" if shares else "shared"

    def _may_wait_for_storage(self) -> bool:
        """Whether samples wait for anything that more readers could share, other than cores."""
        if self.bench.is_stream:
            return False
        loading = [s for s in self.stages() if s.where == "loading"]
        wall = sum(s.wall_seconds for s in loading)
        cpu = sum(min(s.cpu_seconds, s.wall_seconds) for s in loading)
        cpu *= 1.0 + (self.timed.queued if self.timed is not None else 0.0)  # waits for a core
        # storage limits only samples that spend a third of their time off the CPU
        if wall - cpu < 0.3 * wall:
            return False
        return max(loading, key=lambda s: s.wall_seconds - s.cpu_seconds).name not in _READ_NOTHING

    def _refusals(self, settings: FeedSettings) -> list[str]:
        """Why ranks cannot load with these settings. A collective."""
        return [e for e in gather_json(self.run.port.world, self.bench.refuses(settings)) if e]

    def try_remedies(self, values: Mapping[str, Any], proposed: list[Remedy]) -> list[Remedy]:
        """Try each quick remedy for a moment, except those the dataset rules out.

        Those that read in this process come last: what samples open here, such as a pool of
        threads, would be of no use in processes forked later.
        """
        usable: dict[int, Remedy] = {}
        here = ("threads", "none")
        for place, remedy in sorted(
            enumerate(proposed), key=lambda each: each[1].settings.executor in here
        ):
            if not all(gather_json(self.run.port.world, self._applies(remedy))):
                continue
            result = self._try(values, remedy) if remedy.can_try else remedy
            if result is not None:
                usable[place] = result
        return [usable[place] for place in sorted(usable)]

    def _applies(self, remedy: Remedy) -> bool:
        try:
            apply_settings(self.run.port.data, remedy.settings)
        except (RondeError, ImportError):
            return False
        return True

    def _try(self, values: Mapping[str, Any], remedy: Remedy) -> Remedy | None:
        """The remedy with its measured rate; without one if time is up; None if it fails."""
        self.tell(f"trying: {remedy.text}")
        # Load two batches even if no time is left: a remedy that cannot run is not promised.
        reason = next(iter(self._refusals(remedy.settings)), None)
        rates: list[float] = []
        if reason is None:
            enough = self.clock.left() + self.grace > 2 * self.costs.get("real", 0.0)
            if not enough and remedy.loaders == 1:
                return remedy
            arm = Arm("real", settings=remedy.settings)
            try:
                # More loaders are promised most often, and a lock may make them useless.
                for _ in range(2 if enough else 1):
                    window = self.measure(f"try:{remedy.id}", arm, None)
                    rates.append(window.samples_per_second)
            except Exception as error:
                if self.run.world_size > 1:
                    raise  # the other ranks are in the middle of it
                reason = f"{type(error).__name__}: {str(error)[:150]}"
        if reason is not None:
            values["notes"].append(f"{remedy.text}: not for this data set ({reason}).")
            return None
        rate = min(statistics.median(rates), values["samples_per_second"]["synthetic"])
        return dataclasses.replace(remedy, rate=rate, tried=True)


def with_library_threads(stages: list[TimedStage], spent: float, steps: float) -> list[TimedStage]:
    """The stages of loading threads, with the CPU time of a library's threads in the one that waits
    for them.

    Args:
        spent: CPU seconds per sample that the process took beyond its steps.
        steps: CPU seconds per sample of a step, which vary.
    """
    cpu = sum(s.cpu_seconds for s in stages)
    wait = sum(max(0.0, s.wall_seconds - s.cpu_seconds) for s in stages)
    more = spent - cpu
    if not stages or more < max(0.3 * wait, 0.2 * steps, 0.2 * cpu):
        return stages
    waits = max(stages, key=lambda s: s.wall_seconds - s.cpu_seconds)
    longer = dataclasses.replace(waits, cpu_seconds=waits.cpu_seconds + more)
    return [longer if s is waits else s for s in stages]


_WORDS = {
    "synthetic": "recycled batches",
    "real": "real batches",
    "alone": "each worker by itself",
    "replayed": "samples replayed",
    "beside": "recycled batches beside the loaders",
    "limited": "loaders with one compute thread",
}


def examine(run: Run, options: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure and judge. A collective; the run is unchanged afterwards.

    Args:
        run: between two of its steps.
        options: ``seconds`` in all, ``rounds``, ``to`` (devices to predict for), ``nodes``,
            ``verify``.
        tell: called with what is happening.

    Returns:
        dict: the JSON of ``ronde doctor``, on every rank.
    """
    to, nodes = int(options.get("to") or 32), options.get("nodes")
    largest, verify = max(to, run.world_size), bool(options.get("verify"))
    with Bench(run) as bench:
        study = _Study(run, bench, options, tell)
        values = study.reach_verdict()
        if values["refused"] is None and not verify:
            study.find_plateau(values, largest)
        values["loading_samples_per_second"] = study.seen().loading
        facts = study.facts(not values["healthy"] and values["refused"] is None and not verify)
        usable = [] if verify else study.try_remedies(values, remedies(values, facts))
    if run.is_main:
        cuda = run.device.type == "cuda"
        values["device"] = torch.cuda.get_device_name(run.device) if cuda else "cpu"
        values["script"] = Path(sys.argv[0]).name if sys.argv else ""
        values["model"] = type(run.model).__name__
        values["threads"] = torch.get_num_threads()
        values["scale"], values["walls"] = outlook(values, facts, largest, nodes, usable)
        values["prescriptions"] = []
        if not values["refused"]:
            values["prescriptions"] = prescriptions(values, facts, usable, to, nodes)
        values["notes"] += _notes(run, study, values)
        values["arms"] = {name: _arm(results) for name, results in study.results.items()}
    elapsed = study.clock.passed()
    shared = broadcast_json(run.port.world, values if run.is_main else {})
    return {**shared, "script_loop": None, "measured_seconds": elapsed}


def _arm(results: list[ArmResult]) -> dict[str, Any]:
    """An arm's windows, as JSON."""
    waits = zip(*(r.wait_seconds for r in results), strict=True)
    return {
        "samples_per_second": [r.samples_per_second for r in results],
        "step_seconds": statistics.median(r.step_seconds for r in results),
        "wait_seconds": [statistics.median(rank) for rank in waits],
        "steps": [r.steps for r in results],
    }


def _notes(run: Run, study: _Study, values: Mapping[str, Any]) -> list[str]:
    """The limits of the measurement."""
    notes = []
    if study.bench.is_stream:
        notes.append(
            "a stream: every worker reads all of it and keeps its part, so more devices are fed "
            "no faster than one."
        )
    if study.sweep and not study.sweep_ended:
        readers, rate = max(study.sweep, key=lambda point: point[1])
        notes.append(
            f"{readers} loaders without training gave {rate:,.0f} samples/s. Shared storage was "
            "not asked for more, so its limit is not known."
        )
    if study.scope == "unknown":
        notes.append(
            "more loaders of this worker gave no more samples. One worker cannot tell whether "
            "others would share that limit or bring their own: ask with --workers 2."
        )
    if run.world_size > 1 and not study.bench.can_be_alone:
        notes.append(
            f"the plan {run.plan.spec} cannot run without its exchange, which is part of the "
            "ceiling."
        )
    if values["workers"] == 1:
        notes.append("one worker: exchange and stragglers show with two or more (--workers N).")
    if len(values["scale"]) > 1:
        notes.append(
            "the network between nodes was not measured: more devices are predicted from these."
        )
    return notes
