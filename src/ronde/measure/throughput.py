"""Measure the throughput of a training and of its arms, inside the script's own processes.

Arms take turns (A B A B …), so that drift of the machine meets all of them. Each window is many
steps. A window of a real arm has its own loaders, which start with empty queues; it is measured
once these have settled. All ranks take part and agree on the number of steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import torch
from torch.utils.data import IterableDataset

from ronde.adapt import apply_settings
from ronde.data import Order
from ronde.data import named_stages as stages
from ronde.introspect import reopen_files
from ronde.loader import Executor, Feed, FeedSettings, LoaderSettings
from ronde.loader.thread_workers import _openmp_runtimes
from ronde.measure.step_stages import StepStages
from ronde.measure.study import refuse_batches
from ronde.plan import Share, shares
from ronde.profile import StageTimes, read_board
from ronde.run.loop import on_device
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.tensors import tensors_in

if TYPE_CHECKING:
    from ronde.run import Run

_FEWEST_STEPS = 4  # of a window
_LEARN_SAMPLES = 17  # that a loader reads before it replays them, see ronde.profile.probe


@dataclass(frozen=True)
class Arm:
    """One variant of the training.

    Args:
        kind: ``synthetic``: real batches, recycled on the device. ``alone``: synthetic without
            exchange, each rank by itself. ``real``: with the input pipeline. ``beside``: synthetic
            while the loaders run, their batches thrown away. ``loading``: the loaders without
            training.
        samples: replay whole samples through the real loaders, which leaves the transport.
        settings: settings file to read with.
        timed: time each stage, at a cost of some microseconds per call.
        first_only: of ``loading``: only rank 0's loaders run.
    """

    kind: str = "real"
    samples: bool = False
    settings: FeedSettings | None = None
    timed: bool = False
    first_only: bool = False

    @property
    def loads(self) -> bool:
        """Whether loaders run in it."""
        return self.kind in ("real", "beside", "loading")


@dataclass(frozen=True)
class Timed:
    """Cost of a stage per sample: time and bytes read."""

    cpu_seconds: float
    wall_seconds: float
    bytes: float = 0.0


@dataclass(frozen=True)
class ArmResult:
    """One window of one arm.

    Attributes:
        samples_per_second: of all ranks together.
        step_seconds: mean step without the wait for its batch, on the slowest rank.
        wait_seconds: mean wait for a batch per step, of each rank.
        usual_wait_seconds: of the rank that waits longest, the median over groups of as many steps
            as there are loaders. It leaves out short disturbances of the machine.
        per_rank: samples per second of each rank, by its own clock.
        steps: steps in the window.
        seconds: duration of the window.
        first_batch_seconds: from the start of the loaders to the first batch, on the slowest rank;
            0 without loaders.
        stages: for each rank, stage -> its cost in the loaders; empty unless timed.
        in_step: stage -> its cost within the step, on the slowest rank.
        cpu_seconds: per sample, in the training processes; ``with_loaders_cpu_seconds``: in theirs
            and their loaders'.
        other_threads: share of the loaders' CPU time spent outside their main threads.
        queued: seconds that reading threads waited for a core, per second on a core.
    """

    samples_per_second: float
    step_seconds: float
    wait_seconds: tuple[float, ...]
    usual_wait_seconds: float
    per_rank: tuple[float, ...]
    steps: int
    seconds: float
    first_batch_seconds: float = 0.0
    stages: tuple[Mapping[str, Timed], ...] = ()
    in_step: Mapping[str, Timed] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    with_loaders_cpu_seconds: float = 0.0
    other_threads: float = 0.0
    queued: float = 0.0


class _Readings(NamedTuple):
    """The moments between steps, and CPU seconds of this process, and with its children's."""

    moments: list[float]
    cpu_seconds: float
    tree_cpu_seconds: float


def _tree_cpu_seconds() -> float:
    """CPU seconds of this process and all its children, those that have ended included."""
    spent = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended: its parent has its time
            t = process.cpu_times()
            spent += t.user + t.system + t.children_user + t.children_system
    return float(spent)


class Bench:
    """Measures windows of steps. Everything that training changes is restored at the end.

    Args:
        run: the result of ``distribute``, between two steps. Every rank makes a Bench and calls it
            alike.

    Attributes:
        patience: seconds for reading the recycled batches.
        draw_seconds: time in which the script's own sampler draws an epoch; None without one.

    Example:
        >>> with Bench(run) as bench:  # doctest: +SKIP
        ...     ceiling = bench.window(Arm("synthetic"), seconds=2.0)
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.port = run.port
        refuse_batches(self.port.data.order)
        self.batch_samples = min(run.plan.batch_size, run.port.data.order.epoch_samples)
        self.in_step = StepStages()
        self.patience = 10.0
        self.draw_seconds: float | None = None
        self._recycled: list[tuple[Share, list[Any]]] = []
        self._step_seconds: dict[Arm, float] = {}
        self._warm = False
        self._slowest_first = 0.0
        self._executor: Executor | None = None
        self._windows = 0
        self._orders: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()
        self._folder = Path()

    def __enter__(self) -> Bench:
        # A command removes its own folder even if this process is killed.
        answer = os.environ.get("RONDE_STUDY_FILE")
        place = Path(answer).parent if answer and Path(answer).parent.is_dir() else None
        enter = self._stack.enter_context
        self._folder = Path(enter(tempfile.TemporaryDirectory(prefix="ronde-arms-", dir=place)))
        enter(self.port.restoring())
        enter(self.port.unwatched())
        self._stack.callback(stages.listen, stages.listen(self.in_step))
        self.port.prepare()
        return self

    def __exit__(self, *error: Any) -> None:
        self._recycled = []
        self._stack.__exit__(*error)

    # -- batches -----------------------------------------------------------------------

    @property
    def is_stream(self) -> bool:
        """Whether one loader must read the samples in sequence."""
        return isinstance(self.port.data.dataset, IterableDataset)

    @property
    def batches(self) -> list[list[Any]]:
        """The recycled batches, as micro-batches on the device."""
        if not self._recycled:
            self._load_recycled()
        return [micros for _, micros in self._recycled]

    @property
    def loaders(self) -> int:
        """Loaders of each worker, 0 where it reads by itself."""
        return 0 if self.executor == "none" else self._count_loaders(self.port.data.settings)

    @property
    def executor(self) -> Executor:
        """``none``, ``threads`` or ``processes``, also if the script says ``auto``."""
        if self._executor is None:
            self._load_recycled()
        assert self._executor is not None
        return self._executor

    def _count_loaders(self, settings: LoaderSettings) -> int:
        return min(1, settings.num_workers) if self.is_stream else settings.num_workers

    def _shares(self) -> Iterator[Share]:
        """This rank's shares of whole global batches, from the current position, without end."""
        offset = self.run.state.epoch_samples
        for epoch in itertools.count(self.run.state.epoch):
            yield from self._epoch(epoch, offset)
            offset = 0

    def _epoch(self, epoch: int, offset: int = 0) -> Iterator[Share]:
        plan, samples, batch = self.run.plan, self.port.data.order.epoch_samples, self.batch_samples
        replica = plan.layout.place(self.run.rank).replica
        parts = plan.accumulation if plan.pipeline > 1 else None
        layout = (replica, plan.replicas, plan.micro_batch)
        return shares(epoch, offset, samples, batch, *layout, True, parts)

    def _read(self, feed: Feed) -> Iterator[tuple[Share, list[Any]]]:
        if not self.is_stream:
            yield from feed.read(self._shares)
            return
        for epoch in itertools.count(self.run.state.epoch):  # a stream starts over
            yield from feed.read(partial(self._epoch, epoch))

    @contextlib.contextmanager
    def _feed(self, arm: Arm) -> Iterator[tuple[Feed, Path | None]]:
        """The script's feed as the arm changes it, and the folder of its readers' counters."""
        data = self.port.data
        if arm.settings is not None:
            data = apply_settings(data, arm.settings)
        settings = data.settings
        own_executor = arm.settings is not None and arm.settings.executor is not None
        if settings.chosen == "auto" and self._executor is not None and not own_executor:
            settings = dataclasses.replace(settings, executor=self._executor)  # choose once
        with contextlib.ExitStack() as stack:
            # A connection may belong to the thread that opened it: each window opens its own.
            stack.enter_context(reopen_files(data.dataset))
            board: Path | None = None
            if arm.samples or arm.timed:
                from ronde.profile import Probe

                self._windows += 1
                board = self._folder / f"board-{self._windows}"
                probe = Probe(board, arm.samples)
                stack.callback(probe.uninstall)
                settings = dataclasses.replace(settings, probe=probe)
            options = dict(settings.options)
            if self._slowest_first and not options.get("timeout") and not self.is_stream:
                # A loader that hangs ends its window, not the whole study.
                options["timeout"] = 15.0 + 8.0 * self._slowest_first
            settings = dataclasses.replace(settings, options=options)
            stop_openmp_threads()
            order, seed = self._draw_once(data.order), self.run.plan.seed
            feed = Feed(data.dataset, order, settings, seed)
            stack.callback(feed.close)
            yield feed, board

    def _draw_once(self, order: Order) -> Order:
        """Draw two epochs of the script's sampler once, and use them in every window."""
        draw = order.draw
        if draw is None:
            return order
        first = self.run.state.epoch

        def replay(epoch: int) -> Any:
            turn = (epoch - first) % 2
            if turn not in self._orders:
                self._draw(draw, first + turn)
            return self._orders[turn]

        return dataclasses.replace(order, draw=replay)

    def _draw(self, draw: Callable[[int], Any], epoch: int) -> None:
        start = time.perf_counter()
        self._orders[epoch - self.run.state.epoch] = np.asarray(list(draw(epoch)), dtype=np.int64)
        self.draw_seconds = min(self.draw_seconds or float("inf"), time.perf_counter() - start)

    def _load_recycled(self) -> None:
        """Load the batches to recycle: eight, more if small, fewer where reading is slow."""
        size = 0
        order = self.port.data.order
        if order.draw is not None:
            for k in (0, 1):  # before the first window: windows reach into the next epoch
                self._draw(order.draw, self.run.state.epoch + k)
        start = time.perf_counter()
        with self._feed(Arm()) as (feed, _), contextlib.closing(self._read(feed)) as reader:  # type: ignore[type-var]
            for share, micros in reader:
                self._slowest_first = self._slowest_first or time.perf_counter() - start
                self._executor = feed.executor
                self._recycled.append((share, on_device(feed, share, micros, self.run.device)))
                size += sum(t.numel() * t.element_size() for t in tensors_in(micros))
                n, spent = len(self._recycled), time.perf_counter() - start
                # More batches, where they cost little: a cache of the processor flatters a few.
                quick = size < 32 << 20 and spent < 0.5
                enough = n >= (16 if quick else 8)
                if self._agree(enough or (n >= 3 and spent > self.patience)):
                    break

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Let the stages of a step be heard before a probe that reads in this process."""
        if stages.listener is not self.in_step:
            self.in_step.before = stages.listen(self.in_step)
        try:
            yield
        finally:
            self.in_step.before = None

    # -- steps -------------------------------------------------------------------------

    @property
    def can_be_alone(self) -> bool:
        """Whether a rank can take a step by itself; see :attr:`StepPort.can_step_alone`."""
        return self.port.can_step_alone

    def _agree(self, enough: bool) -> bool:
        """Rank 0's answer, on every rank."""
        return bool(broadcast_json(self.port.world, enough))

    def _synchronize(self) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)

    def _barrier(self) -> None:
        self._synchronize()
        gather_json(self.port.world, 0)

    def _clock(self, step: Callable[[], None], steps: int) -> _Readings:
        """Take steps."""
        with_loaders = _tree_cpu_seconds()
        cpu = time.process_time()
        moments = [time.perf_counter()]
        for _ in range(steps):
            step()
            moments.append(time.perf_counter())
        self._synchronize()
        moments[-1] = time.perf_counter()
        return _Readings(
            moments, time.process_time() - cpu, max(0.0, _tree_cpu_seconds() - with_loaders)
        )

    # -- windows -----------------------------------------------------------------------

    def window(self, arm: Arm, seconds: float) -> ArmResult:
        """Measure an arm once, for about so many seconds after its warm-up. A collective."""
        if not self._recycled:
            self._load_recycled()
        return self._measure_loaders(arm, seconds) if arm.loads else self._recycle(arm, seconds)

    def _agreed_steps(self, seconds: float, estimate: float, multiple: int = 1) -> int:
        """Number of steps that fill a window on the slowest rank."""
        slowest = max(gather_json(self.port.world, estimate))
        fewest = _FEWEST_STEPS if slowest < seconds else 2
        steps = max(fewest, round(seconds / max(float(slowest), 1e-6)))
        return -(-steps // multiple) * multiple

    def _recycle(self, arm: Arm, seconds: float) -> ArmResult:
        """A window on recycled batches."""
        turn = itertools.cycle(range(len(self._recycled)))
        train = self.port.step_alone if arm.kind == "alone" else self.port.step

        def step() -> None:
            k = next(turn)
            share, micros = self._recycled[k]
            with self.in_step.step(k, replay=True):
                train(share, micros)

        for _ in range(2):
            step()
        if not self._warm:
            # The first steps make buckets, and record the results of stages within the step.
            for _ in range(max(2, len(self._recycled)) if self.in_step.functions else 2):
                step()
            self._warm = True
        estimate = self._step_seconds.get(arm)
        if estimate is None:
            self._synchronize()
            moments = self._clock(step, 3).moments
            estimate = (moments[-1] - moments[0]) / 3
        steps = self._agreed_steps(seconds, estimate)
        self._barrier()
        self.in_step.clear()
        return self._result(arm, self._clock(step, steps), [0.0] * steps)

    def _measure_loaders(self, arm: Arm, seconds: float) -> ArmResult:
        """A window in which loaders run, on this rank unless only the first one's do."""
        turn = itertools.cycle(range(len(self._recycled)))
        loads = not (arm.first_only and self.run.rank)
        board: Path | None = None
        share, first = self._recycled[0][0], 0.0
        with contextlib.ExitStack() as stack:
            if loads:
                feed, board, reader, share, first = self._first_batch(arm, stack)
                stack.enter_context(self._listening())
            drain = stack.enter_context(Drain(reader)) if arm.kind == "beside" else None
            waits: list[float] = []

            def step() -> None:
                k = next(turn)
                before = time.perf_counter()
                if drain is not None:
                    drain.allow()
                    share, micros = self._recycled[k]
                elif loads:
                    share, micros = next(reader)
                waits.append(time.perf_counter() - before)
                if arm.kind != "loading":
                    with self.in_step.step(k, replay=drain is not None):
                        if arm.kind == "real":
                            micros = on_device(feed, share, micros, self.run.device)
                        self.port.step(share, micros)

            estimate = self._settle(arm, seconds, share, step)
            multiple = self._depth(arm)[1]
            steps = self._agreed_steps(seconds, self._step_seconds.get(arm, estimate), multiple)
            self._barrier()
            waits.clear()
            self.in_step.clear()
            threads = ThreadTimes() if arm.timed else None
            before = read_board(board) if board is not None else {}
            readings = self._clock(step, steps)
            extra: dict[str, Any] = {"first": first}
            if board is not None:
                stages_ = _timed(before, read_board(board))
                extra["stages"] = {name: dataclasses.astuple(t) for name, t in stages_.items()}
            if threads is not None:
                extra["others"], extra["queued"] = threads.shares()
        return self._result(arm, readings, waits, **extra)

    def _settle(self, arm: Arm, seconds: float, share: Share, step: Callable[[], None]) -> float:
        """Take steps until the queues have settled, as many on every rank; seconds of a step."""
        depth, multiple = self._depth(arm)
        micro_batches = len(share.micro)
        # Three times round, queues are as full as they will stay.
        rest = -(-3 * depth // micro_batches)
        learn = 0
        if arm.samples:
            # Every loader reads some samples itself before it replays them.
            per_batch = max(1, max(high - low for low, high in share.micro))
            batches = -(-_LEARN_SAMPLES // per_batch)
            learn = -(-(depth + multiple * batches) // micro_batches)
        start = time.perf_counter()
        for done in itertools.count(1):
            step()
            spent = time.perf_counter() - start
            if done % multiple:
                continue
            begun = done >= min(_FEWEST_STEPS, 2 * multiple) or spent > 2 * seconds
            if not (begun if self.run.world_size == 1 else self._agree(begun)):
                continue
            ready = done >= learn or spent > 5.0 * seconds
            if self._agree(ready and (done >= rest + learn or spent > seconds)):
                break
        return (time.perf_counter() - start) / done

    def _first_batch(
        self, arm: Arm, stack: contextlib.ExitStack
    ) -> tuple[Feed, Path | None, Iterator[Any], Share, float]:
        """A feed that has given its first batch, with the share and the seconds of that batch. The
        feed and its loaders end with the stack.

        A process forked while another of its threads registers with Python may hang at once
        (Python 3.11). A measurement forks often enough to meet that, so it tries again.
        """
        for attempt in itertools.count(1):
            with contextlib.ExitStack() as mine:
                feed, board = mine.enter_context(self._feed(arm))
                reader = self._read(feed)
                mine.callback(reader.close)  # type: ignore[attr-defined]
                start = time.perf_counter()
                try:
                    share, _ = next(reader)
                except RuntimeError as error:
                    if "timed out" not in str(error) or attempt == 2:
                        raise
                    continue
                first = time.perf_counter() - start
                self._slowest_first = max(self._slowest_first, first)
                stack.push(mine.pop_all())
                return feed, board, reader, share, first
        raise AssertionError

    def refuses(self, settings: FeedSettings) -> str | None:
        """The error of reading two batches with these settings on this rank, such as a connection
        that belongs to its thread; None if it works, or is how the script reads already.
        """
        executor = settings.executor
        if executor in (None, self.executor) and (settings.workers is None or self.loaders):
            return None
        try:
            with (
                self._feed(Arm(settings=settings)) as (feed, _),
                contextlib.closing(self._read(feed)) as reader,  # type: ignore[type-var]
            ):
                next(reader)
                next(reader)
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            return f"{type(error).__name__}: {text}"[:200]
        return None

    def _depth(self, arm: Arm) -> tuple[int, int]:
        """How many batches the loaders may be ahead, and how many load at once."""
        settings = self.port.data.settings
        if arm.settings is not None:
            settings = apply_settings(self.port.data, arm.settings).settings
        auto_none = settings.chosen == "auto" and self.executor == "none"
        if settings.chosen == "none" or auto_none or not self._count_loaders(settings):
            return 1, 1
        workers = self._count_loaders(settings)
        ahead = settings.prefetch or int(settings.options.get("prefetch_factor") or 2)
        return workers * ahead, workers

    def _result(
        self, arm: Arm, readings: _Readings, waits: Sequence[float], **extra: Any
    ) -> ArmResult:
        """Gather every rank's reading of the window."""
        steps, in_step = len(waits), self.in_step
        together = self._depth(arm)[1] if arm.loads else 1
        starts = range(0, steps - together + 1, together)
        groups = [sum(waits[i : i + together]) / together for i in starts]
        mine = {
            "seconds": readings.moments[-1] - readings.moments[0],
            "wait": sum(waits) / steps,
            "usual": statistics.median(groups) if groups else sum(waits) / steps,
            "cpu": readings.cpu_seconds,
            "tree": readings.tree_cpu_seconds,
            "samples": self._recycled[0][0].samples,
            "in_step": {
                name: [in_step.cpu[name] / steps, wall / steps]
                for name, wall in in_step.wall.items()
            },
        }
        defaults = {"first": 0.0, "stages": {}, "others": 0.0, "queued": 0.0}
        everyone = gather_json(self.port.world, {**mine, **defaults, **extra})
        self._step_seconds[arm] = max(e["seconds"] for e in everyone) / steps
        return self._merge(everyone, steps)

    def _merge(self, everyone: Sequence[Mapping[str, Any]], steps: int) -> ArmResult:
        longest = max(e["seconds"] for e in everyone)
        in_step: dict[str, Timed] = {}
        for each in everyone:
            for name, (cpu, wall) in each["in_step"].items():
                if name not in in_step or wall > in_step[name].wall_seconds:
                    in_step[name] = Timed(cpu, wall)
        by_rank = tuple({n: Timed(*t) for n, t in e["stages"].items()} for e in everyone)
        trained = self.batch_samples * steps
        samples, seconds = ([e[key] for e in everyone] for key in ("samples", "seconds"))
        return ArmResult(
            samples_per_second=trained / longest,
            step_seconds=max(e["seconds"] / steps - e["wait"] for e in everyone),
            wait_seconds=tuple(e["wait"] for e in everyone),
            usual_wait_seconds=max(e["usual"] for e in everyone),
            per_rank=_per_rank(samples, seconds, steps, self.batch_samples),
            steps=steps,
            seconds=longest,
            first_batch_seconds=max(e["first"] for e in everyone),
            stages=by_rank if any(by_rank) else (),
            in_step=in_step,
            cpu_seconds=sum(e["cpu"] for e in everyone) / trained,
            with_loaders_cpu_seconds=sum(e["tree"] for e in everyone) / trained,
            other_threads=max(e["others"] for e in everyone),
            queued=statistics.fmean(e["queued"] for e in everyone),
        )


def stop_openmp_threads() -> None:
    """End the idle threads of OpenMP; they start again with this thread's next computation.

    A forked child believes that they exist, and waits forever in its first computation with several
    threads. A training forks once an epoch, a measurement all the time.
    """
    for path in _openmp_runtimes():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard, OpenMP 5.0


class ThreadTimes:
    """CPU and queueing time of the loading processes' threads, or of this process without them."""

    def __init__(self) -> None:
        self._start = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        main = others = ran = queued = 0.0
        loaders = psutil.Process().children(recursive=True)
        for process in loaders:
            with contextlib.suppress(psutil.Error):
                for thread in process.threads():
                    spent = thread.user_time + thread.system_time
                    if thread.id == process.pid:
                        main += spent
                    else:
                        others += spent
        tasks = [Path(f"/proc/{p.pid}/task/{p.pid}") for p in loaders]
        for task in tasks or Path("/proc/self/task").glob("*"):
            # The thread has ended, or this kernel has no schedstat.
            with contextlib.suppress(OSError, ValueError):
                on_core, in_queue, _ = (task / "schedstat").read_text().split()
                ran, queued = ran + int(on_core) * 1e-9, queued + int(in_queue) * 1e-9
        return main, others, ran, queued

    def shares(self) -> tuple[float, float]:
        """Since the start: share of CPU time outside the main threads, and seconds that reading
        threads waited for a core per second on a core.
        """
        now = self._read()
        main, others, ran, queued = (b - a for a, b in zip(self._start, now, strict=True))
        outside = others / (main + others) if main + others > 0.05 else 0.0
        return outside, max(0.0, queued) / ran if ran > 0.05 else 0.0


class Drain:
    """Takes batches from a reader in a thread, as many as were allowed, and throws them away."""

    def __init__(self, reader: Iterator[Any]) -> None:
        self._reader = reader
        self._allowed = threading.Semaphore(0)
        self._stop = False
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._error: BaseException | None = None

    def _drain(self) -> None:
        while True:
            self._allowed.acquire()
            if self._stop:
                return
            try:
                next(self._reader)
            except BaseException as error:
                self._error = error
                return

    def allow(self) -> None:
        """Allow one more batch, or raise the reader's error."""
        if self._error is not None:
            raise self._error
        self._allowed.release()

    def __enter__(self) -> Drain:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._allowed.release()
        self._thread.join()


def _per_rank(
    samples: Sequence[int], seconds: Sequence[float], steps: int, batch: int
) -> tuple[float, ...]:
    """Samples per second of each rank, where shares of a batch differ by one sample.

    Counts an equal share or the rank's own, whichever makes the ranks more alike: if a step's time
    does not depend on its samples, the rank with fewer of them is not slow.

    Example:
        >>> _per_rank([3, 3, 2], [1.0, 1.0, 1.0], 3, 8)
        (8.0, 8.0, 8.0)
        >>> _per_rank([3, 3, 2], [3.0, 3.0, 2.0], 3, 8)
        (3.0, 3.0, 3.0)
    """
    alike = tuple(batch / len(samples) * steps / s for s in seconds)
    own = tuple(n * steps / s for n, s in zip(samples, seconds, strict=True))
    return alike if min(own) <= 0 or max(alike) / min(alike) <= max(own) / min(own) else own


def _timed(before: Mapping[str, StageTimes], after: Mapping[str, StageTimes]) -> dict[str, Timed]:
    """Cost of each stage per sample, between two readings of the counters."""
    since = {name: times - before.get(name, StageTimes()) for name, times in after.items()}
    samples = since["python"].samples if "python" in since else 0
    if samples <= 0:
        return {}
    return {
        name: Timed(t.cpu_seconds / samples, t.wall_seconds / samples, t.bytes / samples)
        for name, t in since.items()
        if t.calls
    }
