"""A folder of files, one sample each."""

from __future__ import annotations

import csv
import fnmatch
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ronde.data.sources.base import (
    BaseSource,
    Names,
    Sample,
    check_ids,
    classes_of,
    digest_values,
    encode_labels,
    numbers_of,
)
from ronde.data.sources.byte_ranges import ByteRange, Store
from ronde.world import ArgumentError
from ronde.world.paths import is_remote, local_path

Labels = str | os.PathLike[str] | Callable[[str], Any]


class FolderSource(BaseSource):
    """See :func:`folder`.

    Attributes:
        path: the folder.
        names: paths of the files below it, sorted.
        labels: one for each file, as an array or a list; None where there are none.
        classes: the class names that labels count, or None.
        unlabelled: files that were found and are not in the CSV of labels: they are no samples.
    """

    def __init__(
        self,
        path: str,
        names: Names,
        labels: Any,
        classes: list[str] | None,
        store: Store,
        unlabelled: int = 0,
    ) -> None:
        self.path = path
        self.names = names
        self.labels = labels
        self.classes = classes
        self.unlabelled = unlabelled
        self._store = store
        self._sizes: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"folder({self.path!r}): {len(self):,} files" + (
            f", {len(self.classes)} classes" if self.classes else ""
        )

    def file(self, i: int) -> str:
        """The path or URL of sample ``i``."""
        return f"{self.path}/{self.names[i]}"

    def files(self) -> list[str]:
        """The files, or the shards of a pack."""
        return list(dict.fromkeys(map(self.file, range(len(self)))))

    def name(self, i: int) -> str:
        """Sample ``i``'s path within the folder."""
        return self.names[i]

    def label(self, i: int) -> Any:
        """The label of sample ``i``."""
        if self.labels is None:
            return None
        label_of = self.labels[i]
        return label_of.item() if isinstance(label_of, np.generic) else label_of

    def read(self, ids: Sequence[int]) -> list[Sample]:
        """The samples of these ids, in this order.

        Raises:
            SampleError: a file cannot be read; it is named.
        """
        wanted = check_ids(ids, len(self)).tolist()
        data = self._store.read([ByteRange(self.file(i)) for i in wanted])
        return [Sample(d, self.label(i), self.names[i]) for d, i in zip(data, wanted, strict=True)]

    @property
    def sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes of each file, read on first use."""
        if self._sizes is None:
            self._sizes = np.fromiter(
                (self._store.size(self.file(i)) for i in range(len(self))),
                dtype=np.int64,
                count=len(self),
            )
        return self._sizes

    @property
    def fingerprint(self) -> str:
        """Covers names, sizes and labels, not the location; a pack of it has the same one."""
        if self._fingerprint is None:
            self._fingerprint = digest_values(
                "files",
                self.names.blob,
                self.names.ends,
                self.sizes,
                *_describe(self.labels),
                self.classes,
            )
        return self._fingerprint


def _describe(labels: Any) -> tuple[Any, ...]:
    return (labels.dtype.str, labels) if isinstance(labels, np.ndarray) else (labels,)


def folder(
    path: str | os.PathLike[str],
    *,
    labels: Labels | None = "folder",
    suffixes: str | Sequence[str] | None = None,
    pattern: str | None = None,
    file_column: str | int = 0,
    label_column: str | int = 1,
    classes: Sequence[str] | None = None,
    like: Any = None,
    options: Mapping[str, Any] | None = None,
) -> FolderSource:
    """Files below a folder, sorted by name; each is a :class:`Sample` of bytes, label and name.

    Hidden files, hidden folders and link cycles are skipped. Files are listed once, at this call.

    Args:
        path: the folder, or a URL that fsspec knows (``s3://bucket/train``; extra ``remote``).
        labels: ``"folder"`` takes the first folder below ``path`` as the class, as torchvision's
            ImageFolder does; ``"none"`` or None gives none; the path of a CSV file with a header
            looks each file up in it, and the CSV then chooses: files that are not in it are left
                out; a function is called with each file's path below ``path``.
        suffixes: endings that are taken, as ``".jpg"`` or ``(".jpg", ".png")``, in capitals or not.
            None takes every file.
        pattern: a glob that the path below ``path`` must match, as ``"*/train_*.jpg"``; ``*`` also
            matches ``/``.
        file_column: of the CSV: name or number of the column that holds the file's path below
            ``path``, or its name without ending.
        label_column: likewise the label's. Numbers stay where all are numbers, written as ``7``,
            ``-1.5`` or ``2e-3``; otherwise every text is the name of a class, so ``007`` and ``7``
            are two of them. An empty one is an error.
        classes: the names that labels count from 0. None are those that occur, sorted: in a test
            set that lacks one of them the others would have other numbers.
        like: another source, or a pipeline of one, whose classes count here too: the training
            set's, for a test set.
        options: for fsspec.

    Raises:
        ArgumentError: no such folder, no file, a file without a class folder, a class folder
            without files, a label that is none of the classes given, a CSV that does not fit; it
            says which.

    Example:
        >>> import tempfile, pathlib
        >>> here = pathlib.Path(tempfile.mkdtemp())
        >>> for name in ("cat/1.txt", "dog/2.txt"):
        ...     (here / name).parent.mkdir()
        ...     _ = (here / name).write_text(name)
        >>> files = folder(here)
        >>> files.classes, files[1]
        (['cat', 'dog'], Sample(data=b'dog/2.txt', label=1, name='dog/2.txt'))
    """
    root = (os.fspath(path) if is_remote(os.fspath(path)) else local_path(path)).rstrip("/") or "/"
    store = Store(options)
    if isinstance(suffixes, str):  # it would be one ending for each of its letters
        suffixes = (suffixes,)
    endings = (
        tuple(("." + s.lstrip(".")).lower() for s in suffixes) if suffixes is not None else None
    )
    listed = _listed_remote(root, store) if is_remote(root) else _listed(root)
    names = sorted(
        name
        for name in listed
        if (endings is None or name.lower().endswith(endings))
        and (pattern is None or fnmatch.fnmatchcase(name, pattern))
    )
    if not names:
        what = f" ending in {', '.join(endings)}" if endings is not None else ""
        what += f" matching {pattern!r}" if pattern is not None else ""
        raise ArgumentError(f"the folder {root} holds no file{what} ({len(listed):,} others).")
    values: Any = None
    known = classes_of(classes, like, "feed.folder")
    counted: list[str] | None = None
    unlabelled = 0
    if callable(labels):
        values, counted = encode_labels([labels(name) for name in names], known)
    elif labels == "folder":
        named = [_class_of(name, root) for name in names]
        if known is None and pattern is None and not is_remote(root):
            _none_is_empty(root, set(named), endings)
        try:
            values, counted = encode_labels(named, known)
        except ArgumentError as error:
            raise ArgumentError(f"the folder {root}: {error}") from None
    elif labels is not None and labels != "none":
        table = os.fspath(labels)
        given = _from_csv(table, file_column, label_column, names, store)
        unlabelled = len(names) - len(given)
        names = sorted(given)
        try:
            texts = [given[name] for name in names]
            values, counted = encode_labels(numbers_of(texts) if known is None else texts, known)
        except ArgumentError as error:
            raise ArgumentError(f"{table}: {error}") from None
    source = FolderSource(root, Names.of(names), values, counted, store, unlabelled)
    sizes = [listed[name] for name in names]
    if all(size is not None for size in sizes):
        source._sizes = np.asarray(sizes, dtype=np.int64)
    return source


def _none_is_empty(root: str, classes: set[str], endings: tuple[str, ...] | None) -> None:
    """Refuse empty class folders, which would shift the numbers of later classes."""
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if (
                entry.name in classes
                or entry.name.startswith(".")
                or not entry.is_dir()
                or os.path.samefile(root, entry)  # noqa: PTH121
            ):
                continue
            what = f" ending in {', '.join(endings)}" if endings is not None else ""
            raise ArgumentError(
                f"the class folder {root}/{entry.name} holds no file{what}. Remove it, or "
                "name the classes: like= the training set, or classes=[…]."
            )


def _listed(root: str) -> dict[str, int | None]:
    """Files below a local folder, without sizes: each would cost a system call."""
    if not os.path.isdir(root):  # noqa: PTH112
        kind = "is a file" if os.path.exists(root) else "does not exist"  # noqa: PTH110
        raise ArgumentError(f"the folder {root} {kind}.")
    sizes: dict[str, int | None] = {}
    info = os.stat(root)  # noqa: PTH116
    # Each folder with itself and all those above it: a link may lead back to any of them.
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [
        ("", frozenset({(info.st_dev, info.st_ino)}))
    ]
    while waiting:
        below, above = waiting.pop()
        try:
            with os.scandir(f"{root}/{below}") as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():  # an error for a link to itself
                        info = entry.stat()
                        mark = (info.st_dev, info.st_ino)
                        if mark not in above:
                            waiting.append((f"{below}{entry.name}/", above | {mark}))
                    elif entry.is_file() or entry.is_symlink():
                        # A link to nothing fails when read; it is not silently left out.
                        sizes[below + entry.name] = None
        except OSError as error:
            place = str(error.filename or f"{root}/{below}").rstrip("/")
            raise ArgumentError(f"{place} cannot be listed: {error.strerror}.") from error
    return sizes


def _listed_remote(root: str, store: Store) -> dict[str, int | None]:
    fs = store.file_system(root)
    base = str(fs._strip_protocol(root)).rstrip("/")
    try:
        entries = fs.find(base, detail=True)
    except Exception as error:  # every protocol has errors of its own
        raise ArgumentError(
            f"the folder {root} cannot be listed: {type(error).__name__}: {error}"
        ) from error
    sizes: dict[str, int | None] = {}
    for path, info in entries.items():
        name = str(path)[len(base) :].lstrip("/")
        if name and not any(part.startswith(".") for part in name.split("/")):
            size = info.get("size")
            sizes[name] = int(size) if size is not None else None
    return sizes


def _class_of(name: str, root: str) -> str:
    first, slash, _ = name.partition("/")
    if not slash:
        raise ArgumentError(
            f"{root}/{name} is in no class folder. Use one folder per class, or pass "
            'labels="none", a CSV file, or a function of the path.'
        )
    return first


def _from_csv(
    table: str, file_column: str | int, label_column: str | int, names: list[str], store: Store
) -> dict[str, str]:
    raw = store.whole(table) if is_remote(table) else Store().whole(local_path(table))
    if raw is None:
        raise ArgumentError(
            f'labels={table!r}: no such file. Pass "folder", "none", a CSV file or a function.'
        )
    try:
        rows = list(csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"labels={table!r} is not a CSV file in UTF-8: {error}.") from None
    if len(rows) < 2:
        raise ArgumentError(
            f"labels={table!r} needs a header and one line per file; it has {len(rows)}."
        )
    header = rows[0]

    def column(which: str | int, argument: str) -> int:
        if isinstance(which, str):
            if which not in header:
                raise ArgumentError(
                    f"{argument}={which!r} is not a column of {table}: choose among "
                    f"{', '.join(header)}."
                )
            return header.index(which)
        if not 0 <= which < len(header):
            raise ArgumentError(f"{argument}={which}: {table} has {len(header)} columns.")
        return which

    files, labels = column(file_column, "file_column"), column(label_column, "label_column")
    known = set(names)
    if len(header) > files and header[files].strip().removeprefix("./") in known:
        raise ArgumentError(
            f"labels={table!r} needs a header line: its first line names a file, "
            f"{header[files]!r}, which would be skipped."
        )
    stems: dict[str, list[str]] = {}
    for name in names:
        stems.setdefault(os.path.splitext(name)[0], []).append(name)  # noqa: PTH122
    given: dict[str, str] = {}
    for number, row in enumerate(rows[1:], start=2):
        if not row:
            continue
        if len(row) <= max(files, labels):
            raise ArgumentError(
                f"{table}, line {number}: {len(row)} columns, expected {len(header)}."
            )
        name = row[files].strip().removeprefix("./")
        if name not in known:
            match = stems.get(name, [])
            if len(match) != 1:
                choices = f"could be any of {', '.join(match[:3])}"
                what = choices if match else "is not a file of the folder"
                raise ArgumentError(f"{table}, line {number}: {name!r} {what}.")
            name = match[0]
        if name in given:
            raise ArgumentError(f"{table}, line {number}: {name!r} appears a second time.")
        label = row[labels].strip()
        if not label:  # one of them would make classes of a column of numbers
            raise ArgumentError(
                f"{table}, line {number}: {name!r} has no label. Add one, or delete the line."
            )
        given[name] = label
    return given
