"""A block that several workers hold together: its layers, and how its forward code is narrowed.

:class:`BlockRuntime` says how a narrowed block reaches its weights and the other workers: a trial
stands in for them, training communicates.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "Block",
    "BlockRuntime",
    "Region",
    "features",
    "install_layers",
    "is_linear",
    "linear",
    "multihead",
    "piece",
    "recomputes",
    "replace_attribute",
    "split_dims",
]


@dataclass(frozen=True)
class Block:
    """Layers that several workers can hold together, by their names in the model.

    Attributes:
        path: the smallest module around them.
        kind: ``"multihead"`` is torch's own ``nn.MultiheadAttention``.
        column: modules of which each worker keeps some outputs.
        row: the module of which it keeps the inputs that belong to them.
        pieces: per column, into how many tensors the code cuts its output (3 for fused query, key
            and value).
        heads, kv_heads: of attention; 0 for an MLP.
        attributes: ``(module, attribute)`` that count heads or features, to divide.
        narrow: arguments of ``path`` (places or names) that the code reads its width from.
        inside: whole parameters used between columns and row: their gradients are partial.
        per_head: embeddings with one column a head (relative positions), split with them.
        parameters: elements that are divided among the workers (see :func:`split_dims`).
        reduced_bytes: summed over the workers, forward and backward together, per sample.
        why_not: why it cannot be split; empty if it can.
    """

    path: str
    kind: Literal["mlp", "attention", "multihead"]
    column: tuple[str, ...]
    row: str
    pieces: tuple[int, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    attributes: tuple[tuple[str, str], ...] = ()
    narrow: tuple[int | str, ...] = ()
    inside: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    parameters: int = 0
    reduced_bytes: float = 0.0
    why_not: str = ""


# -- layers ----------------------------------------------------------------------------


def _transposed(module: nn.Module) -> bool:
    """Whether its weight is (inputs, outputs), as in transformers' Conv1D."""
    return not isinstance(module, nn.Linear)


def is_linear(module: nn.Module) -> bool:
    """A Linear or a Conv1D of transformers, with an ordinary weight and the usual forward."""
    if isinstance(module, nn.Linear):
        usual = type(module).forward is nn.Linear.forward
    else:
        usual = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    if not usual or "forward" in vars(module):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2


def features(module: nn.Module) -> tuple[int, int]:
    """Inputs, outputs."""
    a, b = module.weight.shape  # type: ignore[union-attr, misc]
    return (int(a), int(b)) if _transposed(module) else (int(b), int(a))


def linear(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The layer's arithmetic with other weights."""
    return F.linear(x, weight.t() if _transposed(module) else weight, bias)


def piece(x: torch.Tensor, dim: int, pieces: int, place: int, tensor: int) -> torch.Tensor:
    """The part of ``x`` for worker ``place`` of ``tensor``: its share of each of ``pieces`` pieces.

    Example:
        >>> piece(torch.arange(12), 0, 3, 1, 2).tolist()
        [2, 3, 6, 7, 10, 11]
    """
    return torch.cat([p.chunk(tensor, dim)[place] for p in x.chunk(pieces, dim)], dim)


def split_dims(model: nn.Module, block: Block) -> tuple[dict[str, int], list[str]]:
    """A block's divided parameters, by name -> dimension; and those held whole and used in parts.

    A column that the code cuts into several tensors (a fused query, key and value) stays whole: a
    worker's share of each is no single box, which is all that a checkpoint can describe. Each
    worker computes with its share, and gradients are summed.
    """
    divided: dict[str, int] = {}
    whole: list[str] = []
    if block.kind == "multihead":
        module = model.get_submodule(block.path)
        prefix = f"{block.path}." if block.path else ""
        whole = ["in_proj_weight", "in_proj_bias"]
        whole = [f"{prefix}{n}" for n in whole if getattr(module, n) is not None]
        separate = [f"{n}_proj_weight" for n in "qkv"]
        divided = {f"{prefix}{n}": 0 for n in separate if getattr(module, n) is not None}
        divided[f"{block.row}.weight"] = 1
        return divided, whole
    for name, pieces in zip(block.column, block.pieces, strict=True):
        module = model.get_submodule(name)
        own = {f"{name}.weight": 1 if _transposed(module) else 0}
        if module.bias is not None:
            own[f"{name}.bias"] = 0
        if pieces > 1:
            whole += own
        else:
            divided |= own
    divided[f"{block.row}.weight"] = 0 if _transposed(model.get_submodule(block.row)) else 1
    divided |= {f"{name}.weight": 1 for name in block.per_head}
    return divided, whole


# -- narrowed forward passes -----------------------------------------------------------


class BlockRuntime:
    """How a narrowed block reaches its weights, and the other workers."""

    place = 0
    tensor = 1

    def local(self, module: nn.Module, name: str, dim: int, pieces: int) -> torch.Tensor | None:
        """This worker's part of a parameter."""
        raise NotImplementedError

    def enter(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The input of column ``name``: forward the identity, backward the sum over workers."""
        raise NotImplementedError

    def leave(self, block: Block, x: torch.Tensor, row: nn.Module) -> torch.Tensor:
        """Apply the row to this worker's part, and sum over the workers."""
        raise NotImplementedError

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Forward the sum over the workers, backward the identity."""
        raise NotImplementedError

    def begin(self, block: Block, training: bool) -> None:
        """A block's first column is about to run."""

    def end(self, block: Block) -> None:
        """Its row is about to run."""


class Region:
    """A block while it runs, from its columns to its row."""

    def __init__(self, block: Block, runtime: BlockRuntime) -> None:
        self.block = block
        self.runtime = runtime
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enter(self, x: torch.Tensor, training: bool, name: str) -> torch.Tensor:
        """Columns with the same input share it: one sum in the backward pass."""
        for known, entered in self._pairs:
            if known is x:
                return entered
        if not self._pairs:
            self.runtime.begin(self.block, training)
        entered = self.runtime.enter(x, name)
        self._pairs.append((x, entered))
        return entered

    def stand_in(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        """A narrower tensor instead of ``x``; a column that gets it takes ``x``."""
        entered = self.enter(x, training, "")
        narrower = entered.detach().narrow(-1, 0, x.shape[-1] // self.runtime.tensor)
        self._pairs.append((narrower, entered))
        return narrower

    def close(self) -> None:
        """The row has been reached."""
        self._pairs.clear()
        self.runtime.end(self.block)


def multihead(region: Region) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """``nn.MultiheadAttention.forward`` over some of the heads (its own refuses fewer features)."""
    block, runtime = region.block, region.runtime

    def forward(
        module: nn.MultiheadAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads = module.num_heads // runtime.tensor
        low = runtime.place * heads  # the first of this worker's heads
        batched = query.dim() == 3
        inputs = [region.enter(x, module.training, "") for x in (query, key, value)]
        if not batched:
            inputs = [x.unsqueeze(0) for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        if module.in_proj_weight is not None:
            whole = runtime.local(module, "in_proj_weight", 0, 3)
            assert whole is not None
            weights: Sequence[torch.Tensor | None] = whole.chunk(3)
        else:
            weights = [runtime.local(module, f"{n}_proj_weight", 0, 1) for n in "qkv"]
        bias = runtime.local(module, "in_proj_bias", 0, 3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2)  # type: ignore[arg-type, no-untyped-call]
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        n, _, rows, _ = q.shape
        mask: torch.Tensor | None = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            if mask.dim() == 3:  # one for each sample and head
                mask = mask.view(n, -1, rows, k.shape[2])[:, low : low + heads]
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q.dtype)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        elif is_causal and not need_weights:
            mask = None  # as torch: the mask is only a hint then
        dropped = module.dropout if module.training else 0.0
        attention: torch.Tensor | None = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            attention = (scores if mask is None else scores + mask).softmax(-1)
            # In torch's shape, which tells which numbers are this worker's.
            attention = F.dropout(attention.flatten(0, 1), dropped).view_as(attention)
            out = attention @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal and mask is None)
        joined = out.transpose(1, 2).flatten(2)
        region.close()
        result = runtime.leave(block, joined, module.out_proj)
        if attention is not None:
            if average_attn_weights:
                attention = runtime.total(attention.sum(1) / module.num_heads)
            else:
                zeros = attention.new_zeros(n, module.num_heads, *attention.shape[2:])
                placed = torch.cat([zeros[:, :low], attention, zeros[:, low + heads :]], 1)
                attention = runtime.total(placed)
            attention = attention if batched else attention.squeeze(0)
        if not batched:
            result = result.squeeze(0)
        elif not module.batch_first:
            result = result.transpose(0, 1)
        return result, attention

    return forward


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def replace_attribute(stack: ExitStack, target: nn.Module, name: str, value: Any) -> None:
    """Set a module's own attribute until ``stack`` closes; a function becomes its method."""
    old = vars(target).get(name, _ABSENT)
    # A bound method, so that copies of the module have it too.
    is_function = isinstance(value, types.FunctionType)
    vars(target)[name] = types.MethodType(value, target) if is_function else value

    def restore() -> None:
        if old is _ABSENT:
            del vars(target)[name]
        else:
            vars(target)[name] = old

    stack.callback(restore)


_ABSENT: Any = object()


def recomputes(module: nn.Module) -> bool:
    """Whether :mod:`ronde.parallel.recompute` runs it twice."""
    return getattr(vars(module).get("forward"), "__module__", "") == "ronde.parallel.recompute"


def install_layers(
    stack: ExitStack,
    model: nn.Module,
    block: Block,
    runtime: BlockRuntime,
    done: set[tuple[str, str]],
) -> None:
    """Let a block run as one of ``runtime.tensor`` parts until ``stack`` closes.

    ``done``: attributes that are divided already, because another block reads them too.
    """
    region = Region(block, runtime)
    if block.kind == "multihead":
        replace_attribute(stack, model.get_submodule(block.path), "forward", multihead(region))
        for name, module in model.named_modules():
            is_around = block.path.startswith(f"{name}." if name else "")
            if isinstance(module, nn.TransformerEncoderLayer) and is_around:
                # Turns its fused kernel for inference off, which would compute with all heads.
                replace_attribute(stack, module, "activation_relu_or_gelu", 0)
        return
    for name, pieces in zip(block.column, block.pieces, strict=True):
        column = model.get_submodule(name)
        replace_attribute(stack, column, "forward", _column(name, region, pieces))
    replace_attribute(stack, model.get_submodule(block.row), "forward", _row(region))
    for name in block.per_head:
        embedding = model.get_submodule(name)
        if "forward" not in vars(embedding):
            replace_attribute(stack, embedding, "forward", _embedding(runtime))
    for name, attribute in block.attributes:
        if (name, attribute) not in done:
            done.add((name, attribute))
            owner = model.get_submodule(name)
            fewer = vars(owner)[attribute] // runtime.tensor
            replace_attribute(stack, owner, attribute, fewer)
    if block.narrow:
        container = model.get_submodule(block.path)
        # A recomputed block runs twice: narrow each pass, not the input that it keeps for both.
        name = "_forward_once" if recomputes(container) else "forward"
        replace_attribute(stack, container, name, _narrowed(vars(container).get(name), region))


_Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _column(name: str, region: Region, pieces: int) -> _Forward:
    def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        weight = region.runtime.local(module, "weight", 1 if _transposed(module) else 0, pieces)
        assert weight is not None
        entered = region.enter(input, module.training, name)
        return linear(module, entered, weight, region.runtime.local(module, "bias", 0, pieces))

    return forward


def _row(region: Region) -> _Forward:
    def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        region.close()
        return region.runtime.leave(region.block, input, module)

    return forward


def _embedding(runtime: BlockRuntime) -> _Forward:
    def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        weight = runtime.local(module, "weight", 1, 1)
        assert weight is not None
        return F.embedding(input, weight, module.padding_idx)  # type: ignore[arg-type]

    return forward


def _narrowed(own: Callable[..., Any] | None, region: Region) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for place in region.block.narrow:
            named[place] = region.stand_in(named[place], module.training)
        new_args = [named[i] for i in range(len(args))]
        new_kwargs = {k: named[k] for k in kwargs}
        if own is None:
            return type(module).forward(module, *new_args, **new_kwargs)
        return own(*new_args, **new_kwargs)

    return forward
