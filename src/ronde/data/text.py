"""Text as training data: tokens of all documents on disk, cut into samples of equal length."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from ronde.data.build_once import build_once, cache_root, identity, missing_message
from ronde.data.pipeline import Pipeline
from ronde.data.sources.base import BaseSource, Batch, check_ids, digest_values
from ronde.introspect import fingerprint as describe
from ronde.world import ArgumentError, RondeError, SampleError
from ronde.world.paths import files_of, need

_CHUNK = 16 << 20
_VERSION = 2
IGNORED = -100
"""What targets hold where there is no token: ``cross_entropy`` leaves it out."""

Tokens = npt.NDArray[Any]


class _Bytes:
    """Byte tokens."""

    name = "bytes"
    size = 256

    def __call__(self, piece: str | bytes) -> Tokens:
        return np.frombuffer(
            piece if isinstance(piece, bytes) else piece.encode("utf-8"), dtype=np.uint8
        )


class _Characters:
    """One token per distinct character, sorted."""

    name = "chars"

    def __init__(self, points: Tokens) -> None:
        self.points = points
        self.size = len(points)

    def __call__(self, piece: str) -> Tokens:
        return np.searchsorted(self.points, _points(piece))


def _points(piece: str) -> Tokens:
    return np.frombuffer(piece.encode("utf-32-le"), dtype=np.uint32)


class _Given:
    """A user's tokenizer: a function, or an object with ``encode``."""

    def __init__(self, tokenizer: Any, name: str | None) -> None:
        self.tokenizer = tokenizer
        self._encode: Callable[[str], Any] = (
            tokenizer.encode if hasattr(tokenizer, "encode") else tokenizer
        )
        self.size: int | None = None
        if hasattr(tokenizer, "get_vocab_size"):
            self.size = int(tokenizer.get_vocab_size())
        elif hasattr(tokenizer, "__len__"):
            self.size = len(tokenizer)
        self.name = _describe(tokenizer) if name is None else f"named {name}"
        self._settled = name is not None

    def __call__(self, piece: str) -> Any:
        found = self._tokens(piece)
        if piece and not self._settled:
            # One that keeps what it has done (a cache of words, a counter) would have another name
            # the next time, or on another rank.
            self._settled = True
            if _describe(self.tokenizer) != self.name:
                raise ArgumentError(
                    "feed.text: the tokenizer changes with its first text, like a counter: "
                    f"{_NAME_IT}."
                )
        return found

    def _tokens(self, piece: str) -> Any:
        try:
            # transformers would add its own tokens at both ends of every document.
            found = self._encode(
                piece,
                **({"add_special_tokens": False} if hasattr(self.tokenizer, "encode") else {}),
            )
        except TypeError:
            found = self._encode(piece)
        return getattr(found, "ids", found)


_NAME_IT = "name it with name=, and change the name whenever its tokens change"


class _Description(describe.Digest):
    """Describes tokenizers, including native objects that serialize themselves."""

    def _object(self, value: Any, where: str) -> None:
        kind = type(value)
        backend = getattr(value, "backend_tokenizer", value)
        # of tokenizers; of transformers with such a one inside
        if callable(getattr(backend, "to_str", None)):
            state = json.loads(backend.to_str())
            if backend is not value:
                # transformers sets them anew in every call
                state |= {"truncation": None, "padding": None}
            self.visit([kind, json.dumps(state)], where)
        elif callable(getattr(value, "get_vocab", None)) and hasattr(
            value, "init_kwargs"
        ):  # the others of transformers keep caches
            self.visit([kind, sorted(value.get_vocab().items()), value.init_kwargs], where)
        elif not isinstance(value, describe.BASES) and any(  # type: ignore[arg-type]
            getattr(kind, name, None) is not getattr(object, name, None)
            for name in ("__reduce_ex__", "__reduce__", "__getstate__")
        ):
            try:
                parts: Any = value.__reduce_ex__(4)
            except Exception as error:
                raise describe.CannotDescribe(
                    f"{where} is of {kind.__module__}.{kind.__qualname__}: {error}"
                ) from None
            if isinstance(parts, str):  # no state, but where to find it
                super()._object(value, where)
            else:
                self.visit([kind, *parts[:3], *(list(items or ()) for items in parts[3:5])], where)
        else:
            super()._object(value, where)


def _describe(tokenizer: Any) -> str:
    """A digest that tells tokenizers apart, the same in every process."""
    found = _Description(files=False)
    try:
        found.visit(tokenizer, "tokenizer")
    except (describe.CannotDescribe, RecursionError) as error:
        raise ArgumentError(f"feed.text: {error}: {_NAME_IT}.") from None
    return found.sum.hexdigest()


_OTHERS = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"%PDF-": "a PDF",
    b"ARROW1\x00\x00": "an Arrow file",
    b"\x93NUMPY": "a NumPy array",
    b"SQLite format 3\x00": "a database",
}
_TABLES = (".parquet", ".pq")


def _refuse_others(file: Path) -> None:
    """Refuse compressed files, archives and binaries, by their first bytes."""
    with open(file, "rb") as opened:
        head = opened.read(262)
    found = next((what for magic, what in _OTHERS.items() if head.startswith(magic)), None)
    if head.startswith(b"PAR1") and file.suffix.lower() not in _TABLES:
        found = "a Parquet file, whose name ends in .parquet or .pq"
    if head[257:262] == b"ustar":
        found = "a tar"
    if found is not None:
        raise SampleError(
            f"{file} is {found}: expected text in UTF-8, JSON lines (.jsonl) or Parquet. "
            "Unpack it first."
        )


def _iterate_text(
    file: Path, field: str, whole: bool, raw: bool = False
) -> Iterator[tuple[Any, bool]]:
    """Text, each with whether its document ends there; ``whole`` documents, ``raw`` bytes."""
    try:
        _refuse_others(file)
        if file.suffix.lower() == ".jsonl":
            with open(file, encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        try:
                            value = json.loads(line)[field]
                        except (ValueError, KeyError, TypeError, IndexError):
                            raise SampleError(
                                f"{file}, line {number} is not a JSON object with a field "
                                f"{field!r}."
                            ) from None
                        if not isinstance(value, str):
                            raise SampleError(
                                f"{file}, line {number}: the field {field!r} is "
                                f"{type(value).__name__}; expected text."
                            )
                        try:
                            value.encode()
                        except UnicodeEncodeError as error:
                            raise SampleError(
                                f"{file}, line {number}: the field {field!r} is not text: half a "
                                f"character at {error.start:,}."
                            ) from None
                        yield value, True
        elif file.suffix.lower() in _TABLES:
            need("pyarrow", "tables", f"feed.text of {file}")
            import pyarrow.parquet as pq

            opened = pq.ParquetFile(file)
            if field not in opened.schema_arrow.names:
                raise ArgumentError(
                    f"{file} has no column {field!r}: choose field= among "
                    f"{', '.join(opened.schema_arrow.names)}."
                )
            for batch in opened.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield value or "", True
        elif whole:
            # read_text() would change the ends of lines
            yield (file.read_bytes().decode("utf-8"), True)
        else:
            decoder = codecs.getincrementaldecoder("utf-8")()
            with open(file, "rb") as opened_file:
                while chunk := opened_file.read(_CHUNK):
                    piece = decoder.decode(chunk)  # of bytes too, to see that they are text
                    yield chunk if raw else piece, False
            piece = decoder.decode(b"", final=True)
            yield b"" if raw else piece, True
    except UnicodeDecodeError as error:
        raise SampleError(
            f"{file} is not text in UTF-8 ({error.reason} at byte {error.start:,} of a piece)."
        ) from None
    except OSError as error:
        raise SampleError(f"{file} cannot be read: {error.strerror or error}.") from error


def _choose(tokenizer: Any, name: str | None) -> Any:
    if tokenizer == "bytes":
        return _Bytes()
    if tokenizer == "chars":
        return None  # made when the characters are known
    if isinstance(tokenizer, str) or not (callable(tokenizer) or hasattr(tokenizer, "encode")):
        raise ArgumentError(
            f"tokenizer={tokenizer!r}: expected 'bytes', 'chars', a function of a text, or "
            "an object with encode()."
        )
    return _Given(tokenizer, name)


def _end_of(end: Any, tokenizer: Any) -> int | bool:
    """The token after each document: False for none, True for a new one beyond the vocabulary."""
    if isinstance(end, bool):
        if not end or isinstance(tokenizer, str):
            return end
    elif end is not None:
        if not isinstance(end, int) or end < 0:
            raise ArgumentError(f"end={end!r}: expected a token's number, True, False or None.")
        return int(end)
    if isinstance(tokenizer, str):
        return True
    own = getattr(tokenizer, "eos_token_id", None)
    if own is None and end is True:
        raise ArgumentError("end=True: the tokenizer has no eos_token_id. Pass the token's number.")
    return False if own is None else int(own)


def _encode(encoder: Any, piece: Any, which: str) -> Tokens:
    """Tokens of a piece; ``which`` names its place for errors."""
    try:
        given = encoder(piece)
    except RondeError:
        raise
    except Exception as error:
        raise SampleError(
            f"{which}: the tokenizer failed with {type(error).__name__}: {error}"
        ) from error
    try:
        found = np.asarray(given)
    except (ValueError, TypeError, OverflowError):  # lists of unequal length, say
        found = np.empty((), dtype=object)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        shown = f"{found.dtype} of shape {found.shape}" if found.ndim else type(given).__name__
        raise ArgumentError(
            f"{which}: the tokenizer gave {shown}: expected a list of whole numbers."
        )
    return found


def _tokenize(
    files: Sequence[Path], field: str, encoder: Any, end: int | bool, folder: Path
) -> None:
    """Write ``tokens.raw``, ``ends.npy`` (where documents end) and ``about.json``."""
    whole = isinstance(encoder, _Given)
    about: dict[str, Any] = {"version": _VERSION}
    if encoder is None:
        points = np.empty(0, dtype=np.uint32)
        for file in files:
            for piece, _ in _iterate_text(file, field, whole=False):
                points = np.union1d(points, _points(piece))
        encoder = _Characters(points)
        about["characters"] = points.astype("<u4").tobytes().decode("utf-32-le")
    size = encoder.size
    last: int | None = None
    if end is True:
        last, size = size, size + 1
    elif end is not False:
        last = end
        size = None if size is None else max(size, end + 1)
    # A tokenizer that does not know how many tokens it has may give any number.
    kind = np.dtype("<u4" if size is None or size > 1 << 16 else "<u2" if size > 256 else "u1")
    ends: list[int] = []
    total, highest = 0, -1
    raw = folder / "tokens.raw"
    with open(raw, "wb") as out:
        for file in files:
            before = len(ends)
            for piece, ended in _iterate_text(file, field, whole, isinstance(encoder, _Bytes)):
                found = _encode(encoder, piece, f"{file}, document {len(ends) - before + 1:,}")
                if len(found):
                    low, high = int(found.min()), int(found.max())
                    if low < 0 or high > np.iinfo(kind).max:
                        raise ArgumentError(
                            f"the tokenizer gave the token {low if low < 0 else high} for a "
                            f"document in {file}: its vocabulary has {size}."
                        )
                    highest = max(highest, high)
                    out.write(found.astype(kind).tobytes())
                    total += len(found)
                if ended:
                    if last is not None:
                        out.write(np.asarray([last], dtype=kind).tobytes())
                        total += 1
                    ends.append(total)
    about |= {
        "total": total,
        "documents": len(ends),
        "dtype": kind.str,
        "vocabulary": size if size is not None else max(highest, last or 0) + 1,
        "end": last,
    }
    np.save(folder / "ends.npy", np.asarray(ends, dtype=np.int64))
    (folder / "about.json").write_text(json.dumps(about))


class TextSource(BaseSource):
    """See :func:`text`.

    Attributes:
        length: tokens of each sample.
        total: tokens of all documents, their ends included.
        documents: how many there are.
        vocabulary: how many different tokens there can be: the rows of an embedding.
        characters: with ``tokenizer="chars"``: the characters by token; else None.
        end: the token after each document, or None.
    """

    def __init__(self, folder: Path, key: str, length: int, pack: bool, pad: int) -> None:
        about = json.loads((folder / "about.json").read_text())
        self.length = length
        self.pack = pack
        self.pad = pad
        self.total = int(about["total"])
        self.documents = int(about["documents"])
        self.vocabulary = int(about["vocabulary"])
        self.characters: str | None = about.get("characters")
        self.end: int | None = about["end"]
        self._dtype = np.dtype(about["dtype"])
        self._folder = folder
        self._key = key
        self._tokens: Any = None
        if pack:
            self._n = max(0, self.total - 1) // length
        else:
            ends = np.load(folder / "ends.npy")
            self._starts = np.concatenate([np.zeros(1, dtype=np.int64), ends])
            # A document of t tokens has t - 1 targets.
            counts = np.maximum(0, -(-(np.diff(self._starts) - 1) // length))
            self._first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
            self._n = int(self._first[-1])

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return (
            f"text: {len(self):,} samples of {self.length:,}, {self.total:,} tokens in "
            f"{self.documents:,} documents"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}  # a memory map would be copied as an array

    @property
    def fingerprint(self) -> str:
        """Covers the files, the tokenizer, and how samples are cut."""
        return digest_values("text", self._key, self.length, self.pack, self.pad)

    def _map(self) -> Tokens:
        if self._tokens is None:
            try:
                self._tokens = np.memmap(
                    self._folder / "tokens.raw", dtype=self._dtype, mode="r", shape=(self.total,)
                ).view(np.ndarray)
            except (OSError, ValueError) as error:
                raise missing_message(self._folder, "tokens", error) from error
        return cast("Tokens", self._tokens)

    def read(self, ids: Sequence[int]) -> Batch:
        """``(inputs, targets)``, int64, batch × length; targets are shifted by one token."""
        wanted = check_ids(ids, len(self))
        tokens, length = self._map(), self.length
        inputs = np.empty((len(wanted), length), dtype=np.int64)
        targets = np.empty((len(wanted), length), dtype=np.int64)
        if self.pack:
            for k, start in enumerate((wanted * length).tolist()):
                inputs[k] = tokens[start : start + length]
                targets[k] = tokens[start + 1 : start + length + 1]
        else:
            documents = np.searchsorted(self._first, wanted, side="right") - 1
            starts = self._starts[documents] + (wanted - self._first[documents]) * length
            for k, (start, end) in enumerate(
                zip(starts.tolist(), self._starts[documents + 1].tolist(), strict=True)
            ):
                n = min(length, end - 1 - start)
                inputs[k, :n], inputs[k, n:] = tokens[start : start + n], self.pad
                targets[k, :n], targets[k, n:] = tokens[start + 1 : start + n + 1], IGNORED
        return Batch((torch.from_numpy(inputs), torch.from_numpy(targets)))


def text(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    length: int,
    tokenizer: Any = "bytes",
    *,
    pack: bool = True,
    end: int | bool | None = None,
    pad: int = 0,
    field: str = "text",
    cache: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> Pipeline:
    """Text for a language model: sample ``i`` is ``(inputs, targets)`` of ``length`` tokens,
    targets shifted by one.

    All documents are tokenized once into an integer file that all processes of a machine map into
    memory. It is written atomically, and rebuilt when a file or the tokenizer changes. Every sample
    is found in constant time.

    Args:
        path: a file, a folder, a glob, or a list of such. A text file, in UTF-8, is one document;
            of ``.jsonl`` each line, of ``.parquet`` and ``.pq`` each row. What is compressed or
            binary is an error.
        length: tokens of a sample.
        tokenizer: ``"bytes"``; ``"chars"`` (tokens count the characters that occur, sorted); a
            function from a text to whole numbers; or an object with ``encode``, as of
            ``tokenizers`` and ``transformers``. It is told from others by its code and that of what
            it calls (of an installed package by the version), and by the values that these use; not
            by files that it reads.
        pack: cut the documents, one after the other, every ``length`` tokens; the last, shorter
            sample is left out. False begins a sample with each document; what is missing at its end
            is ``pad`` in the inputs and -100 in the targets, which
            ``torch.nn.functional.cross_entropy`` leaves out.
        end: the token after each document. None: the tokenizer's own ``eos_token_id`` if it has
            one; with ``bytes`` and ``chars`` one more token (256 for bytes). False for none.
        pad: see ``pack``.
        field: of ``.jsonl`` and ``.parquet``: the name of the text.
        cache: folder for the tokens; ``$XDG_CACHE_HOME/ronde/text`` or ``~/.cache/ronde/text``
            where None.
        name: of the tokenizer, where it cannot be told from others, or changes as it is used:
            tokens are made anew when its name changes, and only then.

    Returns:
        A pipeline read by batch; its ``source`` is a :class:`TextSource`, with ``vocabulary``,
        ``total`` and ``documents``.

    Raises:
        ArgumentError: a value that cannot be used, too little text for one sample, or a tokenizer
            that needs a name.
        SampleError: a file is no text, or not what its ending says; it is named.

    Example:
        >>> import pathlib, tempfile
        >>> here = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (here / "a.txt").write_text("hello world")
        >>> data = text(here / "a.txt", length=5, cache=here / "cache")
        >>> [bytes(t.tolist()) for t in data[1]]
        [b' worl', b'world']
        >>> len(data), data.source.vocabulary
        (2, 257)
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ArgumentError(f"feed.text: length={length!r} must be a whole number, 1 or more.")
    if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
        raise ArgumentError(f"feed.text: pad={pad!r} must be a token: a whole number, 0 or more.")
    if name is not None and not isinstance(name, str):
        raise ArgumentError(f"feed.text: name={name!r}: expected text.")
    encoder = _choose(tokenizer, name)
    last = _end_of(end, tokenizer)
    files = files_of(path, "feed.text")
    key = digest_values(
        "text", _VERSION, identity(files), "chars" if encoder is None else encoder.name, last, field
    )
    folder = build_once(
        cache_root(cache) / "text" if cache is None else cache_root(cache),
        key,
        lambda into: _tokenize(files, field, encoder, last, into),
    )
    source = TextSource(folder, key, length, pack, pad)
    if not len(source):
        raise ArgumentError(
            f"feed.text: {files[0]}{f' and {len(files) - 1:,} more' if len(files) > 1 else ''}: "
            f"{source.total:,} tokens in {source.documents:,} documents are too few for one sample "
            f"of length={length:,}."
        )
    return Pipeline(source, collate=default_collate)
