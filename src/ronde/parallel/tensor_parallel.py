"""Tensor parallel: several workers hold each attention and MLP block together.

Shoeybi et al. 2019 (Megatron-LM): the first layers of a block are divided by columns, so that each
worker computes some heads or some hidden features, the last one by rows, so that one sum over the
workers ends the block. The script's own forward code runs on each worker as that of a smaller block
(see :mod:`ronde.parallel.tensor_blocks`). Divided parameters are DTensors, whose local part is
computed with; all others are plain and the same on every worker. Before the first step the loss and
every gradient of the split
model are compared with those of the whole one: what does not agree is put back.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as Whole
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ronde.capture import not_an_event
from ronde.parallel.batchnorm import absent, batchnorms, synchronise
from ronde.parallel.ddp import Replicate
from ronde.parallel.dtensor_fixes import mend
from ronde.parallel.fsdp import (
    Shard,
    _alone,
    _Root,
    _through,
    called,
    fully_shard_model,
    refuse_hooks,
    refuse_optimizer,
    step_locally,
)
from ronde.parallel.recompute import large_children, repeated_blocks
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
from ronde.parallel.tensor_blocks import Recognised, quiet, recognise
from ronde.parallel.tensor_layers import Arms, Block, install_layers, linear, piece, split_dims
from ronde.parallel.zero1 import buckets
from ronde.plan import Plan
from ronde.world import ArgumentError, World
from ronde.world.consensus import broadcast_json, gather_json
from ronde.world.meshes import group_of, mesh_of
from ronde.world.tensors import tensors_in

__all__ = ["Divided", "Tensor", "TensorShard", "divide", "one_part", "tensor"]

_LOSS, _WEIGHT, _UNUSED = 0, 1, 2


# -- the sums around a block (Megatron's f and g) --------------------------------------


class _Enter(torch.autograd.Function):
    """The same forward; backward the sum over the workers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    """The sum over the workers; backward the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Workers(Arms):
    """This worker's part of the blocks, for good.

    Between columns and row each worker draws its own dropout; outside of them all draw the same.
    """

    group: dist.ProcessGroup | None

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.place, self.tensor = mesh.get_local_rank(), mesh.size()
        self._cuda = mesh.device_type == "cuda"
        self._kept: tuple[int, Any, Any] | None = None

    def local(self, module: nn.Module, name: str, dim: int, pieces: int) -> torch.Tensor | None:
        value = getattr(module, name)
        if value is None:
            return None
        return (
            value.to_local()
            if isinstance(value, DTensor)
            else piece(value, dim, pieces, self.place, self.tensor)
        )

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
        if not training:
            return
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        cuda = torch.cuda.get_rng_state() if self._cuda else None
        self._kept = (drawn + 1 + self.place, torch.default_generator.get_state(), cuda)
        self._seed(self._kept[0])

    def end(self, block: Block) -> None:
        # A recomputation that ended before the row has left its own randomness behind: then the
        # seed is another by now.
        if self._kept is not None and torch.default_generator.initial_seed() == self._kept[0]:
            torch.default_generator.set_state(self._kept[1])
            if self._cuda:
                torch.cuda.set_rng_state(self._kept[2])
        self._kept = None

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._cuda:
            torch.cuda.manual_seed(seed)


class _Alone(_Workers):
    """The first worker's part without the others: the same work on the same shapes, and sums that
    lack theirs.
    """

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
    """One worker's part of a model whose blocks ``tensor`` workers hold, in one process: to be
    timed and weighed, not to be trained.
    """
    arms = _Alone(tensor)
    done: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        for block in blocks:
            for name, dim in split_dims(model, block)[0].items():
                path, _, attribute = name.rpartition(".")
                owner = model.get_submodule(path)
                if (id(owner), attribute) in arms.divided:
                    continue
                whole = model.get_parameter(name)
                part = (
                    whole.detach()
                    .chunk(tensor, dim)[0]
                    .clone(memory_format=torch.contiguous_format)
                )
                _put(model, name, nn.Parameter(part, requires_grad=whole.requires_grad))
                arms.divided.add((id(owner), attribute))
                stack.callback(_put, model, name, whole)
            install_layers(stack, model, block, arms, done)
        yield


# -- dividing a model ------------------------------------------------------------------


@dataclasses.dataclass
class Divided:
    """A model whose blocks are held together.

    Attributes:
        mesh: of the workers that hold them.
        blocks: those that were divided.
        partial: names of whole parameters whose gradients are to be added up over ``mesh``: each
            worker uses some of them.
        said: what the user should know, or nothing.
    """

    mesh: DeviceMesh
    blocks: tuple[Block, ...] = ()
    partial: frozenset[str] = frozenset()
    said: str = ""


def _local(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.to_local() if isinstance(x, DTensor) else x.detach()


def _put(model: nn.Module, name: str, value: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path)._parameters[attribute] = value


def _adopt(optimizer: Optimizer, new: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Put divided parameters in the place of whole ones, in the same groups and order; state is
    divided alike.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(p, p) for p in group["params"]]
    for old, now in new.items():
        if old in optimizer.state:
            assert isinstance(now, DTensor)
            cut = partial(
                distribute_tensor,
                device_mesh=now.device_mesh,
                placements=now.placements,
                src_data_rank=None,
            )
            state = optimizer.state.pop(old)
            optimizer.state[now] = {
                k: cut(v) if isinstance(v, torch.Tensor) and v.dim() and v.shape == old.shape else v
                for k, v in state.items()
            }
    step_locally(optimizer)


def _install(
    model: nn.Module, blocks: tuple[Block, ...], mesh: DeviceMesh
) -> tuple[ExitStack, dict[str, tuple[nn.Parameter, nn.Parameter]]]:
    """Divide blocks. Returns what undoes it, and the parameters that changed, by name: whole,
    divided.
    """
    stack = ExitStack()
    changed: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    arms = _Workers(mesh)
    done: set[tuple[str, str]] = set()
    for block in blocks:
        for name, dim in split_dims(model, block)[0].items():
            if name in changed:
                continue
            whole = model.get_parameter(name)
            part = distribute_tensor(whole.detach(), mesh, [Split(dim)], src_data_rank=None)
            # not a view into the whole, which is to be let go of
            local = part.to_local().clone(memory_format=torch.contiguous_format)
            part = DTensor.from_local(
                local,
                mesh,
                part.placements,
                run_check=False,
                shape=part.shape,
                stride=part.stride(),
            )
            changed[name] = (whole, nn.Parameter(part, requires_grad=whole.requires_grad))
            _put(model, name, changed[name][1])
            stack.callback(_put, model, name, whole)
        install_layers(stack, model, block, arms, done)
    return stack, changed


class _Reads(TorchFunctionMode):
    """Notes which divided parameters the script's code computes with itself. A block's layers
    compute with their local parts.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._divided = {
            id(p): name for name, p in model.named_parameters() if isinstance(p, DTensor)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not not_an_event(func):
            self.names.update(
                self._divided[id(t)]
                for t in tensors_in((args, kwargs or {}))
                if id(t) in self._divided
            )
        return func(*args, **(kwargs or {}))


def _checked(
    work: Work, run: Any, found: Recognised, mesh: DeviceMesh, partials: frozenset[str]
) -> dict[str, Any]:
    """What this worker finds wrong with a divided model: names as of :func:`_disagreeing`; or the
    error that the pass ends with, and the divided parameters that the script's code computes with
    itself."""
    reads = _Reads(work.model)
    try:
        with reads:
            return {"bad": _disagreeing(work, run, found, mesh, partials)}
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        AssertionError,
    ) as error:
        return {
            "error": f"{type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            "read": sorted(reads.names),
        }


def _disagreeing(
    work: Work, run: Any, found: Recognised, mesh: DeviceMesh, partials: frozenset[str]
) -> list[str]:
    """Parameters whose gradient on the sample is not that of the whole model; ``""`` for the
    loss.
    """
    model = work.model
    with quiet(model):
        loss = run()
        named = list(model.named_parameters())
        grads = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    dtype = torch.float64
    sums = torch.zeros(len(named), 2, dtype=dtype, device=loss.device)
    shared = torch.zeros_like(sums)
    for i, ((name, p), g) in enumerate(zip(named, grads, strict=True)):
        if g is None or g.is_sparse:
            continue
        mine = _local(g)
        if name in partials:
            mine = mine.clone()
            dist.all_reduce(mine, group=mesh.get_group())
        (shared if isinstance(p, DTensor) else sums)[i] = torch.stack(
            [mine.to(dtype).sum(), mine.to(dtype).square().sum()]
        )
    dist.all_reduce(shared, group=mesh.get_group())
    sums += shared
    tolerance = 1e-8 if all(p.dtype == torch.float64 for _, p in named) else 1e-2
    largest = max((square for _, square in found.gradients.values()), default=0.0)
    bad = []
    if abs(float(loss.detach()) - found.loss) > tolerance * max(abs(found.loss), 1e-6):
        bad.append("")
    for (name, p), (total, square) in zip(named, sums.tolist(), strict=True):
        if name not in found.gradients:
            continue
        before, before_square = found.gradients[name]
        floor = tolerance**2 * largest
        apart = abs(total - before) > tolerance * (p.numel() * (before_square + floor)) ** 0.5
        if apart or abs(square - before_square) > tolerance * before_square + floor:
            bad.append(name)
    return bad


def _run(work: Work) -> Any:
    """A pass over two samples, and its loss."""
    sample = work.sample(2)

    def run() -> torch.Tensor:
        return work.compute(sample)[0]

    return run


def _reasons(refused: Sequence[Block], model: nn.Module) -> str:
    """Why blocks stay whole, those of one kind and reason together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for b in refused:
        alike.setdefault((b.kind, b.why_not), []).append(b.path or type(model).__name__)
    told = []
    for (kind, why), names in alike.items():
        shown = ", ".join(map(repr, names[:2])) + (
            f" and {len(names) - 2} more" if len(names) > 2 else ""
        )
        told.append(f"{shown} ({kind}): {why}")
    return "; ".join(told[:4]) + (f"; and {len(told) - 4} more kinds" if len(told) > 4 else "")


def _why_nothing(plan: Plan, found: Recognised, model: nn.Module) -> ArgumentError:
    shown = _reasons(found.refused, model)
    if not shown:
        shown = (
            f"no attention and no MLP was found in {type(model).__name__}: two nn.Linear "
            "with only element-wise operations in between, "
            "or query, key and value before a softmax"
        )
    return ArgumentError(
        f"tensor={plan.tensor}: nothing in the model can be split by {plan.tensor}. "
        f"{shown}. Choose another number, say how with "
        "tensor_plan={module name: a torch.distributed.tensor.parallel style}, or split "
        "the data or the layers (replicate, shard, pipeline)."
    )


def divide(plan: Plan, work: Work, me: World, mesh: DeviceMesh) -> Divided:
    """Divide what can be divided of a model that is the same on every worker.

    Raises:
        ArgumentError: nothing can.
    """
    model = work.model
    if work.tensor_plan is not None:
        return _as_told(plan, work, mesh)
    run = _run(work)
    try:
        found = recognise(model, run, plan.tensor, gradients=True)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        AssertionError,
    ) as error:
        raise ArgumentError(
            f"tensor={plan.tensor}: what can be split is found by a forward pass and a "
            "loss over two samples, which failed "
            f"({type(error).__name__}: {error}). Give ronde.distribute the loss (and "
            "forward) that training uses, or a tensor_plan."
        ) from error
    # Rank 0's verdict holds: rounding may differ between devices.
    verdict = broadcast_json(me, [dataclasses.asdict(b) for b in found.blocks])
    blocks = tuple(_block(b) for b in verdict)
    put_back: list[Block] = []
    changed: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    partials: frozenset[str] = frozenset()
    while blocks:
        stack, changed = _install(model, blocks, mesh)
        partials = frozenset(n for b in blocks for n in (*b.inside, *split_dims(model, b)[1]))
        verdicts = gather_json(me, _checked(work, run, found, mesh, partials))
        failed = next((v for v in verdicts if "error" in v), None)
        bad = sorted({name for v in verdicts for name in v.get("bad", ())})
        if not bad and failed is None:
            break
        stack.close()
        if failed is not None:
            read = {name for v in verdicts for name in v.get("read", ())}
            ill = [b for b in blocks if read & set(split_dims(model, b)[0])]
            if not ill:
                names = ", ".join(repr(b.path or type(model).__name__) for b in blocks[:4])
                raise ArgumentError(
                    f"tensor={plan.tensor}: with {names} split, a forward and backward "
                    f"pass over two samples fails ({failed['error']}). Say with "
                    "tensor_plan what to split, or split the data or the layers "
                    "(replicate, shard, pipeline)."
                )
            for b in ill:
                name = next(n for n in split_dims(model, b)[0] if n in read)
                put_back.append(
                    dataclasses.replace(
                        b, why_not=f"{name!r} is also read outside of its layer's call"
                    )
                )
            blocks = tuple(b for b in blocks if b not in ill)
            continue
        # Gradients flow backwards: the last block with a wrong one is where it began, and others of
        # its kind will be no better.
        wrong = [
            b
            for b in blocks
            if {*split_dims(model, b)[0], *split_dims(model, b)[1], *b.inside} & set(bad)
        ]
        ill = (
            [b for b in blocks if _kind(model, b) == _kind(model, wrong[-1])]
            if wrong
            else list(blocks)
        )
        said = next(
            (n for n in bad if wrong and n.startswith((*wrong[-1].column, wrong[-1].row))), bad[-1]
        )
        put_back += [
            dataclasses.replace(
                b, why_not=f"the gradient of {said!r} is another" if said else "the loss is another"
            )
            for b in ill
        ]
        blocks = tuple(b for b in blocks if b not in ill)
    if not blocks:
        raise _why_nothing(
            plan, dataclasses.replace(found, refused=(*found.refused, *put_back)), model
        )
    refuse_hooks({name: old for name, (old, _) in changed.items()}, f"tensor={plan.tensor}")
    _adopt(work.optimizer, dict(changed.values()))
    refused = [*found.refused, *put_back]
    said = ""
    if refused:
        said = (
            f"tensor={plan.tensor}: {len(blocks)} blocks are split, {len(refused)} are not "
            "and stay whole on every worker: "
            f"{_reasons(refused, model)}"
        )
    return Divided(mesh, blocks, partials, said)


def _kind(model: nn.Module, block: Block) -> tuple[Any, ...]:
    return (
        block.kind,
        type(model.get_submodule(block.path)),
        *(n.removeprefix(block.path) for n in (*block.column, block.row)),
    )


def _block(values: Mapping[str, Any]) -> Block:
    made: dict[str, Any] = {
        k: tuple(tuple(x) if isinstance(x, list) else x for x in v) if isinstance(v, list) else v
        for k, v in values.items()
    }
    return Block(**made)


def _as_told(plan: Plan, work: Work, mesh: DeviceMesh) -> Divided:
    """Divide as the script says."""
    model = work.model
    before = dict(model.named_parameters(remove_duplicate=False))
    assert work.tensor_plan is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            parallelize_module(model, mesh, dict(work.tensor_plan))
        except (UserWarning, ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            raise ArgumentError(
                f"tensor_plan cannot be carried out by torch's parallelize_module: {error}"
            ) from error
    after = dict(model.named_parameters(remove_duplicate=False))
    changed: dict[torch.Tensor, nn.Parameter] = {
        before[n]: p for n, p in after.items() if p is not before[n]
    }
    refuse_hooks({n: p for n, p in before.items() if p in changed}, f"tensor={plan.tensor}")
    if not any(isinstance(p, DTensor) for p in after.values()):
        raise ArgumentError(
            "tensor_plan splits nothing: none of "
            f"{', '.join(map(repr, list(work.tensor_plan)[:5]))} has a parameter that its "
            "style divides."
        )
    for old, new in changed.items():
        new.requires_grad_(old.requires_grad)
    _adopt(work.optimizer, changed)
    return Divided(mesh)


# -- strategies ------------------------------------------------------------------------


def _add_up_over(mesh: DeviceMesh, gradients: list[torch.Tensor], mean: bool = False) -> None:
    """Sum gradients over the workers of a mesh, in place, in buckets."""
    group = mesh.get_group()
    for run in buckets(gradients):
        flat = torch.cat([g.reshape(-1) for g in run])
        dist.all_reduce(flat, group=group)
        if mean:
            flat /= mesh.size()
        for g, part in zip(run, torch.split(flat, [g.numel() for g in run]), strict=True):
            g.copy_(part.view_as(g))


class _Together:
    """What both strategies do for those that hold a layer together."""

    model: nn.Module
    me: World
    divided: Divided
    names: list[str]
    parameters: list[nn.Parameter]

    def _teach(self, scale: Scale | None) -> None:
        """Let the gradient scaler take divided and whole gradients at once, and find what is not
        finite on any worker.
        """
        scaler = getattr(scale, "__self__", None)
        if scaler is None or "_unscale_grads_" in vars(scaler):
            return

        def unscale(
            optimizer: Optimizer, inverse: torch.Tensor, found: torch.Tensor, _allow_fp16: bool
        ) -> dict[Any, torch.Tensor]:
            found = found.to(self.me.device)
            by_type: dict[torch.dtype, list[torch.Tensor]] = {}
            for p in (
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ):
                by_type.setdefault(p.grad.dtype, []).append(_local(p.grad))
            for same in by_type.values():
                torch._amp_foreach_non_finite_check_and_unscale_(
                    same, found, inverse.to(self.me.device)
                )
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return {self.me.device: found}

        scaler._unscale_grads_ = unscale

    def _complete(self) -> None:
        """Add up the gradients of which each worker has a part; where kernels may round
        differently, make the others one.
        """
        partials, same = [], []
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.grad is None or p.grad.is_sparse:
                continue
            if name in self.divided.partial:
                partials.append(_local(p.grad))
            elif not isinstance(p, DTensor) or "tensor" not in (p.device_mesh.mesh_dim_names or ()):
                same.append(_local(p.grad))
        _add_up_over(self.divided.mesh, partials)
        if self.me.device.type != "cpu":
            _add_up_over(self.divided.mesh, same, mean=True)


class Tensor(_Together, Replicate):
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
        self._lenient = ExitStack()
        super().__init__(work.model, me, run_empty)
        self.counts = divided.mesh.get_local_rank() == 0

    def _build(self) -> None:
        """Which parameters are trained; all workers have the same of them already."""
        forget_frozen(self.model)
        named = trainable(self.model)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self._flags = Flags(self.model)
        dtype = (
            torch.float64
            if {p.dtype for p in self.parameters} == {torch.float64}
            else torch.float32
        )
        self._payload = torch.zeros(_UNUSED + len(named), dtype=dtype, device=self.me.device)
        self._loss_slot, self._weight_slot = self._payload[_LOSS], self._payload[_WEIGHT]

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`."""
        if not self._begun:
            self._begun = True
            self._teach(scale)
            self._payload.zero_()
            for p in self.parameters:
                p.grad = None
        if part.samples:
            assert compute is not None
            value, weight = compute()
            self._weighted = weight is not None
            factor = 1 / part.global_samples
            if weight is not None:
                self._weight_slot.add_(weight, alpha=factor)
            else:
                factor *= part.samples
            self._backward(value, factor, scale)
            self._loss_slot.add_(value.detach(), alpha=factor)
        elif self.run_empty:
            assert compute is not None
            with absent():
                self._backward(compute()[0], 0.0, scale)
        if not part.last:
            part_gradients(self.parameters)

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        if self._seen is not None:
            self._choose_buffers(self._seen)
        self.local_loss = self._loss_slot.clone()
        self._begun = False
        for p in self.parameters:
            if (
                isinstance(p.grad, DTensor)
                and isinstance(p, DTensor)
                and p.grad.placements != p.placements
            ):
                # of a whole one, used on parts of a sequence
                p.grad = p.grad.redistribute(placements=p.placements)
        if self._replicas.size() > 1:
            self._exchange()
        self._complete()
        # an optimizer may take all parameters at once
        self._lenient.enter_context(implicit_replication())
        loss = self._payload[_LOSS].clone()
        weight = self._payload[_WEIGHT]
        if self._weighted if self._weighted is not None else bool(weight != 0):
            for p in self.parameters:
                if p.grad is not None:
                    (p.grad if p.grad.is_sparse else _local(p.grad)).div_(weight)
            loss = loss / weight
        return loss

    @torch.no_grad()
    def _exchange(self) -> None:
        payload, group = self._payload, self._replicas.get_group()
        unused = [i for i, p in enumerate(self.parameters) if p.grad is None]
        if unused:
            payload[_UNUSED:][unused] = 1
        dist.all_reduce(payload, group=group)
        nobody = (payload[_UNUSED:] > self._replicas.size() - 0.5).tolist()
        dense = []
        for p, none in zip(self.parameters, nobody, strict=True):
            if none:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad.is_sparse:
                raise ArgumentError(
                    "a gradient is sparse: tensor= with replicas adds up dense ones. Build "
                    "the embedding with sparse=False."
                )
            dense.append(_local(p.grad))
        _add_up_over(self._replicas, dense)

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """See :meth:`Strategy.clip`. What is divided is summed up over those that hold it, what is
        whole is counted once.
        """
        square = torch.zeros(2, dtype=self._payload.dtype, device=self.me.device)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        for g in gradients:
            parted = isinstance(g, DTensor) and not all(isinstance(x, Whole) for x in g.placements)
            square[int(parted)] += _local(g).norm().to(square.dtype).square()
        dist.all_reduce(parts := square[1].clone(), group=self.divided.mesh.get_group())
        factor = (max_norm / ((square[0] + parts).sqrt() + 1e-6)).clamp(max=1.0)
        for g in gradients:
            _local(g).mul_(factor)

    def updated(self) -> None:
        """See :meth:`Strategy.updated`."""
        self._lenient.close()


class TensorShard(_Together, Shard):
    """Carries ``tensor=T`` out with replicas that divide the model among them, on FSDP2 over a mesh
    of both.
    """

    def __init__(
        self, work: Work, me: World, mesh: DeviceMesh, divided: Divided, plan: Plan
    ) -> None:
        self.divided = divided
        assert plan.shard in ("gradients", "parameters")
        super().__init__(work, me, mesh, plan.shard, plan.offload == "parameters")
        self.counts = divided.mesh.get_local_rank() == 0

    def _build(self) -> None:
        work, me = self._work, self.me
        found = _alone(work.model, repeated_blocks(work.model) or large_children(work.model))
        names = broadcast_json(me, list(called(work, found)))
        self._root = _Root(work.model)
        blocks = {f"model.{n}": found[n] for n in names}
        self.sharded = fully_shard_model(
            self._root, self._mesh, self._level, work.optimizer, blocks, self._offload
        )
        _through(work.model, self._root)
        self._several = self._mesh.ndim > 1
        self._reached_names: set[str] = set()
        self._watched: dict[int, Any] = {}
        self._order = group_of("order") if self.sharded.blocks else None
        self._listen()
        self._take_note()
        self.sync_buffers()

    def micro(self, compute: Compute | None, part: Part, scale: Scale | None) -> None:
        """See :meth:`Strategy.micro`."""
        self._teach(scale)
        super().micro(compute, part, scale)

    def finish(self) -> torch.Tensor:
        """See :meth:`Strategy.finish`."""
        me = self.me
        # those among whom gradients are exchanged
        self.me = dataclasses.replace(me, size=self._mesh.size())
        try:
            loss = super().finish()
        finally:
            self.me = me
        self._complete()
        return loss


def _meshes(plan: Plan, me: World) -> tuple[DeviceMesh, DeviceMesh]:
    """This worker's replicas, and those that hold its layers together with it."""
    replicas, within = plan.replicas, plan.shard_within
    if plan.shard == "none" or within is None or within == replicas:
        both = mesh_of(me.device.type, {"data": replicas, "tensor": plan.tensor})
        return both["data"], both["tensor"]
    if within < 2 or replicas % within:
        raise ArgumentError(
            f"shard_within={within}: expected a divisor, 2 or more, of the {replicas} "
            f"replicas that this plan has ({plan.spec!r})."
        )
    whole = mesh_of(
        me.device.type, {"replicate": replicas // within, "shard": within, "tensor": plan.tensor}
    )
    return whole["replicate", "shard"], whole["tensor"]


def tensor(plan: Plan, work: Work, me: World) -> Strategy:
    """The strategy of a plan with ``tensor`` above 1 and no pipeline.

    Raises:
        ArgumentError: nothing in the model can be split so, or the plan asks for what does not go
            together.
    """
    if plan.shard == "optimizer":
        raise ArgumentError(
            f"plan={plan.spec!r}: shard='optimizer' does not go with tensor={plan.tensor}: "
            "use shard='gradients', which divides the optimizer's state as well."
        )
    sharded = plan.shard != "none" and plan.replicas > 1
    if any(isinstance(p, DTensor) for p in work.model.parameters()):
        raise ArgumentError(
            "model, or a part of it, is divided over workers already (DTensor): give "
            "ronde.distribute the plain module, it divides it. Two trainings that "
            "share a part go under replicate or shard='optimizer'."
        )
    if type(work.optimizer).__name__ != "SparseAdam":  # embeddings stay whole
        refuse_optimizer(work.optimizer, f"tensor={plan.tensor}", "plan='replicate'")
    mend()
    data, together = _meshes(plan, me)
    _same(work, me)
    divided = divide(plan, work, me, together)
    if divided.said and me.is_main:
        warnings.warn(divided.said, stacklevel=2)
    for group in work.optimizer.param_groups:
        # Fused kernels take no plain tensors beside divided ones, the others only those of one
        # mesh.
        if group.get("fused") or (sharded and group.get("foreach")):
            group.update(foreach=False, fused=None)
            work.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # what fused ones promise a gradient scaler
    if plan.sync_batchnorm:
        synchronise(work.model, data.get_group() if data.ndim == 1 else group_of("batchnorm"))
    if sharded:
        return TensorShard(work, me, data, divided, plan)
    return Tensor(work, me, data, divided, plan.sync_batchnorm and bool(batchnorms(work.model)))


def _same(work: Work, me: World) -> None:
    """Rank 0's weights and buffers on every worker."""
    tensors = [*work.model.parameters(), *work.model.buffers()]
    with torch.no_grad():
        for run in buckets([t.detach() for t in tensors if t.numel()]):
            flat = torch.cat([t.reshape(-1) for t in run]).to(me.device)
            dist.broadcast(flat.view(torch.uint8), 0)
            for t, part in zip(run, torch.split(flat, [t.numel() for t in run]), strict=True):
                t.copy_(part.view_as(t))
