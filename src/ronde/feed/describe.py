"""A digest of what a function or an object does: equal in every process of a job, another one when its code or its settings change.

A cache on disk must not serve what another version of a transform made. Code counts (of functions, of classes that are not from an
installed package, and of the functions and constants that they use), and values: numbers, strings, arrays, and objects of those. Of an
installed package its version counts. What cannot be told apart by these, such as an open file, is refused, not guessed.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.metadata
import logging
import os
import random
import re
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["CannotDescribe", "digest", "installed_version"]

_INSTALLED = tuple(
    {str(Path(p).resolve()) for name, p in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_WHOLE_ARRAY_BYTES = 1 << 30
_LOOK_AT_FILES = 4096
# What they hold differs from process to process and changes nothing about what is read (or is noticed when it draws).
_BY_NAME = (
    np.generic,
    np.dtype,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    torch.Generator,
    logging.Logger,
    torch.dtype,
    torch.device,
)
_NO_CODE = ("__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__")
_BASES: tuple[Callable[[Any], Any], ...] = (tuple, list, dict, set, str, int, float)
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice)


class CannotDescribe(TypeError):
    """A value of which two states cannot be told apart."""


@functools.cache
def installed_version(package: str) -> str:
    """Of a package, or "" where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return str(getattr(sys.modules.get(package), "__version__", ""))


def _installed(module: str | None) -> bool:
    """Whether a module comes with Python or an installed package: then its version stands for its code."""
    if module is not None and module.partition(".")[0] == "ronde":
        return True
    found = sys.modules.get(module or "")
    file = getattr(found, "__file__", None)
    if file is None:
        return module not in (None, "__main__", "__mp_main__")
    return str(Path(file).resolve()).startswith(_INSTALLED)


class _Digest:
    def __init__(self, files: bool) -> None:
        self.sum = hashlib.sha256()
        self.files = files
        self.looked = 0
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # an address is one object's only as long as that lives

    def put(self, *words: object) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self.sum.update(len(data).to_bytes(8, "little") + data)

    def visit(self, value: Any, where: str) -> None:
        kind = type(value)
        if kind in _CONSTANTS:
            self.put(kind.__name__, value if kind is bytes else repr(value))
            if kind is str and self.files:
                self._file(value)
            return
        if id(value) in self.seen:
            self.put("again", self.seen[id(value)])
            return
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        if kind in (tuple, list):
            self.put(kind.__name__, len(value))
            for i, each in enumerate(value):
                self.visit(each, f"{where}[{i}]")
        elif kind is dict:
            self.put("dict", len(value))
            for k, each in value.items():
                self.visit(k, f"{where}, a key")
                self.visit(each, f"{where}[{k!r}]")
        elif kind in (set, frozenset):
            self.put("set", len(value), *sorted(digest(each, where=where) for each in value))
        elif isinstance(value, enum.Enum):
            self.put("enum", kind.__module__, kind.__qualname__, value.name)
        elif isinstance(value, os.PathLike):
            self.put("path", os.fspath(value))
            if self.files:
                self._file(os.fspath(value))
        elif isinstance(value, np.ndarray):
            self._array(value, where)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, _BY_NAME):
            self.put(kind.__name__, getattr(value, "name", "") if isinstance(value, logging.Logger) else _plain(value))
        elif isinstance(value, re.Pattern):
            self.put("pattern", value.pattern, value.flags)
        elif isinstance(value, types.ModuleType):
            self.put("module", value.__name__, installed_version(value.__name__.partition(".")[0]))
        elif isinstance(value, functools.partial):
            self.put("partial")
            self.visit([value.func, list(value.args), value.keywords], where)
        elif isinstance(value, types.MethodType):
            self.visit([value.__self__, value.__func__], where)
        elif isinstance(value, types.FunctionType):
            self._function(value, where)
        elif isinstance(value, type):
            self._class(value, where)
        elif isinstance(value, staticmethod | classmethod):
            self.visit(value.__func__, where)
        elif isinstance(value, property):
            self.visit([value.fget], where)
        elif isinstance(
            value, types.BuiltinFunctionType | types.MethodWrapperType | types.WrapperDescriptorType | types.MethodDescriptorType
        ):
            self.put("builtin", getattr(value, "__module__", ""), value.__qualname__)
            owner = getattr(value, "__self__", None)
            if not isinstance(owner, types.ModuleType | type | None):
                self.visit(owner, where)
        else:
            self._object(value, where)

    def _function(self, value: types.FunctionType, where: str) -> None:
        self.put("function", value.__module__, value.__qualname__)
        if _installed(value.__module__):
            self.put(installed_version((value.__module__ or "").partition(".")[0]))
        else:
            self._code(value.__code__, value.__globals__, where)
        self.visit([value.__defaults__, value.__kwdefaults__], where)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:
                continue
            self.visit(inside, f"{where}: {name}")

    def _code(self, code: types.CodeType, names: dict[str, Any], where: str) -> None:
        self.put("code", code.co_code, code.co_argcount, code.co_kwonlyargcount, *code.co_names, *code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, names, where)
            else:
                self.visit(constant, where)
        for name in code.co_names:
            if name not in names:
                continue
            used = names[name]
            self.visit(used, f"{where}: {name}")
            if isinstance(used, types.ModuleType) and not _installed(used.__name__):  # settings.SIZE
                for part in code.co_names:
                    if type(found := getattr(used, part, None)) in _CONSTANTS or isinstance(found, types.FunctionType | type):
                        self.visit(found, f"{where}: {name}.{part}")

    def _class(self, value: type, where: str) -> None:
        self.put("class", value.__module__, value.__qualname__)
        for base in value.__mro__:
            if _installed(base.__module__):
                self.put(base.__module__, base.__qualname__, installed_version(base.__module__.partition(".")[0]))
                continue
            for name, part in sorted(vars(base).items()):
                code = isinstance(part, types.FunctionType | staticmethod | classmethod | property)
                if (code or type(part) in _CONSTANTS) and name not in _NO_CODE:
                    self.put(name)
                    self.visit(part, f"{where}: {base.__qualname__}.{name}")

    def _object(self, value: Any, where: str) -> None:
        kind = type(value)
        known = getattr(value, "fingerprint", None)
        if isinstance(known, str):
            self.visit(kind, where)
            self.put("fingerprint", known)
            return
        slots = [n for base in kind.__mro__ for n in _names(base.__dict__.get("__slots__", ()))]
        base = next((b for b in _BASES if isinstance(value, b)), None)  # type: ignore[arg-type]
        if not hasattr(value, "__dict__") and not slots and base is None:
            raise CannotDescribe(f"{where} is of {kind.__module__}.{kind.__qualname__}, of which two states cannot be told apart")
        self.visit(kind, where)
        if base is not None:
            self.visit(base(value), where)
        for name, part in {**{n: getattr(value, n) for n in slots if hasattr(value, n)}, **getattr(value, "__dict__", {})}.items():
            if name in ("__dict__", "__weakref__"):
                continue
            self.put(name)
            self.visit(part, f"{where}.{name}")

    def _array(self, value: np.ndarray, where: str) -> None:
        self.put("array", value.dtype, value.shape)
        if isinstance(value, np.memmap):
            self.put(value.filename, value.offset)
            if value.filename is not None:
                self._look(os.fspath(value.filename))
        elif value.dtype.hasobject:
            self.visit(value.tolist(), where)
        elif value.nbytes <= _WHOLE_ARRAY_BYTES:
            flat = np.ascontiguousarray(value).reshape(-1)
            self.sum.update(flat.view(np.uint8).data if flat.size else b"")
        else:
            flat = value.reshape(-1) if value.flags.c_contiguous else value.flat  # type: ignore[assignment]
            step = max(1, value.size // 4096)
            for start in range(0, value.size, step):
                self.put(np.asarray(flat[start : start + 256]).tobytes())

    def _tensor(self, value: torch.Tensor) -> None:
        self.put("tensor", value.dtype, tuple(value.shape))
        if value.layout is torch.strided and value.device.type != "meta":
            plain = value.detach().cpu().contiguous().reshape(-1)
            if plain.numel():
                self._array(plain.view(torch.uint8).numpy(), "")
        else:
            self.put(repr(value))

    def _file(self, text: str) -> None:
        # Each of the first ones, then one of 64: a million stat calls take seconds.
        if 2 < len(text) < 4096 and ("/" in text or "." in text) and "\0" not in text and "\n" not in text:
            self.looked += 1
            if self.looked <= _LOOK_AT_FILES or self.looked % 64 == 0:
                self._look(text)

    def _look(self, path: str) -> None:
        try:
            found = Path(path).stat()
        except (OSError, ValueError):
            return
        self.put("file", found.st_size, found.st_mtime_ns)


def _plain(value: Any) -> str:
    if isinstance(value, np.generic):
        return f"{value.dtype.str} {value.tobytes().hex()}"
    return str(value) if isinstance(value, np.dtype | torch.dtype | torch.device) else type(value).__qualname__


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def digest(*values: Any, files: bool = False, where: str = "it") -> str:
    """A digest of values, functions and objects.

    Args:
        files: strings that name a file or a folder count with its size and time of change.
        where: how to call them where one is refused.

    Raises:
        CannotDescribe: something that cannot be told apart from another of its kind; the text says where it stands.

    Example:
        >>> from functools import partial
        >>> digest(partial(round, ndigits=2)) == digest(partial(round, ndigits=2)), digest([1, "a"]) == digest([1, "b"])
        (True, False)
    """
    found = _Digest(files)
    try:
        for value in values:
            found.visit(value, where)
    except RecursionError:
        raise CannotDescribe(f"{where} is nested too deeply") from None
    return found.sum.hexdigest()
