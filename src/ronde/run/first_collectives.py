"""Compares the script's own collectives across ranks, before they exchange, until the first steps
are done.

gloo adds tensors of 4 and of 5 elements without an error, and pairs calls of different kinds. Here
they are an error on every rank. Calls of torch and of Ronde pass: their order is not the script's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ronde.introspect import is_user_file
from ronde.world import WorldError
from ronde.world.rendezvous import LateError, Rendezvous

__all__ = ["COMPARED_CALLS", "begin_comparing", "end_comparing", "prepare_comparing"]

COMPARED_CALLS = 500
"""Calls in one process group that are compared at most: each costs messages to the store."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NAMES = _words(
    "all_reduce broadcast reduce all_gather all_gather_into_tensor all_gather_single "
    "reduce_scatter reduce_scatter_tensor reduce_scatter_single gather scatter all_to_all "
    "all_to_all_single barrier all_gather_object broadcast_object_list gather_object "
    "scatter_object_list"
)
# What may differ between ranks, lists that only the root gives, and what _texts adds itself.
_FREE = _words(
    "group async_op device device_ids timeout obj gather_list scatter_list object_gather_list "
    "scatter_object_input_list scatter_object_output_list src dst group_src group_dst"
)
# For a rank that need not wait in a call: what it does next may be what the others wait for.
_ASYNC_SECONDS = 30.0
_LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")

_comparison: _Comparison | None = None
_wrappers: dict[int, Any] = {}  # id of torch's own function -> what stands in for it
_originals: dict[int, Any] = {}  # and back
_last, _holding = "", list[str]()  # see prepare_comparing


def prepare_comparing() -> None:
    """Note which modules hold torch's functions, in a process that is forked later: to look again
    would copy much of its memory.
    """
    global _last
    _wrap()
    _holding[:] = [name for name in _candidates() if _held(name, _wrappers)]
    _last = next(reversed(sys.modules))


def begin_comparing(meeting: Rendezvous) -> None:
    """Compare the collectives that the script's main thread calls from now on. All ranks call it.

    Also those that a module has imported by name.
    """
    global _comparison
    if meeting.me.size == 1:
        return
    if _comparison is None:
        _wrap()
        _replace(_wrappers)
    _comparison = _Comparison(meeting)


def end_comparing() -> None:
    """Give torch its functions back: later calls cost nothing. All ranks call it."""
    global _comparison
    if _comparison is not None:
        _comparison = None
        _replace(_originals)


def _wrap() -> None:
    # torch.compile knows torch's functions by identity, which this module notes on import.
    importlib.import_module("torch.distributed._functional_collectives")
    for name in _NAMES:
        original = getattr(dist, name, None)
        if original is not None and id(original) not in _wrappers | _originals:
            _wrappers[id(original)] = wrapper = _wrapper(name, original)
            _originals[id(wrapper)] = original


def _candidates() -> list[str]:
    """Modules that may hold functions: all, or those that a fork must look at."""
    if not _last:
        return list(sys.modules)
    new = itertools.takewhile(lambda name: name != _last, reversed(sys.modules))
    return ["__main__", *_holding, *new]


def _held(name: str, functions: Mapping[int, Any]) -> list[str]:
    """The names under which a module holds one of the functions."""
    own = name.startswith(("torch.", "ronde.")) and name not in (
        "torch.distributed",
        "torch.distributed.distributed_c10d",
    )
    module = sys.modules.get(name)
    if own or not isinstance(module, ModuleType):
        return []
    return [key for key, value in list(vars(module).items()) if id(value) in functions]


def _replace(functions: Mapping[int, Any]) -> None:
    """Replace functions in torch.distributed, and in all modules that have imported them."""
    for name in _candidates():
        for key in _held(name, functions):
            names = vars(sys.modules[name])
            names[key] = functions[id(names[key])]


def _wrapper(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compared(*args: Any, **kwargs: Any) -> Any:
        comparison = _comparison  # another thread may end it
        if not torch.compiler.is_compiling() and comparison is not None:
            caller = sys._getframe(1)
            if not caller.f_code.co_filename.startswith(_LIBRARIES):
                comparison.compare(name, signature, args, kwargs, caller)
        return original(*args, **kwargs)

    return compared


class _Comparison:
    """What this process compares, from one ``distribute`` to its last checked step."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._thread = threading.get_ident()
        self._calls = Counter[tuple[int, ...]]()

    def compare(
        self, name: str, signature: inspect.Signature, args: Any, kwargs: Any, caller: FrameType
    ) -> None:
        """Meet the other ranks of the call's group.

        Raises:
            WorldError: on each of them, if the calls do not fit together.
        """
        try:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            group = given["group"]
            if threading.get_ident() != self._thread or dist.get_rank(group) < 0:
                return
            ranks = tuple(dist.get_process_group_ranks(group))
            texts = _texts(name, given, ranks)
            if group is not None and group != dist.group.WORLD:
                members = ", ".join(map(str, ranks))
                texts.append(f"group {group.group_name[:8]!r} of ranks {members}")
            flat = [t for v in given.values() for t in (v if isinstance(v, list) else [v])]
            on_cpu = all(t.device.type == "cpu" for t in flat if isinstance(t, torch.Tensor))
            waits = on_cpu and not given.get("async_op")
            place = _place(caller)
            parts = _parts(name, given, len(ranks), place)
        except Exception:  # torch raises its own; or the function is another tool's
            return
        self._calls[ranks] += 1
        if (number := self._calls[ranks]) > COMPARED_CALLS:
            return
        with suppress(LateError):
            found = self._meeting.meet(
                f"dist.{name}({', '.join(texts)})",
                parts,
                ranks=None if ranks == tuple(range(self._meeting.me.size)) else ranks,
                advice=(
                    f"This was collective {number} of the script since ronde.distribute. Every "
                    "rank must make the same calls, in the same order, with the same shapes and "
                    "types: look for what depends on the rank."
                ),
                place=place,
                at_most_seconds=math.inf if waits else _ASYNC_SECONDS,
            )
            _check_parts(self._meeting, name, ranks, found)


# -- a call in words -------------------------------------------------------------------


def _texts(name: str, given: Mapping[str, Any], ranks: Sequence[int]) -> list[str]:
    """What must be the same on all ranks."""
    named = {k: v for k, v in given.items() if k not in _FREE and v is not None}
    if "object" in name:  # of any kind, tensors too
        named = {k: [None] * len(v) if isinstance(v, list) else v for k, v in named.items()}
    if name.startswith("all_to_all"):
        named = {}
    lists = [{_text(each) for each in v} for v in named.values() if isinstance(v, list | tuple)]
    if any(len(kinds) > 1 for kinds in lists):
        # Of parts of unequal sizes, each rank gives or gets its own.
        named = {k: v for k, v in named.items() if not isinstance(v, torch.Tensor)}
    texts = [_list_text(v) if isinstance(v, list | tuple) else _text(v) for v in named.values()]
    for side in {"src", "dst"} & set(given):
        root, place = given[side], given[f"group_{side}"]
        texts.append(f"{side}={ranks[place or 0] if root is None else root}")
    return texts


def _list_text(values: Sequence[Any]) -> str:
    texts = [_text(value) for value in values]
    same = len(set(texts)) == 1
    return f"{len(texts)} × {texts[0]}" if same else f"[{', '.join(texts)}]"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = [1] if value.numel() == 1 else list(value.shape)
        text = f"{str(value.dtype).removeprefix('torch.')} {shape}"
        if value.layout is not torch.strided:
            return f"{text} {str(value.layout).removeprefix('torch.')}"
        # Elements travel in the order of memory.
        return text if value.is_contiguous() else f"{text} with strides {value.stride()}"
    if isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return str(getattr(value, "op", value)).rpartition(".")[2]
    return "object"


def _parts(name: str, given: Mapping[str, Any], size: int, place: str) -> dict[str, Any] | None:
    """What an all-to-all sends to each rank, and awaits from it."""
    if name == "all_to_all":
        sent = [_text(each) for each in given["input_tensor_list"]]
        awaited = [_text(each) for each in given["output_tensor_list"]]
    elif name == "all_to_all_single":
        sent = _rows(given["input"], given["input_split_sizes"], size)
        awaited = _rows(given["output"], given["output_split_sizes"], size)
    else:
        return None
    return {"sent": sent, "awaited": awaited, "place": place}


def _rows(tensor: torch.Tensor, sizes: Sequence[int] | None, size: int) -> list[str]:
    kind = str(tensor.dtype).removeprefix("torch.")
    rows = sizes or [len(tensor) // size] * size
    return [f"{kind} {[int(n), *tensor.shape[1:]]}" for n in rows]


def _check_parts(meeting: Rendezvous, name: str, ranks: Sequence[int], found: list[Any]) -> None:
    for i, sender in enumerate(found):
        for j, receiver in enumerate(found):
            if not sender or len(sender["sent"]) <= j or len(receiver["awaited"]) <= i:
                continue  # torch raises its own
            sent, awaited = sender["sent"][j], receiver["awaited"][i]
            if sent != awaited:
                raise meeting.refuse(
                    WorldError(
                        f"dist.{name}: rank {ranks[i]} sends {sent} to rank {ranks[j]} at "
                        f"{sender['place']}, and rank {ranks[j]} awaits {awaited} at "
                        f"{receiver['place']}. The sizes of both must agree."
                    )
                )


def _place(frame: FrameType) -> str:
    """The script's line; of a package that the script calls, if the script is not on the stack."""
    inner: FrameType | None = frame
    while inner is not None and not is_user_file(inner.f_code.co_filename):
        inner = inner.f_back
    found = inner or frame
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"
