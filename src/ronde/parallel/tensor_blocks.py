"""Find the attention and MLP blocks of any model that several workers can hold together.

The search follows the data flow, not names. One pass over a sample gives autograd's graph, and what
lies between a Linear's input and the Linears behind it is a block (Shoeybi et al. 2019,
Megatron-LM: columns into rows, one sum a block). How to narrow its forward code is found by trial:
one way after another, until the last Linear of each block gets its slice of what it got in the
whole model. Blocks that never agree stay whole and say why.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product, takewhile
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ronde.capture.intercept import NUMBERS, calls_heard, name_of
from ronde.introspect import SavedState
from ronde.parallel.tensor_layers import (
    Block,
    BlockRuntime,
    features,
    install_layers,
    is_linear,
    piece,
    recomputes,
    replace_attribute,
    split_dims,
)

__all__ = ["DivisibleBlocks", "common_path", "quiet", "recognize"]


@dataclass(frozen=True)
class DivisibleBlocks:
    """What :func:`recognize` finds.

    Attributes:
        blocks: those that can be divided, in the order in which they run.
        refused: those that look like a block but cannot be divided, each with ``why_not``.
        loss: of the sample.
        gradients: parameter -> sum and sum of squares of its gradient on the sample, if asked for.
    """

    blocks: tuple[Block, ...]
    refused: tuple[Block, ...]
    loss: float
    gradients: Mapping[str, tuple[float, float]]


# -- one pass over a sample ------------------------------------------------------------


@dataclass
class _Trace:
    """Layer calls of one pass. Nodes are autograd's."""

    nodes: dict[Any, str] = field(default_factory=dict)  # a layer's output -> its name
    # name, input's node, input, output's node
    calls: list[tuple[str, Any, torch.Tensor, Any]] = field(default_factory=list)
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # call by call
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    numbers: dict[int, str] = field(default_factory=dict)  # calls before it -> how one was read
    # calls before it, the function that reduced features, and how many
    joined: list[tuple[int, str, int]] = field(default_factory=list)
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def samples(self) -> int:
        return max((x.shape[0] for _, _, x, _ in self.calls), default=1)


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no fused kernels, fixed randomness; the model is put back afterwards."""
    before = SavedState(model)
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    plain = ExitStack()
    for m in model.modules():
        if recomputes(m):  # autograd's graph would lack the block
            once = vars(m).get("_forward_once") or type(m).forward
            replace_attribute(plain, m, "forward", once)
    for p in model.parameters():
        if p.is_floating_point():
            p.requires_grad_(True)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(0)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        plain.close()
        before.restore()


# Functions that reduce over features. Like _NOT_BY_FEATURE, for what has no gradient and is thus
# not in the graph: a threshold on such a value may only be passed by a later batch.
_JOINS = re.compile(
    r"all|any|(nan)?(mean|median|quantile|sum)|a?(max|min)|aminmax|arg(max|min|sort)|topk|sort|"
    r"(linalg_|linalg_vector_|layer_|rms_)?norm|normalize|(log_)?softmax|logsumexp|kthvalue|prod|"
    r"std|var|count_nonzero"
)


class _ValuesRead(TorchFunctionMode):
    """Notes where Python reads a tensor's value, or features are reduced."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := name_of(func)) in NUMBERS:
            self._trace.numbers[len(self._trace.calls)] = name
        elif _JOINS.fullmatch(name) and isinstance(x := next(iter(args), 0), torch.Tensor):
            self._trace.joined.append((len(self._trace.calls), name, (1, *x.shape)[-1]))
        return func(*args, **(kwargs or {}))


def _trace(model: nn.Module, run: Callable[[], torch.Tensor]) -> _Trace:
    trace = _Trace()
    starts: dict[str, Any] = {}
    modules = dict(model.named_modules())
    layers = {n for n, m in modules.items() if is_linear(m) or isinstance(m, nn.MultiheadAttention)}

    def enter(name: str, args: Any, kwargs: Any) -> None:
        trace.arguments.setdefault(name, (args, kwargs))
        if name in layers and args and isinstance(args[0], torch.Tensor):
            starts[name] = args[0].grad_fn
            trace.inputs.setdefault(name, []).append(args[0].detach().clone())

    def leave(name: str, args: Any, output: Any) -> None:
        x = args[0] if args else None
        y = output[0] if isinstance(output, tuple) else output
        if name not in layers:
            return
        if isinstance(y, torch.Tensor) and y.grad_fn and isinstance(x, torch.Tensor):
            trace.nodes[y.grad_fn] = name
            trace.calls.append((name, starts.pop(name, None), x, y.grad_fn))
            trace.outputs.setdefault(name, []).append(y.detach().clone())

    with calls_heard(modules, enter, leave), _ValuesRead(trace):
        trace.loss = run()
    return trace


def _walk(root: Any, stops: Mapping[Any, str] | set[Any]) -> tuple[set[Any], set[Any]]:
    """Nodes from ``root`` back to ``stops``: those in between, and the stops that were reached."""
    seen: set[Any] = set()
    reached: set[Any] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if node is None or node in seen or node in reached:
            continue
        if node in stops:
            reached.add(node)
            continue
        seen.add(node)
        todo.extend(n for n, _ in node.next_functions)
    return seen, reached


# Operations that mix features: no MLP can be split across them. Autograd's graph has nothing but
# the names of its nodes; what these let through by mistake, the trials and the comparison of
# gradients refuse.
_NOT_BY_FEATURE = re.compile(
    r"Norm|Softmax|Embedding|Convolution|Mean|Sum|Var|Bmm|Mm|Addmm|ScaledDot|Cat|Stack|Index|"
    r"Gather|Fft|Pool|Einsum|Max|Min|Prod|Sort"
)
_ATTENTION = re.compile(r"ScaledDot|(?<!Log)Softmax")


def _shape(node: Any, index: int = 0) -> tuple[int, ...]:
    """The shape of a node's output, without its saved tensors: reading them may recompute."""
    outputs = node._input_metadata
    return tuple(outputs[index].shape) if index < len(outputs) else ()


def _heads(nodes: Iterable[Any], samples: int) -> tuple[int, int]:
    """Query and key heads by the shapes inside the attention; 0 if they do not tell."""
    for node in nodes:
        if "ScaledDot" in node.name() and len(_shape(node)) > 2:
            key, index = node.next_functions[1]
            return _shape(node)[-3], (_shape(key, index) if key is not None else _shape(node))[-3]
    for node in nodes:
        # (samples, heads, …) or (samples × heads, …)
        if _ATTENTION.search(node.name()) and len(shape := _shape(node)) > 2:
            heads = shape[-3] if len(shape) > 3 else shape[0] // samples
            return heads, heads
    return 0, 0


def common_path(names: Sequence[str]) -> str:
    """The smallest module around all of these."""
    levels = zip(*(n.split(".")[:-1] for n in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


@dataclass
class _Candidate:
    block: Block
    region: set[Any] = field(default_factory=set)  # nodes from its columns to its row
    closure: set[Any] = field(default_factory=set)  # those, and the row's
    ways: list[Block] = field(default_factory=list)
    signature: tuple[Any, ...] = ()  # blocks of one signature share their way

    def refuse(self, why: str) -> None:
        self.block = dataclasses.replace(self.block, why_not=why)


# Only the order of the trials follows from attributes' names: likely ones first, so that most
# models need one trial. A trial decides, whatever the name.
_HEAD_NAMES = re.compile(r"head", re.I)
_NOT_COUNTS = re.compile(r"dim|size|width|channels|group|layer|max|len|idx|index|per_", re.I)


def _counters(
    model: nn.Module, path: str, linears: set[str], values: set[int], named: bool
) -> list[tuple[str, str]]:
    """Attributes of the modules in ``path`` that hold one of ``values``, ``named`` as heads."""

    def counts(attribute: str, value: Any) -> bool:
        if not isinstance(value, int) or isinstance(value, bool) or attribute.startswith("_"):
            return False
        is_head_name = _HEAD_NAMES.search(attribute) and not _NOT_COUNTS.search(attribute)
        return value in values and bool(not named or is_head_name)

    modules = model.get_submodule(path).named_modules(prefix=path)
    inner = [(n, m) for n, m in modules if n not in linears]
    return [(n, a) for n, m in inner for a, value in vars(m).items() if counts(a, value)]


def _ways(model: nn.Module, block: Block, trace: _Trace, linears: set[str]) -> list[Block]:
    """Ways to narrow a block's forward code, the likeliest first."""
    if block.kind != "attention":
        return [block]
    pieces: list[tuple[int, ...]] = [block.pieces]
    if max(block.pieces) > 1:
        # query, key and value of each head stand together
        pieces.append(tuple(1 for _ in block.pieces))
    heads = {block.heads, block.kv_heads}
    columns = zip(block.column, block.pieces, strict=True)
    widths = {features(model.get_submodule(n))[1] // p for n, p in columns} - heads
    named = _counters(model, block.path, linears, heads, True)
    wide = _counters(model, block.path, linears, widths, False)
    every = _counters(model, block.path, linears, heads, False)
    sets = [named, [*named, *wide], [], wide, every, [*every, *wide]]
    args, kwargs = trace.arguments.get(block.path, ((), {}))
    entering = {id(x) for name, _, x, _ in trace.calls if name in block.column}
    narrow: tuple[int | str, ...] = (
        *(i for i, a in enumerate(args) if id(a) in entering),
        *(k for k, a in kwargs.items() if id(a) in entering),
    )
    ways: list[Block] = []
    for narrowed, p, attributes in product(((), narrow) if narrow else ((),), pieces, sets):
        unique = tuple(dict.fromkeys(attributes))
        way = dataclasses.replace(block, pieces=p, attributes=unique, narrow=narrowed)
        if way not in ways:
            ways.append(way)
    return ways


class _Search:
    """Candidates in the data flow of one pass."""

    def __init__(self, model: nn.Module, trace: _Trace, tensor: int) -> None:
        self.model, self.trace, self.tensor = model, trace, tensor
        self.modules = dict(model.named_modules())
        self.linears = {n for n, m in self.modules.items() if is_linear(m)}
        self.names: dict[int, list[str]] = {}  # of each parameter
        for n, p in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(p), []).append(n)
        # A layer's first call stands for all its calls; the trials check them all.
        self.calls: dict[str, tuple[str, Any, torch.Tensor, Any]] = {}
        for call in trace.calls:
            self.calls.setdefault(call[0], call)
        self.order = {name: i for i, name in enumerate(self.calls)}
        self.users: dict[str, str] = {}  # layer -> the block that uses it

    def candidates(self) -> list[_Candidate]:
        """All candidates, in the order in which they run."""
        result: list[_Candidate] = []
        # Attention first: a Linear before it is no partner for its columns.
        for attention in (True, False):
            for name, start, _, out in self.calls.values():
                module = self.modules[name]
                candidate = None
                if isinstance(module, nn.MultiheadAttention):
                    candidate = self._multihead(name, module) if attention else None
                elif start is not None:
                    candidate = self._candidate(name, start, out, attention)
                if candidate is not None:
                    result.append(candidate)
        for candidate in result:
            block = candidate.block
            layers = (*block.column, block.row)
            relative = tuple(n.removeprefix(block.path) for n in layers)
            shapes = tuple(features(self.modules[n]) for n in layers if n in self.linears)
            kind = type(self.modules[block.path])
            candidate.signature = (block.kind, kind, relative, shapes, bool(block.per_head))
            if not block.why_not:
                candidate.ways = _ways(self.model, block, self.trace, self.linears)
        order = self.order
        return sorted(
            result, key=lambda c: min(order[n] for n in (c.block.row, c.block.path) if n in order)
        )

    def _candidate(self, name: str, start: Any, out: Any, attention: bool) -> _Candidate | None:
        """The block that ends in the layer ``name``, if there is one of that kind."""
        region, ends = _walk(start, self.trace.nodes)
        columns = sorted({self.trace.nodes[n] for n in ends}, key=self.order.__getitem__)
        if not columns or any(isinstance(self.modules[c], nn.MultiheadAttention) for c in columns):
            return None
        ops = {n.name() for n in region}
        if any(_ATTENTION.search(o) for o in ops) is not attention:
            return None
        if not attention and any(_NOT_BY_FEATURE.search(o) for o in ops):
            return None
        layers = (*columns, name)
        block = Block(
            common_path(layers), "attention" if attention else "mlp", tuple(columns), name
        )
        shared = next((n for n in layers if n in self.users), None)
        if shared is not None:
            why = f"{self.users[shared]!r} uses {shared!r} as well"
            pieces = (1,) * len(columns)
            block = dataclasses.replace(block, pieces=pieces, why_not=why)
            return _Candidate(block) if attention else None
        variables = [n.variable for n in region if hasattr(n, "variable")]
        inside = [self.names[id(v)][0] for v in variables if id(v) in self.names]
        described = (
            self._attention(block, region, inside) if attention else self._mlp(block, inside)
        )
        if described is None:
            return None
        candidate = _Candidate(described, region | ends)
        candidate.closure = candidate.region | _walk(out, candidate.region)[0]
        divided, whole = split_dims(self.model, described)
        for n in (*divided, *whole):
            names = self.names[id(self.model.get_parameter(n))]
            if len(names) > 1 and not candidate.block.why_not:
                other = next(o for o in names if o != n)
                candidate.refuse(f"{n!r} is tied to {other!r}")
        if not candidate.block.why_not:
            self.users |= dict.fromkeys(layers, block.path or type(self.model).__name__)
        return candidate

    def _attention(self, block: Block, region: set[Any], inside: list[str]) -> Block | None:
        """An attention with its heads and pieces; None if it has too many columns to be one."""
        if len(block.column) > 12:
            return None
        heads, kv_heads = _heads(region, self.trace.samples)
        # The values' columns have as many features per head as the row takes; a fused column is
        # cut in three.
        wide = features(self.modules[block.row])[0]
        outs = [features(self.modules[c])[1] for c in block.column]
        pieces = tuple(3 if len(outs) == 1 and o == 3 * wide else 1 for o in outs)
        per_head = []
        for name in [p.removesuffix(".weight") for p in inside if p.endswith(".weight")]:
            module = self.modules[name]
            if isinstance(module, nn.Embedding) and module.embedding_dim == heads:
                per_head.append(name)
        why = ""
        if not heads:
            why = "the shapes of its attention weights do not show its heads"
        elif heads % self.tensor or kv_heads % self.tensor:
            kv = f", key and value heads {kv_heads}" if kv_heads != heads else ""
            why = f"heads {heads}{kv}: not divisible by {self.tensor}"
        return dataclasses.replace(
            block,
            pieces=pieces,
            heads=heads,
            kv_heads=kv_heads,
            per_head=tuple(per_head),
            inside=tuple(p for p in inside if p.removesuffix(".weight") not in per_head),
            why_not=why,
        )

    def _mlp(self, block: Block, inside: list[str]) -> Block | None:
        """An MLP with its pieces; None if its columns do not fit the row."""
        wide = features(self.modules[block.row])[0]
        outs = [features(self.modules[c])[1] for c in block.column]
        if any(o % wide for o in outs) or wide == 1:
            return None
        pieces = tuple(o // wide for o in outs)
        why = f"{wide} features: not divisible by {self.tensor}" if wide % self.tensor else ""
        return dataclasses.replace(block, pieces=pieces, inside=tuple(inside), why_not=why)

    def _multihead(self, name: str, module: nn.MultiheadAttention) -> _Candidate:
        heads, why = module.num_heads, ""
        if heads % self.tensor:
            why = f"heads {heads}: not divisible by {self.tensor}"
        elif module.bias_k is not None or module.add_zero_attn:
            why = "add_bias_kv and add_zero_attn add a key that belongs to no head"
        elif type(module).forward is not nn.MultiheadAttention.forward:
            why = f"{type(module).__name__} has a forward of its own"
        elif any(len(self.names.get(id(p), [])) > 1 for p in module.parameters()):
            why = "its weights are tied to others"
        row = f"{name}.out_proj".lstrip(".")
        return _Candidate(Block(name, "multihead", (name,), row, (3,), heads, heads, why_not=why))


def _sized(model: nn.Module, block: Block, trace: _Trace) -> Block:
    """With its parameters and bytes."""
    parameters = sum(model.get_parameter(n).numel() for n in split_dims(model, block)[0])
    if block.kind == "multihead":
        entering, leaving = trace.inputs[block.path][:1], trace.outputs[block.path][:1]
    else:
        entering = list({id(x): x for n, _, x, _ in trace.calls if n in block.column}.values())
        leaving = trace.outputs[block.row]
    reduced = sum(x.nbytes for x in (*entering, *leaving)) / trace.samples
    return dataclasses.replace(block, parameters=parameters, reduced_bytes=reduced)


def _consumers(trace: _Trace) -> dict[Any, list[Any]]:
    """For each node of the graph, the nodes that take its output."""
    consumers: dict[Any, list[Any]] = {}
    for node in _walk(trace.loss.grad_fn, set())[0]:
        for n, _ in node.next_functions:
            if n is not None:
                consumers.setdefault(n, []).append(node)
    return consumers


def _refuse_other_reads(
    model: nn.Module,
    trace: _Trace,
    candidates: list[_Candidate],
    consumers: Mapping[Any, list[Any]],
) -> None:
    """Refuse blocks with a weight that is read outside of its layer's call as well.

    A tied decoder's ``F.linear(z, layer.weight.t())``, say, needs it whole.
    """
    own: dict[str, set[Any]] = {}
    for name, start, _, out in trace.calls:
        own.setdefault(name, set()).update(_walk(out, {start})[0])
    reads = {id(n.variable): users for n, users in consumers.items() if hasattr(n, "variable")}
    for c in candidates:
        if c.block.why_not:
            continue
        layers = set().union(*(own.get(name, ()) for name in (*c.block.column, c.block.row)))
        divided, whole = split_dims(model, c.block)
        for name in (*divided, *whole):
            if name.rpartition(".")[0] in c.block.per_head:
                continue  # an embedding, whose calls are not noted
            if any(node not in layers for node in reads.get(id(model.get_parameter(name)), ())):
                c.refuse(f"{name!r} is also read outside of its layer's call")
                break


def _refuse_branches(model: nn.Module, trace: _Trace, candidates: list[_Candidate]) -> None:
    """Refuse blocks that read a tensor's value between their layers, and MLPs that reduce over
    features there: by it, a later batch may take a branch that no trial has seen.
    """
    for c in candidates:
        if c.block.kind == "multihead":
            continue  # its forward is torch's, or Ronde's
        inside = False
        wide = features(model.get_submodule(c.block.row))[0]
        of_features = c.block.kind == "mlp"
        joined = {i: n for i, n, size in trace.joined if of_features and size % wide == 0}
        for i, (name, *_) in enumerate(trace.calls):
            if inside and i in trace.numbers and not c.block.why_not:
                c.refuse(f"it reads a tensor's value between its layers ({trace.numbers[i]})")
            if inside and i in joined and not c.block.why_not:
                c.refuse(f"it reduces over features between its layers ({joined[i]})")
            inside = name != c.block.row and (inside or name in c.block.column)


def _refuse_escapes(consumers: Mapping[Any, list[Any]], candidates: list[_Candidate]) -> None:
    """Refuse blocks whose inner results also go elsewhere than into their row."""
    changed = True
    while changed:
        changed = False
        closed = set().union(*(c.closure for c in candidates if not c.block.why_not))
        for c in candidates:
            if c.block.why_not:
                continue
            users = (n for node in c.region for n in consumers.get(node, []))
            outside = next((n for n in users if n not in closed), None)
            if outside is not None:
                into = outside.name().removesuffix("Backward0")
                c.refuse(f"what its columns make also goes elsewhere ({into})")
                changed = True


# -- trials ----------------------------------------------------------------------------


class _PartDiffers(Exception):
    """A block's part is not its slice of the whole."""


class _InputDiffers(Exception):
    """A block's input has changed: narrowing another block has touched it."""


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def _difference(part: torch.Tensor, expected: torch.Tensor) -> str:
    if part.shape != expected.shape:
        return f"it gives {list(part.shape)} where {list(expected.shape)} was expected"
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    largest = float((part.double() - expected.double()).abs().max()) if expected.numel() else 0.0
    if largest <= _TOLERANCE.get(expected.dtype, 1e-2) * scale:
        return ""
    relative = largest / max(scale, 1e-30)
    return f"its part differs from the whole by {relative:.1e} of the largest value"


class _TrialRuntime(BlockRuntime):
    """One worker's part, in one process, compared with what the whole gave."""

    def __init__(self, trace: _Trace, place: int, tensor: int) -> None:
        self.place, self.tensor = place, tensor
        self._trace = trace
        self._parts: dict[tuple[int, str], torch.Tensor | None] = {}
        self._calls: dict[str, int] = {}
        self.open: list[Block] = []  # begun and not yet left
        self.last: Block | None = None

    def local(self, module: nn.Module, name: str, dim: int, pieces: int) -> torch.Tensor | None:
        key, value = (id(module), name), getattr(module, name)
        if key not in self._parts:
            cut = None
            if value is not None:
                cut = piece(value.detach(), dim, pieces, self.place, self.tensor)
            self._parts[key] = cut
        return self._parts[key]

    def enter(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name:
            call = self._calls[name] = self._calls.get(name, -1) + 1
            if _difference(x, self._trace.inputs[name][call]):
                raise _InputDiffers
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def begin(self, block: Block, training: bool) -> None:
        self.open.append(block)

    def end(self, block: Block) -> None:
        if block in self.open:
            self.open.remove(block)
        self.last = block

    def leave(self, block: Block, x: torch.Tensor, row: nn.Module) -> torch.Tensor:
        call = self._calls[block.row] = self._calls.get(block.row, -1) + 1
        whole = self._trace.inputs[block.row][call]
        why = _difference(x, whole.chunk(self.tensor, -1)[self.place])
        if not why and not bool(whole.any()):
            why = "all zero on the sample: it cannot be checked"
        if why:
            self.open.append(block)
            raise _PartDiffers(why)
        return self._trace.outputs[block.row][call]


class _Selection:
    """Which way of each kind of block is tried; blocks without a right one are refused."""

    def __init__(self, candidates: Iterable[_Candidate]) -> None:
        self.active = [c for c in candidates if not c.block.why_not]
        self._tried: dict[tuple[Any, ...], int] = {c.signature: 0 for c in self.active}
        self._first_reasons: dict[tuple[Any, ...], str] = {}
        for c in list(self.active):
            if not c.ways and not c.block.why_not:
                self.fail(c.signature, "no module around it says where its heads are counted")

    def chosen(self) -> list[tuple[_Candidate, Block]]:
        """The way to try next, of each candidate that is left."""
        return [(c, c.ways[self._tried[c.signature]]) for c in self.active]

    def fail(self, signature: tuple[Any, ...], why: str) -> None:
        """Go to the next way of a kind, or refuse it with the reason of its first way."""
        reason = self._first_reasons.setdefault(signature, why)
        self._tried[signature] += 1
        failed = [c for c in self.active if c.signature == signature]
        if self._tried[signature] < min(len(c.ways) for c in failed):
            return
        # Blocks that share an embedding by head with a refused one cannot be divided either.
        shared = {n for c in failed for n in c.block.per_head}
        for c in [*failed, *(c for c in self.active if shared & set(c.block.per_head))]:
            if not c.block.why_not:
                c.refuse(f"no way of narrowing its forward code agrees: {reason}")
        self.active = [c for c in self.active if not c.block.why_not]


def _trial_failure(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    chosen: Sequence[tuple[_Candidate, Block]],
    runtime: _TrialRuntime,
) -> tuple[_Candidate, str] | None:
    """Run the model as one worker's part: the candidate that fails, and why, or nothing."""
    try:
        with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            done: set[tuple[str, str]] = set()
            for _, way in chosen:
                install_layers(stack, model, way, runtime, done)
            run()
        return None
    except _InputDiffers:
        # Attributes that several blocks read, not all of which can be narrowed.
        wide = [c for c, way in chosen if way.attributes] or [chosen[0][0]]
        outermost = min(wide, key=lambda c: len(c.block.path))
        return outermost, "other layers, which cannot be split, also read what counts its heads"
    except Exception as error:
        blamed = runtime.open[-1] if runtime.open else runtime.last
        candidate = next((c for c, way in chosen if way is blamed), chosen[0][0])
        text = str(error).strip().split("\n")[0][:160]
        is_difference = isinstance(error, _PartDiffers)
        return candidate, text if is_difference else f"{type(error).__name__}: {text}"


def _select(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    trace: _Trace,
    candidates: list[_Candidate],
    tensor: int,
) -> None:
    """Choose each block's way, and refuse blocks for which none is right."""
    # torch's own attention is narrowed by a forward of Ronde's: there is nothing to try.
    selection = _Selection(c for c in candidates if c.block.kind != "multihead")
    while selection.active:
        chosen = selection.chosen()
        runtimes = (_TrialRuntime(trace, place, tensor) for place in range(tensor))
        failures = (_trial_failure(model, run, chosen, runtime) for runtime in runtimes)
        failure = next(filter(None, failures), None)
        if failure is None:
            for c, way in chosen:
                c.block = way
            return
        selection.fail(failure[0].signature, failure[1])


def recognize(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    tensor: int,
    *,
    gradients: bool = False,
) -> DivisibleBlocks:
    """Find the blocks of a model that ``tensor`` workers can hold together, in one process.

    Args:
        model: any module tree; it is left as it was.
        run: a forward pass over a few samples (two or more) through ``model``, and its loss, 0-d.
        tensor: into how many parts.
        gradients: also note the gradients' sums, to compare with those of the divided model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> result = recognize(model, lambda: model(torch.ones(2, 4)).sum(), 2)
        >>> [(b.kind, b.column, b.row) for b in result.blocks]
        [('mlp', ('0',), '2')]
    """
    with quiet(model):
        trace = _trace(model, run)
        sums: dict[str, tuple[float, float]] = {}
        candidates = _Search(model, trace, tensor).candidates()
        if trace.loss.grad_fn is not None:
            consumers = _consumers(trace)
            _refuse_other_reads(model, trace, candidates, consumers)
            _refuse_branches(model, trace, candidates)
            _refuse_escapes(consumers, candidates)
            del consumers
            if gradients:
                sums = _gradient_sums(model, trace.loss)
        # The graph keeps activations alive: let it go before the trials.
        trace.nodes.clear()
        for c in candidates:
            c.region, c.closure = set(), set()
        _select(model, run, trace, candidates, tensor)
    blocks = [_sized(model, c.block, trace) for c in candidates]  # of the way that was chosen
    return DivisibleBlocks(
        tuple(b for b in blocks if not b.why_not),
        tuple(b for b in blocks if b.why_not),
        float(trace.loss.detach()),
        sums,
    )


def _gradient_sums(model: nn.Module, loss: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Sum and sum of squares of each parameter's gradient."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        n: (float(g.double().sum()), float(g.double().square().sum()))
        for n, g in zip(names, grads, strict=True)
        if g is not None and not g.is_sparse
    }
