"""Load samples by position: in this process, in threads, or in torch's loading processes."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import signal
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from ronde.data import Order, key_of, named_stages
from ronde.introspect import Marks
from ronde.loader.reader import Ask, Reader, StreamReader
from ronde.loader.settings import Executor, LoaderSettings
from ronde.plan.batch import Share
from ronde.world import FeedError, RondeError

# Most trainings read in their own process: threads and processes are imported where used.
if TYPE_CHECKING:
    from ronde.data import Echoed
    from ronde.loader.request_queue import RequestLine, Shares
    from ronde.loader.thread_workers import Threads

SampleFacts = tuple[list[int], list[Any], bool]

_PREFETCH = 2
_TRIED = 64  # samples
_FALSE_ALARMS = 3


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that no loader stays behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class _WorkerInit:
    user: Callable[[int], None] | None
    threads: int | None = None
    probe: Any = None

    def __call__(self, worker: int) -> None:
        die_with_parent()
        if self.threads is not None:
            from ronde.loader.thread_workers import limit_process_threads

            limit_process_threads(self.threads)
        if self.probe is not None:
            self.probe.install()
        if (info := get_worker_info()) is not None:
            # The script's own: what torch was given is a reader around it. WorkerInfo is frozen,
            # and there is no other way to say it.
            object.__setattr__(info, "dataset", info.dataset.given)  # type: ignore[attr-defined]
        if self.user is not None:
            self.user(worker)


def _identity(value: Any) -> Any:
    return value


def _pinned(batch: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]


def is_own(dataset: Dataset[Any], collate: Any = default_collate) -> bool:
    """Whether samples come only from Ronde's sources and steps.

    Then the script cannot change them between epochs, and loading processes may keep their copy. A
    ``Subset`` does not count: scripts replace its indices.

    Example:
        >>> is_own(torch.utils.data.TensorDataset(torch.zeros(3)))
        False
    """
    if type(dataset).__module__.partition(".")[0] != "ronde":
        return False
    # Imported here: most trainings read a Dataset of their own.
    from ronde.cache import CachedDataset, CachedSource
    from ronde.data import ArraySource, BaseSource, DatasetSource, Pipeline
    from ronde.introspect import is_ronde, walk

    source: Any = dataset
    calls = [collate]
    while isinstance(source, Pipeline | CachedSource | CachedDataset) and is_ronde(type(source)):
        if isinstance(source, Pipeline):
            calls += [source.collate, source.finish]
        if not isinstance(source, CachedDataset):
            calls += [step.call for step in source.steps]
        source = source.dataset if isinstance(source, CachedDataset) else source.source
    if not isinstance(source, BaseSource) or isinstance(source, DatasetSource):
        return False
    # The script may write to an array that it gave.
    if isinstance(source, ArraySource) and any(
        isinstance(origin, np.ndarray) for origin in source.origins()
    ):
        return False
    inside = walk([call for call in calls if call is not default_collate], functions=True)
    return is_ronde(type(source)) and all(is_ronde(one) for one in inside if callable(one))


class _Asks(Sampler[Ask]):
    """What the next epoch's loader reads; filled in before each iteration."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterator[Ask]] = lambda: iter(())

    def __iter__(self) -> Iterator[Ask]:
        return self.source()


class Feed:
    """Reads this worker's micro-batches.

    Args:
        dataset: a map-style Dataset, or an IterableDataset with a length.
        order: which sample stands where.
        settings: how to fetch.
        seed: key of the augmentation's randomness.
        evaluate: bad samples are left out, not replaced.
        on_cpu: the device is the CPU: loading threads may finish batches, which the training would
            otherwise wait for.
        say: told what was chosen, once, where there was a choice; a second argument is true where
            it is a warning.
        compares: other ranks read the same data set: :attr:`facts` is for them.

    Attributes:
        executor: what it reads with: ``none``, ``threads`` or ``processes``; ``auto`` until it has
            read something.
        skipped: ``(id, text)`` of each bad sample among those handed out since the reading began,
            repeats included.
        facts: the indices of samples that every rank has read, what they are, and whether the
            collate function mixes them, once the first share was read; None before, and after
            :meth:`take_facts`.
        left_out: how many samples are missing in each micro-batch of the last share, in evaluation.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        settings: LoaderSettings,
        seed: int,
        *,
        evaluate: bool = False,
        on_cpu: bool = False,
        say: Callable[[str, bool], None] | None = None,
        compares: bool = False,
    ) -> None:
        self.order = order
        self.settings = settings
        self.seed = seed
        self.executor: Executor = settings.chosen
        self.skipped: list[tuple[int, str]] = []
        self.left_out: tuple[int, ...] = ()
        self.facts: SampleFacts | None = None
        self._compares = compares
        # Only what gives the same bits in any thread: a function of the user's may add up in
        # another order with fewer compute threads.
        self._finishes_anywhere = on_cpu and getattr(settings.finish, "anywhere", False)
        self._say = say or (lambda text, warning: None)
        self._probe = settings.probe
        self._asks = _Asks()
        self._stream: StreamReader | None = None
        self._reader: Reader | None = None
        if isinstance(dataset, IterableDataset):
            collate = settings.collate
            if self._probe is not None:
                dataset, collate = self._probe.attach(dataset, collate)
            self._stream = StreamReader(
                cast("IterableDataset[Any]", dataset), collate, seed, order.n
            )
            self.executor = (
                "processes" if settings.num_workers and settings.executor != "none" else "none"
            )
        else:
            self._reader = Reader(dataset, settings, order, seed, evaluate)
        # Nothing that the script does between two epochs can show in such data.
        self._is_own = self._reader is not None and is_own(
            self._reader.dataset, self._reader.collate
        )
        self._tolerant = self._reader is not None and self._reader.skip
        self._tried = False
        self._warned = False
        self._false_alarms = 0
        self._line: RequestLine | None = None
        self._threads: Threads | None = None
        self._loader: DataLoader[Any] | None = None
        self._mark: tuple[Any, ...] = ()  # of the data set, when processes that stay began
        self._reading: weakref.ref[Generator[Any, None, None]] | None = None

    # -- what it reads with ------------------------------------------------------------

    @property
    def _direct(self) -> bool:
        return (
            self._reader is not None
            and self.executor == "none"
            and not self.settings.options.get("pin_memory")
        )

    def _make_loader(self) -> None:
        """torch's DataLoader, for processes and pinned batches; created on first use."""
        settings = self.settings
        options = dict(settings.options)
        workers = settings.num_workers if self.executor == "processes" else 0
        if self._stream is not None:
            workers = min(workers, 1)
            # a process that stays keeps what it was asked for in the epoch before
            options.pop("persistent_workers", None)
        if workers == 0:
            for name in (
                "prefetch_factor",
                "persistent_workers",
                "multiprocessing_context",
                "timeout",
            ):
                options.pop(name, None)
        else:
            if settings.prefetch is not None:
                options["prefetch_factor"] = settings.prefetch
            if (
                settings.executor is not None
                and self._stream is None
                and "persistent_workers" not in options
            ):
                # Nobody said whether they stay: as in torch's DataLoader they do not, since each
                # has a copy of data that may change.
                options["persistent_workers"] = self._is_own
        # The loader draws its base seed from a generator of its own: the script's randomness is
        # left alone.
        options["generator"] = torch.Generator().manual_seed(
            key_of(self.seed, 3) & 0x7FFFFFFFFFFFFFFF
        )
        self._loader = DataLoader(
            self._reader if self._reader is not None else cast("Dataset[Any]", self._stream),
            batch_size=None,
            sampler=None if self._stream is not None else self._asks,
            collate_fn=_identity,
            num_workers=workers,
            worker_init_fn=_WorkerInit(settings.init, settings.threads, self._probe)
            if workers
            else None,
            **options,
        )

    def _inspect_samples(self, share: Share) -> None:
        """Inspect samples before threads read them, and choose the executor if asked."""
        from ronde.introspect import preserve_state
        from ronde.loader.autotune import choose_executor, try_samples

        assert self._reader is not None
        self._tried = True
        low, high = share.micro[0]
        size = max(1, high - low)
        # Some of an epoch's samples, beginning with those that come first; the rest of an epoch may
        # be shorter.
        count = min(_TRIED, self.order.epoch_samples)
        low = min(low, self.order.epoch_samples - count)
        ask = Ask(share.epoch, low, self.order.ids(share.epoch, low, low + count).tolist())
        workers, threads = self.settings.num_workers, self._compute_threads
        trial = try_samples(self._reader, ask)
        if self.executor == "auto":
            with preserve_state(self._reader.dataset):
                found, why = choose_executor(self._reader, ask, trial, size, workers, threads)
            self.executor = cast("Executor", found)
            self._say(
                f"feed: executor {found}{'' if found == 'none' else f' ({workers})'}, "
                f"chosen: {why}",
                False,
            )
        elif trial.draws:
            self._serialise("they are read one by one in the training process instead")

    def _end_line(self) -> None:
        if self._line is not None:
            self._line.end()
            self._line = None

    def _warn_of_what_is_open(self) -> None:
        from ronde.introspect import describe_open

        dataset = self._reader.dataset if self._reader is not None else None
        if dataset is not None and (held := describe_open(dataset)) is not None:
            self._say(
                f"feed: the data set holds {held} open. Loading {self.executor} share its "
                "place in it, and may be given each other's "
                "bytes: open it when the first sample is read, or set executor: none",
                True,
            )

    def _serialise(self, what: str) -> None:
        self.executor = "none"
        self._say(
            "feed: samples draw from torch's, random's or numpy's global generator, which "
            "loading threads would share with each other and "
            f"with the training: {what}. Draw from ronde.feed.rng(), or set executor: processes",
            True,
        )

    @property
    def _compute_threads(self) -> int:
        return 1 if self.settings.threads is None else self.settings.threads

    def _pool(self) -> Threads:
        if self._threads is None:
            prefetch = _PREFETCH if self.settings.prefetch is None else self.settings.prefetch
            workers = self.settings.num_workers
            from ronde.loader.thread_workers import Threads

            self._threads = Threads(workers, workers * prefetch, self._compute_threads)
        return self._threads

    def close(self) -> None:
        """End threads, processes and the last :meth:`read`; reading again restarts them."""
        reading = self._reading() if self._reading is not None else None
        if reading is not None and inspect.getgeneratorstate(reading) != inspect.GEN_RUNNING:
            reading.close()
        self._end_line()
        if self._threads is not None:
            self._threads.stop()
        if self._loader is not None:
            from ronde.loader.process_workers import end as end_processes

            end_processes(self._loader)
            self._loader = None

    # -- reading -----------------------------------------------------------------------

    def read(
        self, shares: Shares, after: Shares | None = None
    ) -> Iterator[tuple[Share, list[Any]]]:
        """Yield each share with its micro-batches, in order.

        Args:
            shares: makes the shares of (the rest of) one epoch.
            after: makes those of the next, where there will be one: loaders that have nothing left
                to do may begin with it.

        Raises:
            SampleError: a sample cannot be used.
            FeedError: a loading process died, or more samples were skipped than may be.
        """
        self.skipped = []
        if (
            not self._warned
            and self.settings.executor != "auto"
            and self.executor in ("threads", "processes")
        ):
            self._warned = True
            self._warn_of_what_is_open()
        if self.executor in ("auto", "threads") and not self._tried:
            if (first := next(shares(), None)) is None:
                return iter(())
            self._inspect_samples(first)
        echoes = hasattr(self.order, "again")
        found = self._repeat(shares) if echoes else self._read(shares, after)
        if self._probe is not None and self.executor != "processes":
            found = self._probed(found)
        found = self._count_skipped(found) if self._tolerant else found
        self._reading = weakref.ref(cast("Generator[Any, None, None]", found))
        return found

    def _repeat(self, shares: Shares) -> Iterator[tuple[Share, list[Any]]]:
        """Read each batch once and yield copies for its turns, because scripts may modify them."""
        from ronde.profile import deep_copy

        order = cast("Echoed", self.order)

        def firsts() -> Iterator[Share]:
            last = None
            for share in shares():
                if last is None or not order.again(last, share):
                    yield share
                last = share

        batches = self._read(firsts)
        last: Share | None = None
        micros: list[Any] = []
        for share in shares():
            if last is None or not order.again(last, share):
                _, micros = next(batches)
            last = share
            yield share, deep_copy(micros)

    def _probed(
        self, found: Iterator[tuple[Share, list[Any]]]
    ) -> Iterator[tuple[Share, list[Any]]]:
        self._probe.install()
        try:
            yield from found
        finally:
            self._probe.uninstall()

    def take_facts(self) -> SampleFacts | None:
        """:attr:`facts`, once."""
        facts, self.facts = self.facts, None
        return facts

    def _facts_asks(self, shares: Shares) -> list[Ask]:
        """Asks for the first and the last samples of the first global batch, once: all ranks know
        them. Of a stream the first only.
        """
        first = next(shares(), None) if self._compares else None
        if first is None:
            return []
        self._compares = False
        low, high = first.start, first.stop
        more = self._reader is not None and not self._reader.stacks and high - low > 3
        places = [low] if self._stream else sorted({low, high - 1})
        places += [low + 1, high - 2] if more else []  # for a look at the collate function
        ids = [int(self.order.ids(first.epoch, at, at + 1)[0]) for at in places]
        return [Ask(first.epoch, first.start, ids, facts=True)]

    def _read(
        self, shares: Shares, after: Shares | None = None
    ) -> Iterator[tuple[Share, list[Any]]]:
        if self.executor == "threads" or self._direct:
            assert self._reader is not None
            for ask in self._facts_asks(shares):
                self.facts = (ask.ids, *self._reader.facts(ask))
        if self.executor == "threads":
            return self._read_in_threads(shares, after if self._may_read_ahead else None)
        if self._direct:
            return self._from_here(shares)
        if self._loader is None:
            self._make_loader()
        self._renew_processes()
        return self._from_loader(shares, after if self._may_read_ahead else None)

    def _renew_processes(self) -> None:
        """End processes that stay if the script has changed the data set since they started, by
        ``dataset.set_epoch(epoch)`` for instance: each has a copy of it.
        """
        if self._is_own or self._loader is None or not self._loader.persistent_workers:
            return
        from ronde.introspect import state_mark

        settings, reader = self.settings, self._reader
        mark = state_mark([reader and reader.given, settings.collate, settings.init])
        if mark != self._mark:
            from ronde.loader.process_workers import end as end_processes

            end_processes(self._loader)
        self._mark = mark

    @property
    def _may_read_ahead(self) -> bool:
        """Whether reading may start the next epoch early: only if nothing the script does in
        between could matter.

        The script's own sampler may depend on the training's results.
        """
        if not self._is_own or self._probe is not None or self.order.draw is not None:
            return False
        return self.executor == "threads" or (
            self._loader is not None and bool(self._loader.persistent_workers)
        )

    def _continue_ahead(self, shares: Shares) -> RequestLine | None:
        """The reading in progress, if it matches the request."""
        line, self._line = self._line, None
        if line is None:
            return None
        first = next(shares(), None)
        if first is not None and line.road.leads_to(first):
            return line
        line.end()
        return None

    def _keep_ahead(self, line: RequestLine) -> bool:
        """Keep the next epoch's reading in progress after an epoch was handed out."""
        if line.road.entered():
            self._line = line
            return True
        if next(line.results, None) is not None:  # it comes to its end
            raise RondeError("more batches came than were asked for")
        return False

    def _from_here(self, shares: Shares) -> Iterator[tuple[Share, list[Any]]]:
        reader = self._reader
        assert reader is not None
        # Read in this process: what DataLoader would add is 15 µs a batch.
        for share in shares():
            yield share, [reader.micro(self.order, share, low, high) for low, high in share.micro]

    def _from_loader(
        self, shares: Shares, after: Shares | None
    ) -> Iterator[tuple[Share, list[Any]]]:
        from ronde.loader.process_workers import batches as from_processes
        from ronde.loader.request_queue import RequestLine, RequestQueue

        assert self._loader is not None
        line = self._continue_ahead(shares)
        if line is None:
            asks = self._facts_asks(shares)
            road = RequestQueue(self.order, shares, asks)
            self._asks.source = road.__iter__
            if self._stream is not None:
                self._stream.asks = list(road) if self._loader.num_workers else iter(road)
            line = RequestLine(road, from_processes(self._loader))
            for ask in asks:
                self.facts = (ask.ids, *next(line.results))
        line.road.follow(after)
        kept = False
        try:
            for share in shares():
                micros = list(itertools.islice(line.results, len(share.micro)))
                if len(micros) < len(share.micro):
                    raise RondeError(
                        f"the loading processes ended with {len(line.road.asked)} batches "
                        "still to come"
                    )
                line.road.hand_out(share)
                yield share, micros
                del micros
            kept = self._keep_ahead(line)
        finally:
            if not kept:
                line.end()
                # Without this the loader would be part of a cycle; collected as one, its processes
                # are not told to end, and waited for.
                self._asks.source = lambda: iter(())

    def _read_in_threads(
        self, shares: Shares, after: Shares | None
    ) -> Iterator[tuple[Share, list[Any]]]:
        """Read ahead in threads while nothing draws from the global generators.

        A dataset that draws is usually found in its first samples. One that starts later is found
        by a global generator that moved during a read. The training may also have moved it, so that
        part is read again here, under keys.
        """
        from ronde.loader.request_queue import RequestLine, RequestQueue
        from ronde.loader.thread_workers import parts_of

        reader = self._reader
        assert reader is not None
        pin = self.settings.options.get("pin_memory") and torch.cuda.is_available()
        # What is on its way into the next epoch is held by the feed, and shall not hold it.
        me = weakref.proxy(self)
        whole = reader.rows is not None

        def cut(ask: Ask, most: int) -> Sequence[Ask]:
            if whole or most == 1:
                return (ask,)
            return [ask.part(low, high) for low, high in parts_of(len(ask.ids), most)]

        def read(ask: Ask) -> tuple[Any, bool]:
            nonlocal whole
            if reader.rows is not None:
                return reader[ask], False
            marks = Marks() if me._false_alarms < _FALSE_ALARMS else None
            samples = reader.read(ask)
            whole = whole or type(samples) is not list  # columns, which are not put together again
            return samples, marks is not None and not marks.unmoved()

        def finished(ask: Ask, batch: Any) -> Any:
            if not me._finishes_anywhere:
                return batch
            low, high = ask.start, ask.start + len(ask.ids)
            if reader.skip:
                return me._finished(ask.epoch, low, high, batch[0]), batch[1]
            return me._finished(ask.epoch, low, high, batch)

        def join(ask: Ask, parts: list[tuple[Any, bool]]) -> tuple[Any, bool]:
            if reader.rows is not None:
                return parts[0]
            moved = any(part[1] for part in parts)
            samples = (
                parts[0][0] if len(parts) == 1 else [sample for part in parts for sample in part[0]]
            )
            batch = reader.join(ask, samples)
            batch = finished(ask, batch)
            if pin:
                batch = _pinned(batch)
            return batch, moved

        line = self._continue_ahead(shares)
        if line is None:
            road = RequestQueue(self.order, shares)
            line = RequestLine(road, self._pool().run(iter(road), cut, read, join))
        line.road.follow(after)
        handed, kept = 0, False
        try:
            for share in shares():
                micros: list[Any] = []
                for ask, (batch, moved) in itertools.islice(line.results, len(share.micro)):
                    if moved and self._false_alarms < _FALSE_ALARMS:
                        again = reader.batch(ask)
                        if reader.randomness.draws:
                            break
                        del again
                        self._false_alarms += 1
                    micros.append(batch)
                if reader.randomness.draws:
                    break
                handed += 1
                line.road.hand_out(share)
                yield share, micros
                del micros
            else:
                kept = self._keep_ahead(line)
                return
        finally:
            if not kept:
                line.end()
        self._serialise(
            "from here on they are read one after another in the training process. What "
            "was trained on so far may not be repeatable"
        )
        yield from self._read(lambda: itertools.islice(shares(), handed, None))

    # -- what is done to a batch -------------------------------------------------------

    def _count_skipped(
        self, found: Iterator[tuple[Share, list[Any]]]
    ) -> Iterator[tuple[Share, list[Any]]]:
        """Remove the skipped samples' reports from the batches, and check their share."""
        most = self.settings.max_skipped * self.order.epoch_samples
        for share, micros in found:
            self.left_out = tuple(
                len(skipped) if high > low else 0
                for (_, skipped), (low, high) in zip(micros, share.micro, strict=True)
            )
            for (_, skipped), (low, high) in zip(micros, share.micro, strict=True):
                if high > low:
                    self.skipped += skipped
            if len(self.skipped) > most:
                raise FeedError(
                    too_many(self.skipped, self.order.epoch_samples, self.settings.max_skipped)
                )
            yield share, [batch for batch, _ in micros]

    def finish(self, share: Share, micros: list[Any]) -> list[Any]:
        """Run a pipeline's device steps, unless a loading thread already did."""
        if self.settings.finish is None or (self._finishes_anywhere and self.executor == "threads"):
            return micros
        return [
            self._finished(
                share.epoch, *((low, high) if low < high else (share.start, share.start + 1)), micro
            )
            for micro, (low, high) in zip(micros, share.micro, strict=True)
        ]

    def _finished(self, epoch: int, low: int, high: int, micro: Any) -> Any:
        call = self.settings.finish
        assert call is not None
        order, seed = self.order, self.seed
        found: list[int] = []

        def key(j: int) -> int:
            if not found:
                found.extend(
                    range(low, high)
                    if order.draw is not None
                    else order.ids(epoch, low, high).tolist()
                )
            return key_of(seed, 7, epoch, found[j])

        with named_stages.sample_keys(high - low, key):
            return (
                call(micro)
                if named_stages.listener is None
                else named_stages.stage("finish")(call)(micro)
            )


def too_many(skipped: Sequence[tuple[int, str]], of: int, most: float) -> str:
    """The message when more samples were skipped than allowed."""
    return (
        f"{len(skipped)} of {of} samples were skipped, more than the share of {most:g} that "
        f"max_skipped allows: {first_few(skipped)}. Fix or remove them, or allow more"
    )


def first_few(skipped: Sequence[tuple[int, str]], most: int = 3) -> str:
    """Names of the first few bad samples."""
    distinct = list(dict(skipped).values())
    return "; ".join(distinct[:most]) + (
        f"; and {len(distinct) - most} more" if len(distinct) > most else ""
    )
