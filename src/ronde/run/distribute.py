"""``ronde.distribute``: makes a Run of a script's model, optimizer, data, and loss."""

from __future__ import annotations

import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ronde import checkpoint
from ronde.data import Order
from ronde.loader import Feed, FeedSettings, TakenOver, take_over
from ronde.parallel import Strategy, Work
from ronde.parallel.registry import carry_out
from ronde.plan import LR_RULES, SPLIT_FIELDS, Plan, Share
from ronde.run import checks, hooks
from ronde.run.announce import announce, to_tensorboard
from ronde.run.callback import check_callbacks
from ronde.run.callbacks import ON_NAN, check_on_nan
from ronde.run.content import CheckpointContent, KeepBest
from ronde.run.group import RunGroup, current, open_run_dir
from ronde.run.loop import on_device, to_device
from ronde.run.losses import LossCall
from ronde.run.options import (
    BatchOptions,
    RunOptions,
    SaveOptions,
    SplitOptions,
    accumulate,
    asked_plan,
    given_settings,
    grow,
    micro_batch_sizes,
    recorded_cut,
    script_plan,
    watch_every,
)
from ronde.run.parts import DTYPES, Parts
from ronde.run.run import Run
from ronde.run.step_draws import probe_draws
from ronde.watch import Record, Watcher, choose_display
from ronde.world import ArgumentError, PlanError, World
from ronde.world.connect import connect
from ronde.world.consensus import agree
from ronde.world.rendezvous import rendezvous

__all__ = ["distribute"]


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    data: Dataset[Any] | DataLoader[Any] | Run,
    *,
    loss: Callable[..., Any],
    loss_reduction: Literal["mean", "sum"] = "mean",
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
    randomness: Literal["global", "worker"] | None = None,
    name: str | None = None,
    drop_last: bool = False,
    shuffle: bool | None = None,
    sync_batchnorm: bool = False,
    lr_rule: Literal["linear", "sqrt", "none"] | None = None,
    warmup_steps: int | None = None,
    save_every: int | None = None,
    keep: int | str = 3,
    keep_best: str | None = None,
    patience: int | None = None,
    async_save: bool = True,
    check_replicas: int | None = 1000,
    on_nan: Literal["error", "ignore", "skip"] = "error",
    tensorboard: bool = False,
    watch: bool | int = False,
    feed: FeedSettings | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Train one script's model on one device or on many.

    Under plain ``python`` the script uses one device. Under ``ronde run --workers N``,
    ``torchrun``, ``srun``, ``mpirun``, or in a SageMaker-style container, the same lines run on all
    workers.

    Args:
        model: the script's module. It stays the script's own and moves to this worker's device. A
            Keras model comes with its Keras optimizer and loss: docs/keras.md.
        optimizer: a torch optimizer over ``model.parameters()``.
        data: a map-style Dataset, which is shuffled; a DataLoader, whose dataset, batch_size,
            sampler, collate_fn, drop_last, and loading processes are taken over; a
            :class:`ronde.feed.Pipeline`; or another Run, whose batches this one shares (a
            generator those of its discriminator).
        loss: ``loss(output, target)`` -> scalar mean over the given samples, or ``(sum, weight)``
            for a weighted mean (over tokens, say). A loss over the whole global batch gathers
            it, see :meth:`Run.gather`.
        loss_reduction: ``"sum"`` if ``loss`` returns the sum over the given samples: the loss and
            the gradient of a step are then sums over the global batch, and ``evaluate`` returns
            the sum divided by the number of samples.
        forward: ``forward(model, batch)`` -> arguments of ``loss`` (a tuple is spread), if a batch
            is not ``(inputs, target)``.
        batch_size: **global** samples per optimizer step, over all workers.
        batch: ``"keep"`` keeps the global batch for any number of workers. With ``"grow"``,
            ``batch_size`` is per worker and the learning rate follows ``lr_rule``.
        micro_batch: most samples that a worker holds at once; it accumulates the rest of its share.
        scheduler: steps once per optimizer step.
        clip_norm: largest norm of all gradients together.
        precision: ``"bf16"`` and ``"fp16"`` run forward and loss under autocast; ``"fp32"`` leaves
            the script's types alone.
        plan: how the work is split: ``"replicate"``, ``"shard"``, ``"pipeline=2,shard=optimizer"``,
            … (see :meth:`Plan.parse`), a :class:`Plan`, the path of a plan file, or ``"auto"``.
            ``ronde run --plan`` overrides it.
        shard, pipeline, tensor, recompute, split_at: the fields of the plan with these names.
        tensor_plan: for ``tensor``: module name -> a ``torch.distributed.tensor.parallel`` style
            that overrides the recognized one.
        init: fills a model that was built under ``torch.device("meta")``: a function of a module
            that initializes the module's own parameters and buffers; ``"reset"`` for each module's
            ``reset_parameters()``; or the path of a checkpoint, a safetensors file, or a folder of
            them. The weights are the same under any plan.
        seed: key of the sample order and of augmentation. The order is a pure function of (seed,
            epoch, position).
        randomness: what forward and loss draw (dropout, stochastic depth, noise). ``"global"``:
            each sample's numbers follow from (seed, step, its place in the global batch), the same
            on any number of workers and under every plan. ``"worker"``: each worker draws its own.
            None is ``"global"`` on CPUs, where it costs nothing, and ``"worker"`` on accelerators.
        name: of the run directory, unless ``ronde run`` starts the script and names it. A run that
            is made before the first step of another trains in one loop with it, in the same
            directory and the same checkpoints: then it is this run's name in them.
        drop_last: drop a shorter last batch.
        shuffle: overrides the DataLoader's setting, or a Dataset's True.
        sync_batchnorm: batch normalization over the global batch instead of each worker's share.
        lr_rule: for ``batch="grow"``: ``"linear"`` (Goyal et al. 2017), ``"sqrt"`` (adaptive
            optimizers), or ``"none"``; None chooses.
        warmup_steps: for ``batch="grow"``; None is five epochs, as in Goyal et al.
        save_every: optimizer steps between checkpoints; None saves at the end, and at ends of
            epochs at most once a minute.
        keep: how many of the newest checkpoints to keep, or a policy, as
            ``"last=3,every=1000,best=accuracy"``: besides the newest, the first checkpoint of each
            thousand steps, and that of the best evaluation (as ``keep_best``).
        keep_best: also keep the checkpoint of the best evaluation, by this metric of
            :meth:`Run.evaluate`: ``"accuracy"``, ``"loss"``, ``"min:rank"``, or ``"val/loss"`` of
            evaluations with that name. Without a direction, less is better if the metric's name
            contains "loss", "error", or "perplexity". See :attr:`Run.best`.
        patience: with ``keep_best``: :meth:`Run.stop` the training after so many evaluations
            without a better one. A resume counts on.
        async_save: write the checkpoints of ``save_every``, ``keep_best``, and ends of epochs in
            the background: the training stops for a copy in the host's memory only, which is kept
            for the next one. False writes them while the training waits.
        check_replicas: optimizer steps from one comparison of the replicas' weights, by digest, to
            the next; also after 4, 8, 16, … and before each checkpoint. A flipped bit is an error
            that names rank and parameter. None never compares.
        on_nan: ``"error"`` ends the training at a NaN or infinite loss, before the weights change;
            ``"ignore"`` trains on. On accelerators, where a check waits for the device, it checks
            one step in fifty. ``"skip"`` looks at loss and gradients of each step, and leaves out
            the update of one that is not finite. Eleven such steps in a row are an error.
        tensorboard: also log for TensorBoard (``pip install '.[tensorboard]'`` in a clone).
        watch: measure gradients, updates, weights, and layers' outputs every so many steps, for the
            rules of ``ronde watch``; True: every 32 steps. ``ronde run --watch`` overrides it.
        feed: how samples are fetched: :class:`ronde.feed.FeedSettings`, a mapping of its fields, or
            the path of a settings file. ``ronde run --feed`` (or ``RONDE_FEED``) overrides it,
            setting by setting.
        callbacks: objects whose methods the run calls at its events, after its own: ``step_ended``,
            ``before_update``, ``epoch_ended``, … See :class:`ronde.run.callback.Callback`.

    Returns:
        Run: the training, for the script's loop.

    Raises:
        ArgumentError: an argument cannot be used.
        WorldError: the workers cannot meet, or disagree on the arguments, the model, or the data.
        CheckpointError: the run directory exists, or cannot be resumed.

    Example:
        >>> import torch, ronde
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        >>> run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss,
        ...     batch_size=16)
        >>> for batch in run.batches():  # one epoch; run.epochs(n) loops over several
        ...     loss = run.step(batch)
        >>> run.state.step
        4
    """
    me = connect()
    if me.is_main and os.environ.get("RONDE_RUNS") != "none":
        from ronde.run.announce import ask_git

        ask_git()  # it answers while the rest is made ready
    checks.check_arguments(
        choices={
            "batch": (batch, ("keep", "grow")),
            "precision": (precision, ("fp32", "bf16", "fp16")),
            "loss_reduction": (loss_reduction, ("mean", "sum")),
            "on_nan": (on_nan, ON_NAN),
            "randomness": (randomness, (None, "global", "worker")),
            "lr_rule": (lr_rule, (None, *LR_RULES)),
        },
        counts={
            "batch_size": batch_size,
            "micro_batch": micro_batch,
            "save_every": save_every,
            "patience": patience,
            "check_replicas": check_replicas,
        },
        seed=seed,
        warmup_steps=warmup_steps,
        loss=loss,
        clip_norm=clip_norm,
    )
    if loss_reduction == "sum" and batch == "grow" and lr_rule != "none":
        raise ArgumentError(
            "loss_reduction='sum' with batch='grow': the gradient grows with the batch, and the "
            "learning rate would grow as well. Give lr_rule='none', or a loss that is a mean."
        )
    fields: dict[str, Any] = {"shard": shard, "pipeline": pipeline, "tensor": tensor}
    fields |= {"recompute": recompute, "split_at": split_at}
    split = SplitOptions(plan, fields, tensor_plan, init, randomness)
    batches = BatchOptions(
        batch_size, batch, micro_batch, shuffle, drop_last, seed, feed, lr_rule, warmup_steps
    )
    saves = SaveOptions.read(
        keep,
        keep_best,
        save_every=save_every,
        patience=patience,
        async_save=async_save,
        name=name,
        tensorboard=tensorboard,
    )
    options = RunOptions(check_replicas, on_nan, check_callbacks(callbacks), watch_every(watch))
    asked = asked_plan(plan, me, fields)
    if "keras" in sys.modules:
        from ronde.keras import adopt_keras, is_keras

        if is_keras(model):
            optimizer, loss = adopt_keras(
                model, optimizer, loss, reduction=loss_reduction, batch=batch, device=str(me.device)
            )
    checks.check_model(model, me)
    checks.check_init(init, model)
    left_out = checks.check_optimizer(optimizer, model)
    checks.check_scheduler(scheduler, optimizer)
    source = data if isinstance(data, Run) else None
    taken = _taken(data, batches, me)
    if source is not None:
        shared = source.plan
        batches = dataclasses.replace(
            batches, batch=shared.batch, seed=shared.seed, micro_batch=shared.micro_batch
        )
    opening = hooks.Opening(
        model,
        optimizer,
        scheduler,
        taken,
        LossCall(loss, forward, loss_reduction),
        precision,
        batches.batch,
        clip_norm,
        batches.micro_batch or asked.micro_batch,
        # torch's SyncBatchNorm refuses the CPU; Ronde computes the same there.
        sync_batchnorm or (me.device.type == "cpu" and _is_converted(model)),
        batches.seed,
        script_plan(plan, me, fields) if hooks.observed() else asked,
    )
    hooks.observer.on_open(opening)
    if source is not None:  # as a study may have changed it
        opening.taken, opening.micro_batch = source.port.data, source.plan.micro_batch
    _place(opening, me, on_meta=init is not None)
    chosen = _plan(opening, asked, me, batches, split, source, options.watch)
    work = _work(opening, chosen, me, split)
    chosen = hooks.observer.on_plan(chosen, work, opening.calls, me)
    why = ""
    if split.auto and hooks.planner is not None:
        chosen, why = hooks.planner(chosen, work, opening.calls, me)
    if source is not None:
        checks.check_same_shares(chosen, source.plan)
    group, part = _group(me, saves, options, source)
    directory = group.directory
    if directory is not None:
        checks.check_saved(model)
    before: tuple[str, ...] = ()
    if group.resumes and directory is not None and not part and chosen.pipeline > 1:
        before = recorded_cut(chosen, directory.plan, me)
        chosen = dataclasses.replace(chosen, split_at=chosen.split_at or before)
    skeleton = None
    if chosen.workers > 1:
        from ronde.run.whole_model import refuse_save_pretrained, skeleton_of

        skeleton = skeleton_of(opening.model, chosen)
    probes = probe_draws(work, opening.calls) if chosen.randomness == "global" else {}
    with group.buffers_kept():
        strategy = carry_out(chosen, work, me)
    if strategy.split_at:
        chosen = dataclasses.replace(chosen, split_at=strategy.split_at)
    parts = _parts(opening, chosen, work, strategy, me, group, part, follows=source is not None)
    given = given_settings(parts.optimizer, chosen.lr_factor)
    best = KeepBest(saves.keep_best, directory.checkpoints if directory else None, saves.patience)
    content = CheckpointContent(
        parts, best, saves.keep, saves.async_save, saves.save_every, group.ending, given
    )
    # A batch may be larger than any before it.
    grows = chosen.micro_batch is not None and opening.taken.order.ends(0) is not None
    run_type: type[Run] = hooks.observer.run_type or Run
    run = run_type(
        content,
        group,
        options,
        sent=to_tensorboard(directory, saves.tensorboard, me, part),
        source=source,
        probes=probes,
        skeleton=skeleton,
        in_lists=batches.micro_batch is not None or grows,
    )
    if skeleton is not None:
        skeleton.note(parts.model)
        refuse_save_pretrained(parts.model, chosen)
    if parts.strategy.exchange is not None:
        from ronde.run.exchange_state import check_save_every

        check_save_every(parts, saves.save_every)
    check_on_nan(parts, options.on_nan)
    announce(parts, left_out)
    if before and before != chosen.split_at:
        parts.watcher.say(
            f"the pipeline is cut at {', '.join(chosen.split_at)}, as asked; before the resume it "
            f"was cut at {', '.join(before)}"
        )
    if why:
        parts.watcher.say(f"plan {chosen.spec}: {why}")
    _begin(content, group)
    hooks.observer.on_ready(run, chosen)
    return run


def _begin(content: CheckpointContent, group: RunGroup) -> None:
    """Refuse what would see a part of the model, resume if asked to, and write the plan."""
    parts, directory = content.parts, group.directory
    if not parts.holds_all:
        from ronde.run.whole_model import refuse_state_dict

        refuse_state_dict(parts.model, parts.optimizer, parts.strategy.owns, parts.plan.spec)
    if group.resumes and directory is not None:
        from ronde.run.resume import resume

        parts.watcher.say(resume(content, group, directory))
        parts.strategy.sync_buffers()
    if (until := os.environ.get("RONDE_UNTIL")) and not parts.part:
        from ronde.run.leave import pause_if_there

        pause_if_there(until, parts, group)
    if parts.world.is_main and directory is not None and not parts.part:
        parts.plan.save(directory.plan)  # only now: a refused resume leaves the old one


def _taken(data: Any, batches: BatchOptions, me: World) -> TakenOver:
    """The data and how it is read; another run's if this one shares its batches."""
    if isinstance(data, Run):
        given = ("batch_size", "micro_batch", "shuffle", "feed")
        own = {name: getattr(batches, name) for name in given}
        checks.check_shared({**own, "drop_last": batches.drop_last or None})
        return data.port.data
    taken = take_over(
        data,
        seed=batches.seed,
        batch_size=batches.batch_size,
        shuffle=batches.shuffle,
        shuffle_dataset=True,
        drop_last=batches.drop_last,
    )
    if batches.feed is not None or os.environ.get("RONDE_FEED", "none") not in ("", "none"):
        from ronde.adapt import apply_settings, requested_settings

        taken = apply_settings(taken, requested_settings(batches.feed), me.local_size)
    return taken


def _parts(
    opening: hooks.Opening,
    chosen: Plan,
    work: Work,
    strategy: Strategy,
    me: World,
    group: RunGroup,
    part: str,
    follows: bool,
) -> Parts:
    """What the run is made of, once its plan is carried out."""
    directory, precision = group.directory, chosen.precision
    if (first := group.first) is None:
        record = Record(directory.record) if me.is_main and directory is not None else None
        watcher = Watcher(record, choose_display(me.is_main), me.is_main)
    else:
        beside = first.watcher
        watcher = Watcher(beside.record, beside.display, me.is_main, part, beside)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if precision in DTYPES:
        autocast = partial(torch.autocast, me.device.type, DTYPES[precision])
    return Parts(
        model=opening.model,
        optimizer=opening.optimizer,
        scheduler=opening.scheduler,
        plan=chosen,
        data=opening.taken,
        loss=opening.calls,
        work=work,
        strategy=strategy,
        world=me,
        rendezvous=rendezvous(me),
        watcher=watcher,
        directory=directory,
        part=part,
        follows=follows,
        autocast=autocast,
        scaler=torch.amp.GradScaler(me.device.type) if precision == "fp16" else None,
    )


def _place(opening: hooks.Opening, me: World, on_meta: bool) -> None:
    """Shape lazy parameters, and move model and optimizer state to this device."""
    if opening.taken.batch_size is None:
        raise ArgumentError(
            "batch_size is missing: give ronde.distribute(…, batch_size=N), the global number of "
            "samples per optimizer step over all workers, or a DataLoader that has one."
        )
    model = opening.model
    lazy = checks.lazy_names(model)
    if lazy:
        from ronde.run.model_values import shape_lazy

        shape_lazy(model, opening.calls, opening.taken, lazy)
    if not on_meta:
        model.to(me.device)
    if me.device.type == "cpu":
        return
    for values in opening.optimizer.state.values():
        tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor) and v.dim()}
        values.update({k: to_device(v, me.device) for k, v in tensors.items()})


def _plan(
    opening: hooks.Opening,
    asked: Plan,
    me: World,
    batches: BatchOptions,
    split: SplitOptions,
    source: Run | None,
    watch: int | None,
) -> Plan:
    """The complete plan, after all ranks have agreed on its facts."""
    default: Literal["global", "worker"] = "global" if me.device.type == "cpu" else "worker"
    default = source.plan.randomness if source is not None else default
    randomness = split.randomness or default
    if source is not None and randomness != default:
        raise ArgumentError(
            f"randomness={randomness!r}: the run whose batches this one shares has {default!r}. "
            "Leave it out."
        )
    taken = opening.taken
    assert taken.batch_size is not None  # _place checks it
    chosen = Plan(
        **dict[str, Any]({name: getattr(asked, name) for name in SPLIT_FIELDS}),
        workers=me.size,
        batch_size=taken.batch_size,
        batch=opening.batch,
        micro_batch=opening.micro_batch,
        precision=opening.precision,
        clip_norm=opening.clip_norm,
        seed=opening.seed,
        randomness=randomness,
        drop_last=taken.drop_last,
        sync_batchnorm=opening.sync_batchnorm,
    )
    chosen.check()
    # Before anything else is exchanged: gloo adds tensors of different shapes without an error.
    facts = checks.run_facts(chosen, taken, opening.model, opening.optimizer, opening.scheduler)
    agree(me, facts | {"watch": watch}, "ronde.distribute")
    checks.check_batches(chosen, taken.order, split.auto)
    samples = taken.order.epoch_samples
    if opening.batch == "grow":
        chosen = dataclasses.replace(chosen, workers=hooks.observer.count_workers(me.size))
        rule, warmup = batches.lr_rule, batches.warmup_steps
        chosen = grow(chosen, opening.optimizer, opening.scheduler, rule, warmup, samples)
        chosen = dataclasses.replace(chosen, workers=me.size)
    chosen = accumulate(chosen)
    if chosen.drop_last and samples < chosen.batch_size:
        raise ArgumentError(
            f"drop_last=True leaves nothing to train on: an epoch has {samples} samples, a global "
            f"batch {chosen.batch_size}."
        )
    return chosen


def _work(opening: hooks.Opening, chosen: Plan, me: World, split: SplitOptions) -> Work:
    """The objects that a strategy carries the plan out on."""
    init = split.init
    model, optimizer, calls = opening.model, opening.optimizer, opening.calls
    dtype = DTYPES.get(opening.precision)

    def compute(batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        with torch.autocast(me.device.type, dtype) if dtype else nullcontext():
            try:
                return calls(model, batch)
            except NameError as error:
                raise PlanError(
                    f"forward or loss uses a name without a value: {error}. plan={chosen.spec!r} "
                    "runs them before ronde.distribute returns, so they cannot use the run: for "
                    "run.gather(), use plan='replicate' or 'shard'."
                ) from error

    sizes = micro_batch_sizes(chosen, opening.taken.order.epoch_samples)
    work = Work(model, optimizer, compute, _sampler(opening, me), split.tensor_plan, sizes)
    work.functions = (calls.loss, *([calls.forward] if calls.forward else []))
    work.groups, work.tied = checkpoint.group_names(model, optimizer), checkpoint.tied_names(model)
    if init is not None:
        from ronde.parallel.meta_init import FILL_THEMSELVES
        from ronde.run.model_values import filler

        work.fill = filler(model, init, opening.seed, me)
        alone = me.size == 1 or chosen.family.split(" ")[0] not in FILL_THEMSELVES
        if alone or chosen.tensor > 1:  # blocks are found by passes over the whole model
            work.fill(lambda name: True)
            work.fill = None
            model.to(me.device)
    if work.fill is None:  # torch swaps no tensor that has a weak reference
        work.undivided = [weakref.ref(p) for p in model.parameters()]
    return work


def _is_converted(model: nn.Module) -> bool:
    """Whether all batch normalizations are torch's SyncBatchNorm, which a CPU cannot run."""
    if not any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        return False
    from ronde.parallel import converted

    return converted(model)


def _sampler(opening: hooks.Opening, me: World) -> Callable[[int], Any]:
    """Makes micro-batches before the training without consuming randomness or samples."""
    taken = opening.taken
    in_here = dataclasses.replace(taken.settings, num_workers=0)
    sampled = Feed(taken.dataset, taken.order, in_here, opening.seed)

    def sample(n: int) -> Any:
        from ronde.introspect import detached_copy, reopen_files

        share = Share(0, 0, n, ((0, n),), n)
        dataset = detached_copy(taken.dataset)
        order = _repeat(taken.order, n)
        same = dataset is taken.dataset and order is taken.order
        feed = sampled if same else Feed(dataset, order, in_here, opening.seed)
        with reopen_files(dataset):
            _, micros = next(feed.read(lambda: iter([share])))
            return on_device(feed, share, micros, me.device)[0]

    return sample


def _repeat(order: Order, n: int) -> Order:
    """An order whose epoch has at least ``n`` samples, by repetition; those of one batch, if a
    batch_sampler decides which samples fit together.
    """
    if (ends := order.ends(0)) is not None:
        first = np.resize(order.ids(0, 0, ends[0]), n).tolist()
        return Order(order.n, order.seed, draw=lambda _epoch: first, length=n)
    if n <= order.epoch_samples:
        return order
    ids = order.ids(0, 0, order.epoch_samples)
    return dataclasses.replace(order, draw=lambda _epoch: np.resize(ids, n).tolist(), length=n)


def _group(
    me: World, saves: SaveOptions, options: RunOptions, source: Run | None
) -> tuple[RunGroup, str]:
    """The group that this run joins, or a new one, and its name in it."""
    group = current()
    if group is None or not group.takes(saves.name):
        directory, resumes = open_run_dir(me, saves.name)
        group = RunGroup(directory, resumes)
    part = group.name_part(saves.name, saves.keep_best is not None, options.leaves_out)
    if source is not None and source.port.group is not group:
        raise ArgumentError(
            "data=run: the run has trained or ended already. Call ronde.distribute for both runs "
            "before the first step of either."
        )
    return group, part
