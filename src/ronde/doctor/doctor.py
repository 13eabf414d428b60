"""Measure a script's own training with and without parts of its input pipeline.

``ronde doctor`` starts the script with a :class:`Doctor` attached: it measures at the end of
``distribute``, rank 0 writes the result where the command reads it, and the processes end.
``run.doctor()`` does the same during a training, which then continues unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ronde.adapt import apply_settings
from ronde.data import Pipeline
from ronde.doctor.prescribe import Facts, Remedy, is_crowded, outlook, prescriptions, remedies
from ronde.doctor.verdict import Diagnosis, Measurements, TimedStage, ceiling_shares, judge
from ronde.introspect import describe_open, preserve_state
from ronde.loader import FeedSettings
from ronde.measure import Arm, ArmResult, Bench, Timed
from ronde.run import hooks
from ronde.watch import MARK
from ronde.world import ArgumentError, RondeError, usable_cores
from ronde.world.consensus import broadcast_json, gather_json

if TYPE_CHECKING:
    from ronde.plan import Plan
    from ronde.run.step_port import RunView

__all__ = ["Doctor", "doctor", "examine", "install_doctor", "load_doctor"]

_SECONDS = 60.0
_ROUNDS = 3
_TO = 32
_WIDE = 0.06  # of the ceiling, between the fastest and the slowest window of the real training
_FOR_REMEDIES = 0.4  # of the time, which trying remedies may need
_TAKEN_OUT_ABOVE = 0.05  # share of the loaders' time, or of a step: a smaller stage is only timed
_CLEARLY = 0.03  # a gap above this after the first round is looked into at once
_OTHER_THREADS = 0.10
# share of a sample's time in the loaders without CPU: what it waits for may be all that is there
_WAITS = 0.3
# stages that have all that they need: what they wait for is no storage
_READ_NOTHING = (
    "augment",
    "collate",
)
_MOST_LOADERS = 64  # of all workers together
_ORDER_ABOVE = 0.02  # of an epoch: what a sampler takes to draw it is worth a line


def install_doctor() -> None:
    """Attach a doctor to this process if ``RONDE_STUDY=doctor``."""
    hooks.observer = Doctor(
        json.loads(os.environ.get("RONDE_STUDY_OPTIONS", "{}")),
        Path(os.environ["RONDE_STUDY_FILE"]),
    )


def _tell(text: str) -> None:
    if os.environ.get("RONDE_LAUNCHER_PID"):
        os.write(1, (MARK + json.dumps({"study": text}) + "\n").encode())


class Doctor(hooks.Observer):
    """Measures before the first step, writes the result, and ends the process.

    Args:
        options: those of :func:`examine`.
        file: where rank 0 writes the JSON.
    """

    def __init__(self, options: dict[str, Any], file: Path) -> None:
        self.options = options
        self.file = file

    def on_ready(self, run: RunView, plan: Plan) -> None:
        """See :class:`Observer`."""
        values = examine(run, self.options, _tell if run.is_main else _silent)
        if run.is_main:
            temporary = self.file.with_suffix(".writing")
            temporary.write_text(json.dumps(values))
            temporary.rename(self.file)
        raise SystemExit(0)


def _silent(_: str) -> None:
    return None


def load_doctor(file: Path) -> dict[str, Any]:
    """Read a :class:`Doctor`'s result.

    Raises:
        RondeError: the script ended without calling ``distribute``.
    """
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except OSError:
        raise RondeError(
            "the script ended without calling ronde.distribute: there is nothing to examine."
        ) from None
    return found


def doctor(run: RunView, seconds: float = _SECONDS, **options: Any) -> dict[str, Any]:
    """Examine a run between two steps; training then continues bit for bit. See
    :meth:`ronde.Run.doctor`.
    """
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
        raise ArgumentError(
            f"run.doctor(seconds={seconds!r}): expected how long it may take, in seconds, above 0."
        )
    unknown = set(options) - {"rounds", "to", "cold"}
    if unknown:
        raise ArgumentError(
            f"run.doctor() got {', '.join(sorted(unknown))}: it takes seconds, rounds, to and cold."
        )
    if run.port.backwards:
        raise RondeError(
            "run.doctor() was called between run.backward() and run.update(): call it "
            "after update()."
        )
    return examine(run, {"seconds": seconds, **options}, _silent)


class _Clock:
    """The remaining time budget, the same on every rank."""

    def __init__(self, run: RunView, seconds: float) -> None:
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
        self, run: RunView, bench: Bench, options: Mapping[str, Any], tell: Callable[[str], None]
    ) -> None:
        self.run = run
        self.bench = bench
        self.tell = tell
        seconds = float(options.get("seconds") or _SECONDS)
        bench.patience = 0.15 * seconds
        self.rounds = int(options.get("rounds") or _ROUNDS)
        self.window = min(max(seconds / 40, 0.35 if seconds >= 5 else 0.1), 2.5)
        self.grace = 0.15 * seconds  # that trying remedies may take beyond
        self.patience = (
            seconds  # that a machine which disturbs it may take beyond, before nothing is said
        )
        self.clock = _Clock(run, seconds)
        self.found: list[dict[str, float]] = []
        self.results: dict[str, list[ArmResult]] = {}
        self.alone: list[tuple[float, ...]] = []
        self.waits: list[tuple[float, ...]] = []
        self.timed: ArmResult | None = None
        self.collate_seconds: float | None = None
        self.costs: dict[str, float] = {}
        self.notes: list[str] = []
        self.asked: list[
            tuple[int, float]
        ] = []  # loaders of all workers -> samples a second, without training
        self.asked_all = True  # whether they gave what the most devices want, or came to an end
        self.swept: dict[int, tuple[float, float]] = {}  # readers -> files and bytes a second, cold

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
        self.notes += [n for n in result.notes if n not in self.notes]
        return result

    def round(self, arms: Mapping[str, Arm], backwards: bool) -> None:
        """Measure every arm once."""
        into: dict[str, float] = {}
        for name in reversed(list(arms)) if backwards else list(arms):
            self.tell(
                f"round {len(self.found) + 1}: "
                f"{_WORDS.get(name.partition(':')[0], name)}{name.partition(':')[2]}"
            )
            self.measure(name, arms[name], into)
        into.pop("alone", None)
        self.found.append(into)

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

    def promising_arms(self, verdict: Diagnosis) -> dict[str, Arm]:
        """Arms worth adding, most promising first."""
        assert self.timed is not None
        executor = self.bench.executor
        stages = {s.name: s for s in self.stages()}
        total = sum(s.wall_seconds for s in stages.values() if s.where == "loading")
        step = self.results["synthetic"][-1].step_seconds
        per_rank = self.bench.batch_samples / self.run.world_size
        promised = {
            row["name"]: row["alone_points"]
            for row in verdict.values["stages"]
            if row["name"] in stages
        }
        found: list[tuple[float, str, Arm]] = []
        for name, s in stages.items():
            inside = sum(i.wall_seconds for i in stages.values() if i.name in s.contains)
            whole = total if s.where == "loading" else step / per_rank
            if (
                s.removable
                and name != "python"
                and whole
                and (s.wall_seconds + inside) / whole >= _TAKEN_OUT_ABOVE
            ):
                found.append(
                    (
                        promised.get(name, 0.0),
                        f"without:{name}",
                        Arm("real", remove=frozenset({name})),
                    )
                )
        if executor == "processes" and self.timed.other_threads > _OTHER_THREADS:
            found.append((1e3, "limited", Arm("real", threads=1)))
        if executor == "processes" or (
            total and stages["python"].wall_seconds / total >= _TAKEN_OUT_ABOVE
        ):
            # What the stages' own times do not explain is lost between the processes, or in Python.
            capacity = self.run.world_size * max(1, self.bench.loaders) / total if total else 0.0
            unexplained = capacity > 1.2 * verdict.values["samples_per_second"]["real"]
            found.append(
                (
                    2e3 if unexplained else promised.get("python", 0.0) + 1.0,
                    "replayed",
                    Arm("real", samples=True),
                )
            )
        if executor != "none":
            found.append(
                (
                    5e2 if found and max(f[0] for f in found) >= 1e3 else _after_first(found),
                    "beside",
                    Arm("beside"),
                )
            )
        found.sort(key=lambda f: -f[0])
        return {name: arm for _, name, arm in found}

    def stages(self) -> list[TimedStage]:
        """Stage times of the loaders and of the step."""
        assert self.timed is not None
        found = []
        by_rank = self.timed.stages
        names = list(dict.fromkeys(n for rank in by_rank for n in rank))
        for name in names:
            seen = [rank[name] for rank in by_rank if name in rank]
            walls = tuple(rank[name].wall_seconds if name in rank else 0.0 for rank in by_rank)
            found.append(
                TimedStage(
                    name,
                    "loading",
                    statistics.fmean(t.cpu_seconds for t in seen),
                    statistics.fmean(t.wall_seconds for t in seen),
                    walls,
                    statistics.fmean(t.bytes for t in seen),
                    all(t.removable for t in seen),
                    frozenset(n for t in seen for n in t.contains),
                )
            )
        per_rank = self.bench.batch_samples / self.run.world_size
        for name, t in self._in_step().items():
            if name in names:
                continue
            found.append(
                TimedStage(
                    name,
                    "step",
                    t.cpu_seconds / per_rank,
                    t.wall_seconds / per_rank,
                    removable=t.removable,
                )
            )
        return found

    def _in_step(self) -> Mapping[str, Timed]:
        assert self.timed is not None
        return self.timed.in_step

    def blocks(self) -> dict[str, float]:
        """Seconds of a step spent in ``with stage(…)`` blocks, which the ceiling includes."""
        return {
            name: t.wall_seconds
            for name, t in self._in_step().items()
            if name in self.bench.in_step.blocks
        }

    def time_collate(self) -> None:
        """Time collation in this process, without the loading processes' shared memory."""
        taken = self.run.port.data
        stages = [s for s in self.stages() if s.where == "loading"]
        total = sum(s.wall_seconds for s in stages)
        collate = next((s for s in stages if s.name == "collate"), None)
        if (
            self.bench.executor != "processes"
            or collate is None
            or not total
            or collate.wall_seconds / total < _TAKEN_OUT_ABOVE
        ):
            return
        ids = taken.order.ids(
            self.run.state.epoch,
            0,
            max(1, min(32, self.bench.batch_samples // self.run.world_size)),
        ).tolist()
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
            return  # a bad sample, which the training may skip: then this is not told apart
        self.collate_seconds = min(spent[1:]) / len(ids)

    # -- what it comes to --------------------------------------------------------------

    def seen(self) -> Measurements:
        """All measurements."""
        synthetic = self.results["synthetic"]
        assert self.timed is not None
        return Measurements(
            workers=self.run.world_size,
            loaders=self.bench.loaders,
            executor=self.bench.executor,
            cores=usable_cores(),
            batch=self.bench.batch_samples,
            rounds=tuple(self.found),
            stages=tuple(self.stages()),
            alone=tuple(self.alone),
            waits=tuple(self.waits),
            arm_waits={
                name: min(r.usual_wait_seconds for r in results)
                for name, results in self.results.items()
            },
            step_seconds=statistics.median(r.step_seconds for r in synthetic),
            real_step_seconds=statistics.median(r.step_seconds for r in self.results["real"]),
            collate_seconds=self.collate_seconds,
            loading=self.results["loading"][-1].samples_per_second
            if "loading" in self.results
            else None,
            startup_seconds=statistics.median(r.first_batch_seconds for r in self.results["real"]),
            loaders_threads=self.timed.other_threads,
            block_seconds=self.blocks(),
            order=self.order(),
            notes=tuple(self.notes),
        )

    def order(self) -> dict[str, float] | None:
        """The sampler's time at the start of each epoch, which no window contains; None if
        small.
        """
        draws = self.bench.draw_seconds
        if draws is None:
            return None
        rate = statistics.median(r.samples_per_second for r in self.results["real"])
        share = draws / (draws + self.run.port.data.order.epoch_samples / rate)
        return {"seconds": draws, "share": share} if share >= _ORDER_ABOVE else None

    def reach_verdict(self) -> Diagnosis:
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
            done = len(self.found)
            if not arms and (verdict.values["gap"] > _CLEARLY or verdict.values["gap_low"] > 0.02):
                arms = self.promising_arms(verdict)
            price = sum(self.costs.get(n, 3 * self.window) for n in (*basic_arms, *arms))
            clear = verdict.refused is None or done >= 4 * self.rounds
            if clear and self._is_wide(verdict):
                clear = (
                    done >= 2 * self.rounds
                    or self.clock.left() < price + _FOR_REMEDIES * self.clock.seconds
                )
            if clear and done >= max(2, wanted):
                break
            if done >= max(2, wanted):
                wanted = done + 1  # one more, to see whether it settles
            left = self.clock.left()
            if done >= 2 and left < 0.7 * price:
                if verdict.refused is None or not self.patience:
                    break
                self.clock.extend(self.patience)
                left, self.patience = left + self.patience, 0.0
            self.round({**basic_arms, **self._affordable(arms, basic_arms, left)}, done % 2 == 1)
        if not verdict.healthy:
            self.time_collate()
            self.tell("loading alone")
            self.measure("loading", Arm("loading"), None)
            verdict = judge(self.seen())
        return verdict

    def _is_wide(self, verdict: Diagnosis) -> bool:
        """Whether windows of the real training differ enough to justify another round."""
        real = ceiling_shares(self.seen(), "real")
        return not verdict.healthy and max(real) - min(real) > _WIDE

    def _affordable(
        self, arms: Mapping[str, Arm], basic_arms: Mapping[str, Arm], left: float
    ) -> dict[str, Arm]:
        """The arms that fit into the remaining time, most promising first; at least two."""
        rounds = max(1, self.rounds - len(self.found))
        left = left / rounds - sum(self.costs.get(n, 0.0) for n in basic_arms)
        chosen: dict[str, Arm] = {}
        for name, arm in arms.items():
            cost = self.costs.get(name, 3 * self.window)
            if (
                len(chosen) < (3 if left > 0 else 2)
                or left >= cost
                or any(name in r for r in self.found)
            ):
                chosen[name] = arm
                left -= cost
        return chosen

    # -- what would help ---------------------------------------------------------------

    def facts(self, sick: bool) -> Facts:
        """What remedies depend on. ``sick`` also inspects samples, to see which remedies the
        dataset allows.
        """
        run, taken = self.run, self.run.port.data
        settings = taken.settings
        timed = {s.name: s for s in self.stages()}
        synthetic = self.results["synthetic"]
        cuda = run.device.type == "cuda"
        local = run.port.world.local_size
        devices = (
            torch.cuda.device_count()
            if cuda
            else max(local, usable_cores() // max(1, torch.get_num_threads()))
        )
        found = Facts(
            workers=run.world_size,
            loaders=self.bench.loaders,
            executor=self.bench.executor,
            cores=usable_cores(),
            devices_per_node=max(1, devices, local),
            cuda=cuda,
            pinned=bool(settings.options.get("pin_memory")),
            prefetch=settings.prefetch or int(settings.options.get("prefetch_factor") or 2),
            sample_bytes=timed["read"].bytes if "read" in timed else 0.0,
            samples=taken.order.n,
            memory_bytes=float(psutil.virtual_memory().available),
            pipeline=isinstance(taken.dataset, Pipeline),
            step_cpu_seconds=statistics.median(r.cpu_seconds for r in synthetic),
            queued=self.timed.queued if self.timed is not None else 0.0,
            loading_sweep=tuple(self.asked),
            stream=self.bench.is_stream,
            held="" if self.bench.is_stream else describe_open(taken.dataset) or "",
        )
        if sick and not self.bench.is_stream:
            from ronde.adapt import dataset_facts

            self.tell("looking at what the data set does")
            each = sum(s.wall_seconds for s in timed.values() if s.where == "loading")
            seen = dataset_facts(taken.dataset, min(16, max(4, int(1.0 / max(each, 1e-6)))))
            if not seen.error:
                found = dataclasses.replace(
                    found,
                    jpeg=seen.jpeg,
                    decoders={
                        "pillow": max(
                            (j.pillow_milliseconds for j in seen.decoders.values()), default=0.0
                        ),
                        **{name: j.milliseconds for name, j in seen.decoders.items() if j.images},
                    },
                    same_pixels=tuple(name for name, j in seen.decoders.items() if j.same_bits),
                    array_milliseconds=min(
                        (j.array_milliseconds for j in seen.decoders.values() if j.images),
                        default=0.0,
                    ),
                    images=seen.images,
                    imread=seen.imread,
                    draws=seen.draws,
                    shrink=seen.shrink,
                    files=min(
                        round(seen.files * taken.order.n), _files_in(seen.folder, taken.order.n)
                    ),
                    folder=seen.folder,
                    sample_bytes=seen.file_bytes or found.sample_bytes,
                    decoded_bytes=(
                        seen.decoded_bytes if seen.pipeline or (seen.images and seen.draws) else 0.0
                    )
                    or (0.0 if seen.draws else seen.sample_bytes),
                    opens=self._opened(),
                )
        if self.swept and found.sample_bytes:
            swept = tuple(
                (n, rate / found.sample_bytes) for n, (_, rate) in self.swept.items() if rate > 0
            )
            found = dataclasses.replace(found, storage_sweep=swept)
        told = broadcast_json(run.port.world, dataclasses.asdict(found))
        told["storage_sweep"] = tuple((int(n), float(r)) for n, r in told["storage_sweep"])
        told["loading_sweep"] = tuple((int(n), float(r)) for n, r in told["loading_sweep"])
        return Facts(**told)

    def _opened(self) -> str:
        """What the dataset opens with its first sample, or ""."""
        taken = self.run.port.data
        with preserve_state(taken.dataset):
            try:
                taken.dataset[int(taken.order.ids(self.run.state.epoch, 0, 1)[0])]
            except (
                Exception
            ):  # a bad sample, which the training may skip: what it would have opened is not known
                return ""
            return describe_open(taken.dataset) or ""

    def measure_storage(self) -> dict[str, Any] | None:
        """Measure the storage on the files that were read, from memory and from disk. Rank 0
        measures.
        """
        found: dict[str, Any] | None = None
        if self.run.is_main:
            from ronde.profile import cached_share, storage_sweep

            files = self.bench.files
            if not files:
                self.notes.append("--cold: no file was seen to be read for a sample.")
            else:
                shares = [s for s in map(cached_share, files[:64]) if s is not None]
                found = {
                    "files": len(files),
                    "cached_share": statistics.fmean(shares) if shares else None,
                }
                for name, cold in (("warm", False), ("cold", True)):
                    self.tell(f"reading {len(files)} files, {name}")
                    self.swept = storage_sweep(files, (1, 4, 16), 0.5, cold)
                    most = max(self.swept.values())
                    found |= {
                        f"{name}_files_per_second": most[0],
                        f"{name}_bytes_per_second": most[1],
                    }
                    found[f"{name}_readers"] = ", ".join(
                        f"{n} at once: {rate:,.0f} files/s" for n, (rate, _) in self.swept.items()
                    )
        told: dict[str, Any] | None = broadcast_json(self.run.port.world, found)
        return told

    def find_plateau(self, values: Mapping[str, Any], to: int) -> None:
        """Add loaders, without training, until they reach what ``to`` devices need.

        Two well-fed devices say nothing about storage that sixteen will share. If samples never
        wait, the cores decide, which follows from the CPU time per sample.
        """
        loading = [s for s in self.stages() if s.where == "loading"]
        wall, cpu = (
            sum(s.wall_seconds for s in loading),
            sum(min(s.cpu_seconds, s.wall_seconds) for s in loading),
        )
        # for want of a core, it waits for no storage
        cpu *= 1.0 + (self.timed.queued if self.timed is not None else 0.0)
        if self.bench.is_stream or wall - cpu < _WAITS * wall:
            return
        if max(loading, key=lambda s: s.wall_seconds - s.cpu_seconds).name in _READ_NOTHING:
            # whatever it waits for is no storage: more loaders would tell how many of them fit on
            # this machine
            return
        workers, loaders = self.run.world_size, self.bench.loaders
        wanted = 1.1 * to * values["samples_per_second"]["synthetic"] / workers
        if "loading" not in self.results:
            self.tell("loading alone")
            self.measure("loading", Arm("loading"), None)
        rate = self.results["loading"][-1].samples_per_second
        self.asked = [(workers * max(1, loaders), rate)]
        more = 2 * max(1, loaders)
        if not loaders and any(
            gather_json(self.run.port.world, self.bench.refuses(FeedSettings(workers=more)))
        ):
            self.asked_all = rate >= wanted
            return
        while rate < wanted and workers * more <= _MOST_LOADERS:
            self.tell(f"loading alone, {more} loaders each: what {to} devices want")
            now = self.measure(
                "loading more", Arm("loading", settings=FeedSettings(workers=more)), None
            ).samples_per_second
            self.asked.append((workers * more, now))
            if now < 1.1 * rate:
                self.asked_all = not is_crowded(self.asked)
                return
            rate, more = now, 2 * more
        self.asked_all = rate >= wanted

    def try_remedies(self, values: Mapping[str, Any], found: list[Remedy]) -> list[Remedy]:
        """Try each quick remedy for a moment, except those the dataset rules out."""
        tried = []
        for remedy in found:
            usable = True
            if remedy.settings is not None:
                try:
                    apply_settings(self.run.port.data, remedy.settings)
                except (RondeError, ImportError):
                    usable = False
            if not all(gather_json(self.run.port.world, usable)):
                continue
            if remedy.can_try and remedy.settings is not None:
                self.tell(f"trying: {remedy.text}")
                # Two batches, even where no time is left for more: nothing is promised that cannot
                # be had.
                refused = [
                    error
                    for error in gather_json(
                        self.run.port.world, self.bench.refuses(remedy.settings)
                    )
                    if error
                ]
                if refused:
                    values["notes"].append(f"{remedy.text}: not for this data set ({refused[0]}).")
                    continue
                if self.clock.left() + self.grace <= 2 * self.costs.get("real", 0.0):
                    tried.append(remedy)
                    continue
                try:
                    rates = [
                        self.measure(
                            f"try:{remedy.id}", Arm("real", settings=remedy.settings), None
                        ).samples_per_second
                        for _ in range(2)
                    ]
                except Exception as error:
                    if self.run.world_size > 1:
                        raise  # the other ranks are in the middle of it
                    values["notes"].append(
                        f"{remedy.text}: not for this data set ({type(error).__name__}: "
                        f"{str(error)[:150]})."
                    )
                    continue
                remedy = dataclasses.replace(
                    remedy,
                    rate=min(statistics.median(rates), values["samples_per_second"]["synthetic"]),
                    tried=True,
                )
            tried.append(remedy)
        return tried


def _files_in(folder: str, most: int) -> int:
    """Count files below a folder, up to ``most``: several samples may share one."""
    if not folder:
        return most
    count = 0
    for _, _, names in os.walk(folder):
        count += len(names)
        if count >= most:
            return most
    return count


def _after_first(found: list[tuple[float, str, Arm]]) -> float:
    """The position right after the most promising arm."""
    ordered = sorted((f[0] for f in found), reverse=True)
    return (ordered[0] + ordered[1]) / 2 if len(ordered) > 1 else -1.0


_WORDS = {
    "synthetic": "recycled batches",
    "real": "real batches",
    "alone": "each worker by itself",
    "without": "without ",
    "replayed": "samples replayed",
    "beside": "recycled batches beside the loaders",
    "limited": "loaders with one compute thread",
}


def examine(
    run: RunView, options: Mapping[str, Any], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure and judge. A collective; the run is unchanged afterwards.

    Args:
        run: between two of its steps.
        options: ``seconds`` in all, ``rounds``, ``to`` (devices to predict for), ``nodes``,
            ``cold``.
        tell: what is being done.

    Returns:
        dict: the JSON of ``ronde doctor``, on every rank.
    """
    to = int(options.get("to") or _TO)
    with Bench(run) as bench:
        study = _Study(run, bench, options, tell)
        verdict = study.reach_verdict()
        values = verdict.values
        found: list[Remedy] = []
        if verdict.refused is None and not options.get("verify"):
            study.find_plateau(values, max(to, run.world_size))
        values["loading_samples_per_second"] = study.seen().loading
        if options.get("cold") and not options.get("verify"):
            values["cold"] = study.measure_storage()
        facts = study.facts(
            not verdict.healthy and verdict.refused is None and not options.get("verify")
        )
        if not options.get("verify"):
            found = study.try_remedies(values, remedies(values, facts))
    told: dict[str, Any] = {}
    if run.is_main:
        values["device"] = (
            torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu"
        )
        values["script"] = Path(sys.argv[0]).name if sys.argv else ""
        values["model"] = type(run.model).__name__
        values["threads"] = torch.get_num_threads()
        values["scale"], values["walls"] = outlook(
            values, facts, max(to, run.world_size), options.get("nodes")
        )
        values["prescriptions"] = (
            prescriptions(values, facts, found, to, options.get("nodes"))
            if not verdict.refused
            else []
        )
        values["notes"] = [*values["notes"], *_notes(run, study, values)]
        values["arms"] = {
            name: {
                "samples_per_second": [r.samples_per_second for r in results],
                "step_seconds": statistics.median(r.step_seconds for r in results),
                "wait_seconds": [
                    statistics.median(r.wait_seconds[k] for r in results)
                    for k in range(run.world_size)
                ],
                "steps": [r.steps for r in results],
            }
            for name, results in study.results.items()
        }
        told = values
    passed = study.clock.passed()
    told = dict(broadcast_json(run.port.world, told))
    told["measured_seconds"] = passed
    return told


def _notes(run: RunView, study: _Study, values: Mapping[str, Any]) -> list[str]:
    """What was not measured."""
    notes = []
    if study.bench.is_stream:
        notes.append(
            "a stream: every worker goes through all of it and keeps its part, so more "
            "devices are fed no faster than one."
        )
    if study.asked and not study.asked_all:
        readers, rate = max(study.asked, key=lambda asked: asked[1])
        notes.append(
            f"{readers} loaders without training gave {rate:,.0f} samples/s: a storage "
            "that all share was not asked for more, and what it cannot give is not seen."
        )
    if run.world_size > 1 and not study.bench.can_be_alone:
        notes.append(
            f"under the plan {run.plan.spec} the exchange cannot be left out: it is part "
            "of the ceiling."
        )
    if values["workers"] == 1:
        notes.append("one worker: exchange and stragglers show with two or more (--workers N).")
    if len(values["scale"]) > 1:
        notes.append(
            "the network between nodes was not measured; more devices are predicted from "
            "what was measured on these."
        )
    return notes
