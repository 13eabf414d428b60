"""What all sources share: samples of files, compact name lists, batches with a collated form."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from ronde.data.named_stages import stage
from ronde.world import ArgumentError

Ints = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """One file's contents.

    Attributes:
        data: its bytes, as they are stored.
        label: a class as an integer, a number, or what the labels' function gave; None where there
            are no labels.
        name: which file it is: its path below the folder, or its key in a tar.
    """

    data: bytes
    label: Any
    name: str


class Names(Sequence[str]):
    """Many strings in two arrays: a million names cost their letters plus 8 bytes each, and copy
    fast.

    Example:
        >>> names = Names.of(["a.jpg", "b.jpg"])
        >>> len(names), names[1]
        (2, 'b.jpg')
    """

    __slots__ = ("blob", "ends")

    def __init__(self, blob: bytes, ends: Ints) -> None:
        self.blob = blob
        self.ends = ends

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Build from any strings; file names may hold bytes that are not text."""
        raw = [name.encode("utf-8", "surrogateescape") for name in names]
        return cls(b"".join(raw), np.cumsum([len(r) for r in raw], dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Names]) -> Names:
        """Concatenate several."""
        starts = np.cumsum([0, *(len(p.blob) for p in parts)])
        ends = [p.ends + start for p, start in zip(parts, starts, strict=False)]
        return cls(
            b"".join(p.blob for p in parts),
            np.concatenate(ends) if ends else np.empty(0, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        if i < 0:
            i += len(self)
        if not 0 <= i < len(self):
            raise IndexError(i)
        start = int(self.ends[i - 1]) if i else 0
        return self.blob[start : int(self.ends[i])].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends.tolist():
            yield self.blob[start:end].decode("utf-8", "surrogateescape")
            start = end


class Row(dict[str, Any]):
    """One sample of named columns; many of them collate column by column."""


class Tuple(tuple[Any, ...]):
    """One sample of unnamed columns; collates like :class:`Row`."""

    __slots__ = ()


def _mapped(
    columns: Any, call: Callable[[Any], Any], named: Any = dict, unnamed: Any = tuple
) -> Any:
    """Nested columns with ``call`` of each, in these kinds of dicts and tuples."""
    if isinstance(columns, dict):
        return named((name, _mapped(c, call, named, unnamed)) for name, c in columns.items())
    if isinstance(columns, tuple):
        return unnamed(_mapped(c, call, named, unnamed) for c in columns)
    return call(columns)


class Batch(Sequence[Any]):
    """Samples of one batch as columns; rows are made only on access.

    torch's ``default_collate`` of it is :attr:`collated`, so neither Ronde nor a plain DataLoader
    visits rows.

    Args:
        columns: equally long columns: numpy arrays, tensors or lists; with names, or as tuples,
            which may be nested.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: dict[str, Any] | tuple[Any, ...]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        column: Any = self.columns
        while isinstance(column, dict | tuple):
            column = next(iter(column.values() if isinstance(column, dict) else column))
        return len(column)

    @overload
    def __getitem__(self, i: int) -> Any: ...
    @overload
    def __getitem__(self, i: slice) -> Batch: ...
    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return Batch(_mapped(self.columns, itemgetter(i)))
        if not -len(self) <= i < len(self):
            raise IndexError(i)  # what ends a loop over a sequence
        return _mapped(self.columns, itemgetter(i), Row, Tuple)

    @property
    def collated(self) -> Any:
        """The batch as the model takes it: tensors for numeric columns, else lists; a dict, or a
        list for unnamed columns.
        """
        return _mapped(self.columns, tensor_of, dict, list)


def tensor_of(values: Any) -> Any:
    """A numeric column as a tensor; anything else unchanged."""
    if isinstance(values, np.ndarray):
        if values.dtype == object or values.dtype.kind in "SUV":
            return values.tolist()
        if values.dtype.kind in "mM":  # torch has no dates, and knows one byte order
            return torch.from_numpy(values.astype(np.int64))
        if not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        return torch.from_numpy(values if values.flags.writeable else values.copy())
    return values


def _collate_batch(batch: Any, *, collate_fn_map: Any = None) -> Any:
    if isinstance(batch, Batch):
        return batch.collated
    # Rows that went through a step one by one, or were gathered from several batches.
    from torch.utils.data._utils.collate import collate

    def column(values: list[Any]) -> Any:
        missing = any(value is None for value in values)
        return values if missing else collate(values, collate_fn_map=collate_fn_map)

    if isinstance(batch[0], dict):
        return {name: column([row[name] for row in batch]) for name in batch[0]}
    return [column(list(values)) for values in zip(*batch, strict=True)]


default_collate_fn_map[Row] = _collate_batch
default_collate_fn_map[Tuple] = _collate_batch


class BaseSource(Dataset[Any]):
    """A source is a map-style Dataset too, ready for ``ronde.distribute``."""

    classes: list[str] | None = None
    """The names of the classes that labels count; None where labels are no classes."""

    blocks: tuple[int, ...] | None = None
    """Sizes of the runs of samples that are best read together, in order; None where any sample
    costs the same (see :class:`Order`).
    """

    window: int = 64
    """How many blocks may be open at once."""

    function: Callable[..., Any] | None = None
    """A function of the user's that makes a part of each sample as it is read."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, ids: Sequence[int]) -> Any:
        """The samples of these ids, in this order."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Changes with the samples, their number or their order."""
        raise NotImplementedError

    def files(self) -> Sequence[str]:
        """The paths and URLs of its files; empty if a sample is made of anything else too."""
        return ()

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, ids: Sequence[int]) -> Any:
        return stage("read")(self.read)(ids)


def check_ids(ids: Sequence[int], n: int) -> Ints:
    """Ids as an integer array, each in [0, n); otherwise IndexError or TypeError."""
    given = np.asarray(ids)
    if given.dtype.kind in "fc" and given.size:  # numpy would cut off what is behind the point
        raise TypeError(f"a sample index must be an integer, not {given.reshape(-1)[0].item()!r}")
    wanted = given.astype(np.int64).reshape(-1)
    if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= n):
        wrong = int(wanted.min()) if int(wanted.min()) < 0 else int(wanted.max())
        raise IndexError(f"sample {wrong} is not in [0, {n})")
    return wanted


def digest_values(*parts: Any) -> str:
    """16 letters, equal for equal values on every machine.

    Example:
        >>> digest_values("a", 1) == digest_values("a", 1), digest_values("a",
        ...     1) == digest_values("a1")
        (True, False)
    """
    digest = hashlib.sha256()
    for part in parts:
        raw = (
            part
            if isinstance(part, bytes)
            else part.tobytes()
            if isinstance(part, np.ndarray)
            else repr(part).encode("utf-8", "surrogateescape")
        )
        # with its length, which keeps ("a", "bc") and ("ab", "c") apart
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:16]


def classes_of(classes: Sequence[str] | None, like: Any, what: str) -> list[str] | None:
    """The classes named by ``classes=`` or ``like=``, in label order; None without either."""
    if like is not None:
        if classes is not None:
            raise ArgumentError(
                f"{what}: classes= and like= both name the classes: give one of them."
            )
        classes = getattr(getattr(like, "source", like), "classes", None)
        if classes is None:
            raise ArgumentError(
                f"{what}: like= takes a source, or a pipeline of one, with classes; this one has "
                "none."
            )
    if classes is None:
        return None
    names = [classes] if isinstance(classes, str) else list(classes)
    if (
        not names
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < len(names)
    ):
        raise ArgumentError(
            f"{what}: classes={classes!r}: expected the names of the classes, each of them once."
        )
    return names


def unknown_class(label: Any, classes: Sequence[str]) -> str:
    """The message for a label that is not a class."""
    shown = ", ".join(classes[:10]) + (", …" if len(classes) > 10 else "")
    return f"the label {label!r} is not among the {len(classes):,} given classes ({shown})"


def encode_labels(
    values: Sequence[Any], known: Sequence[str] | None = None
) -> tuple[Any, list[str] | None]:
    """Encode labels as class numbers.

    Args:
        known: the classes that texts are; None are those that occur, sorted.

    Raises:
        ArgumentError: one of them is no class that is known.

    Returns:
        ``(labels, classes)``: texts become integers that count a sorted list of classes; numbers
        become an array; anything else stays.

    Example:
        >>> labels, classes = encode_labels(["dog", "cat", "dog"])
        >>> labels.tolist(), classes
        ([1, 0, 1], ['cat', 'dog'])
    """
    names = frozenset(known or ())
    if (
        known is not None
        and (wrong := next((v for v in values if v not in names), None)) is not None
    ):
        raise ArgumentError(f"{unknown_class(wrong, known)}.")
    if values and all(isinstance(v, str) for v in values):
        classes = sorted(set(values)) if known is None else list(known)
        number = {name: i for i, name in enumerate(classes)}
        return np.fromiter((number[v] for v in values), dtype=np.int64, count=len(values)), classes
    kinds = set(map(type, values))
    numbers = (int, float, np.integer, np.floating)
    if kinds and bool not in kinds and all(issubclass(kind, numbers) for kind in kinds):
        whole = all(issubclass(kind, int | np.integer) for kind in kinds)
        return np.asarray(values, dtype=np.int64 if whole else np.float64), None
    return list(values), None


_WHOLE = re.compile(r"0|-?[1-9][0-9]*")
_DECIMAL = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)


def numbers_of(texts: Sequence[str]) -> Sequence[Any]:
    """Texts as integers if all are written as Python writes them, else floats if all are decimals,
    else unchanged.

    So ``007`` and ``7``, two different names, never become one number.

    Raises:
        ArgumentError: all are decimals but for some ``nan`` or ``inf``, which no training can take
            and which would make classes of numbers.

    Example:
        >>> numbers_of(["7", "10"]), numbers_of(["7", "1.5"]), numbers_of(["007", "10"])
        ([7, 10], [7.0, 1.5], ['007', '10'])
    """
    if all(_WHOLE.fullmatch(text) for text in texts):
        whole = [int(text) for text in texts]
        # Larger ones are in no tensor of integers, and as floating-point numbers some of them would
        # be the same.
        return whole if all(-(1 << 63) <= number < 1 << 63 for number in whole) else texts
    others = [text for text in texts if not _DECIMAL.fullmatch(text)]
    if not others:
        numbers = [float(text) for text in texts]
        return numbers if all(map(math.isfinite, numbers)) else texts
    if len(others) < len(texts) and all(_NO_NUMBER.fullmatch(text) for text in others):
        raise ArgumentError(
            f"{len(others):,} of {len(texts):,} labels are not numbers, such as {others[0]!r}; all "
            "others are numbers."
        )
    return texts
