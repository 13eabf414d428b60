"""Find, map and rebuild tensors in nested values: batches, samples, arguments, results.

torch's pytree knows lists, tuples, dictionaries, and types that libraries register. Batches are
also dataclasses, ``UserDict`` (transformers' ``BatchEncoding``) and container subclasses, which
pytree treats as leaves; :func:`parts` and :func:`rebuild` handle those too.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Opaque",
    "build",
    "flatten",
    "is_named_tuple",
    "is_sharded",
    "leaves",
    "local_part",
    "map_leaves",
    "map_tensors",
    "named_tensors",
    "parts",
    "rebuild",
    "tensors_in",
]

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, type(None))
_LEAF = (torch.Tensor, *_PLAIN)


class Opaque(Exception):
    """A value holds tensors that pytree cannot reach."""


def is_named_tuple(value: Any) -> bool:
    """Whether a value is a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def parts(value: Any) -> Mapping[Any, Any] | None:
    """Return a container's items by index, key or field; None for anything else.

    Example:
        >>> parts([5, 6]), parts({"a": 1}), parts(7)
        ({0: 5, 1: 6}, {'a': 1}, None)
    """
    if isinstance(value, Mapping):
        # An open file that acts as a mapping (NumPy's NpzFile, an h5py group) is a leaf: looking
        # inside would read all of it.
        return None if hasattr(value, "close") or hasattr(value, "file") else value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, _PLAIN):
        return None
    if (node := pytree.SUPPORTED_NODES.get(type(value))) is not None:
        return dict(enumerate(node.flatten_fn(value)[0]))
    if dataclasses.is_dataclass(value):
        return {
            f.name: getattr(value, f.name)
            for f in dataclasses.fields(value)
            if hasattr(value, f.name)
        }
    return None


def rebuild(value: Any, held: dict[Any, Any]) -> Any:
    """Copy a container with other items, given as :func:`parts` returns them."""
    kind = type(value)
    if kind is dict:
        return held
    if isinstance(value, tuple):  # before pytree, which makes a plain tuple of a torch.Size
        return kind(*held.values()) if is_named_tuple(value) else kind(list(held.values()))
    if (node := pytree.SUPPORTED_NODES.get(kind)) is not None:
        return node.unflatten_fn(list(held.values()), node.flatten_fn(value)[1])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return kind(held)  # type: ignore[call-arg]
    made = copy.copy(value)
    if isinstance(made, list | deque):
        made.clear()
        made.extend(held.values())
    elif isinstance(made, MutableMapping):
        made.update(held)
    else:
        for name, each in held.items():
            object.__setattr__(made, name, each)  # the dataclass may be frozen
    return made


def map_leaves(
    call: Callable[[Any], Any], value: Any, leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply ``call`` to everything in a value that is not a container.

    Args:
        leaf: says of a container that it is to be passed to ``call`` as a whole.

    Example:
        >>> map_leaves(lambda x: x + 1, {"a": [1, 2], "b": (3,)})
        {'a': [2, 3], 'b': (4,)}
    """
    if isinstance(value, torch.Tensor) or (leaf is not None and leaf(value)):
        return call(value)
    kind = type(value)
    if kind is tuple or kind is list:  # these two without parts(): this runs for every batch
        return kind(
            [call(v) if isinstance(v, torch.Tensor) else map_leaves(call, v, leaf) for v in value]
        )
    if kind is dict:
        return {
            k: call(v) if isinstance(v, torch.Tensor) else map_leaves(call, v, leaf)
            for k, v in value.items()
        }
    held = parts(value)
    if held is None:
        return call(value)
    return rebuild(value, {k: map_leaves(call, v, leaf) for k, v in held.items()})


def map_tensors(call: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply ``call`` to every tensor in a value."""
    return map_leaves(lambda v: call(v) if isinstance(v, torch.Tensor) else v, value)


def leaves(value: Any) -> Iterator[Any]:
    """Iterate over everything in a value that is not a container."""
    held = None if isinstance(value, torch.Tensor) else parts(value)
    if held is None:
        yield value
    else:
        for v in held.values():
            yield from leaves(v)


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors in a value with their paths.

    Packed sequences are skipped: their rows and indices are not in batch order.

    Example:
        >>> [path for path, _ in named_tensors({"x": [torch.zeros(1), torch.zeros(1)]}, "batch")]
        ['batch[x][0]', 'batch[x][1]']
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    elif not isinstance(value, PackedSequence) and (held := parts(value)) is not None:
        form = (
            ".{}" if dataclasses.is_dataclass(value) and not isinstance(value, Mapping) else "[{}]"
        )
        for k, v in held.items():
            yield from named_tensors(v, path + form.format(k))


def tensors_in(value: Any, attributes: bool = False) -> list[torch.Tensor]:
    """List every tensor in an argument or a result.

    Args:
        value: of any kind.
        attributes: also look at the attributes of other objects: a script may have its own batch
            class.

    Example:
        >>> [t.shape[0] for t in tensors_in({"a": [torch.zeros(2)], "b": (1, torch.zeros(3))})]
        [2, 3]
    """
    tensors: list[torch.Tensor] = []
    _gather(value, tensors, attributes, ())
    return tensors


def _gather(
    value: Any, tensors: list[torch.Tensor], attributes: bool, within: tuple[Any, ...]
) -> None:
    """Collect tensors; ``within`` holds the enclosing objects, to stop at cycles."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, _PLAIN):
        pass
    elif isinstance(value, list | tuple | set | Mapping):
        for v in value.values() if isinstance(value, Mapping) else value:
            _gather(v, tensors, attributes, within)
    elif len(within) < 8 and not any(value is outer for outer in within):
        held = parts(value)
        for v in _attributes(value, attributes) if held is None else held.values():
            _gather(v, tensors, attributes, (*within, value))


def _attributes(value: Any, every: bool) -> Iterable[Any]:
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if not every or callable(value) or isinstance(value, ModuleType):
        return ()
    own = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in own for name in ((names,) if isinstance(names, str) else names)]
    return [
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name, None) for name in slots),
    ]


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Split a result into its tensors and constants, and a structure for :func:`build`.

    Raises:
        Opaque: an object holds tensors that pytree does not reach.
    """
    if isinstance(value, torch.Tensor):
        return [value], None
    flat: list[Any] = []
    return flat, _flatten(value, flat)


def _flatten(value: Any, flat: list[Any]) -> Any:
    """Like pytree's ``tree_flatten``, but four times as fast: it runs for every result in a
    pipeline.
    """
    if not isinstance(value, _LEAF):
        # the key that pytree has for them all
        kind: Any = namedtuple if is_named_tuple(value) else type(value)
        node = pytree.SUPPORTED_NODES.get(kind)
        if node is not None:
            held, context = node.flatten_fn(value)
            return node, context, [_flatten(v, flat) for v in held]
        if tensors_in([value, *getattr(value, "__dict__", {}).values()]):
            raise Opaque
    flat.append(value)
    return None


def build(values: Iterable[Any], structure: Any) -> Any:
    """Rebuild a result that :func:`flatten` split."""
    return _build(iter(values), structure)


def _build(values: Iterator[Any], structure: Any) -> Any:
    if structure is None:
        return next(values)
    node, context, held = structure
    return node.unflatten_fn([_build(values, each) for each in held], context)


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing DTensor's module, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's own part of a tensor, detached."""
    return (tensor._local_tensor if is_sharded(tensor) else tensor).detach()
