"""Which attention and MLP blocks of any module tree can be held by several workers together.

Found in the data flow, not by names: one pass over a sample gives autograd's graph, and what lies
between a Linear's input and the Linears behind it is a block (Shoeybi et al. 2019, Megatron-LM:
columns into rows, one sum a block). How its forward code has to be told that it has fewer heads is
tried, way after way, until the pass over the sample is the unsplit one's, block by block: what the
last Linear is given must be its slice of what it was given before. What never agrees stays whole
and says why.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ronde.parallel.tensor_layers import (
    Arms,
    Block,
    Region,
    features,
    install_layers,
    is_linear,
    multihead,
    piece,
    recomputes,
    replaced,
    split_dims,
)

__all__ = ["Recognised", "quiet", "recognise"]


@dataclass(frozen=True)
class Recognised:
    """What of a model can be split.

    Attributes:
        blocks: those that can, in the order in which they run.
        refused: those that look like a block and cannot, each with ``why_not``.
        parameters: elements of the whole model.
        flops: of all its linear layers, forward, per sample.
        loss: of the sample.
        gradients: parameter -> sum and sum of squares of its gradient on the sample; empty if not
            asked for.
        called: names of the modules that ran.
    """

    blocks: tuple[Block, ...]
    refused: tuple[Block, ...]
    parameters: int
    flops: float
    loss: float = 0.0
    gradients: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    called: frozenset[str] = frozenset()

    @property
    def parameter_share(self) -> float:
        """Part of the parameters that is divided."""
        return sum(b.parameters for b in self.blocks) / max(self.parameters, 1)

    @property
    def work_share(self) -> float:
        """Part of the linear layers' work that is divided."""
        return sum(b.flops for b in self.blocks) / max(self.flops, 1.0)

    @property
    def reduced_bytes(self) -> float:
        """Bytes summed over the workers in forward and backward, per sample."""
        return sum(b.reduced_bytes for b in self.blocks)


# -- one pass over a sample ------------------------------------------------------------


@dataclass
class _Trace:
    """What one pass left behind."""

    # autograd node of a layer's output -> its name
    nodes: dict[Any, str] = field(default_factory=dict)
    # name, input's node, input, output's node
    calls: list[tuple[str, Any, torch.Tensor, Any]] = field(default_factory=list)
    # what each layer was given, call by call
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no fused kernels, the same randomness every time; everything as it was
    afterwards.
    """
    modes = [(m, m.training) for m in model.modules()]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    fast = torch.backends.mha.get_fastpath_enabled()
    buffers = [(b, b.clone()) for b in model.buffers()]
    model.eval()
    plain = ExitStack()
    for m in model.modules():
        if recomputes(m):  # not here: what is looked at would be computed again
            replaced(plain, m, "forward", vars(m).get("_forward_once") or type(m).forward)
    for p, _ in flags:
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
        for p, flag in flags:
            p.requires_grad_(flag)
        for m, training in modes:
            m.training = training
        with torch.no_grad():
            for b, old in buffers:
                if not b.equal(old):
                    b.copy_(old)


def _trace(model: nn.Module, run: Callable[[], torch.Tensor]) -> _Trace:
    found = _Trace()
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.called.add(name)
            found.arguments.setdefault(name, (args, kwargs))

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x = args[0] if args else None
            y = output[0] if isinstance(output, tuple) else output
            if (
                isinstance(y, torch.Tensor)
                and y.grad_fn is not None
                and isinstance(x, torch.Tensor)
            ):
                found.nodes[y.grad_fn] = name
                found.calls.append((name, starts.pop(name, None), x, y.grad_fn))
                found.outputs.setdefault(name, []).append(y.detach().clone())

        def start(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):
                starts[name] = args[0].grad_fn
                found.inputs.setdefault(name, []).append(args[0].detach().clone())

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if is_linear(module) or isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_pre_hook(start))
            handles.append(module.register_forward_hook(after))

    starts: dict[str, Any] = {}
    try:
        for name, module in model.named_modules():
            watch(name, module)
        found.loss = run()
    finally:
        for handle in handles:
            handle.remove()
    return found


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


_NOT_BY_FEATURE = re.compile(
    r"Norm|Softmax|Embedding|Convolution|Mean|Sum|Var|Bmm|Mm|Addmm|ScaledDot|Cat|Stack|Index|Gather|Fft|Pool|Einsum|Max|Min|Prod|Sort"
)
_ATTENTION = re.compile(r"ScaledDot|(?<!Log)Softmax")


def _shape(node: Any, index: int = 0) -> tuple[int, ...]:
    """Of what a node's forward made. (What it has saved is left alone: to look at that may compute
    a block again.)
    """
    made = node._input_metadata
    return tuple(made[index].shape) if index < len(made) else ()


def _heads(nodes: Iterable[Any], samples: int) -> tuple[int, int]:
    """Query and key heads, as the shapes in the middle of the attention say; 0 if they do not."""
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


def _common(names: Sequence[str]) -> str:
    """The smallest module around all of these."""
    parts = [n.split(".")[:-1] for n in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


@dataclass
class _Candidate:
    block: Block
    region: set[Any] = field(default_factory=set)
    closure: set[Any] = field(default_factory=set)
    ways: list[Block] = field(default_factory=list)
    signature: tuple[Any, ...] = ()


_HEAD_NAMES = re.compile(r"head", re.I)
_NOT_COUNTS = re.compile(r"dim|size|width|channels|group|layer|max|len|idx|index|per_", re.I)


def _counters(
    model: nn.Module, path: str, linears: set[str], values: set[int], named: bool
) -> list[tuple[str, str]]:
    """Attributes of the modules in ``path`` that hold one of ``values``."""
    found = []
    for name, module in model.get_submodule(path).named_modules(prefix=path):
        if name in linears:
            continue
        for attribute, value in vars(module).items():
            if (
                isinstance(value, int)
                and not isinstance(value, bool)
                and value in values
                and not attribute.startswith("_")
            ):
                if not named or (
                    _HEAD_NAMES.search(attribute) and not _NOT_COUNTS.search(attribute)
                ):
                    found.append((name, attribute))
            elif (
                attribute == "_axes_lengths"
                and isinstance(value, tuple)
                and any(v in values for _, v in value)
            ):
                found.append((name, attribute))
    return found


def _ways(model: nn.Module, block: Block, trace: _Trace, linears: set[str]) -> list[Block]:
    """Ways of telling a block's code that it has fewer heads, the likeliest first."""
    if block.kind != "attention":
        return [block]
    pieces: list[tuple[int, ...]] = [block.pieces]
    if max(block.pieces) > 1:
        # query, key and value of each head stand together
        pieces.append(tuple(1 for _ in block.pieces))
    heads = {block.heads, block.kv_heads}
    widths = {
        features(model.get_submodule(n))[1] // p
        for n, p in zip(block.column, block.pieces, strict=True)
    } - heads
    named = _counters(model, block.path, linears, heads, True)
    wide = _counters(model, block.path, linears, widths, False)
    every = _counters(model, block.path, linears, heads, False)
    sets = [named, [*named, *wide], [], wide, every, [*every, *wide]]
    args, kwargs = trace.arguments.get(block.path, ((), {}))
    given = {id(x) for name, _, x, _ in trace.calls if name in block.column}
    narrow = tuple(i for i, a in enumerate(args) if id(a) in given) + tuple(
        k for k, a in kwargs.items() if id(a) in given
    )
    ways: list[Block] = []
    for narrowed in ((), narrow) if narrow else ((),):
        for p in pieces:
            for attributes in sets:
                way = dataclasses.replace(
                    block, pieces=p, attributes=tuple(dict.fromkeys(attributes)), narrow=narrowed
                )
                if way not in ways:
                    ways.append(way)
    return ways


def _candidates(model: nn.Module, trace: _Trace, tensor: int) -> list[_Candidate]:
    modules = dict(model.named_modules())
    parameters = {id(p): n for n, p in model.named_parameters()}
    names: dict[int, list[str]] = {}
    for n, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(n)
    linears = {n for n, m in modules.items() if is_linear(m)}
    samples = max((x.shape[0] for _, _, x, _ in trace.calls), default=1)
    used: dict[str, str] = {}
    found: list[_Candidate] = []
    # Attention first: a Linear before it is no partner for its columns. A layer that runs several
    # times: what is found for its first call holds for all, and is checked for all.
    once = [
        next(c for c in trace.calls if c[0] == name)
        for name in dict.fromkeys(c[0] for c in trace.calls)
    ]
    for first, (name, start, _, out) in [(f, c) for f in (True, False) for c in once]:
        module = modules[name]
        if isinstance(module, nn.MultiheadAttention):
            if first:
                found.append(_multihead_candidate(model, name, module, tensor, names))
            continue
        if start is None:
            continue
        region, ends = _walk(start, trace.nodes)
        columns = list(dict.fromkeys(trace.nodes[n] for n in ends))
        if not columns or any(isinstance(modules[c], nn.MultiheadAttention) for c in columns):
            continue
        columns.sort(key=lambda c: next(i for i, call in enumerate(trace.calls) if call[0] == c))
        ops = {n.name() for n in region}
        attention = any(_ATTENTION.search(o) for o in ops)
        if attention is not first:
            continue
        wide = features(module)[0]
        outs = [features(modules[c])[1] for c in columns]
        inside = [
            parameters[id(n.variable)]
            for n in region
            if hasattr(n, "variable") and id(n.variable) in parameters
        ]
        block = Block(
            _common([*columns, name]), "attention" if attention else "mlp", tuple(columns), name
        )
        bad = sorted(o for o in ops if _NOT_BY_FEATURE.search(o))
        if not attention and bad:
            continue
        taken = [c for c in (*columns, name) if c in used]
        if taken:
            if attention:
                why = f"{used[taken[0]]!r} uses {taken[0]!r} as well"
                found.append(
                    _Candidate(dataclasses.replace(block, pieces=(1,) * len(columns), why_not=why))
                )
            continue
        if attention:
            heads, kv_heads = _heads(region, samples)
            # The values' columns carry as many features a head as the row takes; a fused one is cut
            # in three.
            pieces = tuple(3 if len(columns) == 1 and o == 3 * wide else 1 for o in outs)
            per_head = tuple(
                p.removesuffix(".weight")
                for p in inside
                if p.endswith(".weight")
                and isinstance(e := modules[p.removesuffix(".weight")], nn.Embedding)
                and e.embedding_dim == heads
            )
            block = dataclasses.replace(
                block,
                pieces=pieces,
                heads=heads,
                kv_heads=kv_heads,
                per_head=per_head,
                inside=tuple(p for p in inside if p.removesuffix(".weight") not in per_head),
            )
            why = ""
            if len(columns) > 12:
                continue
            if not heads:
                why = "its heads are not seen in the shapes of its attention weights"
            elif heads % tensor or kv_heads % tensor:
                counted = f"heads {heads}" + (
                    f", key and value heads {kv_heads}" if kv_heads != heads else ""
                )
                why = f"{counted}: not divisible by {tensor}"
            block = dataclasses.replace(block, why_not=why)
        else:
            if any(o % wide for o in outs) or wide == 1:
                continue
            block = dataclasses.replace(
                block, pieces=tuple(o // wide for o in outs), inside=tuple(inside)
            )
            if wide % tensor:
                block = dataclasses.replace(
                    block, why_not=f"{wide} features: not divisible by {tensor}"
                )
        tied = [
            n
            for part in split_dims(model, block)
            for n in part
            if len(names[id(model.get_parameter(n))]) > 1
        ]
        if tied and not block.why_not:
            others = [n for n in names[id(model.get_parameter(tied[0]))] if n != tied[0]]
            block = dataclasses.replace(block, why_not=f"{tied[0]!r} is tied to {others[0]!r}")
        rows, _ = _walk(out, region | ends)
        candidate = _Candidate(block, region | ends, region | ends | rows)
        found.append(candidate)
        if not block.why_not:
            for c in (*columns, name):
                used[c] = block.path or type(model).__name__
    found.sort(
        key=lambda c: next(
            i for i, call in enumerate(once) if call[0] in (c.block.row, c.block.path)
        )
    )
    for candidate in found:
        block = _sized(model, candidate.block, trace, samples)
        candidate.block = block
        relative = tuple(n.removeprefix(block.path) for n in (*block.column, block.row))
        shapes = tuple(features(modules[n]) for n in (*block.column, block.row) if n in linears)
        candidate.signature = (
            block.kind,
            type(modules[block.path]),
            relative,
            shapes,
            bool(block.per_head),
        )
        if not block.why_not:
            candidate.ways = _ways(model, block, trace, linears)
    return found


def _multihead_candidate(
    model: nn.Module,
    name: str,
    module: nn.MultiheadAttention,
    tensor: int,
    names: dict[int, list[str]],
) -> _Candidate:
    why = ""
    if module.num_heads % tensor:
        why = f"heads {module.num_heads}: not divisible by {tensor}"
    elif module.bias_k is not None or module.add_zero_attn:
        why = "add_bias_kv and add_zero_attn add a key that belongs to no head"
    elif type(module).forward is not nn.MultiheadAttention.forward:
        why = f"{type(module).__name__} has a forward of its own"
    elif any(len(names.get(id(p), [])) > 1 for p in module.parameters()):
        why = "its weights are tied to others"
    row = f"{name}.out_proj".lstrip(".")
    return _Candidate(
        Block(
            name, "multihead", (name,), row, (3,), module.num_heads, module.num_heads, why_not=why
        )
    )


def _sized(model: nn.Module, block: Block, trace: _Trace, samples: int) -> Block:
    """With its parameters, work and bytes."""
    parameters = sum(model.get_parameter(n).numel() for n in split_dims(model, block)[0])
    flops = reduced = 0.0
    if block.kind == "multihead":
        x, y = trace.inputs[block.path][0], trace.outputs[block.path][0]
        weights = sum(p.numel() for p in model.get_submodule(block.path).parameters())
        flops = 2.0 * weights * x.numel() / x.shape[-1] / samples
        reduced = (x.nbytes + y.nbytes) / samples
    else:
        for n in (*block.column, block.row):
            for x in trace.inputs.get(n, []):
                weight: Any = model.get_submodule(n).weight
                flops += 2.0 * weight.numel() * x.numel() / x.shape[-1] / samples
        entering = {id(x): x.nbytes for n, _, x, _ in trace.calls if n in block.column}
        reduced = (
            sum(entering.values()) + sum(y.nbytes for y in trace.outputs[block.row])
        ) / samples
    return dataclasses.replace(block, parameters=parameters, flops=flops, reduced_bytes=reduced)


def _consumers(trace: _Trace) -> dict[Any, list[Any]]:
    """Of each node of the graph, those that take what it made."""
    consumers: dict[Any, list[Any]] = {}
    everything, _ = _walk(trace.loss.grad_fn, set())
    for node in everything:
        for n, _ in node.next_functions:
            if n is not None:
                consumers.setdefault(n, []).append(node)
    return consumers


def _read_elsewhere(
    model: nn.Module,
    trace: _Trace,
    candidates: list[_Candidate],
    consumers: Mapping[Any, list[Any]],
) -> None:
    """Refuse blocks with a weight that is read outside of its layer's call as well (a tied
    decoder's ``F.linear(z, layer.weight.t())``): there it is needed whole."""
    own: dict[str, set[Any]] = {}
    for name, start, _, out in trace.calls:
        own.setdefault(name, set()).update(_walk(out, {start})[0])
    reads = {
        id(node.variable): found for node, found in consumers.items() if hasattr(node, "variable")
    }
    for c in candidates:
        if c.block.why_not:
            continue
        layers = set().union(*(own.get(name, ()) for name in (*c.block.column, c.block.row)))
        divided, whole = split_dims(model, c.block)
        for name in (*divided, *whole):
            if name.rpartition(".")[0] in c.block.per_head:
                continue  # an embedding, whose calls are not noted
            if any(node not in layers for node in reads.get(id(model.get_parameter(name)), ())):
                c.block = dataclasses.replace(
                    c.block, why_not=f"{name!r} is also read outside of its layer's call"
                )
                break


def _escapes(consumers: Mapping[Any, list[Any]], candidates: list[_Candidate]) -> None:
    """Refuse what also goes elsewhere than into its row."""
    while True:
        closed = set().union(*(c.closure for c in candidates if not c.block.why_not))
        changed = False
        for c in candidates:
            if c.block.why_not or not c.region:
                continue
            for node in c.region:
                outside = [n for n in consumers.get(node, []) if n not in closed]
                if outside:
                    into = outside[0].name().removesuffix("Backward0")
                    c.block = dataclasses.replace(
                        c.block, why_not=f"what its columns make also goes elsewhere ({into})"
                    )
                    changed = True
                    break
        if not changed:
            return


# -- trials ----------------------------------------------------------------------------


class _Differs(Exception):
    """A block's part is not its slice of the whole."""


class _Elsewhere(Exception):
    """A block is given something else than before: what another one's narrowing has touched."""


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def _differs(found: torch.Tensor, expected: torch.Tensor) -> str:
    if found.shape != expected.shape:
        return f"it gives {list(found.shape)} where {list(expected.shape)} was expected"
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    largest = float((found.double() - expected.double()).abs().max()) if expected.numel() else 0.0
    if largest <= _TOLERANCE.get(expected.dtype, 1e-2) * scale:
        return ""
    return (
        f"its part differs from the whole by {largest / max(scale, 1e-30):.1e} of the largest value"
    )


class _Trial(Arms):
    """One worker's part, in one process, compared with what the whole gave."""

    def __init__(self, trace: _Trace, place: int, tensor: int) -> None:
        self.place, self.tensor = place, tensor
        self._trace = trace
        self._parts: dict[tuple[int, str], torch.Tensor | None] = {}
        self._calls: dict[str, int] = {}
        self.open: list[Block] = []  # begun and not yet left
        self.last: Block | None = None

    def local(self, module: nn.Module, name: str, dim: int, pieces: int) -> torch.Tensor | None:
        key = (id(module), name)
        if key not in self._parts:
            value = getattr(module, name)
            self._parts[key] = (
                None
                if value is None
                else piece(value.detach(), dim, pieces, self.place, self.tensor)
            )
        return self._parts[key]

    def enter(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name:
            call = self._calls[name] = self._calls.get(name, -1) + 1
            if _differs(x, self._trace.inputs[name][call]):
                raise _Elsewhere
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
        expected = whole.chunk(self.tensor, -1)[self.place]
        why = _differs(x, expected)
        if not why and not bool(whole.any()):
            why = "all zero on the sample: it cannot be checked"
        if why:
            self.open.append(block)
            raise _Differs(why)
        return self._trace.outputs[block.row][call]


class _MultiheadTrial(_Trial):
    """torch's own attention does not show what its row is given: all parts together are compared
    with its output.
    """

    def leave(self, block: Block, x: torch.Tensor, row: nn.Module) -> torch.Tensor:
        return F.linear(x, piece(row.weight.detach(), 1, 1, self.place, self.tensor))  # type: ignore[operator, arg-type]


def _try_multihead(model: nn.Module, block: Block, trace: _Trace, tensor: int) -> str:
    module = model.get_submodule(block.path)
    assert isinstance(module, nn.MultiheadAttention)
    args, kwargs = trace.arguments[block.path]
    whole: torch.Tensor | None = None
    for place in range(tensor):
        part = multihead(Region(block, _MultiheadTrial(trace, place, tensor)))(
            module, *args, **kwargs
        )[0]
        whole = part if whole is None else whole + part
    assert whole is not None
    bias = module.out_proj.bias
    return _differs(whole if bias is None else whole + bias, trace.outputs[block.path][0])


def _select(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    trace: _Trace,
    candidates: list[_Candidate],
    places: Sequence[int],
    tensor: int,
) -> None:
    """Choose each block's way, and refuse those for which none is right."""
    with torch.no_grad():
        for c in candidates:
            if c.block.kind == "multihead" and not c.block.why_not:
                try:
                    why = _try_multihead(model, c.block, trace, tensor)
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                if why:
                    c.block = dataclasses.replace(c.block, why_not=why)
    active = [c for c in candidates if c.block.kind != "multihead" and not c.block.why_not]
    tried: dict[tuple[Any, ...], int] = {c.signature: 0 for c in active}
    first_reason: dict[tuple[Any, ...], str] = {}

    def fail(signature: tuple[Any, ...], why: str) -> None:
        nonlocal active
        first_reason.setdefault(signature, why)
        tried[signature] += 1
        ill = [c for c in active if c.signature == signature]
        if tried[signature] < min(len(c.ways) for c in ill):
            return
        shared = {n for c in ill for n in c.block.per_head}
        for c in [*ill, *(c for c in active if shared & set(c.block.per_head))]:
            if not c.block.why_not:
                c.block = dataclasses.replace(
                    c.block,
                    why_not="no way of narrowing its forward code agrees: "
                    f"{first_reason[signature]}",
                )
        active = [c for c in active if not c.block.why_not]

    for c in [c for c in active if not c.ways]:
        if not c.block.why_not:
            fail(c.signature, "no module around it says where its heads are counted")
    while active:
        chosen = [(c, c.ways[tried[c.signature]]) for c in active]
        failed = False
        for place in places:
            arms = _Trial(trace, place, tensor)
            try:
                with ExitStack() as stack, torch.no_grad(), torch.random.fork_rng():
                    torch.manual_seed(0)
                    done: set[tuple[str, str]] = set()
                    for _, way in chosen:
                        install_layers(stack, model, way, arms, done)
                    run()
            except Exception as error:
                blamed = arms.open[-1] if arms.open else arms.last
                text = str(error).strip().split("\n")[0][:160]
                why = text if isinstance(error, _Differs) else f"{type(error).__name__}: {text}"
                if isinstance(error, _Elsewhere):
                    # Attributes that several blocks read, of which not all can be narrowed.
                    wide = [c for c, way in chosen if way.attributes]
                    ill = min(wide or [chosen[0][0]], key=lambda c: len(c.block.path))
                    why = (
                        "what counts its heads is read by other layers as well, which cannot "
                        "be split"
                    )
                else:
                    ill = next((c for c, way in chosen if way is blamed), chosen[0][0])
                fail(ill.signature, why)
                failed = True
                break
        if not failed:
            for c, way in chosen:
                c.block = way
            return


def recognise(
    model: nn.Module,
    run: Callable[[], torch.Tensor],
    tensor: int,
    *,
    places: Sequence[int] | None = None,
    gradients: bool = False,
) -> Recognised:
    """Find the blocks of a model that ``tensor`` workers can hold together. In one process, without
    communication.

    Args:
        model: any module tree; it is left as it was.
        run: a forward pass over a few samples (two or more) through ``model``, and its loss, 0-d.
        tensor: into how many parts.
        places: whose parts are tried on the sample; None for all of them.
        gradients: also note the gradients' sums, to compare with those of the split model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        >>> found = recognise(model, lambda: model(torch.ones(2, 4)).sum(), 2)
        >>> [(b.kind, b.column, b.row) for b in found.blocks]
        [('mlp', ('0',), '2')]
    """
    with quiet(model):
        trace = _trace(model, run)
        sums: dict[str, tuple[float, float]] = {}
        candidates = _candidates(model, trace, tensor)
        if trace.loss.grad_fn is not None:
            consumers = _consumers(trace)
            _read_elsewhere(model, trace, candidates, consumers)
            _escapes(consumers, candidates)
            del consumers
            if gradients:
                named = list(model.named_parameters())
                grads = torch.autograd.grad(trace.loss, [p for _, p in named], allow_unused=True)
                for (name, _), g in zip(named, grads, strict=True):
                    if g is not None and not g.is_sparse:
                        sums[name] = (float(g.double().sum()), float(g.double().square().sum()))
                del grads
        trace.nodes.clear()
        for c in candidates:
            c.region, c.closure = set(), set()
        _select(model, run, trace, candidates, range(tensor) if places is None else places, tensor)
    samples = max((x.shape[0] for _, _, x, _ in trace.calls), default=1)
    for c in candidates:
        c.block = _sized(model, c.block, trace, samples)  # of the way that was chosen
    flops = 0.0
    for n, xs in trace.inputs.items():
        weight = getattr(model.get_submodule(n), "weight", None)
        if weight is not None:
            flops += sum(2.0 * weight.numel() * x.numel() / x.shape[-1] / samples for x in xs)
    flops += sum(c.block.flops for c in candidates if c.block.kind == "multihead")
    return Recognised(
        tuple(c.block for c in candidates if not c.block.why_not),
        tuple(c.block for c in candidates if c.block.why_not),
        sum(p.numel() for p in model.parameters()),
        flops,
        float(trace.loss.detach()),
        sums,
        frozenset(trace.called),
    )
