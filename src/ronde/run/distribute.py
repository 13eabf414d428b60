"""``ronde.distribute``: a script's model, optimizer, data and loss become a Run on however many
workers there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ronde import checkpoint
from ronde.adapt import apply_settings, asked_settings
from ronde.data import Order
from ronde.introspect import apart, reopened
from ronde.loader import Feed, FeedSettings, Taken, take_over
from ronde.parallel import Work, batchnorms, carry_out, converted, spectral_norms
from ronde.parallel.meta_init import FILL_THEMSELVES, Init, materialise, weights_in
from ronde.plan import SPLIT_FIELDS, Plan, Share, split
from ronde.plan.schedules import micro_batches_of
from ronde.run import checks, hooks, lr_rules
from ronde.run.check_prediction import Forecast, PredictionCheck
from ronde.run.evaluation import on_device, to_device
from ronde.run.losses import LossCall
from ronde.run.partial_state_dict import hold_in_parts, say_in_parts
from ronde.run.persist import held_whole, restore, restore_pieces
from ronde.run.run import Run
from ronde.run.run_state import DTYPES
from ronde.watch import (
    SCHEMA_VERSION,
    Record,
    Resumed,
    RunDir,
    Started,
    Watcher,
    choose_display,
    claim,
    script_stem,
)
from ronde.world import ArgumentError, CheckpointError, RondeError, World
from ronde.world.connect import connect
from ronde.world.consensus import agree, broadcast_json, gather_json

__all__ = ["distribute"]

_made = 0  # runs that this process has made


def _materialise(model: nn.Module, forward: LossCall, taken: Taken, lazy: list[str]) -> None:
    """Run one sample through a model with lazily initialised parameters, without training it."""
    was_training = model.training
    model.eval()
    try:
        feed = Feed(
            apart(taken.dataset),
            Order(taken.order.n, 0, False),
            dataclasses.replace(taken.settings, num_workers=0),
            0,
        )
        share = Share(0, 0, 1, ((0, 1),), 1)
        for _, micros in feed.read(lambda: iter([share])):
            with torch.no_grad():
                forward.arguments(model, feed.finish(share, micros)[0])
    except Exception as error:
        raise ArgumentError(
            f"the lazily initialised parameters {', '.join(map(repr, lazy[:3]))} could not "
            "be given their shape by running one sample "
            f"({type(error).__name__}: {error}). Run one batch through the model before "
            "ronde.distribute."
        ) from error
    finally:
        model.train(was_training)
    still = checks.lazy_names(model)
    if still:
        raise ArgumentError(
            f"{', '.join(map(repr, still[:3]))} still has no shape after one sample was "
            "run: it is never used. Remove it."
        )


def _filler(
    model: nn.Module, init: Init, seed: int, me: World
) -> Callable[[Callable[[str], bool]], None]:
    """Gives a model on meta its values. Weights on disk are verified by rank 0, once."""
    if not callable(init) and init != "reset":
        error = None
        if me.is_main:
            try:
                weights_in(init)
            except RondeError as caught:
                error = [type(caught).__name__, str(caught)]
        error = broadcast_json(me, error)
        if error:
            raise (ArgumentError if error[0] == "ArgumentError" else CheckpointError)(error[1])

    def fill(keep: Callable[[str], bool]) -> None:
        materialise(model, init, seed=seed, device=me.device, keep=keep, verified=True)

    return fill


def _grow(
    plan: Plan,
    optimizer: Optimizer,
    scheduler: Any,
    rule: str | None,
    warmup: int | None,
    samples: int,
) -> Plan:
    """``batch="grow"``: the global batch times the workers, and the learning rate after it."""
    chosen = lr_rules.choose_rule(optimizer, rule)
    factor = lr_rules.lr_factor(chosen, plan.workers)
    size = plan.batch_size * plan.workers
    steps = (5 * -(-samples // size)) if warmup is None else warmup
    lr_rules.scale_rates(optimizer, scheduler, factor)
    values = {
        **plan.to_dict(),
        "batch_size": size,
        "lr_rule": chosen,
        "lr_factor": factor,
        "warmup_steps": steps if factor > 1 else 0,
    }
    return Plan.from_dict(values)


def _split(plan: str | Plan | os.PathLike[str], me: World, given: Mapping[str, Any]) -> Plan:
    """How the work is split, from ``ronde run --plan``, the argument, and the arguments that name
    one field each.
    """
    asked = os.environ.get("RONDE_PLAN") or plan
    if asked == "auto":
        asked = Plan()
    file = (
        Path(asked)
        if isinstance(asked, os.PathLike)
        else Plan.file_of(asked)
        if isinstance(asked, str)
        else None
    )
    if file is not None:
        if not file.is_file():
            raise ArgumentError(f"plan={str(file)!r}: there is no such file (in {Path.cwd()}).")
        asked = Plan.load(file)
        if asked.workers not in (1, me.size):
            raise ArgumentError(
                f"the plan in {file} is for {asked.workers} workers, here are {me.size}."
            )
    elif not isinstance(asked, Plan):
        if not isinstance(asked, str):
            raise ArgumentError(
                f"plan must be a text, a file or a ronde.Plan; found {type(asked).__name__}."
            )
        asked = Plan.parse(asked)
    fields: dict[str, Any] = {
        k: tuple(v) if k == "split_at" else v for k, v in given.items() if v is not None
    }
    if fields and not os.environ.get("RONDE_PLAN"):
        asked = dataclasses.replace(asked, **fields)
    if asked.schedule in ("interleaved", "looped", "zbv") and asked.virtual == 1:
        asked = dataclasses.replace(asked, virtual=2)
    asked = dataclasses.replace(asked, workers=me.size)
    asked.check()
    asked.check_workers(me.size)
    return asked


def _accumulate(plan: Plan) -> Plan:
    """With the number of micro-batches that a step has."""
    largest = split(0, plan.batch_size, plan.replicas)[0][1]
    count = micro_batches_of(plan, largest)
    return dataclasses.replace(
        plan,
        accumulation=count,
        micro_batch=-(-largest // count) if plan.pipeline > 1 else plan.micro_batch,
    )


def _sizes(plan: Plan, epoch_samples: int) -> tuple[int, ...]:
    """Samples of the micro-batches that occur in an epoch, on any worker; the stand-in of an empty
    one has one.
    """
    found = set()
    for total in {
        min(plan.batch_size, epoch_samples),
        epoch_samples % plan.batch_size or plan.batch_size,
    }:
        for low, high in split(0, total, plan.replicas):
            found |= {max(1, b - a) for a, b in split(low, high, plan.accumulation)}
    return tuple(sorted(found))


def _long_enough(order: Order, n: int) -> Order:
    """An order whose epoch has ``n`` samples: a smaller one's over and over."""
    if n <= order.epoch_samples:
        return order
    ids = order.ids(0, 0, order.epoch_samples)
    return dataclasses.replace(order, draw=lambda _epoch: np.resize(ids, n).tolist(), length=n)


def _directory(me: World, name: str | None) -> tuple[RunDir | None, bool]:
    """This run's directory, chosen by rank 0 (or the launcher), the same on every rank; and whether
    it is resumed.
    """
    global _made
    _made += 1
    answer: dict[str, Any] = {}
    if me.is_main:
        resume = os.environ.get("RONDE_RESUME") == "1"
        base = os.environ.get("RONDE_RUNS", "runs")
        given = os.environ.get("RONDE_RUN_DIR")
        try:
            if os.environ.get("RONDE_MEASURE") or (base == "none" and not given):
                answer = {"path": None, "resume": False}
            elif given:
                # The launcher made it. A script that trains several models gives the later ones a
                # place of their own.
                path = Path(given) if _made == 1 else Path(f"{given}.{_made}")
                path.mkdir(exist_ok=True)
                answer = {"path": str(path), "resume": resume}
            else:
                run = claim(Path(base), name, script_stem(), resume)
                answer = {"path": str(run.path.absolute()), "resume": resume}
        except (RondeError, OSError) as error:
            answer = {"error": str(error)}
    answer = broadcast_json(me, answer)
    if "error" in answer:
        raise CheckpointError(answer["error"])
    return (RunDir(Path(answer["path"])) if answer["path"] else None), bool(answer["resume"])


def _send_tensors(me: World, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rank 0's tensors on every rank, on the CPU."""
    if me.size == 1:
        return tensors
    layout = (
        {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()}
        if me.is_main
        else None
    )
    result = {}
    for name, (shape, dtype) in broadcast_json(me, layout).items():
        tensor = (
            tensors[name].contiguous()
            if me.is_main
            else torch.empty(shape, dtype=getattr(torch, dtype))
        )
        if tensor.numel():
            bits = tensor.reshape(-1).view(torch.uint8).to(me.device)
            dist.broadcast(bits, 0)
            if not me.is_main:
                tensor = bits.cpu().view(tensor.dtype).view(shape)
        result[name] = tensor
    return result


def _restore_pieces(
    run: Run, me: World, found: checkpoint.Checkpoint | None, told: Mapping[str, Any]
) -> None:
    """Each worker reads what it holds from the checkpoint that rank 0 has verified, if it sees the
    same one.
    """
    if found is None:
        found = checkpoint.trust(Path(told["folder"]) / told["path"], told["digest"])
    with contextlib.ExitStack() as stack:
        sources = (
            {part: stack.enter_context(found.source(part)) for part in ("model", "optimizer")}
            if found
            else {}
        )
        shapes = {
            part: {name: list(e.shape) for name, e in source.entries.items()}
            for part, source in sources.items()
        }
        all_see = all(gather_json(me, found is not None))
        restore_pieces(
            run, told["state"], shapes if all_see else broadcast_json(me, shapes), sources, all_see
        )


def _resume(run: Run, me: World, directory: RunDir) -> str:
    """Go on from the newest whole checkpoint, which rank 0 has verified. Returns what to tell the
    user.
    """
    answer: dict[str, Any] = {}
    found = None
    if me.is_main:
        found, refused = checkpoint.find_valid(directory.checkpoints)
        answer = {"refused": refused, "path": None}
        if found:
            answer |= {
                "path": found.path.name,
                "folder": str(found.path.parent.absolute()),
                "state": found.state,
                "digest": found.digest,
            }
    answer = broadcast_json(me, answer)
    for text in answer["refused"]:
        run._warn(text)
    if answer["path"] is None:
        if answer["refused"]:
            raise CheckpointError(
                f"nothing to resume in {directory.checkpoints}: no checkpoint there is "
                f"whole. {answer['refused'][0]}"
            )
        return f"{directory.name} has no checkpoint yet: it starts from the beginning"
    if held_whole(run):
        tensors = {
            part: _send_tensors(me, found.whole(part) if found else {})
            for part in ("model", "optimizer", "random")
        }
        restore(run, answer["state"], tensors)
    else:
        _restore_pieces(run, me, found, answer)
    state = answer["state"]
    run._watcher.event(
        Resumed(
            step=state["step"],
            epoch=state["epoch"],
            samples=state["samples"],
            checkpoint=f"checkpoints/{answer['path']}",
            workers=me.size,
            written_by_workers=state["workers"],
        )
    )
    others = f" (written by {state['workers']} workers)" if state["workers"] != me.size else ""
    return (
        f"resumed {directory.name} at step {state['step']}, epoch {state['epoch'] + 1}, sample "
        f"{state['epoch_samples']}{others}"
    )


def _writer(directory: RunDir | None, asked: bool, me: World) -> Any:
    if (
        not (asked or os.environ.get("RONDE_TENSORBOARD") == "1")
        or not me.is_main
        or directory is None
    ):
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ArgumentError(
            "tensorboard=True needs the tensorboard package: pip install '.[tensorboard]' "
            "in a clone of Ronde."
        ) from error
    return SummaryWriter(str(directory.path / "tensorboard"))


def _tell(run: Run, model: nn.Module, left_out: list[str], taken: Taken) -> None:
    """What the user should know before the first step."""
    plan = run.plan
    if plan.batch == "grow" and plan.workers > 1:
        cite = {
            "linear": "linear scaling, Goyal et al. 2017",
            "sqrt": "square root, for adaptive optimizers",
            "none": "unchanged",
        }[plan.lr_rule]
        warm = f", warmed up over {plan.warmup_steps} steps" if plan.warmup_steps else ""
        run._watcher.say(
            f"batch='grow': {plan.workers} workers × {plan.batch_size // plan.workers} = "
            f"{plan.batch_size} samples per step; "
            f"learning rate × {plan.lr_factor:g} ({cite}){warm}"
        )
    for note in taken.notes:
        run._warn(note)
    if left_out:
        shown = ", ".join(map(repr, left_out[:5])) + (", …" if len(left_out) > 5 else "")
        run._warn(
            f"{len(left_out)} trainable parameters are not in the optimizer and stay as "
            f"they are: {shown}"
        )
    norms = batchnorms(model)
    if norms and ((plan.replicas > 1 and not plan.sync_batchnorm) or plan.accumulation > 1):
        size = -(-plan.batch_size // plan.replicas)
        size = min(size, plan.micro_batch or size) * (plan.replicas if plan.sync_batchnorm else 1)
        cure = (
            "; sync_batchnorm=True uses all workers'"
            if plan.replicas > 1 and plan.pipeline == 1 and not plan.sync_batchnorm
            else ""
        )
        run._warn(
            "batch normalisation "
            f"({norms[0]!r}{f' and {len(norms) - 1} more' if len(norms) > 1 else ''}) sees "
            f"{size} samples at a time, not the "
            f"global batch of {plan.batch_size}: this is not the same training as on one "
            f"device{cure}"
        )
    if plan.accumulation > 1 and (iterating := spectral_norms(model)):
        run._warn(
            f"spectral normalisation ({iterating[0]!r}) iterates once in each forward "
            f"pass, and a step has {plan.accumulation} of them: this is "
            "not the same training as without micro-batches"
        )


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    data: Dataset[Any] | DataLoader[Any],
    *,
    loss: Callable[..., Any],
    forward: Callable[[nn.Module, Any], Any] | None = None,
    batch_size: int | None = None,
    batch: Literal["keep", "grow"] = "keep",
    micro_batch: int | None = None,
    scheduler: Any = None,
    clip_norm: float | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    plan: str | Plan | os.PathLike[str] = "replicate",
    shard: Literal["none", "optimizer", "gradients", "parameters"] | None = None,
    pipeline: int | None = None,
    tensor: int | None = None,
    recompute: Literal["none", "selective", "full"] | None = None,
    split_at: Sequence[str] | None = None,
    tensor_plan: Mapping[str, Any] | None = None,
    init: Callable[[nn.Module], None] | str | os.PathLike[str] | None = None,
    seed: int = 0,
    name: str | None = None,
    drop_last: bool = False,
    shuffle: bool | None = None,
    sync_batchnorm: bool = False,
    lr_rule: Literal["linear", "sqrt", "none"] | None = None,
    warmup_steps: int | None = None,
    save_every: int | None = None,
    keep: int = 3,
    on_nan: Literal["error", "ignore"] = "error",
    tensorboard: bool = False,
    feed: FeedSettings | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Run:
    """Train one script's model on one device or on many: the same training.

    Started by plain ``python`` this is one device; under ``ronde run --workers N``, ``torchrun``,
    ``srun``, ``mpirun`` or in a SageMaker-style container the same lines run on all workers.

    Args:
        model: the module as the script built it. It stays the script's own; it is moved to this
            worker's device.
        optimizer: a torch optimizer over ``model.parameters()``.
        data: a map-style Dataset; or a DataLoader, whose dataset, batch_size, sampler, collate_fn,
            drop_last and loading processes are taken over; or a :class:`ronde.feed.Pipeline`. A
            bare Dataset is shuffled.
        loss: ``loss(output, target)`` -> scalar mean over the samples given, or ``(sum, weight)``
            for a weighted mean (of tokens, say).
        forward: ``forward(model, batch)`` -> what ``loss`` takes (a tuple is spread), where a batch
            is not ``(inputs, target)``.
        batch_size: **global** samples per optimizer step, over all workers.
        batch: ``"keep"``: the global batch stays, whatever the number of workers. ``"grow"``:
            ``batch_size`` is per worker, and the learning rate follows ``lr_rule``.
        micro_batch: most samples that a worker holds at once; the rest of its share is accumulated.
        scheduler: stepped once per optimizer step.
        clip_norm: largest norm of all gradients together.
        precision: ``"bf16"`` and ``"fp16"`` run forward and loss under autocast; ``"fp32"`` leaves
            the script's types alone.
        plan: how the work is split: ``"replicate"``, ``"shard"``, ``"pipeline=2,shard=optimizer"``,
            … (see :meth:`Plan.parse`), a :class:`Plan`, a file that holds one, or ``"auto"``.
            ``ronde run --plan`` overrides it.
        shard, pipeline, tensor, recompute, split_at: the plan's own fields of these names, one by
            one.
        tensor_plan: module name -> a ``torch.distributed.tensor.parallel`` style, for ``tensor``:
            overrides what is recognised.
        init: fills a model that was built under ``torch.device("meta")``: a function of a module,
            which initialises the parameters and buffers that this module itself owns; ``"reset"``
            for each module's ``reset_parameters()``; or the path of a checkpoint, of a safetensors
            file or of a folder of such. The same weights come out under any plan.
        seed: key of the order of samples and of augmentation. The order is a pure function of
            (seed, epoch, position).
        name: of the run directory, where the script is not started by ``ronde run``, which names
            it.
        drop_last: leave out a last batch that is shorter.
        shuffle: overrides the DataLoader's, or a Dataset's True.
        sync_batchnorm: batch normalisation over the global batch instead of each worker's share.
        lr_rule: for ``batch="grow"``: ``"linear"`` (Goyal et al. 2017), ``"sqrt"`` (adaptive
            optimizers) or ``"none"``; None chooses.
        warmup_steps: for ``batch="grow"``; None is five epochs, as in Goyal et al.
        save_every: optimizer steps between checkpoints; None saves at the end, and at ends of
            epochs at most once a minute.
        keep: how many checkpoints to keep.
        on_nan: ``"error"`` ends the training at a NaN or infinite loss, before the weights are
            touched; ``"ignore"`` trains on. On accelerators, where looking means waiting, it looks
            at one step in fifty.
        tensorboard: also write what is logged for TensorBoard (``pip install '.[tensorboard]'`` in
            a clone).
        feed: how samples are fetched: :class:`ronde.feed.FeedSettings`, the same as names and
            values, or the path of a settings file. What ``ronde run --feed`` (or ``RONDE_FEED``)
            names is used instead of it, setting by setting.

    Returns:
        Run: what the script holds from here on.

    Raises:
        ArgumentError: an argument cannot be used.
        WorldError: the workers cannot meet, or disagree on the arguments, the model or the data.
        CheckpointError: the run directory exists, or cannot be resumed.

    Example:
        >>> import torch, ronde
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        >>> run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss,
        ...     batch_size=16)
        >>> for epoch in run.epochs(2):
        ...     for batch in run.batches():
        ...         loss = run.step(batch)
    """
    me = connect()
    for argument, value, allowed in (
        ("batch", batch, ("keep", "grow")),
        ("precision", precision, ("fp32", "bf16", "fp16")),
        ("on_nan", on_nan, ("error", "ignore")),
    ):
        if value not in allowed:
            raise ArgumentError(
                f"{argument}={value!r} is not known: choose one of {', '.join(map(repr, allowed))}."
            )
    auto = (os.environ.get("RONDE_PLAN") or plan) == "auto"
    asked = _split(
        plan,
        me,
        {
            "shard": shard,
            "pipeline": pipeline,
            "tensor": tensor,
            "recompute": recompute,
            "split_at": split_at,
        },
    )
    for argument, whole in (
        ("batch_size", batch_size),
        ("micro_batch", micro_batch),
        ("save_every", save_every),
    ):
        checks.positive(argument, whole, optional=True)
    checks.positive("keep", keep)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed={seed!r} must be a whole number.")
    if warmup_steps is not None and (
        isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0
    ):
        raise ArgumentError(f"warmup_steps={warmup_steps!r} must be a whole number, 0 or more.")
    if lr_rule is not None and lr_rule not in lr_rules.RULES:
        raise ArgumentError(
            f"lr_rule={lr_rule!r} is not known: choose one of {', '.join(lr_rules.RULES)}."
        )
    if not callable(loss):
        raise ArgumentError(
            f"loss must be callable, loss(output, target) -> scalar; found {type(loss).__name__}."
        )
    if clip_norm is not None and (isinstance(clip_norm, bool | str) or not clip_norm > 0):
        raise ArgumentError(f"clip_norm={clip_norm!r} must be above 0, or None for no clipping.")
    checks.check_model(model, me)
    checks.check_init(init, model)
    left_out = checks.check_optimizer(optimizer, model)
    checks.check_scheduler(scheduler, optimizer)
    fetched = asked_settings(feed)
    taken = take_over(
        data,
        seed=seed,
        batch_size=batch_size,
        shuffle=shuffle,
        shuffle_dataset=True,
        drop_last=drop_last,
    )
    taken = apply_settings(taken, fetched, me.local_size)
    if batch == "grow" and taken.settings.echo > 1:
        raise ArgumentError(
            "feed setting echo cannot be used with batch='grow': what is repeated would "
            "depend on the number of workers."
        )
    calls = LossCall(loss, forward)
    # Made for GPUs by torch's own function: the same computation, carried out by Ronde where
    # torch's refuses.
    sync_batchnorm = sync_batchnorm or (me.device.type == "cpu" and converted(model))
    in_lists = micro_batch is not None  # before an observer asks for others
    if hooks.observer is not None:
        given = hooks.Opening(
            model,
            optimizer,
            scheduler,
            taken,
            calls,
            precision,
            batch,
            clip_norm,
            micro_batch or asked.micro_batch,
            sync_batchnorm,
            seed,
        )
        hooks.observer.opening(given)
        taken, calls, precision, micro_batch, sync_batchnorm = (
            given.taken,
            given.calls,
            given.precision,
            given.micro_batch,
            given.sync_batchnorm,
        )
    if taken.batch_size is None:
        raise ArgumentError(
            "batch_size is missing: give ronde.distribute(…, batch_size=N), the global "
            "number of samples per optimizer step over all "
            "workers, or a DataLoader that has one."
        )
    lazy = checks.lazy_names(model)
    if lazy:
        _materialise(model, calls, taken, lazy)
    if init is None:
        model.to(me.device)
    if me.device.type != "cpu":
        for values in optimizer.state.values():
            values.update(
                {
                    k: to_device(v, me.device)
                    for k, v in values.items()
                    if isinstance(v, torch.Tensor) and v.dim()
                }
            )

    chosen = Plan(
        **dict[str, Any]({name: getattr(asked, name) for name in SPLIT_FIELDS}),
        workers=me.size,
        batch_size=taken.batch_size,
        batch=batch,
        micro_batch=micro_batch if micro_batch is not None else asked.micro_batch,
        precision=precision,
        clip_norm=clip_norm,
        seed=seed,
        drop_last=taken.drop_last,
        sync_batchnorm=sync_batchnorm,
    )
    agree(me, checks.run_facts(chosen, taken, model, optimizer, scheduler), "ronde.distribute")
    if batch == "grow":
        if hooks.observer is not None:
            chosen = dataclasses.replace(chosen, workers=hooks.observer.workers(me.size))
        chosen = _grow(
            chosen, optimizer, scheduler, lr_rule, warmup_steps, taken.order.epoch_samples
        )
        chosen = dataclasses.replace(chosen, workers=me.size)
    chosen = _accumulate(chosen)
    if chosen.drop_last and taken.order.epoch_samples < chosen.batch_size:
        raise ArgumentError(
            "drop_last=True leaves nothing to train on: an epoch has "
            f"{taken.order.epoch_samples} samples, a global batch {chosen.batch_size}."
        )

    in_here = dataclasses.replace(taken.settings, num_workers=0)
    sampled = Feed(taken.dataset, taken.order, in_here, seed)

    def sample(n: int) -> Any:
        share = Share(0, 0, n, ((0, n),), n)
        looked_at = apart(taken.dataset)
        order = _long_enough(taken.order, n)
        feed = (
            sampled
            if looked_at is taken.dataset and order is taken.order
            else Feed(looked_at, order, in_here, seed)
        )
        with reopened(looked_at):
            return next(
                on_device(feed, share, micros, me.device)[0]
                for _, micros in feed.read(lambda: iter([share]))
            )

    autocast = (
        partial(torch.autocast, me.device.type, DTYPES[precision])
        if precision in DTYPES
        else nullcontext
    )

    def compute(batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        with autocast():
            return calls(model, batch)

    work = Work(
        model, optimizer, compute, sample, tensor_plan, _sizes(chosen, taken.order.epoch_samples)
    )
    work.groups, work.tied = checkpoint.group_names(model, optimizer), checkpoint.tied_names(model)
    if init is not None:
        work.fill = _filler(model, init, seed, me)
        if me.size == 1 or chosen.family.split(" ")[0] not in FILL_THEMSELVES:
            work.fill(lambda name: True)
            model.to(me.device)
    if hooks.observer is not None:
        chosen = hooks.observer.planned(chosen, work, calls, me)
    forecast: Forecast | None = None
    if auto and hooks.planner is not None:
        chosen, forecast = hooks.planner(chosen, work, calls, me)
    directory, resume = _directory(me, name)
    strategy = carry_out(chosen, work, me)
    record = Record(directory.record) if me.is_main and directory is not None else None
    measuring = os.environ.get("RONDE_MEASURE")
    run = Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        taken=taken,
        strategy=strategy,
        work=work,
        loss=calls,
        plan=chosen,
        me=me,
        watcher=Watcher(record, choose_display(me.is_main), me.is_main),
        directory=directory,
        save_every=save_every,
        keep=keep,
        on_nan=on_nan,
        writer=_writer(directory, tensorboard, me),
        in_lists=in_lists,
    )
    run._watcher.event(
        Started(
            schema=SCHEMA_VERSION,
            run=directory.name if directory else "",
            script=sys.argv[0] if sys.argv else "",
            workers=me.size,
            device=_device_name(me),
            host=socket.gethostname(),
            launcher=os.environ.get("RONDE_LAUNCHER", me.launcher),
            model=type(model).__name__,
            parameters=sum(p.numel() for p in model.parameters()),
            optimizer=type(optimizer).__name__,
            samples=taken.order.epoch_samples,
            steps_per_epoch=run.steps_per_epoch,
            threads=torch.get_num_threads(),
            plan=chosen.to_dict(),
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )
    )
    _tell(run, model, left_out, taken)
    if not held_whole(run):
        watcher = run._watcher
        hold_in_parts(model, strategy.owns, strategy.loaded, lambda text: watcher.say(text))
        say_in_parts(optimizer, lambda text: watcher.say(text))
    if forecast is not None:
        run._watcher.say(f"plan {chosen.spec}: {forecast.sentence}")
        run._comparison = PredictionCheck(forecast, me.device)
    if resume and directory is not None:
        run._watcher.say(_resume(run, me, directory))
        strategy.sync_buffers()
    if me.is_main and directory is not None:
        chosen.save(directory.plan)  # only now: a resume that was refused leaves the old one
    if measuring:
        run.measure(float(measuring))
    if hooks.observer is not None:
        hooks.observer.ready(run, chosen)
    return run


def _device_name(me: World) -> str:
    return torch.cuda.get_device_name(me.device) if me.device.type == "cuda" else "cpu"
