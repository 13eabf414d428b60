"""Read micro-batches, each sample under its own random key, and name bad samples in errors."""

from __future__ import annotations

import copy
import functools
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ronde.data import (
    Bad,
    Order,
    key_of,
    named_stages,
    sample_key,
    sample_keys,
    stage,
)
from ronde.introspect import Marks, restore_states, seed_all, states
from ronde.plan.batch import Share
from ronde.world import ArgumentError, RondeError, SampleError
from ronde.world.tensors import tensors_in

if TYPE_CHECKING:
    from ronde.data import Pipeline
    from ronde.loader.sample_facts import Facts
    from ronde.loader.settings import LoaderSettings

_STAND_IN_TRIES = 16  # so many bad ones in a row are no chance
_WATCHED_SAMPLES = 64  # that draw nothing, before a data set is believed to draw nothing
_JUDGED_SAMPLES = 5  # whose most common shape is that of all


@dataclass(frozen=True, slots=True)
class Ask:
    """A micro-batch to read, or part of one: consecutive positions of an epoch.

    Attributes:
        start: the first position.
        ids: the indices that stand there.
        upto: the end of the global batch, if this is its last part, else 0. Every worker reads a
            stream up to there.
        facts: no batch is wanted, but what its samples are, see :meth:`Reader.facts`.
    """

    epoch: int
    start: int
    ids: list[int]
    upto: int = 0
    facts: bool = False

    def part(self, low: int, high: int) -> Ask:
        """The positions from ``low`` to ``high`` of this one."""
        return Ask(self.epoch, self.start + low, self.ids[low:high])


def ask_of(order: Order, share: Share, low: int, high: int) -> Ask:
    """The request for positions ``low`` to ``high`` of a share."""
    upto = share.stop if (low, high) == share.micro[-1] else 0
    low, high = read_positions(share, low, high)
    return Ask(share.epoch, low, order.ids(share.epoch, low, high).tolist(), upto)


def read_positions(share: Share, low: int, high: int) -> tuple[int, int]:
    """An empty share still yields a batch, so that a script's own lines run: the first sample of
    the global batch, which is weighted with zero.
    """
    return (low, high) if low < high else (share.start, share.start + 1)


@dataclass(frozen=True)
class CarriedError:
    """An error of a loading process, sent so that it keeps its type, text, and traceback."""

    kind: type[RondeError]
    text: str
    traceback: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: RondeError) -> CarriedError:
        """Wrap an error caught in the loading process."""
        return cls(
            type(error),
            str(error),
            "".join(traceback.format_exception(error)),
            tuple(getattr(error, "__notes__", ())),
        )

    def error(self) -> RondeError:
        """Rebuild the error in the training process."""
        error = self.kind(self.text)
        for note in self.notes:
            error.add_note(note)
        error.__cause__ = _InLoader(self.traceback)
        return error


class _InLoader(Exception):
    """A loading process's traceback, shown as the cause of an error."""

    def __str__(self) -> str:
        return f"in a loading process:\n\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A replacement sample, and the index it replaces."""

    sample: Any
    bad: Bad


def picklable_error(error: Exception) -> Exception:
    """The error, or an equivalent that can be pickled.

    torch pickles errors in a thread: a failure there sends nothing, and the training would wait
    forever.
    """
    kind = type(error)
    try:
        ForkingPickler.dumps(kind)
    except Exception:  # a local class, or its own __reduce__ failed
        equivalent = RuntimeError(f"{kind.__module__}.{kind.__qualname__}: {error}")
        for note in getattr(error, "__notes__", ()):
            equivalent.add_note(note)
        equivalent.__cause__ = error
        return equivalent
    return error


def _form(value: Any) -> Any:
    """What samples must share to be stacked."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype).removeprefix("torch."))
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype))
    if isinstance(value, dict):
        return tuple((k, _form(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(_form(v) for v in value)
    return type(value).__name__


def _show_form(form: Any) -> str:
    """A readable form: ``(3, 32, 32) float32``."""
    match form:
        case (tuple(shape), str(dtype)):
            return f"{list(shape)} {dtype}"
        case tuple():
            return "(" + ", ".join(_show_form(f) for f in form) + ")"
    return str(form)


def pipeline_in(dataset: Any) -> Pipeline | None:
    """The pipeline a dataset is, or wraps."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset if _is_pipeline(dataset) else None


def _is_pipeline(dataset: Any) -> TypeGuard[Pipeline]:
    """Without importing pipelines, which few trainings have."""
    module = sys.modules.get("ronde.data.pipeline")
    return module is not None and isinstance(dataset, module.Pipeline)


def other_classes(train: Any, test: Any) -> str | None:
    """How two datasets' class names disagree about a label; None if they agree or lack ``classes``.

    Example:
        >>> from types import SimpleNamespace as Data
        >>> other_classes(Data(classes=["ant", "bee", "cat"]), Data(classes=["ant", "cat"]))
        "label 1 is 'cat' here, and 'bee' in the training data"
        >>> other_classes(Data(classes=["ant", "bee", "cat"]), Data(classes=["ant", "bee"]))
    """
    known, theirs = _classes(train), _classes(test)
    if known is None or theirs is None:
        return None
    for label, name in enumerate(theirs):
        if label >= len(known):
            return (
                f"label {label} is {name!r} here, and the training data have {len(known)} classes"
            )
        if known[label] != name:
            return f"label {label} is {name!r} here, and {known[label]!r} in the training data"
    return None


def _classes(dataset: Any) -> list[Any] | None:
    for _ in range(8):  # as deep as wrappers go
        try:
            names = getattr(dataset, "classes", None)
            within = getattr(dataset, "source", None), getattr(dataset, "dataset", None)
        except Exception:  # a property of the script's own that cannot be read now
            return None
        if isinstance(names, list | tuple) and all(isinstance(name, str | int) for name in names):
            return list(names)
        dataset = next((each for each in within if each is not None), None)
    return None


class Reader(Dataset[Any]):
    """Reads an :class:`Ask` of a map-style dataset as a collated batch.

    With ``on_error="skip"``, returns ``(batch, [(id, error text), …])``: training replaces a bad
    sample, evaluation drops it. ``given`` is the dataset; a probe may wrap ``dataset``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        settings: LoaderSettings,
        order: Order,
        seed: int,
        evaluate: bool = False,
    ) -> None:
        self.dataset = self.given = dataset
        self.seed = seed
        self.evaluate = evaluate
        self.skip = settings.on_error == "skip"
        self.by_position = order.draw is not None
        self.order = order if self.skip and order.draw is not None else None
        self.n = order.n
        collate = settings.collate
        self.stacks = collate is default_collate
        self.collate = collate
        self._draws, self._quiet = False, 0  # whether it draws; samples in a row that did not
        # One indexing operation per tensor gives the same bits as collating row by row.
        self.rows = dataset.tensors if type(dataset) is TensorDataset and self.stacks else None
        self.one_by_one = False
        self._usual: Any = None
        self.probe = settings.probe
        if self.probe is not None:  # last: the lines above inspect the bare dataset
            self.dataset, self.collate = self.probe.attach(dataset, self.collate)

    @property
    def many(self) -> Callable[[Sequence[int]], Any] | None:
        """The dataset's ``__getitems__``, if it has one."""
        return getattr(self.dataset, "__getitems__", None)

    # -- one micro-batch ---------------------------------------------------------------

    def __getitem__(self, ask: Ask) -> Any:
        if ask.facts:
            return self.facts(ask)
        if self.probe is None:
            return self._one(ask)
        return self.probe.make(self._one, ask, len(ask.ids))

    def micro(self, order: Order, share: Share, low: int, high: int) -> Any:
        """A micro-batch of a share, read here: rows of tensors without a request for them."""
        if self.rows is None or self.probe is not None or named_stages.listener is not None:
            return self[ask_of(order, share, low, high)]
        return self._gather(order.ids(share.epoch, *read_positions(share, low, high)))

    def _gather(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Any:
        assert self.rows is not None
        index = torch.from_numpy(np.array(ids, dtype=np.int64))  # orders are read-only
        # On a CPU, index_select takes half the time of indexing.
        return [rows.index_select(0, index) if rows.is_cpu else rows[index] for rows in self.rows]

    def _one(self, ask: Ask) -> Any:
        if self.rows is not None:
            gather = self._gather
            return (gather if named_stages.listener is None else stage("collate")(gather))(ask.ids)
        if get_worker_info() is None:
            return self.batch(ask)
        try:
            return self.batch(ask)
        except Exception as error:
            sent = picklable_error(error)
            if isinstance(sent, RondeError):
                return CarriedError.of(sent)
            if sent is error:
                raise
            raise sent  # noqa: B904  # with its cause

    def batch(self, ask: Ask) -> Any:
        """Read and collate a batch, each sample under its own key: what it draws is a function of
        (seed, epoch, sample), in whichever process it is read.
        """
        # Keys cost about 10 µs a sample and 200 µs a batch, more than reading rows of tensors. A
        # data set that draws nothing is read without them, under one cheap check a batch.
        if not self._draws and self._quiet >= _WATCHED_SAMPLES:
            marks = Marks()
            batch = self.join(ask, self.read(ask))
            if marks.unmoved():
                return batch
            marks.put_back()
            self._draws = True  # rarely: this batch again, and all others, under keys
        keys = self._keys(ask)
        before = states()  # the reader may share its process, and its generators, with the model
        try:
            samples = [
                self._keyed(key_of(self.seed, 1, ask.epoch, k), self._read_one, ask.part(j, j + 1))
                for j, k in enumerate(keys)
            ]
            join = functools.partial(self.join, ask)
            return self._keyed(key_of(self.seed, 2, ask.epoch, keys[0]), join, samples)
        finally:
            restore_states(before)

    def _keyed(self, key: int, call: Callable[[Any], Any], argument: Any) -> Any:
        seed_all(key)
        if self._draws:
            return call(argument)
        marks = Marks()
        result = call(argument)
        if marks.unmoved():
            self._quiet += 1
        else:
            self._draws = True
        return result

    def _read_one(self, ask: Ask) -> Any:
        return self.read(ask)[0]

    def facts(self, ask: Ask) -> tuple[list[Facts | None], bool]:
        """What each sample is, to compare it with other ranks' (None if it cannot be read, or has
        another form the second time), and whether the collate function makes a row from more than
        its own sample. Leaves no trace in the data set's generators and files.
        """
        from ronde.introspect import preserve_state
        from ronde.loader.sample_facts import facts_of

        facts: list[Facts | None] = []
        samples: list[Any] = []
        for j in range(len(ask.ids)):
            part, both = ask.part(j, j + 1), []
            with suppress(Exception), preserve_state(self.given):  # a training read names it
                for _ in range(2):
                    seed_all(key_of(self.seed, 1, ask.epoch, self._keys(part)[0]))
                    with self.keys(part, 1):
                        sample = self.given[ask.ids[j]]
                        both.append(facts_of(sample))
                samples.append(sample)
            same = len(both) == 2 and len(both[0]) == len(both[1])
            facts.append(
                [a if repr(a) == repr(b) else None for a, b in zip(*both, strict=True)]
                if same
                else None
            )
        mixes = False
        with suppress(Exception), preserve_state([self.given, self.collate]):
            whole = len(samples) > 2 and all(sample is not None for sample in samples)
            mixes = whole and not self.stacks and self._mixes(samples)
        return facts, mixes

    def _mixes(self, samples: list[Any]) -> bool:
        half, made = len(samples) // 2, []
        for some in (samples, samples[:half]):
            seed_all(0)
            made.append(tensors_in(self.collate(copy.deepcopy(some))))
        return any(
            len(one) == len(samples)
            and len(two) == half
            and one.shape[1:] == two.shape[1:]
            and not torch.allclose(one[:half].double(), two.double(), equal_nan=True)
            for one, two in zip(*made, strict=True)
            if one.dim() and two.dim()
        )

    def _keys(self, ask: Ask) -> Sequence[int]:
        # A sampler may draw a sample twice in an epoch; each draw is augmented differently.
        return range(ask.start, ask.start + len(ask.ids)) if self.by_position else ask.ids

    def keys(self, ask: Ask, purpose: int) -> sample_keys:
        """The samples' keys, for one purpose."""
        seed, epoch, keys = self.seed, ask.epoch, self._keys(ask)
        return sample_keys(len(ask.ids), lambda j: key_of(seed, purpose, epoch, keys[j]))

    def read(self, ask: Ask) -> Any:
        """The samples, not collated. Thread-safe if the dataset is."""
        ids = ask.ids
        with self.keys(ask, 1) as at:
            if self.skip:
                return self._tolerant(ask, at)
            many = self.many
            if many is not None and not (self.one_by_one and len(ids) > 1):
                try:
                    samples = many(ids)
                except StopIteration as error:
                    raise self._stop_iteration(ids) from error
                except Exception as error:
                    self._note(error, ids)
                    raise
                if not at.unclear:
                    return samples
                self.one_by_one = True  # rng() was called without a current sample
            if many is not None:
                return [self._read_one(ask.part(j, j + 1)) for j in range(len(ids))]
            samples = []
            dataset: Any = self.dataset
            i = -1
            try:
                for j, i in enumerate(ids):
                    at.at = j
                    samples.append(dataset[i])
            except StopIteration as error:
                raise self._stop_iteration([i]) from error
            except Exception as error:
                self._note(error, [i])
                raise
            return samples

    def _note(self, error: Exception, ids: Sequence[int]) -> None:
        if not isinstance(error, SampleError):
            shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
            error.add_note(
                f"while sample{'s' if len(ids) > 1 else ''} {shown} of the data set "
                f"{'were' if len(ids) > 1 else 'was'} read"
            )

    def _stop_iteration(self, ids: Sequence[int]) -> RuntimeError:
        """An error instead of StopIteration, which torch and generators take for a normal end."""
        error = RuntimeError("the data set, or its collate function, raised StopIteration")
        self._note(error, ids)
        return error

    def join(self, ask: Ask, samples: Any) -> Any:
        """Collate samples from :meth:`read`."""
        skipped: list[tuple[int, str]] = []
        if self.skip and type(samples) is list:
            good: list[Any] = []
            for one in samples:
                if type(one) is Bad:
                    skipped.append((one.id, one.text))
                    continue
                if type(one) is _Replacement:
                    skipped.append((one.bad.id, one.bad.text))
                    one = one.sample
                good.append(one)
            # if no sample is left, one replacement gives the batch a shape; it has no weight
            samples = good or [self._replace(ask, 0)]
        try:
            with sample_keys(1, lambda _: key_of(self.seed, 2, ask.epoch, self._keys(ask)[0])):
                collate = self.collate
                if named_stages.listener is not None:
                    collate = stage("collate")(collate)
                batch = collate(samples)
        except StopIteration as error:
            raise self._stop_iteration(ask.ids) from error
        except Exception as error:
            self._name_refused(error, ask, samples)
            raise
        return (batch, skipped) if self.skip else batch

    def _name_refused(self, error: Exception, ask: Ask, samples: Any) -> None:
        """Name the samples a collate function refused."""
        if (
            isinstance(error, RondeError)
            or type(samples) is not list
            or len(samples) != len(ask.ids)
        ):
            return
        forms = [_form(s) for s in samples]
        usual = Counter(forms).most_common(1)[0][0]
        odd = [j for j, form in enumerate(forms) if form != usual]
        pipeline = pipeline_in(self.dataset)
        if not odd or len(odd) == len(samples):
            self._note(error, ask.ids)
            return
        text = (
            f"{self._describe(ask.ids[odd[0]])}, stage collate: it is "
            f"{_show_form(forms[odd[0]])}, where the others are "
            f"{_show_form(usual)}"
        )
        if pipeline is not None:
            raise SampleError(f"{text}: {error}") from error
        error.add_note(text)

    # -- bad samples -------------------------------------------------------------------

    def _attempt(self, ids: Sequence[int]) -> Any:
        """Samples, with a :class:`Bad` for each that fails."""
        dataset: Any = self.dataset
        if _is_pipeline(dataset):
            return dataset.attempt(ids)
        keys = named_stages.current_keys()
        samples = []
        for j, i in enumerate(ids):
            if keys is not None and keys.n == len(ids):
                keys.at = j
            try:
                samples.append(dataset[i])
            except ArgumentError:
                raise
            except Exception as error:
                samples.append(Bad.of(int(i), None, "read", error))
        return samples

    def _tolerant(self, ask: Ask, at: sample_keys) -> Any:
        usual = self._common_form() if self.stacks else None
        samples = None
        if not self.one_by_one or len(ask.ids) == 1:
            samples = self._attempt(ask.ids)
            if at.unclear:
                self.one_by_one = True
                samples = None
        if samples is None:
            return [self._read_one(ask.part(j, j + 1)) for j in range(len(ask.ids))]
        if type(samples) is not list:
            return samples
        for j, one in enumerate(samples):
            bad = one if type(one) is Bad else self._unusual(ask.ids[j], one, usual)
            if bad is not None:
                samples[j] = bad if self.evaluate else _Replacement(self._replace(ask, j), bad)
        return samples

    def _unusual(self, i: int, sample: Any, usual: Any) -> Bad | None:
        if usual is None or (form := _form(sample)) == usual:
            return None
        shown, others = _show_form(form), _show_form(usual)
        return Bad(i, f"{self._describe(i)}: it is {shown}, where others are {others}")

    def _describe(self, i: int) -> str:
        """``sample 3 (photos/3.jpg)``; the name only where the dataset knows names."""
        name = self.dataset.name(i) if _is_pipeline(self.dataset) else None
        return f"sample {i}{f' ({name})' if name else ''}"

    def _common_form(self) -> Any:
        """The most common form among the first few samples; the same for every reader."""
        if self._usual is None:
            before = states()
            try:
                with sample_key(key_of(self.seed, 8)):
                    forms: Counter[Any] = Counter()
                    for i in range(self.n):
                        one = self._attempt([i])
                        if type(one) is list and type(one[0]) is not Bad:
                            forms[_form(one[0])] += 1
                        if sum(forms.values()) == _JUDGED_SAMPLES or i >= 8 * _JUDGED_SAMPLES:
                            break
                self._usual = forms.most_common(1)[0][0] if forms else ()
            finally:
                restore_states(before)
        return self._usual or None

    def _replace(self, ask: Ask, j: int) -> Any:
        """A replacement for sample j, a function of seed, epoch and that sample."""
        key, reasons = self._keys(ask)[j], []
        usual = self._common_form() if self.stacks else None
        for attempt in range(_STAND_IN_TRIES):
            draw = key_of(self.seed, 6, ask.epoch, key, attempt)
            if self.order is None:
                i = draw % self.n
            else:  # only what the script's sampler has drawn
                at = draw % self.order.samples_in(ask.epoch)
                i = int(self.order.ids(ask.epoch, at, at + 1)[0])
            with sample_key(key_of(self.seed, 1, ask.epoch, key, attempt + 1)):
                one = self._attempt([i])[0]
            bad = one if type(one) is Bad else self._unusual(i, one, usual)
            if bad is None:
                return one
            reasons.append(bad.text)
        raise SampleError(
            f"{_STAND_IN_TRIES} samples in a row cannot be used, so nothing can replace sample "
            f"{ask.ids[j]}; the last one: {reasons[-1]}"
        )


class StreamReader(IterableDataset[Any]):
    """Reads an iterable dataset: every worker reads all of it and keeps its own positions."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        collate: Callable[[list[Any]], Any],
        seed: int,
        length: int,
    ) -> None:
        self.dataset = self.given = dataset
        self.collate = collate
        self.seed = seed
        self.length = length
        self.asks: list[Ask] | Iterator[Ask] = []

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise RuntimeError("an IterableDataset allows at most one loading process")
        stream = iter(self.dataset)
        position = 0
        sample: Any = None
        for ask in self.asks:
            samples: list[Any] = []
            marks = Marks() if ask.facts else None
            for wanted in ask.ids:
                # Padding repeats the position just read, so the last sample serves again.
                while position <= wanted:
                    sample, position = self._next(stream, position), position + 1
                samples.append(sample)
            if marks is not None:  # it cannot be read twice: one that draws is left alone
                from ronde.loader.sample_facts import facts_of

                still = marks.unmoved()
                yield [facts_of(each) if still else None for each in samples], False
                continue
            # All workers stop at the same place, for streams that continue in the next epoch.
            while position < ask.upto:
                sample, position = self._next(stream, position), position + 1
            yield self.collate(samples)

    def _next(self, stream: Iterator[Any], position: int) -> Any:
        try:
            return next(stream)
        except StopIteration:
            raise ArgumentError(
                f"the dataset reports a length of {self.length}, but it ended after {position} "
                "samples"
            ) from None
        except Exception as error:
            if get_worker_info() is None:
                raise
            raise picklable_error(error)  # noqa: B904  (its cause is in it)
