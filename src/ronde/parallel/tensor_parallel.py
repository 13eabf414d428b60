"""Tensor parallel: several workers hold each attention and MLP block together.

Shoeybi et al. 2019 (Megatron-LM): a block's first layers are divided by columns, so that each
worker computes some heads or hidden features, and its last one by rows, so that one sum over the
workers ends the block. The script's own forward code runs on each worker as that of a smaller block
(see :mod:`ronde.parallel.tensor_blocks`). Divided parameters are DTensors, and layers compute with
their local parts; all others are plain and equal on all workers. Before the first step, the loss
and all gradients of the divided model are compared with those of the whole one. Blocks that
disagree stay whole.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module

from ronde.capture import Reads, draws_globally, following
from ronde.checkpoint import shard_like
from ronde.parallel.batchnorm import absent, batchnorms, synchronize_batchnorms
from ronde.parallel.buckets import broadcast_packed, exchange_packed
from ronde.parallel.ddp import Replicate, payload_dtype
from ronde.parallel.dtensor_fixes import extend_scaler, fix_dtensors
from ronde.parallel.fsdp import (
    Shard,
    add_squares,
    adopt,
    refuse_divided,
    refuse_hooks,
    refuse_optimizer,
    shard_width,
)
from ronde.parallel.own_calls import OwnCalls
from ronde.parallel.strategy import (
    Compute,
    Flags,
    Part,
    Scale,
    Strategy,
    Work,
    forget_frozen,
    part_gradients,
    trainable,
)
from ronde.parallel.tensor_blocks import DivisibleBlocks, quiet, recognize
from ronde.parallel.tensor_layers import (
    Block,
    BlockRuntime,
    features,
    install_layers,
    linear,
    piece,
    split_dims,
)
from ronde.plan import Plan
from ronde.world import ArgumentError, World
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.meshes import group_of, mesh_of
from ronde.world.tensors import local_part

__all__ = [
    "Divided",
    "Tensor",
    "TensorShard",
    "complete_gradients",
    "divide",
    "divide_stages",
    "one_part",
    "tensor",
]

_LOSS, _WEIGHT, _UNUSED = 0, 1, 2


# -- the sums around a block (Megatron's f and g) --------------------------------------

# Each one's backward is the other, and can be differentiated again: a gradient penalty does.


class _Enter(torch.autograd.Function):
    """Forward the identity, backward the sum over the workers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Leave.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _Leave(torch.autograd.Function):
    """Forward the sum over the workers, backward the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        ctx.group = group
        if group is not None and not isinstance(total, FakeTensor):  # a pass that is followed
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Enter.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Generators around a block: the script's before and after its seed was drawn, the block's."""

    seed: int
    before: torch.Tensor
    after: torch.Tensor
    seeded: list[torch.Tensor]
    cuda: torch.Tensor | None


class _WorkerRuntime(BlockRuntime):
    """This worker's part in training. Dropout differs between workers inside blocks only."""

    group: dist.ProcessGroup | None
    own_calls: OwnCalls | None = None

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.place, self.tensor = mesh.get_local_rank(), mesh.size()
        self._cuda = mesh.device_type == "cuda"
        self._kept: _Kept | None = None

    def local(self, module: nn.Module, name: str, dim: int, pieces: int) -> torch.Tensor | None:
        value = getattr(module, name)
        if value is None:
            return None
        if isinstance(value, DTensor):
            return value.to_local()
        return piece(value, dim, pieces, self.place, self.tensor)

    def enter(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return _Enter.apply(x, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, block: Block, x: torch.Tensor, row: nn.Module) -> torch.Tensor:
        dim = 1 if isinstance(row, nn.Linear) else 0
        weight = self.local(row, "weight", dim, 1)
        assert weight is not None
        total = self.total(linear(row, x, weight, None))
        bias = row.bias
        return total if bias is None else total + bias.to(total.dtype)  # type: ignore[union-attr, operator]

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return _Leave.apply(x, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def begin(self, block: Block, training: bool) -> None:
        if self.own_calls is not None:
            self.own_calls.enter(block.path)
        if training:
            self._kept = self._start_draws()

    def _start_draws(self) -> _Kept | None:
        """Let this worker draw other random numbers than the others; None in a followed pass, and
        where all draw their part of the same numbers.
        """
        if following() or draws_globally():
            return None
        before = torch.default_generator.get_state()
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        cuda = torch.cuda.get_rng_state() if self._cuda else None
        after, seed = torch.default_generator.get_state(), drawn + 1 + self.place
        self._seed(seed)
        return _Kept(seed, before, after, self._states(), cuda)

    def end(self, block: Block) -> None:
        """See :class:`BlockRuntime`. All workers draw the same again."""
        kept, self._kept = self._kept, None
        # If a recomputation ended before the row, the seed is already another: leave it.
        if kept is not None and torch.default_generator.initial_seed() == kept.seed:
            # A block that draws nothing leaves the script's numbers as one process has them.
            drew = any(
                not torch.equal(a, b) for a, b in zip(self._states(), kept.seeded, strict=True)
            )
            torch.default_generator.set_state(kept.after if drew else kept.before)
            if kept.cuda is not None:
                torch.cuda.set_rng_state(kept.cuda)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run blocks on this worker only: their results are no sums, and are not used."""
        group, self.group = self.group, None
        try:
            yield
        finally:
            self.group = group

    def _states(self) -> list[torch.Tensor]:
        states = [torch.default_generator.get_state()]
        return [*states, torch.cuda.get_rng_state()] if self._cuda else states

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._cuda:
            torch.cuda.manual_seed(seed)


class _SoloRuntime(_WorkerRuntime):
    """The first worker's part without the others: same work, same shapes, sums without theirs."""

    def __init__(self, tensor: int) -> None:
        self.group, self.place, self.tensor = None, 0, tensor
        self._cuda, self._kept = False, None
        self.divided: set[tuple[int, str]] = set()

    def local(self, module: nn.Module, name: str, dim: int, pieces: int) -> torch.Tensor | None:
        value = getattr(module, name)
        if value is None or (id(module), name) in self.divided:
            return cast("torch.Tensor | None", value)
        return piece(value, dim, pieces, self.place, self.tensor)


@contextmanager
def one_part(model: nn.Module, blocks: Sequence[Block], tensor: int) -> Iterator[None]:
    """One worker's part of a divided model, in one process: to time and weigh, not to train."""
    runtime = _SoloRuntime(tensor)
    done: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        for block in blocks:
            for name, dim in split_dims(model, block)[0].items():
                path, _, attribute = name.rpartition(".")
                owner = model.get_submodule(path)
                if (id(owner), attribute) in runtime.divided:
                    continue
                whole = model.get_parameter(name)
                part = whole.detach().chunk(tensor, dim)[0]
                part = part.clone(memory_format=torch.contiguous_format)
                _put(model, name, nn.Parameter(part, requires_grad=whole.requires_grad))
                runtime.divided.add((id(owner), attribute))
                stack.callback(_put, model, name, whole)
            install_layers(stack, model, block, runtime, done)
        yield


# -- dividing a model ------------------------------------------------------------------


@dataclasses.dataclass
class Divided:
    """A model whose blocks the workers of ``mesh`` hold together.

    Attributes:
        blocks: the divided ones.
        partial: whole parameters of which each worker uses a part: their gradients are summed.
        note: what to tell the user, or nothing.
        runtime: how the blocks communicate; None if torch's ``parallelize_module`` divided them.
        whole: the parameters before they were divided, by name.
    """

    mesh: DeviceMesh
    blocks: tuple[Block, ...] = ()
    partial: frozenset[str] = frozenset()
    note: str = ""
    runtime: _WorkerRuntime | None = None
    whole: dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)

    def fused_widths(self, model: nn.Module) -> frozenset[int]:
        """Widths of columns that the code cuts into several tensors: a worker has a part of each,
        so that its columns are not next to each other in the whole.
        """
        blocks = [b for b in self.blocks if b.kind != "multihead"]
        pairs = [pair for b in blocks for pair in zip(b.column, b.pieces, strict=True)]
        names = [name for name, pieces in pairs if pieces > 1]
        return frozenset(features(model.get_submodule(name))[1] for name in names)


def _put(model: nn.Module, name: str, value: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path)._parameters[attribute] = value


Changes = dict[str, tuple[nn.Parameter, nn.Parameter]]
"""Parameters that were divided, by name: whole, divided."""


def _install(
    model: nn.Module, blocks: tuple[Block, ...], mesh: DeviceMesh
) -> tuple[ExitStack, Changes, _WorkerRuntime]:
    """Divide blocks. The stack undoes it."""
    stack = ExitStack()
    changed: Changes = {}
    runtime = _WorkerRuntime(mesh)
    done: set[tuple[str, str]] = set()
    for block in blocks:
        for name, dim in split_dims(model, block)[0].items():
            if name in changed:
                continue
            whole = model.get_parameter(name)
            part = distribute_tensor(whole.detach(), mesh, [Split(dim)], src_data_rank=None)
            # A copy: a view would keep the whole alive.
            local = part.to_local().clone(memory_format=torch.contiguous_format)
            divided = nn.Parameter(shard_like(local, part), requires_grad=whole.requires_grad)
            changed[name] = (whole, divided)
            _put(model, name, divided)
            stack.callback(_put, model, name, whole)
        install_layers(stack, model, block, runtime, done)
    return stack, changed, runtime


# What a forward pass of a wrongly divided model may end with.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def _verdict(
    work: Work, run: Any, whole: DivisibleBlocks, mesh: DeviceMesh, partials: frozenset[str]
) -> dict[str, Any]:
    """This worker's :func:`_disagreements`, or why a pass failed."""
    parameters = work.model.named_parameters()
    reads = Reads({id(p): name for name, p in parameters if isinstance(p, DTensor)})
    try:
        return {"bad": _disagreements(work.model, run, whole, mesh, partials, reads)}
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        first_line = str(error).strip().split("\n")[0]
        return {"error": f"{type(error).__name__}: {first_line}", "read": sorted(reads.read)}


def _disagreements(
    model: nn.Module,
    run: Any,
    whole: DivisibleBlocks,
    mesh: DeviceMesh,
    partials: frozenset[str],
    reads: Reads,
) -> list[str]:
    """Parameters whose gradient on the sample is not the whole model's; ``""`` for the loss.

    Compares sums and sums of squares, so that no whole gradient is exchanged.
    """
    with quiet(model), reads:  # putting the model back reads no weight
        loss = run()
        named = list(model.named_parameters())
        grads = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    sums = torch.zeros(len(named), 2, dtype=torch.float64, device=loss.device)
    divided_sums = torch.zeros_like(sums)
    for i, ((name, p), g) in enumerate(zip(named, grads, strict=True)):
        if g is None or g.is_sparse:
            continue
        mine = local_part(g)
        if name in partials:
            mine = mine.clone()
            dist.all_reduce(mine, group=mesh.get_group())
        wide = mine.double()
        (divided_sums if isinstance(p, DTensor) else sums)[i] = torch.stack(
            [wide.sum(), wide.square().sum()]
        )
    dist.all_reduce(divided_sums, group=mesh.get_group())
    sums += divided_sums
    tolerance = 1e-8 if all(p.dtype == torch.float64 for _, p in named) else 1e-2
    largest = max((square for _, square in whole.gradients.values()), default=0.0)
    floor = tolerance**2 * largest
    bad = []
    if abs(float(loss.detach()) - whole.loss) > tolerance * max(abs(whole.loss), 1e-6):
        bad.append("")
    for (name, p), (total, square) in zip(named, sums.tolist(), strict=True):
        if name not in whole.gradients:
            continue
        before, before_square = whole.gradients[name]
        sum_bound = tolerance * (p.numel() * (before_square + floor)) ** 0.5
        square_bound = tolerance * before_square + floor
        if abs(total - before) > sum_bound or abs(square - before_square) > square_bound:
            bad.append(name)
    return bad


def _reasons(refused: Sequence[Block], model: nn.Module) -> str:
    """Why blocks stay whole, those of one kind and reason together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for b in refused:
        alike.setdefault((b.kind, b.why_not), []).append(b.path or type(model).__name__)
    lines = []
    for (kind, why), names in alike.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"{', '.join(map(repr, names[:2]))}{more} ({kind}): {why}")
    return "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more kinds" if len(lines) > 4 else "")


def _nothing_divisible(plan: Plan, refused: Sequence[Block], model: nn.Module) -> ArgumentError:
    why = _reasons(refused, model) or (
        f"no attention and no MLP was found in {type(model).__name__}: two nn.Linear with only "
        "element-wise operations in between, or query, key and value before a softmax"
    )
    return ArgumentError(
        f"tensor={plan.tensor}: nothing in the model can be split by {plan.tensor}. {why}. Choose "
        "another number, say how with tensor_plan={module name: a "
        "torch.distributed.tensor.parallel style}, or split the data or the layers (replicate, "
        "shard, pipeline)."
    )


def divide(plan: Plan, work: Work, me: World, mesh: DeviceMesh) -> Divided:
    """Divide what can be divided of a model that is the same on every worker.

    Raises:
        ArgumentError: nothing can.
    """
    if work.tensor_plan is not None:
        return _divide_by_plan(plan, work, work.tensor_plan, mesh)
    model, sample = work.model, work.sample(2)

    def run() -> torch.Tensor:
        with work.trial():
            return work.compute(sample)[0]

    try:
        whole = recognize(model, run, plan.tensor, gradients=True)
    except _FAILURES as error:
        raise ArgumentError(
            f"tensor={plan.tensor}: finding what to split takes a forward pass and a loss over "
            f"two samples, which failed ({type(error).__name__}: {error}). Give ronde.distribute "
            "the loss (and forward) that training uses, or a tensor_plan."
        ) from error
    # Rank 0's verdict holds: rounding may differ between devices.
    verdict = broadcast_json(me, [dataclasses.asdict(b) for b in whole.blocks])
    blocks = tuple(_block(b) for b in verdict)
    refused = list(whole.refused)
    while blocks:
        stack, changed, runtime = _install(model, blocks, mesh)
        partials = frozenset(n for b in blocks for n in (*b.inside, *split_dims(model, b)[1]))
        verdicts = gather_json(me, _verdict(work, run, whole, mesh, partials))
        wrong = _wrong_blocks(plan, model, blocks, verdicts)
        if not wrong:
            break
        stack.close()
        refused += [dataclasses.replace(b, why_not=why) for b, why in wrong]
        blocks = tuple(b for b in blocks if all(b is not w for w, _ in wrong))
    else:
        raise _nothing_divisible(plan, refused, model)
    refuse_hooks({name: old for name, (old, _) in changed.items()}, f"tensor={plan.tensor}")
    adopt(work.optimizer, dict(changed.values()))
    note = ""
    if refused:
        note = (
            f"tensor={plan.tensor}: {len(blocks)} blocks are split. {len(refused)} stay whole on "
            f"every worker: {_reasons(refused, model)}"
        )
    whole_parameters = {name: old for name, (old, _) in changed.items()}
    return Divided(mesh, blocks, partials, note, runtime, whole_parameters)


def _wrong_blocks(
    plan: Plan, model: nn.Module, blocks: Sequence[Block], verdicts: Sequence[Mapping[str, Any]]
) -> list[tuple[Block, str]]:
    """Blocks to leave whole after all workers' verdicts, and why; empty if the model is right."""
    failed = next((v["error"] for v in verdicts if "error" in v), None)
    if failed is not None:
        read = {name for v in verdicts for name in v.get("read", ())}
        direct = [(b, [n for n in split_dims(model, b)[0] if n in read]) for b in blocks]
        why = "{!r} is also read outside of its layer's call"
        wrong = [(b, why.format(names[0])) for b, names in direct if names]
        if not wrong:
            shown = ", ".join(repr(b.path or type(model).__name__) for b in blocks[:4])
            raise ArgumentError(
                f"tensor={plan.tensor}: with {shown} split, a forward and backward pass over two "
                f"samples fails ({failed}). Say with tensor_plan what to split, or split the data "
                "or the layers (replicate, shard, pipeline)."
            )
        return wrong
    bad = sorted({name for v in verdicts for name in v["bad"]})
    if not bad:
        return []
    # Gradients flow backwards: the fault began in the last block with a wrong one, and others of
    # its kind will be no better.
    suspects = [b for b in blocks if not {*b.inside}.union(*split_dims(model, b)).isdisjoint(bad)]
    name = bad[-1]
    if suspects:
        last = suspects[-1]
        blocks = [b for b in blocks if _kind(model, b) == _kind(model, last)]
        name = next((n for n in bad if n.startswith((*last.column, last.row))), name)
    why = f"the gradient of {name!r} differs" if name else "the loss differs"
    return [(b, why) for b in blocks]


def _kind(model: nn.Module, block: Block) -> tuple[Any, ...]:
    layers = [n.removeprefix(block.path) for n in (*block.column, block.row)]
    return (block.kind, type(model.get_submodule(block.path)), *layers)


def _block(values: Mapping[str, Any]) -> Block:
    """A block from JSON, whose lists were tuples."""

    def as_tuple(value: Any) -> Any:
        return tuple(map(as_tuple, value)) if isinstance(value, list) else value

    return Block(**{k: as_tuple(v) for k, v in values.items()})


def _divide_by_plan(
    plan: Plan, work: Work, tensor_plan: Mapping[str, Any], mesh: DeviceMesh
) -> Divided:
    """Divide as the script says."""
    model = work.model
    before = dict(model.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            parallelize_module(model, mesh, dict(tensor_plan))
        except (UserWarning, ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            raise ArgumentError(
                f"torch's parallelize_module cannot carry tensor_plan out: {error}"
            ) from error
    after = dict(model.named_parameters(remove_duplicate=False))
    changed: dict[torch.Tensor, nn.Parameter] = {
        before[n]: p for n, p in after.items() if p is not before[n]
    }
    refuse_hooks({n: p for n, p in before.items() if p in changed}, f"tensor={plan.tensor}")
    if not any(isinstance(p, DTensor) for p in after.values()):
        shown = ", ".join(map(repr, list(tensor_plan)[:5]))
        raise ArgumentError(
            f"tensor_plan splits nothing: none of {shown} has a parameter that its style divides."
        )
    for old, new in changed.items():
        new.requires_grad_(old.requires_grad)
    adopt(work.optimizer, changed)
    return Divided(mesh)


# -- strategies ------------------------------------------------------------------------


def _sum_over(mesh: DeviceMesh, gradients: list[torch.Tensor], mean: bool = False) -> None:
    """Sum gradients over the workers of a mesh, in place."""

    def add(flat: torch.Tensor) -> None:
        dist.all_reduce(flat, group=mesh.get_group())
        if mean:
            flat /= mesh.size()

    exchange_packed(gradients, add)


def complete_gradients(
    divided: Divided, names: Sequence[str], parameters: Sequence[nn.Parameter], me: World
) -> None:
    """Sum gradients of which each worker has a part; on GPUs, average those all have.

    Kernels may round differently there, and whole parameters would drift apart.
    """
    partials, same = [], []
    for name, p in zip(names, parameters, strict=True):
        if p.grad is None or p.grad.is_sparse:
            continue
        if name in divided.partial:
            partials.append(local_part(p.grad))
        elif not isinstance(p, DTensor) or "tensor" not in (p.device_mesh.mesh_dim_names or ()):
            same.append(local_part(p.grad))
    _sum_over(divided.mesh, partials)
    if me.device.type != "cpu":
        _sum_over(divided.mesh, same, mean=True)


class Tensor(Replicate):
    """Carries ``tensor=T`` out, with as many replicas as there are workers for.

    Args:
        replicas: mesh of the workers that hold the same parameters.
        divided: see :func:`divide`.
    """

    def __init__(
        self, work: Work, me: World, replicas: DeviceMesh, divided: Divided, run_empty: bool
    ) -> None:
        self.divided = divided
        self._replicas = replicas
        self._mixed_tensors = ExitStack()
        super().__init__(work.model, me, run_empty)
        self.counts = divided.mesh.get_local_rank() == 0

    def _build(self) -> None:
        """Note which parameters are trained; all workers have the same values already."""
        forget_frozen(self.model, self.parameters)
        named = trainable(self.model)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._flags = Flags(self.model)
        size, dtype = _UNUSED + len(named), payload_dtype(self.parameters)
        self._payload = torch.zeros(size, dtype=dtype, device=self.me.device)
        self._loss_slot, self._weight_slot = self._payload[_LOSS], self._payload[_WEIGHT]

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`."""
        if not self._begun:
            self._begun = True
            extend_scaler(scale, self.me)
            self._payload.zero_()
            for p in self.parameters:
                p.grad = None
        assert compute is not None or not (part.samples or self.run_empty)
        if part.samples:
            value, weight = cast(Compute, compute)()
            factor = self._weigh(weight, part)
            self._backward(value, factor, scale)
            self._loss_slot.add_(value.detach(), alpha=factor)
        elif self.run_empty:
            with absent():
                self._backward(cast(Compute, compute)()[0], 0.0, scale)
        if not part.last:
            part_gradients(self.parameters)

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        if self._seen is not None:
            self._choose_buffers(self._seen)
        self.local_loss = self._loss_slot.clone()
        self._begun = False
        for p in self.parameters:
            g = p.grad
            if isinstance(g, DTensor) and isinstance(p, DTensor) and g.placements != p.placements:
                # a whole parameter, used on parts of a sequence (SequenceParallel of a tensor_plan)
                p.grad = g.redistribute(placements=p.placements)
        if self._replicas.size() > 1:
            self._exchange()
        complete_gradients(self.divided, self.names, self.parameters, self.me)
        # An optimizer may take all parameters at once, plain ones and DTensors.
        self._mixed_tensors.enter_context(implicit_replication())
        loss = self._payload[_LOSS].clone()
        weight = self._payload[_WEIGHT]
        if bool(weight != 0) if self._weighted is None else self._weighted:
            for p in self.parameters:
                if p.grad is not None:
                    (p.grad if p.grad.is_sparse else local_part(p.grad)).div_(weight)
            loss = loss / weight
        return loss

    @torch.no_grad()
    def _exchange(self) -> None:
        """Sum the payload and all gradients over the replicas."""
        payload = self._payload
        unused = [i for i, p in enumerate(self.parameters) if p.grad is None]
        if unused:
            payload[_UNUSED:][unused] = 1
        dist.all_reduce(payload, group=self._replicas.get_group())
        flags = payload[_UNUSED:] > self._replicas.size() - 0.5
        nobody = flags.tolist() if unused else [False] * len(flags)  # reading waits for a GPU
        dense = []
        for p, is_unused in zip(self.parameters, nobody, strict=True):
            if is_unused:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad.is_sparse:
                raise ArgumentError(
                    "tensor= with replicas sums dense gradients, and one is sparse. Build the "
                    "embedding with sparse=False."
                )
            dense.append(local_part(p.grad))
        _sum_over(self._replicas, dense)

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """See :meth:`Strategy.clip`. Divided gradients are summed up, whole ones counted once."""
        total = torch.zeros((), dtype=self._payload.dtype, device=self.me.device)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        add_squares(total, gradients)
        factor = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for g in gradients:
            local_part(g).mul_(factor)

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        self._mixed_tensors.close()

    def watch(self, calls: OwnCalls) -> None:
        """See :meth:`Strategy.watch`."""
        super().watch(calls)
        if self.divided.runtime is not None:
            self.divided.runtime.own_calls = calls


class TensorShard(Shard):
    """Carries ``tensor=T`` out with replicas that shard the model: FSDP2 over a mesh of both."""

    def __init__(
        self, work: Work, me: World, mesh: DeviceMesh, divided: Divided, plan: Plan
    ) -> None:
        self.divided = divided
        assert plan.shard in ("gradients", "parameters")
        super().__init__(work, me, mesh, plan.shard, plan.offload == "parameters")
        self.counts = divided.mesh.get_local_rank() == 0

    def _build(self) -> None:
        """As :class:`Shard`, of a model that is divided and equal on all workers already."""
        self._divide()
        self._attach()

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`."""
        extend_scaler(scale, self.me)
        super().micro(compute, part, scale)

    def watch(self, calls: OwnCalls) -> None:
        """See :meth:`Strategy.watch`."""
        super().watch(calls)
        if self.divided.runtime is not None:
            self.divided.runtime.own_calls = calls

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        me = self.me
        self.me = dataclasses.replace(me, size=self._mesh.size())  # gradients are exchanged there
        try:
            loss = super().finish()
        finally:
            self.me = me
        complete_gradients(self.divided, self.names, self.parameters, self.me)
        return loss


def _meshes(plan: Plan, me: World) -> tuple[DeviceMesh, DeviceMesh]:
    """This worker's replicas, and the workers that hold its layers together with it."""
    replicas = plan.replicas
    within = replicas if plan.shard == "none" else shard_width(plan, replicas)
    if within == replicas:
        both = mesh_of(me.device.type, {"data": replicas, "tensor": plan.tensor})
        return both["data"], both["tensor"]
    shape = {"replicate": replicas // within, "shard": within, "tensor": plan.tensor}
    whole = mesh_of(me.device.type, shape)
    return whole["replicate", "shard"], whole["tensor"]


def tensor(plan: Plan, work: Work, me: World) -> Strategy:
    """The strategy of a plan with ``tensor`` above 1 and no pipeline.

    Raises:
        ArgumentError: nothing in the model can be split so, or the plan asks for what does not go
            together.
    """
    if plan.shard == "optimizer":
        raise ArgumentError(
            f"plan={plan.spec!r}: shard='optimizer' does not go with tensor={plan.tensor}. Use "
            "shard='gradients', which divides the optimizer's state as well."
        )
    sharded = plan.shard != "none" and plan.replicas > 1
    _refuse(plan, work)
    data, together = _meshes(plan, me)
    divided = _divided(plan, work, me, together, sharded)
    divided.whole.clear()
    if plan.sync_batchnorm:
        synchronize_batchnorms(
            work.model, data.get_group() if data.ndim == 1 else group_of("batchnorm")
        )
    if sharded:
        return TensorShard(work, me, data, divided, plan)
    return Tensor(work, me, data, divided, plan.sync_batchnorm and bool(batchnorms(work.model)))


def divide_stages(plan: Plan, work: Work, me: World, mesh: DeviceMesh) -> Divided:
    """Divide the blocks of a model that a pipeline will cut, and keep the whole parameters.

    Raises:
        ArgumentError: nothing in the model can be split so.
    """
    if work.tensor_plan is not None:
        raise ArgumentError(
            f"plan={plan.spec!r}: tensor_plan does not go with a pipeline, which follows the "
            "model's own layers. Leave tensor_plan out, so that Ronde finds the blocks, or use "
            f"tensor={plan.tensor} without a pipeline."
        )
    _refuse(plan, work)
    return _divided(plan, work, me, mesh, plan.shard != "none" and plan.replicas > 1)


def _refuse(plan: Plan, work: Work) -> None:
    refuse_divided(work.model)
    if type(work.optimizer).__name__ != "SparseAdam":  # embeddings stay whole
        refuse_optimizer(work.optimizer, f"tensor={plan.tensor}", "plan='replicate'")


def _divided(plan: Plan, work: Work, me: World, mesh: DeviceMesh, sharded: bool) -> Divided:
    """Divide a model that is on every worker, and prepare its optimizer."""
    fix_dtensors(me)
    broadcast_packed([*work.model.parameters(), *work.model.buffers()], me.device)
    divided = divide(plan, work, me, mesh)
    if divided.note and me.is_main:
        warnings.warn(divided.note, stacklevel=2)
    for group in work.optimizer.param_groups:
        # Fused kernels take no plain tensors beside DTensors, the others only those of one mesh.
        if group.get("fused") or (sharded and group.get("foreach")):
            group.update(foreach=False, fused=None)
            # which fused ones promise a gradient scaler
            work.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return divided
