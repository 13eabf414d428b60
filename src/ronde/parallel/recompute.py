"""Activation recomputation: a block keeps only its inputs, and its backward runs its forward again.

Chen et al. 2016 ("Training Deep Nets with Sublinear Memory Cost") for whole blocks; Korthikanti et
al. 2022 ("Reducing Activation Recomputation in Large Transformer Models") for selective
recomputation: results of matrix products, convolutions and attention are kept, the rest is computed
again. torch's non-reentrant checkpoint does the work. A block's ``forward`` is wrapped in place, so
``state_dict()`` names stay, and the second pass equals the first in randomness (torch) and in the
buffers it reads and changes (here).
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ronde.world import ArgumentError, PlanError, RondeError
from ronde.world.tensors import tensors_in

__all__ = ["applied", "apply", "large_children", "repeated_blocks"]

_Kept = dict[tuple[str, str], tuple[nn.Module, torch.Tensor]]
"""(module, buffer) -> that module, and the buffer as it was before a block's first pass."""

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_LISTS = (nn.ModuleList, nn.ModuleDict)  # they have no forward pass of their own
_IDEMPOTENT = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
_WHOLE = (nn.RNNBase, nn.MultiheadAttention)  # leaves, or nearly, that keep many activations

_KEPT = """
    mm addmm bmm baddbmm addbmm addmv mv convolution _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
""".split()  # noqa: SIM905


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if _has_parameters(child)]


def _is_leaf(module: nn.Module) -> bool:
    return not _children(module)


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules with parameters in a ModuleList, ModuleDict or Sequential, by name, in
    order.

    A short Sequential of single layers (an MLP inside a model) is one block.

    Example:
        >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> model = nn.ModuleDict({"body": nn.ModuleList([layer(), layer()]), "head": layer()})
        >>> list(repeated_blocks(model))
        ['body.0', 'body.1', 'head']
    """
    blocks: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        listed = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        for name, child in _children(module):
            full = f"{path}.{name}" if path else name
            if id(child) in seen:
                continue
            seen.add(id(child))
            layers = _children(child)
            leaves = all(_is_leaf(c) for _, c in layers)
            short = isinstance(child, nn.Sequential) and 1 < len(layers) <= 4 and leaves
            if short or (listed and not isinstance(child, _LISTS)):
                blocks[full] = child
            else:
                visit(full, child)

    visit("", model)
    return blocks


def large_children(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with at least 1/16 of the parameters; one with over half is split into its children.

    For models without repeated blocks.
    """
    total = sum(p.numel() for p in model.parameters())
    blocks: dict[str, nn.Module] = {}

    def visit(path: str, module: nn.Module) -> None:
        for name, child in _children(module):
            full = f"{path}.{name}" if path else name
            size = sum(p.numel() for p in child.parameters())
            if size > total / 2 and len(_children(child)) > 1:
                visit(full, child)
            elif size >= total / 16 and not isinstance(child, _LISTS):
                blocks[full] = child

    visit("", model)
    return blocks


class _Buffers:
    """A block's buffers: the second pass must find them unchanged.

    Otherwise batch normalization, for example, would count every batch twice.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.changing: set[tuple[str, str]] | None = None  # known after the first pass

    @contextmanager
    def first(self, block: nn.Module, kept: _Kept) -> Iterator[None]:
        """Save the buffers this pass changes."""
        places = [
            ((path, key), m, b)
            for path, m in block.named_modules()
            for key, b in m._buffers.items()
            if b is not None
        ]
        if not places:
            yield
            return
        marks = {place: (id(b), b._version) for place, _, b in places}
        before = {
            place: (m, b.clone())
            for place, m, b in places
            if self.changing is None or place in self.changing
        }
        yield
        changed = set()
        for place, m, _ in places:
            now = m._buffers[place[1]]
            assert now is not None
            if isinstance(m, _NormBase) or (id(now), now._version) != marks[place]:
                changed.add(place)
                if place not in before:
                    raise RondeError(
                        f"recompute: buffer {place[1]!r} in block {self.name!r} "
                        f"({type(m).__name__}) was constant in the first forward pass and has "
                        "changed now, so this pass cannot be repeated. Use recompute='none'."
                    )
        self.changing = changed | (self.changing or set())
        kept.update({place: before[place] for place in changed})


class _Again:
    """Runs a pass on copies of the buffers the first one saw, each time it is entered: a backward
    pass that keeps its graph may run it many times.
    """

    def __init__(self, kept: _Kept, results: _Results | None = None) -> None:
        self.kept, self.results = kept, results
        self._now: list[list[tuple[nn.Module, str, torch.Tensor | None]]] = []
        self._inner: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._now.append([(m, key, m._buffers[key]) for (_, key), (m, _) in self.kept.items()])
        for (_, key), (m, value) in self.kept.items():
            m._buffers[key] = value.clone()
        self._inner.append(self.results.again() if self.results else nullcontext())
        self._inner[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.pop().__exit__(*error)
        for m, key, buffer in self._now.pop():
            m._buffers[key] = buffer


class _Results:
    """What selective recomputation keeps of a first pass: the next pass takes it, where it can."""

    def __init__(self, policy: Callable[..., CheckpointPolicy]) -> None:
        self._first, self._again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        self._usable = False

    @contextmanager
    def first(self, buffers: AbstractContextManager[Any]) -> Iterator[None]:
        """The first pass. One that is not over, with a gradient inside, cannot be taken up."""
        with buffers, self._first:
            yield
        self._usable = True

    def again(self) -> AbstractContextManager[Any]:
        """Another pass: once with what was kept, unless it has been written into since
        (``scores += bias``); else with nothing.
        """
        usable, self._usable = self._usable and self._intact(), False
        return self._again if usable else nullcontext()

    def _intact(self) -> bool:
        kept = tree_leaves([list(each.values()) for each in self._first.storage.values()])
        versions = [(v.val, v.version) for v in kept if getattr(v, "version", None) is not None]
        return all(tensor._version == version for tensor, version in versions)


def _kept_ops() -> set[Any]:
    # some exist only in a torch with CUDA
    packets = [getattr(torch.ops.aten, name) for name in _KEPT if hasattr(torch.ops.aten, name)]
    overloads = [(p, name) for p in packets for name in p.overloads()]
    return {getattr(p, name) for p, name in overloads if not name.endswith("out")}


def _copied(value: Any) -> Any:
    """Copy lists, dictionaries, and objects such as a key-value cache, but not their tensors."""
    if isinstance(value, torch.Tensor) or value is None:
        return value
    if type(value) is list:
        return [_copied(v) for v in value]
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    if type(value) is tuple:
        return tuple(_copied(v) for v in value)
    if _is_plain(value):
        return value
    try:
        return copy.deepcopy(value, {id(t): t for t in tensors_in(value, attributes=True)})
    except Exception:
        return value  # _Arguments sees whether the pass changes it


def _is_plain(value: Any) -> bool:
    return callable(value) or isinstance(value, bool | int | float | str | torch.dtype)


class _Arguments:
    """What a block was given: its pass may not change that, but for what :func:`_copied` copies."""

    def __init__(self, name: str, block: nn.Module, given: Any, copied: Any) -> None:
        self.name = name
        # Doing it twice changes nothing: relu(relu(x)) is relu(x).
        inplace = [m for m in block.modules() if getattr(m, "inplace", False) is True]
        harmless = inplace and all(isinstance(m, _IDEMPOTENT) for m in inplace)
        self.versions = [] if harmless else [(t, t._version) for t in tensors_in(given)]
        pairs = zip(_objects(given), _objects(copied), strict=True)
        self.uncopied = [(o, tensors_in(o, attributes=True)) for o, c in pairs if o is c]

    def check(self) -> None:
        """Raise PlanError where the pass has changed them."""
        changed = any(t._version != version for t, version in self.versions)
        for value, before in self.uncopied:
            now = tensors_in(value, attributes=True)
            changed = changed or [id(t) for t in now] != [id(t) for t in before]
        if changed:
            raise PlanError(
                f"recompute: block {self.name!r} changes a tensor or an object that it is given, "
                "so its forward pass cannot be repeated. Let it return a new one (x = 2 * x in "
                "place of x *= 2), or use recompute='none'."
            )


def _objects(values: Any) -> list[Any]:
    """What is neither tensor, list, dictionary, tuple, nor plain."""
    if isinstance(values, list | tuple):
        return [o for v in values for o in _objects(v)]
    if isinstance(values, dict):
        return [o for v in values.values() for o in _objects(v)]
    plain = values is None or isinstance(values, torch.Tensor) or _is_plain(values)
    return [] if plain else [values]


def _wrap(name: str, block: nn.Module, selective: bool) -> None:
    buffers = _Buffers(name)
    ops = _kept_ops() if selective else set()
    own_forward = block.__dict__.get("forward")  # set on the module itself, not on its class
    if own_forward is not None:
        block.__dict__["_forward_once"] = own_forward

    def contexts(block: nn.Module) -> _Contexts:
        kept: _Kept = {}
        first = buffers.first(block, kept)
        if not selective:
            return first, _Again(kept)

        results = _Results(policy)
        return results.first(first), _Again(kept, results)

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(type(self).forward, self)
        once: Callable[..., Any] = self.__dict__.get("_forward_once") or plain
        if not torch.is_grad_enabled():
            return once(*args, **kwargs)

        # The first pass may change the caller's lists, dictionaries and caches; the second one
        # must not see or repeat that.
        as_given = _copied((args, kwargs))
        first = True
        after: list[tuple[torch.Tensor, int]] = []

        def run(values: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            nonlocal first, after
            if not first:
                if any(t._version != version for t, version in after):
                    raise PlanError(
                        f"recompute: a tensor that block {name!r} was given has been changed since "
                        "(x += block(x)), so its forward pass cannot be repeated. Make a new one "
                        "(x = x + block(x)), or use recompute='none'."
                    )
                args, kwargs = _copied(as_given)
                return once(*args, **kwargs)
            first = False
            arguments = _Arguments(name, self, values, as_given)
            result = once(*values[0], **values[1])
            arguments.check()
            tensors = tensors_in(values)
            after = [(t, t._version) for t in tensors if not isinstance(t, nn.Parameter)]
            return result

        # All arguments in one: torch searches it for the devices whose random state it saves.
        return checkpoint(
            run, (args, kwargs), use_reentrant=False, context_fn=partial(contexts, self)
        )

    # A method, not a function: a copy of the model then calls the copy.
    block.forward = types.MethodType(forward, block)  # type: ignore[method-assign]


def _gains(block: nn.Module) -> bool:
    """Whether recomputation saves anything: a single layer keeps little but its input."""
    return not isinstance(block, torch.jit.ScriptModule) and (
        isinstance(block, _WHOLE) or not _is_leaf(block)
    )


def _wrap_chosen(model: nn.Module, level: str) -> dict[str, nn.Module]:
    """Recompute the default blocks: the repeated ones, or the largest children."""
    blocks = {n: b for n, b in repeated_blocks(model).items() if _gains(b)}
    blocks = blocks or {n: b for n, b in large_children(model).items() if _gains(b)}
    for name, block in blocks.items():
        # an in-place layer would overwrite the results that are kept
        in_place = any(getattr(m, "inplace", False) is True for m in block.modules())
        _wrap(name, block, level == "selective" and not in_place)
    return blocks


@contextmanager
def applied(model: nn.Module, level: str) -> Iterator[list[str]]:
    """Like :func:`apply`, for the duration of a ``with`` block. Yields the blocks' names."""
    chosen = _wrap_chosen(model, level)
    try:
        yield list(chosen)
    finally:
        for block in chosen.values():
            own = block.__dict__
            del own["forward"]
            if "_forward_once" in own:
                own["forward"] = own.pop("_forward_once")


def apply(model: nn.Module, level: str) -> list[str]:
    """Recompute a model's blocks in the backward pass.

    Args:
        model: changed in place; parameters, buffers and their names stay.
        level: ``"full"``: a block keeps its inputs only. ``"selective"``: also the results of its
            matrix products, convolutions, and attention. Blocks with in-place layers
            (``nn.ReLU(inplace=True)``), which overwrite those, are recomputed in full.
            ``"none"``: nothing.

    Returns:
        list: names of the blocks (:func:`repeated_blocks`, else the largest children). If there are
        none, you get a warning.

    Example:
        >>> layer = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> model = nn.Sequential(layer(), layer())
        >>> apply(model, "full")
        ['0', '1']
        >>> list(model.state_dict())[0]
        '0.0.weight'
    """
    if level == "none":
        return []
    if level not in ("full", "selective"):
        raise ArgumentError(
            f"recompute={level!r} is unknown. Choose 'none', 'selective', or 'full'."
        )
    chosen = _wrap_chosen(model, level)
    if not chosen:
        warnings.warn(
            f"recompute={level!r} has no effect: {type(model).__name__} has no block of several "
            "layers. Group its layers into modules in an nn.ModuleList or nn.Sequential.",
            stacklevel=2,
        )
    return list(chosen)
