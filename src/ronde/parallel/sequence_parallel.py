"""Sequence parallel: what lies between divided blocks is divided along the sequence.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models". In a list
of layers, each tensor parallel worker holds its part of the tokens: norms, dropout, and residuals
compute with those. A block gathers the tokens before its columns and scatters the sum after its
row, in place of the all-reduce. The first layer of a list takes the worker's part, the last one
puts the whole together again. Tokens are the second of three dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ronde.parallel.tensor_blocks import common_path
from ronde.parallel.tensor_layers import Block, Region, recomputes, replace_attribute
from ronde.world import PlanError
from ronde.world.tensors import tensors_in

__all__ = ["DividedSequence", "layer_lists"]

_Way = tuple[dist.ProcessGroup | None, int, int]
"""The workers (None for this one alone), how many, this one's place."""


def _gathered(x: torch.Tensor, way: _Way) -> torch.Tensor:
    group, size, _ = way
    if group is None or isinstance(x, FakeTensor):
        return torch.cat([x] * size, 1)
    rows = x.transpose(0, 1).contiguous()
    whole = rows.new_empty(rows.shape[0] * size, *rows.shape[1:])
    dist.all_gather_into_tensor(whole, rows, group=group)
    return whole.transpose(0, 1).contiguous()


def _reduced(x: torch.Tensor, way: _Way) -> torch.Tensor:
    group, size, _ = way
    if group is None or isinstance(x, FakeTensor):
        return _part(x, way)
    rows = x.transpose(0, 1).contiguous()
    mine = rows.new_empty(rows.shape[0] // size, *rows.shape[1:])
    dist.reduce_scatter_tensor(mine, rows, group=group)
    return mine.transpose(0, 1).contiguous()


def _part(x: torch.Tensor, way: _Way) -> torch.Tensor:
    return x.chunk(way[1], 1)[way[2]].clone(memory_format=torch.contiguous_format)


# Each one's backward is another, and can be differentiated again.


class _Take(torch.autograd.Function):
    """Forward this worker's tokens of a whole, backward all workers' gradients together."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return _part(x, way)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Join.apply(gradient, ctx.way), None  # type: ignore[no-untyped-call]


class _Join(torch.autograd.Function):
    """Forward all workers' tokens, which all go on with, backward this worker's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return _gathered(x, way)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Take.apply(gradient, ctx.way), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Forward all workers' tokens, each for its part of a block; backward the sum, in parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return _gathered(x, way)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Scatter.apply(gradient, ctx.way), None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """Forward the sum over the workers, in parts; backward all parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return _reduced(x, way)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Gather.apply(gradient, ctx.way), None  # type: ignore[no-untyped-call]


def layer_lists(model: nn.Module, blocks: Sequence[Block]) -> list[list[str]]:
    """Names of layers that follow each other: lists of one type that all hold divided attention."""
    attention = [b.path for b in blocks if b.kind != "mlp"]

    def holds(layer: str) -> bool:
        return any(f"{path}.".startswith(f"{layer}.") for path in attention)

    lists: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            layers = [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
            if len({type(m) for m in module}) == 1 and all(map(holds, layers)):
                lists[name] = layers
    inner = [n for n in lists if not any(o != n and f"{o}.".startswith(f"{n}.") for o in lists)]
    return [lists[n] for n in inner]


class DividedSequence:
    """The tokens of a model's layers, divided over the workers that hold its blocks together.

    Args:
        plan: as a user writes it, for errors.
        runtime: how these workers communicate (``group``, ``tensor``, ``place``), and their random
            numbers (``start_draws``, ``finish_draws``).
        checked: layers must run one after another; a pipeline checks that by itself.

    Attributes:
        layers: their names.
    """

    def __init__(self, plan: str, runtime: Any, checked: bool) -> None:
        self._plan, self._runtime, self._checked = plan, runtime, checked
        self.layers: list[str] = []
        self._lists: list[list[str]] = []
        self._next: dict[int, int] = {}  # of a list that is under way, the layer that must follow
        self._parts: dict[str, bool] = {}  # what blocks take -> whether it is a part of the tokens
        self._tokens = 0  # that this worker has, while a layer runs
        self._whole: frozenset[int] = frozenset()  # identities of the layer's other tensors

    def _way(self) -> _Way:
        return self._runtime.group, self._runtime.tensor, self._runtime.place

    # -- for the blocks ----------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether one of the layers is running."""
        return self._tokens > 0

    def divides(self, x: torch.Tensor, place: str) -> bool:
        """Whether a tensor has this worker's tokens only.

        A whole tensor that has as many by chance was made in the layer. Passes over other lengths
        tell it: at one ``place`` (where it is given, not empty) the answer must stay the same.
        """
        is_part = x.dim() == 3 and x.shape[1] == self._tokens and x.is_floating_point()
        found = self.running and is_part and id(x) not in self._whole
        if place and self.running and self._parts.setdefault(place, found) != found:
            raise self._refusal(
                f"{place!r} takes {'a part' if found else 'all'} of the tokens (shape "
                f"{list(x.shape)}), and took {'all' if found else 'a part'} of them before"
            )
        return found

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens, before a block's columns."""
        return _Gather.apply(x, self._way())  # type: ignore[no-any-return, no-untyped-call]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This worker's tokens of the sum, after a block's row."""
        if x.dim() != 3:
            raise self._refusal(f"a block makes a tensor of shape {list(x.shape)}")
        return _Scatter.apply(x, self._way())  # type: ignore[no-any-return, no-untyped-call]

    # -- layers ------------------------------------------------------------------------

    def install(
        self, stack: ExitStack, model: nn.Module, regions: Sequence[Region]
    ) -> frozenset[str]:
        """Divide a model's layers until ``stack`` closes.

        Returns:
            Names of the parameters of which each worker's gradient is from its tokens only.

        Raises:
            PlanError: the model has no such layers.
        """
        blocks = [region.block for region in regions]
        self._lists = layer_lists(model, blocks)
        if not self._lists:
            raise self._refusal(
                "the model has no nn.ModuleList or nn.Sequential of layers of one type that all "
                "have an attention which is split"
            )
        self.layers = [layer for layers in self._lists for layer in layers]
        for number, layers in enumerate(self._lists):
            for place, layer in enumerate(layers):
                self._replace(stack, model.get_submodule(layer), self._layer(number, place))
        for region in regions:
            around = common_path(region.block.column)
            within = any(around.startswith(f"{layer}.") for layer in self.layers)
            if within and region.block.kind == "attention":
                # its code may read how many tokens there are before it calls a column
                self._replace(stack, model.get_submodule(around), self._attention(region, around))
        if self._checked:
            self._replace(stack, model, self._end_pass)
        inside = {id(p) for layer in self.layers for p in model.get_submodule(layer).parameters()}
        named = model.named_parameters()
        return frozenset(n for n, p in named if id(p) in inside and not isinstance(p, DTensor))

    def _replace(
        self,
        stack: ExitStack,
        module: nn.Module,
        around: Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        # A recomputed layer runs twice, each time with its own state here.
        name = "_forward_once" if recomputes(module) else "forward"
        own = vars(module).get(name)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if own is None:
                    return type(module).forward(module, *args, **kwargs)
                return own(*args, **kwargs)

            return around(module, call, args, kwargs)

        replace_attribute(stack, module, name, forward)

    def _layer(self, number: int, place: int) -> Callable[..., Any]:
        name, count = self._lists[number][place], len(self._lists[number])

        def run(module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
            self._check_order(number, place, name)
            named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            tensors = [k for k, t in named.items() if isinstance(t, torch.Tensor) and t.dim() == 3]
            if not tensors or not named[tensors[0]].is_floating_point():
                needed = "a tensor of samples × tokens × features"
                raise self._refusal(f"layer {name!r} does not take {needed}")
            key = tensors[0]
            if place == 0:
                x = named[key]
                if x.shape[1] % self._runtime.tensor:
                    raise self._refusal(
                        f"layer {name!r} takes {x.shape[1]} tokens (shape {list(x.shape)}), which "
                        f"{self._runtime.tensor} workers cannot divide. Pad sequences to a multiple"
                    )
                named[key] = _Take.apply(x, self._way())  # type: ignore[no-untyped-call]
            others = tensors_in([t for k, t in named.items() if k != key])
            with self._running(named[key], frozenset(map(id, others)), module.training):
                out = call(*(named[i] for i in range(len(args))), **{k: named[k] for k in kwargs})
            made = out[0] if type(out) in (tuple, list) and out else out
            if not isinstance(made, torch.Tensor) or made.shape[:2] != named[key].shape[:2]:
                raise self._refusal(f"layer {name!r} does not return a tensor of the same tokens")
            if place < count - 1:
                return out
            whole = _Join.apply(made, self._way())  # type: ignore[no-untyped-call]
            return whole if out is made else type(out)((whole, *out[1:]))

        return run

    def _attention(self, region: Region, name: str) -> Callable[..., Any]:
        def run(module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
            def whole(place: Any, x: Any) -> Any:
                where = f"argument {place} of {name}"
                if isinstance(x, torch.Tensor) and self.divides(x, where):
                    return region.gather(x, module.training)
                return x

            everything = [whole(i, x) for i, x in enumerate(args)]
            return call(*everything, **{k: whole(k, v) for k, v in kwargs.items()})

        return run

    @contextmanager
    def _running(self, x: torch.Tensor, whole: frozenset[int], training: bool) -> Iterator[None]:
        before = self._tokens, self._whole
        self._tokens, self._whole = x.shape[1], whole
        kept = self._runtime.start_draws() if training else None
        try:
            yield
            if kept is not None:
                self._runtime.finish_draws(kept)
        finally:
            self._tokens, self._whole = before

    def _check_order(self, number: int, place: int, name: str) -> None:
        """Refuse a pass that leaves a layer out: a part would be taken for the whole."""
        if not self._checked or torch._C._current_graph_task_id() != -1:  # it is computed again
            return
        expected = self._next.get(number, 0)
        if place != expected:
            self._next.clear()
            missing = self._lists[number][expected]
            raise self._refusal(f"the forward pass calls {name!r} where {missing!r} should follow")
        self._next[number] = place + 1
        if place == len(self._lists[number]) - 1:
            del self._next[number]

    def _end_pass(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        self._next.clear()
        out = call(*args, **kwargs)
        if self._next:
            number, place = self._next.popitem()
            raise self._refusal(f"the forward pass leaves {self._lists[number][place]!r} out")
        return out

    def _refusal(self, why: str) -> PlanError:
        return PlanError(
            f"plan={self._plan!r}: {why}. Sequence parallelism divides the tokens of a list of "
            "layers that run one after another. Use the plan without sequence_parallel."
        )
