"""Load samples by position: in this process, in threads, or in torch's loading processes."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from ronde.data import Order, key_of, named_stages
from ronde.introspect import Marks
from ronde.loader.reader import Ask, Reader, StreamReader, ask_of, read_positions
from ronde.loader.settings import Executor, LoaderSettings
from ronde.plan.batch import Share
from ronde.world import FeedError, RondeError

# Most trainings read in their own process: threads and processes are imported where used.
if TYPE_CHECKING:
    from ronde.loader.thread_workers import Threads

SampleFacts = tuple[list[int], list[Any], bool]
Shares = Callable[[], Iterator[Share]]

_PREFETCH_BATCHES = 2  # of each worker, as torch's DataLoader
_TRIED_SAMPLES = 64
_DRAWS = (
    "feed: samples draw from torch's, random's or numpy's global generator, which loading threads "
    "would share with each other and with the training: they are read one by one in the training "
    "process instead. Draw from ronde.feed.rng(), or set executor: processes"
)


@dataclass(frozen=True)
class _WorkerInit:
    user: Callable[[int], None] | None
    threads: int | None = None
    probe: Any = None

    def __call__(self, worker: int) -> None:
        from ronde.world.processes import end_with_parent

        end_with_parent()
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


def _asks(order: Order, shares: Shares) -> Iterator[Ask]:
    """The requests for an epoch's micro-batches, in order."""
    for share in shares():
        for low, high in share.micro:
            yield ask_of(order, share, low, high)


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
        self._tolerant = self._reader is not None and self._reader.skip
        self._tried = False
        self._warned = False
        self._threads: Threads | None = None
        self._loader: DataLoader[Any] | None = None
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
        if workers == 0:
            for name in ("prefetch_factor", "multiprocessing_context", "timeout"):
                options.pop(name, None)
        elif settings.prefetch is not None:
            options["prefetch_factor"] = settings.prefetch
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

    def _choose(self) -> None:
        from ronde.loader.choose_executor import choose_executor

        assert self._reader is not None
        workers = self.settings.num_workers
        self.executor, why = choose_executor(self._reader.given, self.settings.collate, workers)
        chosen = self.executor if self.executor == "none" else f"{self.executor} ({workers})"
        self._say(f"feed: executor {chosen}, chosen: {why}", False)

    def _draws(self, share: Share) -> bool:
        """Whether the first samples draw from the global generators, which threads share."""
        from ronde.introspect import preserve_state

        assert self._reader is not None
        low, high = share.micro[0]
        ask = ask_of(self.order, share, low, min(high, low + _TRIED_SAMPLES))
        with preserve_state(self._reader.dataset):  # its own generators too
            marks = Marks()
            with suppress(Exception):  # a training read names it
                self._reader.join(ask, self._reader.read(ask))
            return not marks.unmoved()

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

    def _pool(self) -> Threads:
        if self._threads is None:
            from ronde.loader.thread_workers import Threads

            settings = self.settings
            ahead = settings.num_workers * (settings.prefetch or _PREFETCH_BATCHES)
            # One compute thread each, as torch gives its loading processes.
            self._threads = Threads(settings.num_workers, ahead, settings.threads or 1)
        return self._threads

    def close(self) -> None:
        """End threads, processes and the last :meth:`read`; reading again restarts them."""
        self._end_reading()
        if self._threads is not None:
            self._threads.stop()
        self._loader = None

    def _end_reading(self) -> None:
        reading = self._reading() if self._reading is not None else None
        if reading is not None and inspect.getgeneratorstate(reading) != inspect.GEN_RUNNING:
            reading.close()

    # -- reading -----------------------------------------------------------------------

    def read(self, shares: Shares) -> Iterator[tuple[Share, list[Any]]]:
        """Yield each share with its micro-batches, in order.

        Args:
            shares: makes the shares of (the rest of) one epoch.

        Raises:
            SampleError: a sample cannot be used.
            FeedError: a loading process died, or more samples were skipped than may be.
        """
        self._end_reading()
        self.skipped = []
        if (
            not self._warned
            and self.settings.executor != "auto"
            and self.executor in ("threads", "processes")
        ):
            self._warned = True
            self._warn_of_what_is_open()
        if self.executor == "auto":
            self._choose()
        elif self.executor == "threads" and not self._tried:
            if (first := next(shares(), None)) is None:
                return iter(())
            self._tried = True
            if self._draws(first):
                self.executor = "none"
                self._say(_DRAWS, True)
        batches = self._read(shares)
        if self._probe is not None and self.executor != "processes":
            batches = self._probed(batches)
        batches = self._count_skipped(batches) if self._tolerant else batches
        self._reading = weakref.ref(cast("Generator[Any, None, None]", batches))
        return batches

    def _probed(
        self, batches: Iterator[tuple[Share, list[Any]]]
    ) -> Iterator[tuple[Share, list[Any]]]:
        self._probe.install()
        try:
            yield from batches
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

    def _read(self, shares: Shares) -> Iterator[tuple[Share, list[Any]]]:
        if self.executor == "threads" or self._direct:
            assert self._reader is not None
            for ask in self._facts_asks(shares):
                self.facts = (ask.ids, *self._reader.facts(ask))
        if self.executor == "threads":
            return self._read_in_threads(shares)
        if self._direct:
            return self._from_here(shares)
        if self._loader is None:
            self._make_loader()
        return self._from_loader(shares)

    def _from_here(self, shares: Shares) -> Iterator[tuple[Share, list[Any]]]:
        reader = self._reader
        assert reader is not None
        # Read in this process: what DataLoader would add is 15 µs a batch.
        for share in shares():
            yield share, [reader.micro(self.order, share, low, high) for low, high in share.micro]

    def _from_loader(self, shares: Shares) -> Iterator[tuple[Share, list[Any]]]:
        from ronde.loader.process_workers import batches as from_processes

        assert self._loader is not None
        facts_asks, order = self._facts_asks(shares), self.order
        self._asks.source = lambda: itertools.chain(facts_asks, _asks(order, shares))
        if self._stream is not None:
            asks = self._asks.source()
            self._stream.asks = list(asks) if self._loader.num_workers else asks
        results = from_processes(self._loader)
        try:
            for ask in facts_asks:
                self.facts = (ask.ids, *next(results))
            for share in shares():
                micros = list(itertools.islice(results, len(share.micro)))
                if len(micros) < len(share.micro):
                    raise RondeError("the loading processes ended with batches still to come")
                yield share, micros
                del micros
        finally:
            results.close()

    def _read_in_threads(self, shares: Shares) -> Iterator[tuple[Share, list[Any]]]:
        reader = self._reader
        assert reader is not None
        pin = self.settings.options.get("pin_memory") and torch.cuda.is_available()

        def work(ask: Ask) -> Any:
            # not Reader.batch: it seeds the global generators, which threads share
            batch = reader[ask] if reader.rows is not None else reader.join(ask, reader.read(ask))
            return _pinned(batch) if pin else batch

        results = self._pool().run(_asks(self.order, shares), work)
        try:
            for share in shares():
                yield share, list(itertools.islice(results, len(share.micro)))
        finally:
            results.close()

    # -- what is done to a batch -------------------------------------------------------

    def _count_skipped(
        self, batches: Iterator[tuple[Share, list[Any]]]
    ) -> Iterator[tuple[Share, list[Any]]]:
        """Remove the skipped samples' reports from the batches, and check their share."""
        most = self.settings.max_skipped * self.order.epoch_samples
        for share, micros in batches:
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
        """Run a pipeline's device steps, each micro-batch under the keys of its samples."""
        call = self.settings.finish
        if call is None:
            return micros
        if named_stages.listener is not None:
            call = named_stages.stage("finish")(call)
        finished = []
        for micro, (low, high) in zip(micros, share.micro, strict=True):
            first, last = read_positions(share, low, high)
            # Few steps on a device are random: the ids are looked up for the first that draws.
            ids = functools.cache(functools.partial(self._draw_ids, share.epoch, first, last))

            def key(j: int, ids: Callable[[], Sequence[int]] = ids) -> int:
                return key_of(self.seed, 7, share.epoch, ids()[j])

            with named_stages.sample_keys(last - first, key):
                finished.append(call(micro))
        return finished

    def _draw_ids(self, epoch: int, low: int, high: int) -> Sequence[int]:
        # A sampler may draw a sample twice in an epoch: its position tells the draws apart.
        if self.order.draw is not None:
            return range(low, high)
        ids: list[int] = self.order.ids(epoch, low, high).tolist()
        return ids


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
