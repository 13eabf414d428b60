"""Digests of functions and objects: equal in all processes of a job, different after a change.

A disk cache must not serve the results of another version of a transform. Code counts: functions
and classes outside installed packages, with the functions, modules and constants they use. Values
count: numbers, strings, arrays, and objects of those. An installed package counts by its version, a
source by its fingerprint and the location of its samples. Anything else, such as an open file, is
refused rather than guessed.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import mmap
import os
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ronde.introspect.code_owner import is_installed, is_ronde

_MOST_ARRAY_BYTES = 8 << 30
"""A larger array in memory is refused: to read all of it takes each process more than ten seconds,
and to read some of it is to guess.
"""
_MOST_STATS = 100_000
_LOOK_AT_FILES = 4096
# What they hold differs from process to process and changes nothing about what is read (or is
# noticed when it draws).
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
    weakref.finalize,
    type(threading.Lock()),
    type(threading.RLock()),
)
_NO_CODE = ("__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__")
_FROM_C = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    np.ufunc,
)
_MAKING = (
    "__init__",
    "__new__",
    "__post_init__",
    "__setstate__",
    "__init_subclass__",
    "__set_name__",
)
"""What these look up stands in what they made."""
_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
_PARTS = ("source", "steps", "data", "dataset", "plan", "held", "_packed")
"""What an object of Ronde's own, whose fingerprint is another's, is made of."""
_ABSENT = object()
BASES: tuple[Callable[[Any], Any], ...] = (tuple, list, dict, set, str, int, float)
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice)


class CannotDescribe(TypeError):
    """A value whose states cannot be told apart."""


@functools.cache
def installed_version(package: str) -> str:
    """A package's version, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return str(getattr(sys.modules.get(package), "__version__", ""))


def _origins(source: Any) -> Iterable[Any]:
    """Where a source's samples come from: paths and URLs as strings, and other objects that matter.

    Raises:
        CannotDescribe: a source of Ronde's own that tells nothing.
    """
    kind = type(source)
    own = vars(source) if hasattr(source, "__dict__") else {}
    if callable(getattr(kind, "origins", None)):
        origins: Iterable[Any] | None = source.origins()
        if origins is not None:
            return origins
    ours = is_ronde(kind)
    if ours and (parts := [own[name] for name in _PARTS if name in own]):
        return parts
    if callable(getattr(kind, "file", None)):
        n = len(source)
        sampled = range(0, n, max(1, -(-n // _MOST_STATS)))  # evenly spread
        try:
            return [own.get("path"), *dict.fromkeys(str(source.file(i)) for i in sampled)]
        except (TypeError, ValueError, IndexError, NotImplementedError):
            pass
    found: list[Any] = []
    for name, value in own.items():
        several = list(value.values()) if isinstance(value, dict) else value
        if not isinstance(several, list | tuple):
            several = [value]
        for each in several[:_MOST_STATS]:
            if isinstance(each, str | os.PathLike):
                if name in ("path", "paths") or _is_there(os.fspath(each)):
                    found.append(os.fspath(each))
            elif not isinstance(each, type) and isinstance(getattr(each, "fingerprint", None), str):
                found.append(each)
    if ours and not found:
        raise CannotDescribe(
            f"a source of {kind.__module__}.{kind.__qualname__} does not tell where its "
            "samples come from"
        )
    return found


def _is_there(path: Any) -> bool:
    try:
        return 0 < len(path) < 4096 and Path(path).exists()
    except (OSError, ValueError, TypeError):
        return False


class Digest:
    """Reads a value, part by part, into a SHA-256.

    It does not use ``object_graph.walk``: a walk skips unknown parts and stops at a limit, while a
    fingerprint reads everything in order or refuses.
    """

    def __init__(self, files: bool, folders: set[str] | None = None) -> None:
        self.sum = hashlib.sha256()
        self.files = files
        self.folders = folders
        self.looked = self.words = 0
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # an address is one object's only as long as that lives
        self.walked: set[tuple[int, int]] = set()

    def put(self, *words: object) -> None:
        """Add words or bytes with their length, so that two never read as one."""
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self.sum.update(len(data).to_bytes(8, "little") + data)

    def visit(self, value: Any, where: str) -> None:
        """Add a value with everything in it; ``where`` names it in errors."""
        kind = type(value)
        if kind in _CONSTANTS:
            self.put(kind.__name__, value if kind is bytes else repr(value))
            if kind is str:
                self._string(value)
            return
        if id(value) in self.seen:
            self.put("again", self.seen[id(value)])
            return
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        if kind in (tuple, list, collections.deque):
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
            self.visit(value.value, where)
        elif isinstance(value, os.PathLike):
            self.put("path", os.fspath(value))
            self._string(os.fspath(value))
        elif isinstance(value, np.ndarray):
            self._array(value, where)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, where)
        elif isinstance(value, _BY_NAME):
            name = value.name if isinstance(value, logging.Logger) else _plain(value)
            self.put(kind.__name__, name)
        elif isinstance(value, re.Pattern):
            self.put("pattern", value.pattern, value.flags)
        elif isinstance(value, types.ModuleType):
            self._module(value, None, where)
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
            self.visit([value.fget, value.fset, value.fdel], where)
        elif isinstance(value, functools.cached_property):
            self.visit(value.func, where)
        elif isinstance(value, functools.singledispatchmethod):
            self.visit(dict(value.dispatcher.registry), where)
        elif isinstance(value, types.GenericAlias | types.UnionType) or kind.__module__ == "typing":
            self.put("type", repr(value))
        elif isinstance(value, types.MappingProxyType):
            self.visit(dict(value), where)
        elif isinstance(value, _FROM_C):
            name = getattr(value, "__qualname__", value.__name__)
            self.put("builtin", getattr(value, "__module__", ""), name)
            owner = getattr(value, "__self__", None)
            if not isinstance(owner, types.ModuleType | type | None):
                self.visit(owner, where)
        else:
            self._object(value, where)

    def _function(self, value: types.FunctionType, where: str) -> None:
        self.put("function", value.__module__, value.__qualname__)
        if is_installed(value.__module__):
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

    def _code(
        self,
        code: types.CodeType,
        names: dict[str, Any],
        where: str,
        words: frozenset[str] | None = None,
    ) -> None:
        if words is None:
            # with those of inner functions, which may use a module that the outer one imports
            words = _words(code)
            self.kept.append(words)
        self.put("code", code.co_code, code.co_argcount, code.co_kwonlyargcount)
        self.put(*code.co_names, *code.co_varnames)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, names, where, words)
            else:
                self.visit(constant, where)
        for name in code.co_names:
            if name not in names:
                continue
            if isinstance(names[name], types.ModuleType):
                self._module(names[name], words, f"{where}: {name}")
            else:
                self.visit(names[name], f"{where}: {name}")
        self._imports(code, names, words, where)
        if code.co_name not in _MAKING:
            self._by_name(code, names, words, where)

    def _by_name(
        self, code: types.CodeType, names: dict[str, Any], words: frozenset[str], where: str
    ) -> None:
        """Add what a function looks up by a string: environment variables, globals, modules. The
        string is a constant or a global.
        """
        used = set(code.co_names)
        values = (*code.co_consts, *(names.get(name) for name in code.co_names))
        texts = [text for text in values if isinstance(text, str)]
        refused = f"{where} looks up %s by a name that does not stand beside it"
        if used & {"environ", "environb", "getenv"}:
            found = [text for text in texts if _NAME.fullmatch(text)]
            if not found:
                raise CannotDescribe(refused % "the environment")
            for text in found:
                self.put("environment", text, repr(os.environ.get(text)))
        if "globals" in used:
            known = [text for text in texts if text in names]
            if not known:
                raise CannotDescribe(refused % "globals()")
            for text in known:
                self.visit(names[text], f"{where}: {text}")
        if used & {"import_module", "__import__"}:
            dotted = [text for text in texts if all(map(_NAME.fullmatch, text.split(".")))]
            modules = [text for text in dotted if _is_module(text)]
            if not modules:
                raise CannotDescribe(refused % "a module")
            for text in modules:
                if is_installed(text):
                    self.put("module", text, installed_version(text.partition(".")[0]))
                else:
                    try:
                        module = importlib.import_module(text)
                    except Exception as error:
                        raise CannotDescribe(
                            f"{where} imports {text}, which cannot be looked into: {error}"
                        ) from None
                    self._module(module, words, f"{where}: {text}")

    def _imports(
        self, code: types.CodeType, names: dict[str, Any], words: frozenset[str], where: str
    ) -> None:
        """Add what a function imports when called."""
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for level, wanted, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname != "IMPORT_NAME":
                continue
            try:
                package = names.get("__package__") or (
                    names.get("__spec__") and names["__spec__"].parent
                )
                full = importlib.util.resolve_name("." * level.argval + step.argval, package)
                if is_installed(full):
                    self.put("module", full, installed_version(full.partition(".")[0]))
                    continue
                module = importlib.import_module(full)
                found = [] if wanted.argval else [sys.modules[full.partition(".")[0]], module]
                for part in wanted.argval or ():
                    found.append(
                        getattr(module, part)
                        if hasattr(module, part)
                        else importlib.import_module(f"{full}.{part}")
                    )
            except Exception as error:
                raise CannotDescribe(
                    f"{where} imports {step.argval}, which cannot be looked into: {error}"
                ) from None
            for each in found:
                if isinstance(each, types.ModuleType):
                    self._module(each, words, f"{where}: {full}")
                else:
                    self.visit(each, f"{where}: {full}")

    def _module(self, module: types.ModuleType, words: frozenset[str] | None, where: str) -> None:
        """Add a module: the names used of it (settings.SIZE), or else its whole file."""
        self.put("module", module.__name__)
        if is_installed(module.__name__):
            self.put(installed_version(module.__name__.partition(".")[0]))
        elif words is None:
            try:
                self.put(Path(str(module.__file__)).read_bytes())
            except (OSError, AttributeError):
                raise CannotDescribe(
                    f"{where} is the module {module.__name__}, which has no file"
                ) from None
        elif (id(module), id(words)) not in self.walked:
            self.walked.add((id(module), id(words)))
            for part in sorted(words):
                found = getattr(module, part, _ABSENT)
                if isinstance(found, types.ModuleType):
                    self._module(found, words, f"{where}.{part}")
                elif found is not _ABSENT and not _dunder(part):
                    self.put(part)
                    self.visit(found, f"{where}.{part}")

    def _class(self, value: type, where: str) -> None:
        self.put("class", value.__module__, value.__qualname__)
        for base in value.__mro__:
            if is_installed(base.__module__):
                self.put(
                    base.__module__,
                    base.__qualname__,
                    installed_version(base.__module__.partition(".")[0]),
                )
                continue
            members = getattr(base, "__members__", {}) if issubclass(base, enum.Enum) else {}
            for name, part in sorted(vars(base).items()):
                code = isinstance(part, types.FunctionType | staticmethod | classmethod | property)
                if (
                    name in _NO_CODE
                    or name in members
                    or (_dunder(name) and not code and type(part) not in _CONSTANTS)
                ):
                    continue
                if (issubclass(base, enum.Enum) and name.startswith("_") and not code) or type(
                    part
                ).__module__ in ("_abc", "_collections"):
                    # what Python itself writes down of members, of abstract classes and of named
                    # tuples
                    continue
                self.put(name)
                self.visit(part, f"{where}: {base.__qualname__}.{name}")
            self.visit({name: member.value for name, member in members.items()}, where)

    def _object(self, value: Any, where: str) -> None:
        kind = type(value)
        try:
            known = getattr(value, "fingerprint", None)
        except Exception:  # of an object that answers for every name in its own way
            known = None
        if isinstance(known, str):
            self.visit(kind, where)
            self.put("fingerprint", known)
            for each in _origins(value):
                if isinstance(each, str):
                    self.put("path", each)
                    self._look(each)
                else:
                    self.visit(each, where)
            return
        slots = [n for base in kind.__mro__ for n in _names(base.__dict__.get("__slots__", ()))]
        base = next((b for b in BASES if isinstance(value, b)), None)  # type: ignore[arg-type]
        if isinstance(value, io.IOBase) or (
            not hasattr(value, "__dict__") and not slots and base is None
        ):
            raise CannotDescribe(
                f"{where} is of {kind.__module__}.{kind.__qualname__}, of which two states "
                "cannot be told apart"
            )
        self.visit(kind, where)
        if base is not None:
            self.visit(base(value), where)
        for name, part in {
            **{n: getattr(value, n) for n in slots if hasattr(value, n)},
            **getattr(value, "__dict__", {}),
        }.items():
            if name in ("__dict__", "__weakref__"):
                continue
            self.put(name)
            self.visit(part, f"{where}.{name}")

    def _array(self, value: np.ndarray, where: str) -> None:
        self.put("array", value.dtype, value.shape)
        # A part of a mapped file says the file's own offset, and what was made of one says no file:
        # those are arrays as others are.
        if (
            isinstance(value, np.memmap)
            and value.filename is not None
            and value.mode != "c"
            and isinstance(value.base, mmap.mmap)
        ):
            self.put(value.filename, value.offset, value.flags.f_contiguous)
            self._look(os.fspath(value.filename))
        elif value.dtype.hasobject:
            self.visit(value.tolist(), where)
        elif value.nbytes > _MOST_ARRAY_BYTES:
            raise CannotDescribe(
                f"{where} is an array of {value.nbytes / 2**30:.3g} GiB in memory, too "
                "much to read all of it"
            )
        elif value.flags.c_contiguous:
            self.sum.update(value.reshape(-1).view(np.uint8).data if value.nbytes else b"")
        elif value.nbytes:
            for part in np.nditer(
                value, ["external_loop", "buffered"], order="C", buffersize=1 << 20
            ):
                self.sum.update(np.ascontiguousarray(part).view(np.uint8).data)

    def _tensor(self, value: torch.Tensor, where: str) -> None:
        self.put("tensor", value.dtype, tuple(value.shape))
        if value.layout is torch.strided and value.device.type != "meta":
            plain = value.detach().cpu().contiguous().reshape(-1)
            if plain.numel():
                self._array(plain.view(torch.uint8).numpy(), where)
        else:
            self.put(repr(value))

    def _string(self, text: str) -> None:
        if self.files:
            self._file(text)
        if self.folders is not None and 0 < len(text) < 4096 and self.words < _LOOK_AT_FILES:
            self.words += 1
            if text not in (".", "/") and os.path.isdir(text):  # noqa: PTH112
                self.folders.add(os.path.abspath(text))  # noqa: PTH100

    def _file(self, text: str) -> None:
        # Each of the first ones, then one of 64: a million stat calls take seconds.
        if (
            2 < len(text) < 4096
            and ("/" in text or "." in text)
            and "\0" not in text
            and "\n" not in text
        ):
            self.looked += 1
            if self.looked <= _LOOK_AT_FILES or self.looked % 64 == 0:
                self._look(text)

    def _look(self, path: str) -> None:
        try:
            found = Path(path).stat()
        except (OSError, ValueError):
            return
        self.put("file", found.st_size, found.st_mtime_ns)


def _dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _words(code: types.CodeType) -> frozenset[str]:
    by_text = (
        [text for text in code.co_consts if isinstance(text, str)]
        if "getattr" in code.co_names
        else []
    )
    return frozenset([*code.co_names, *by_text]).union(
        *(_words(inside) for inside in code.co_consts if isinstance(inside, types.CodeType))
    )


def _is_module(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _plain(value: Any) -> str:
    if isinstance(value, np.generic):
        return f"{value.dtype.str} {value.tobytes().hex()}"
    return (
        str(value)
        if isinstance(value, np.dtype | torch.dtype | torch.device)
        else type(value).__qualname__
    )


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def digest(
    *values: Any, files: bool = False, where: str = "it", folders: set[str] | None = None
) -> str:
    """Digest values, functions and objects.

    Args:
        files: strings that name a file or a folder count with its size and time of change.
        where: how to call them where one is refused.
        folders: takes up the folders that are named.

    Raises:
        CannotDescribe: something that cannot be told apart from another of its kind; the text says
            where it stands.

    Example:
        >>> from functools import partial
        >>> digest(partial(round, ndigits=2)) == digest(partial(round, ndigits=2)), digest([1,
        ...     "a"]) == digest([1, "b"])
        (True, False)
    """
    found = Digest(files, folders)
    try:
        for value in values:
            found.visit(value, where)
    except RecursionError:
        raise CannotDescribe(f"{where} is nested too deeply") from None
    return found.sum.hexdigest()
