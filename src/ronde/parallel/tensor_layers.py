"""A block that several workers hold together: which layers it has, and how its forward code is told
that it is narrower.

What a forward pass does with other workers is left to :class:`Arms`: a trial stands them in, a
training lets them take part.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "Arms",
    "Block",
    "Region",
    "features",
    "install_layers",
    "is_linear",
    "linear",
    "multihead",
    "piece",
    "recomputes",
    "replaced",
    "split_dims",
]


@dataclass(frozen=True)
class Block:
    """Layers that several workers can hold together, by their names in the model.

    Attributes:
        path: the smallest module around them.
        kind: ``"attention"``, ``"mlp"``, or ``"multihead"`` for torch's own
            ``nn.MultiheadAttention``.
        column: modules of which each worker keeps some outputs.
        row: the module of which it keeps the inputs that belong to them.
        pieces: per column, how many tensors its output is cut into by the code (3 for fused query,
            key and value).
        heads, kv_heads: of attention; 0 for an MLP.
        attributes: ``(module, attribute)`` that count heads or features and are divided.
        narrow: arguments of ``path`` (places or names) that the code reads its width from.
        inside: parameters used between columns and row and held by all: their gradients are
            partial.
        per_head: embeddings with one column a head (relative positions), split with them.
        parameters: elements that are divided among the workers (see :func:`split_dims`).
        flops: of these layers, forward, per sample.
        reduced_bytes: summed over the workers, forward and backward together, per sample.
        why_not: what stands against it; empty if it can be split.
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
    flops: float = 0.0
    reduced_bytes: float = 0.0
    why_not: str = ""


# -- layers ----------------------------------------------------------------------------


def _transposed(module: nn.Module) -> bool:
    """Whether its weight is (inputs, outputs), as that of transformers' Conv1D."""
    return not isinstance(module, nn.Linear)


def is_linear(module: nn.Module) -> bool:
    """A Linear, or what is one by another name, with an ordinary weight and the usual forward."""
    if isinstance(module, nn.Linear):
        usual = type(module).forward is nn.Linear.forward
    else:
        usual = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    weight = module._parameters.get("weight")
    return usual and weight is not None and weight.dim() == 2 and "forward" not in vars(module)


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
    """What the worker at ``place`` of ``tensor`` keeps of ``x``: its part of each of ``pieces``
    equal pieces.

    Example:
        >>> piece(torch.arange(12), 0, 3, 1, 2).tolist()
        [2, 3, 6, 7, 10, 11]
    """
    return torch.cat([p.chunk(tensor, dim)[place] for p in x.chunk(pieces, dim)], dim)


def split_dims(model: nn.Module, block: Block) -> tuple[dict[str, int], list[str]]:
    """A block's parameters that are divided, by name -> along which dimension; and those held whole
    and used in parts.

    Whole stay tensors that the code cuts into several (a fused query, key and value): a worker's
    part of each is no one box of the whole, which no checkpoint could say. Each worker computes
    with its part, and their gradients are added up.
    """
    divided: dict[str, int] = {}
    whole: list[str] = []
    if block.kind == "multihead":
        module = model.get_submodule(block.path)
        for name in (
            "in_proj_weight",
            "in_proj_bias",
            "q_proj_weight",
            "k_proj_weight",
            "v_proj_weight",
        ):
            if getattr(module, name) is None:
                continue
            if name.startswith("in_"):
                whole.append(f"{block.path}.{name}".lstrip("."))
            else:
                divided[f"{block.path}.{name}".lstrip(".")] = 0
        divided[f"{block.row}.weight"] = 1
        return divided, whole
    for name, pieces in zip(block.column, block.pieces, strict=True):
        module = model.get_submodule(name)
        own = {f"{name}.weight": 1 if _transposed(module) else 0} | (
            {f"{name}.bias": 0} if module.bias is not None else {}
        )
        if pieces > 1:
            whole += own
        else:
            divided |= own
    divided[f"{block.row}.weight"] = 0 if _transposed(model.get_submodule(block.row)) else 1
    divided |= {f"{name}.weight": 1 for name in block.per_head}
    return divided, whole


# -- narrowed forward passes -----------------------------------------------------------


class Arms:
    """How a narrowed block reaches its weights, and the other workers."""

    place = 0
    tensor = 1

    def local(self, module: nn.Module, name: str, dim: int, pieces: int) -> torch.Tensor | None:
        """This worker's part of a parameter."""
        raise NotImplementedError

    def enter(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """What comes into the column ``name``: the same forward; backward the sum over the
        workers.
        """
        raise NotImplementedError

    def leave(self, block: Block, x: torch.Tensor, row: nn.Module) -> torch.Tensor:
        """The row applied to this worker's part, summed over the workers."""
        raise NotImplementedError

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the workers; backward the same."""
        raise NotImplementedError

    def begin(self, block: Block, training: bool) -> None:
        """A block's first column is about to run."""

    def end(self, block: Block) -> None:
        """Its row is about to run."""


class Region:
    """From a block's columns to its row, while it runs."""

    def __init__(self, block: Block, arms: Arms) -> None:
        self.block = block
        self.arms = arms
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enter(self, x: torch.Tensor, training: bool, name: str) -> torch.Tensor:
        """The columns share what they share: one sum in the backward pass for each input."""
        for given, entered in self._pairs:
            if given is x:
                return entered
        if not self._pairs:
            self.arms.begin(self.block, training)
        entered = self.arms.enter(x, name)
        self._pairs.append((x, entered))
        return entered

    def stand_in(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        """A narrower tensor in the place of ``x``; a column that is given it takes ``x``."""
        entered = self.enter(x, training, "")
        narrower = x.detach().narrow(-1, 0, x.shape[-1] // self.arms.tensor)
        self._pairs.append((narrower, entered))
        return narrower

    def close(self) -> None:
        """The row has been reached."""
        self._pairs.clear()
        self.arms.end(self.block)


def multihead(region: Region) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """``nn.MultiheadAttention.forward`` over some of the heads (its own refuses fewer features)."""
    block, arms = region.block, region.arms

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
        heads = module.num_heads // arms.tensor
        low = arms.place * heads
        batched = query.dim() == 3
        inputs = [region.enter(x, module.training, "") for x in (query, key, value)]
        if not batched:
            inputs = [x.unsqueeze(0) for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        if module.in_proj_weight is not None:
            whole = arms.local(module, "in_proj_weight", 0, 3)
            assert whole is not None
            weights: Sequence[torch.Tensor | None] = whole.chunk(3)
        else:
            weights = [arms.local(module, f"{n}_proj_weight", 0, 1) for n in "qkv"]
        bias = arms.local(module, "in_proj_bias", 0, 3)
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
        seen: torch.Tensor | None = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            seen = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropped)
            out = seen @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal and mask is None)
        joined = out.transpose(1, 2).flatten(2)
        region.close()
        result = arms.leave(block, joined, module.out_proj)
        if seen is not None:
            if average_attn_weights:
                seen = arms.total(seen.sum(1) / module.num_heads)
            else:
                placed = seen.new_zeros(n, module.num_heads, *seen.shape[2:])
                seen = arms.total(torch.cat([placed[:, :low], seen, placed[:, low + heads :]], 1))
            seen = seen if batched else seen.squeeze(0)
        if not batched:
            result = result.squeeze(0)
        elif not module.batch_first:
            result = result.transpose(0, 1)
        return result, seen

    return forward


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def replaced(stack: ExitStack, target: nn.Module, name: str, value: Any) -> None:
    """Give a module an attribute of its own until ``stack`` is closed; a function becomes its
    method, also that of copies of it.
    """
    old = vars(target).get(name, _ABSENT)
    vars(target)[name] = (
        types.MethodType(value, target) if isinstance(value, types.FunctionType) else value
    )

    def back() -> None:
        if old is _ABSENT:
            del vars(target)[name]
        else:
            vars(target)[name] = old

    stack.callback(back)


_ABSENT: Any = object()


def _divided(value: Any, counts: Iterable[int], tensor: int) -> Any:
    """An attribute that counts heads, with fewer of them (einops' layers hold pairs of names and
    numbers).
    """
    if isinstance(value, tuple):
        return tuple((n, v // tensor if v in counts else v) for n, v in value)
    return value // tensor


def recomputes(module: nn.Module) -> bool:
    """Whether :mod:`ronde.parallel.recompute` runs it twice."""
    return getattr(vars(module).get("forward"), "__module__", "") == "ronde.parallel.recompute"


def install_layers(
    stack: ExitStack, model: nn.Module, block: Block, arms: Arms, done: set[tuple[str, str]]
) -> None:
    """Let a block run as one of ``arms.tensor`` parts, until ``stack`` is closed; ``done``:
    attributes that are divided already.
    """
    region = Region(block, arms)
    if block.kind == "multihead":
        module = model.get_submodule(block.path)
        assert isinstance(module, nn.MultiheadAttention)
        replaced(stack, module, "forward", multihead(region))
        for (
            name,
            around,
        ) in model.named_modules():  # their fused kernel, for inference, knows nothing of this
            if isinstance(around, nn.TransformerEncoderLayer) and block.path.startswith(
                f"{name}." if name else ""
            ):
                replaced(stack, around, "activation_relu_or_gelu", 0)
        return
    for name, pieces in zip(block.column, block.pieces, strict=True):
        column = model.get_submodule(name)
        replaced(stack, column, "forward", _column(name, region, pieces))
    row = model.get_submodule(block.row)
    replaced(stack, row, "forward", _row(region))
    for name in block.per_head:
        embedding = model.get_submodule(name)
        if "forward" not in vars(embedding):
            replaced(stack, embedding, "forward", _embedding(arms))
    counts = {block.heads, block.kv_heads}
    for name, attribute in block.attributes:
        owner = model.get_submodule(name)
        if (name, attribute) in done:
            continue  # two blocks read it
        done.add((name, attribute))
        replaced(stack, owner, attribute, _divided(vars(owner)[attribute], counts, arms.tensor))
    if block.narrow:
        container = model.get_submodule(block.path)
        given = vars(container).get("forward")
        if recomputes(container):  # each of its passes is to be narrowed, not what goes into it
            replaced(
                stack,
                container,
                "_forward_once",
                _narrowed(vars(container).get("_forward_once"), region),
            )
        else:
            replaced(stack, container, "forward", _narrowed(given, region))


def _column(
    name: str, region: Region, pieces: int
) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        weight = region.arms.local(module, "weight", 1 if _transposed(module) else 0, pieces)
        assert weight is not None
        return linear(
            module,
            region.enter(input, module.training, name),
            weight,
            region.arms.local(module, "bias", 0, pieces),
        )

    return forward


def _row(region: Region) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        region.close()
        return region.arms.leave(region.block, input, module)

    return forward


def _embedding(arms: Arms) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        weight = arms.local(module, "weight", 1, 1)
        assert weight is not None
        return F.embedding(input, weight, module.padding_idx)  # type: ignore[arg-type]

    return forward


def _narrowed(given: Callable[..., Any] | None, region: Region) -> Callable[..., Any]:
    places = region.block.narrow

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        new = {
            p: region.stand_in(args[p] if isinstance(p, int) else kwargs[p], module.training)
            for p in places
        }
        args, kwargs = (
            tuple(new.get(i, a) for i, a in enumerate(args)),
            {k: new.get(k, v) for k, v in kwargs.items()},
        )
        return (
            type(module).forward(module, *args, **kwargs)
            if given is None
            else given(*args, **kwargs)
        )

    return forward
