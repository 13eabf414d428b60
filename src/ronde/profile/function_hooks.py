"""Replacements for library functions: same result, timed while a sample is made."""

from __future__ import annotations

import functools
import io
import os
import stat
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

from ronde.profile.stage_timer import current_timer

_READING = frozenset(("r", "rt", "tr", "rb", "br"))


def timed_function(original: Callable[..., Any], stage: str, first: str = "") -> Callable[..., Any]:
    """Make a replacement for a function that reads, decodes, or augments.

    Args:
        first: the kind of its first argument, if its bytes are to be counted: ``path`` or
            ``count``.
    """

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        account = current_timer()
        if account is None:
            return original(*args, **kwargs)
        # Reading and decoding count everywhere. Augmentation counts only outside of named stages,
        # and inside reading: the user's ``read_image`` may do all of it.
        if stage == "augment" and account.current not in (account.python, account.read):
            return original(*args, **kwargs)
        if stage == "subprocess" and account.current != account.python:
            return original(*args, **kwargs)  # a program that reads or decodes
        number = account.slot.stage(stage)
        outermost = account.current != number
        value = account.run(number, original, *args, **kwargs)
        if stage == "read" and outermost:
            if first == "count":
                account.count_bytes(len(value))
            elif first == "path" and args and not kwargs.get("mmap_mode"):
                account.count_bytes(_file_bytes(args[0]))
        return value

    return function


def _file_bytes(path: Any) -> int:
    try:
        return os.stat(path).st_size if isinstance(path, str | os.PathLike) else 0  # noqa: PTH116
    except OSError:
        return 0


class _TimedFile(io.FileIO):
    """A file whose reads count as a stage while a sample is made."""

    def readinto(self, buffer: Any, /) -> int:
        account = current_timer()
        if account is None:
            return super().readinto(buffer)  # type: ignore[return-value]
        n: int = account.run(account.read, super().readinto, buffer)
        account.count_bytes(n or 0)
        return n

    def readall(self) -> bytes:
        account = current_timer()
        if account is None:
            return super().readall()
        data: bytes = account.run(account.read, super().readall)
        account.count_bytes(len(data))
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        buffer = bytearray(size)
        n = self.readinto(memoryview(buffer))
        return bytes(buffer[:n])


def opener(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``open``: times the file's reads, not only its opening."""
    theirs = not isinstance(original_of(original), BuiltinFunctionType | NoneType)

    @functools.wraps(original)
    def open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        account = current_timer()
        arguments = (file, mode, buffering, encoding, errors, newline, closefd, opener)
        if (
            account is None
            or account.current == account.read
            or mode not in _READING
            or isinstance(file, int)
            or buffering == 1
            or (buffering == 0 and "b" not in mode)
            or ("b" in mode and (encoding, errors, newline) != (None, None, None))
        ):
            return original(*arguments)
        if theirs:  # whose files may be anything: only their opening is timed
            return account.run(account.read, original, *arguments)
        account.enter(account.read)
        try:
            raw = _TimedFile(os.fspath(file), "r", closefd, opener)
            if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
                raw.close()
                return original(*arguments)
        finally:
            account.leave()
        return wrap_raw(raw, mode, buffering, encoding, errors, newline)

    return open


def wrap_raw(
    raw: Any,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
) -> Any:
    """Wrap a raw file as ``open`` would for the requested mode."""
    if buffering == 0:
        return raw
    size = max(getattr(raw, "_blksize", 0), 0) or io.DEFAULT_BUFFER_SIZE
    binary = io.BufferedReader(raw, buffering if buffering > 1 else size)
    if "b" in mode:
        return binary
    text = io.TextIOWrapper(binary, io.text_encoding(encoding), errors, newline)
    text.mode = mode  # type: ignore[misc]
    return text


def image_load(original: Callable[..., Any], plain: bool) -> Callable[..., Any]:
    """Replaces ``PIL.ImageFile.ImageFile.load`` and the formats' own; ``plain`` is the first, which
    does nothing without tiles.
    """

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        account = current_timer()
        if account is None or (plain and not self.tile):
            return original(self, *args, **kwargs)
        return account.run(account.decode, original, self, *args, **kwargs)

    return load


def image_convert(original: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """Replaces ``PIL.Image.Image.convert``: decoding for an image file, augmentation otherwise."""
    decode, augment = timed_function(original, "decode"), timed_function(original, "augment")

    @functools.wraps(original)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (decode if isinstance(self, base) else augment)(self, *args, **kwargs)

    return convert


def original_of(function: Any) -> Any:
    """The function that was there before this package's replacements."""
    while isinstance(function, FunctionType) and str(
        function.__globals__.get("__name__")
    ).startswith("ronde."):
        function = getattr(function, "__wrapped__", None)
    return function


def _original(value: Any) -> Any:
    return value


class Named:
    """A user's callable that belongs to a stage. It poses as the original, also in pickles."""

    def __init__(self, value: Any, stage: str) -> None:
        object.__setattr__(self, "_ronde_value", value)
        object.__setattr__(self, "_ronde_stage", stage)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._ronde_value)

    def _ronde_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        account = current_timer()
        if account is None:
            return function(*args, **kwargs)
        return account.probe.call(self._ronde_stage, function, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self._ronde_call(self._ronde_value, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ronde_value, name)
        if name.startswith(("encode", "batch_encode", "tokenize")) and callable(value):
            return functools.partial(
                lambda function, *args, **kwargs: self._ronde_call(function, args, kwargs), value
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ronde_value, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _original, (self._ronde_value,)

    def __repr__(self) -> str:
        return repr(self._ronde_value)

    def __eq__(self, other: object) -> bool:
        other = other._ronde_value if type(other) is Named else other
        return bool(self._ronde_value == other)

    def __hash__(self) -> int:
        return hash(self._ronde_value)

    def __bool__(self) -> bool:
        return bool(self._ronde_value)

    def __len__(self) -> int:
        return len(self._ronde_value)

    def __iter__(self) -> Any:
        return iter(self._ronde_value)

    def __getitem__(self, i: Any) -> Any:
        return self._ronde_value[i]
