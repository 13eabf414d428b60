"""The Run: the object a script holds after ``distribute``. One step is one optimizer step, on any
number of workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ronde.parallel.strategy import GradientHooks
from ronde.run import hooks
from ronde.run.callbacks import AveragesWeights, Recording, ask_to_stop, callbacks_of
from ronde.run.collective_calls import CollectiveCalls
from ronde.run.content import BestCheckpoint, CheckpointContent
from ronde.run.group import RunGroup, save, warn_of_late_save
from ronde.run.loop import Loop
from ronde.run.options import RunOptions
from ronde.run.parts import Gathering
from ronde.run.script_state import Decay, Registered, WeightAverage
from ronde.run.step import OptimizerStep, follow_run
from ronde.run.step_draws import StepDraws
from ronde.world import ArgumentError
from ronde.world.rendezvous import counted

if TYPE_CHECKING:
    from ronde.run.step_port import StepPort
    from ronde.run.whole_model import Skeleton

__all__ = ["Run"]


class Run(CollectiveCalls):
    """A training in progress; :func:`ronde.distribute` makes it.

    Attributes:
        model: the script's own module.
        optimizer: the script's own optimizer.
        plan: how the work is split.
        state: epoch, step, and samples so far.
        dir: the run directory; None if nothing is written (``RONDE_RUNS=none``).
        rank: this worker's rank, from 0.
        world_size: the number of workers that train together.
        is_main: True on rank 0 only.
        device: the device this worker trains on.
    """

    def __init__(
        self,
        content: CheckpointContent,
        group: RunGroup,
        options: RunOptions,
        *,
        sent: Callable[[], None],
        source: Run | None,
        probes: dict[int, Any],
        skeleton: Skeleton | None,
        in_lists: bool,
    ) -> None:
        parts = content.parts
        me, plan, folder = parts.world, parts.plan, parts.directory
        self.model, self.optimizer = parts.model, parts.optimizer
        self.plan, self.state, self.dir = plan, parts.state, folder
        self.rank, self.world_size = me.rank, me.size
        self.is_main, self.device = me.is_main, me.device
        self._parts, self._content, self._group = parts, content, group
        self._rendezvous = parts.rendezvous
        self._skeleton = skeleton
        gathering, gradient_hooks = Gathering(), GradientHooks()
        self._recording = Recording(gathering, content.ending, sent)
        callbacks = callbacks_of(content, group, options, gathering, self._recording)
        calls = None
        if me.size > 1:
            from ronde.parallel.own_calls import own_calls

            calls = own_calls(parts.model, plan, parts.rendezvous)
        if calls is not None:
            parts.strategy.watch(calls)
        self._step: OptimizerStep = OptimizerStep(
            parts,
            callbacks,
            group,
            StepDraws(parts, probes, lambda: group.alone),
            gathering,
            gradient_hooks,
            calls,
            source._step if source is not None else None,
            content.averages,
        )
        self._gathering = gathering
        loop_type: type[Loop] = hooks.observer.loop_type or Loop
        self._loop: Loop = loop_type(
            content,
            group,
            callbacks,
            self._step,
            source._loop if source is not None else None,
            in_lists=in_lists,
            leaves_out=options.leaves_out,
            studied=hooks.observed(),
        )
        if me.size > 1:
            from ronde.run.rank_facts import TrainedNames

            parts.strategy.on_change = TrainedNames(parts.model, parts.rendezvous).agree
        follow_run(parts)
        if group.memory is None and folder is not None and os.environ.get("RONDE_MEMORY_DIR"):
            from ronde.run.memory_copies import memory_copies  # needs a launcher that restarts

            group.memory = memory_copies(me, folder.path)

    @property
    def scheduler(self) -> Any:
        """The script's own scheduler, or None. It steps once per optimizer step."""
        return self._parts.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._parts.scheduler = scheduler

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch; in the current one, if a ``batch_sampler`` decides."""
        return self._parts.steps_per_epoch

    @property
    def best(self) -> BestCheckpoint | None:
        """The best evaluation so far, by ``keep_best``, and its checkpoint. None before the first
        one, or without ``keep_best``.
        """
        return self._content.best.best

    @property
    def port(self) -> StepPort:
        """For tools that measure this run: its parts, steps on given batches, a snapshot."""
        from ronde.run.step_port import StepPort  # which ordinary runs do not need

        return StepPort(self._step, self._group)

    # -- the loop ----------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """Iterate over epochs, up to ``n`` in all. A resumed run continues in its epoch.

        Args:
            n: epochs of the whole training, including those before a resume.

        Yields:
            int: the epoch, from 0. A run that stopped after an epoch's last batch yields that epoch
            again, without batches, because it may not have been evaluated.

        Example:
            >>> for epoch in run.epochs(10):  # doctest: +SKIP
            ...     for batch in run.batches():
            ...         loss = run.step(batch)
        """
        return self._loop.epochs(n)

    def batches(self) -> Iterator[Any]:
        """This worker's share of each global batch of the current epoch, on its device. After a
        resume, the rest of the epoch.

        Every worker gets the same number of batches. If the last global batch is smaller than the
        world, a worker with an empty share gets one sample as a stand-in, which does not count.

        Yields:
            The output of the data set's collate function: usually ``(inputs, target)``, samples
            first. A :class:`MicroBatches` if a step has several micro-batches or the script set
            ``micro_batch``.
        """
        return self._loop.batches()

    def step(self, batch: Any) -> torch.Tensor:
        """Train on one batch from :meth:`batches`: forward, backward, exchange, clip, update, and
        schedule.

        Args:
            batch: an item of :meth:`batches`, or what the script made of it.

        Returns:
            Tensor: 0-d, the loss of the whole global batch, the same on every rank. Nothing waits
            for it until you read it.

        Raises:
            LossError: the loss is not a scalar, or is NaN or infinite.
        """
        return self._step.step(batch)

    def backward(self, loss: torch.Tensor | tuple[torch.Tensor, Any]) -> None:
        """Backward pass of a script that owns its loop: once per micro-batch, in order, then call
        :meth:`update`. The last one of a step exchanges: after it, gradients are those of the
        global batch, and the script may change them.

        Args:
            loss: the mean over this worker's samples of the (micro-)batch, or ``(sum, weight)``.
        """
        self._step.backward(loss)

    def update(self) -> torch.Tensor:
        """Clip, update, and schedule, after :meth:`backward`. Returns the global loss, as
        :meth:`step` does.
        """
        return self._step.update()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all workers for the current global batch, in the order of its samples: for
        losses that relate samples to each other (contrastive, statistics of the batch). Call it
        on every worker, in ``forward``, in the loss, or in a loop of your own.

        Gradients flow back to the worker that a row came from. If the loss is computed from
        gathered tensors alone, loss and gradients are those of one process with the whole batch.
        In :meth:`evaluate`, it returns the rows of the current global evaluation batch.

        Args:
            tensor: one row for each sample of this worker's share, in their order.

        Returns:
            Tensor: one row for each sample of the global batch, the same on every worker.

        Raises:
            RondeError: outside of a step, with several micro-batches, or under a pipeline or
                tensor plan.
            ArgumentError: the rows do not fit the samples, or differ between workers.

        Example:
            >>> def loss(a, b):  # two views of each image  # doctest: +SKIP
            ...     return nt_xent(run.gather(a), run.gather(b))
        """
        return self._step.gather(tensor)

    # -- evaluation --------------------------------------------------------------------

    @counted("run.evaluate(data)")
    def evaluate(
        self, data: Any, metrics: Mapping[str, Any] | None = None, *, name: str = "evaluate"
    ) -> dict[str, Any]:
        """Loss and metrics over a data set. Each sample counts once, and every rank gets the same
        result, for any number of workers. Call it on every worker: each evaluates its share.

        Args:
            data: a Dataset or DataLoader, read in its own order.
            metrics: name -> a torchmetrics object, or a callable that takes what the loss takes,
                usually ``(output, target)``, and returns a mean over these samples, ``(sum,
                weight)``, or one value per sample, or a :class:`ronde.clarify.Bias`.
            name: of this evaluation, in the record, the printed line, and TensorBoard: ``"test"``.

        Returns:
            dict: ``"loss"`` and each metric, as numbers (or whatever a torchmetrics object
            computes).

        Example:
            >>> run.evaluate(test_set, metrics={"accuracy": lambda out,  # doctest: +SKIP
            ...     y: (out.argmax(1) == y).float()})
            {'loss': 0.31, 'accuracy': 0.92}
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"run.evaluate(…, name={name!r}): expected a text, as 'test'.")
        self._rendezvous.meet("run.evaluate(data)")
        self._parts.check_settled("run.evaluate(data)")
        rate = self._parts.watcher.rate
        rate.pause()
        loop = self._loop
        if loop.evaluations is None:
            from ronde.run.evaluation import Evaluations

            loop.evaluations = Evaluations(self._parts, self._gathering, loop.callbacks)
        outcome = loop.evaluations.evaluate(data, metrics or {}, name, loop.is_reading)
        rate.resume()
        return dict(outcome.result)

    def fit(
        self, epochs: int, validate: Any = None, metrics: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The whole loop: train, and evaluate after every epoch.

        Args:
            epochs: epochs of the whole training.
            validate: data to evaluate on, or None.
            metrics: see :meth:`evaluate`.

        Returns:
            dict: of the last evaluation, or ``{"loss": last training loss}``.
        """
        result: dict[str, Any] = {}
        for _ in self.epochs(epochs):
            loss = None
            for batch in self.batches():
                loss = self.step(batch)
            if validate is not None:
                result = self.evaluate(validate, metrics)
            elif loss is not None:
                result = {"loss": float(loss)}
        return result

    def whole_model(
        self, ranks: Literal["all", "main"] = "all", device: torch.device | str | None = None
    ) -> AbstractContextManager[Any]:
        """The whole model, for sampling, evaluation, and ``save_pretrained``, under every plan.

        Enter it on every worker. Inside, nothing communicates: each rank may call the model as
        often as it likes, or not at all, with any of its methods.

        Under a plan that divides the model, it is a copy: the original classes, plain tensors,
        current weights and buffers, and the modes of the training. Changes to it are lost. Under
        other plans it is the script's own model with rank 0's buffers; buffers and modes are put
        back at the end, and changed weights are an error.

        Args:
            ranks: ``"all"`` gives the model to every rank, ``"main"`` to rank 0, and None to the
                others. A copy takes the memory of all weights on each rank that gets one.
            device: where a copy is; None for this worker's device.

        Raises:
            PlanError: the model cannot be copied, or weights were changed inside.
            WorldError: a rank called something else, or ended.

        Example:
            >>> with run.whole_model() as model:  # doctest: +SKIP
            ...     if run.is_main:
            ...         print(model.eval().generate(prompt))
        """
        from ronde.run.whole_model import whole_model

        return whole_model(self._parts, self._skeleton, ranks, device)

    def stop(self, reason: str, *, together: bool = True) -> None:
        """End the training before its last epoch: there is no further batch, on any worker. The
        script goes on behind its loops. The run has *completed*, its record says why, and a resume
        does not train on.

        Args:
            reason: a few words for the record.
            together: every worker calls it at the same place: this step is the last one. False:
                one worker or some may call it. All stop together at a step about a second later.

        Raises:
            WorldError: only some workers called it, with ``together``.

        Example:
            >>> if run.evaluate(test_set)["loss"] > 10:  # doctest: +SKIP
            ...     run.stop("it diverges")
        """
        if not isinstance(reason, str) or not reason:
            raise ArgumentError(f"run.stop({reason!r}): expected a reason, as 'it diverges'.")
        if together or self.world_size == 1:
            advice = "Call it on every worker, or with together=False."
            self._group.stop(self._rendezvous.meet("run.stop(reason)", reason, advice=advice)[0])
        else:
            ask_to_stop(self._group, reason)

    # -- what it writes ----------------------------------------------------------------

    def log(self, values: Mapping[str, Any]) -> None:
        """Record the script's own values. Rank 0 writes; other ranks ignore the call.

        Args:
            values: name -> number, text, 0-d tensor, or a list of these.
        """
        self._recording.log(self._parts, values)

    def register(self, **things: Any) -> Registered:
        """Keep the script's own state in the checkpoints, and restore it here after a resume, under
        any plan and on any number of workers. Call it on every worker, before the first step.

        Args:
            things: name -> an object with ``state_dict()`` and ``load_state_dict()`` (a scheduler
                that the script steps, a further optimizer, a copy of the model), or a plain value:
                numbers, strings, None, tensors, NumPy arrays, and lists, tuples, dicts, and deques
                of these. They must be the same on all ranks.

        Returns:
            Registered: everything registered, as attributes. Objects, lists, dicts, deques, and
            tensors are restored in place; assign to the attribute to change a plain value.

        Raises:
            ArgumentError: a name is taken, or something cannot be in a checkpoint.
            CheckpointError: the checkpoint has something else under this name.

        Example:
            >>> kept = run.register(scheduler=scheduler, best=0.0)  # doctest: +SKIP
            >>> kept.best = max(kept.best, accuracy)  # doctest: +SKIP
        """
        return self._content.registry.add(self._parts, things)

    def average(
        self, decay: Decay = 0.999, *, name: str = "average", start: int = 0, every: int = 1
    ) -> WeightAverage:
        """Keep an average of the weights, under every plan. It is updated after each optimizer
        step, is in the checkpoint, and continues after a resume under any plan and on any number of
        workers. Call it on every worker, before the first step.

        Args:
            decay: ``average = decay * average + (1 - decay) * weights``. The average begins as the
                weights of now. A function takes the number of updates so far, from 0, for a
                warm-up: ``lambda n: min(0.999, (1 + n) / (10 + n))``. None gives the plain mean of
                the weights after each update (stochastic weight averaging).
            name: in the checkpoint, for a second average.
            start: the optimizer step after which it begins.
            every: optimizer steps from one update to the next.

        Returns:
            WeightAverage: ``with average.applied():`` gives the model the averaged weights;
            ``run.export(path, average=average)`` writes them.

        Raises:
            ArgumentError: an argument cannot be used.
            CheckpointError: the checkpoint's average is of another model.

        Example:
            >>> average = run.average(decay=0.999)  # doctest: +SKIP
            >>> with average.applied():  # doctest: +SKIP
            ...     run.evaluate(test_set)
        """
        from ronde.run.exchange_state import check_can_average

        check_can_average(self._parts)
        self._loop.callbacks.wake(AveragesWeights)
        return self._content.averages.add(self._parts, name, decay, start, every)

    def save(self, *, wait: bool = True) -> Path | None:
        """Write a checkpoint now: weights, optimizer, scheduler, what is registered, and the place
        in the data, of all runs of the loop. Call it on every worker, last in the body of the loop
        over batches.

        Args:
            wait: False copies everything and writes it in the background, as ``save_every`` does.

        Returns:
            Path: the checkpoint on rank 0, None on other ranks and with ``wait=False``.

        Raises:
            CheckpointError: it could not be written; earlier ones are untouched. With
                ``wait=False``, a warning tells it.
        """
        warn_of_late_save(self._content)
        return save(self._loop, wait)

    def export(self, path: str | os.PathLike[str], average: WeightAverage | None = None) -> None:
        """Write the model's weights, or an average of them, as plain safetensors, under the
        script's names. Call it on every worker; rank 0 writes.

        Tensors that share memory are written under each of their names. Under a plan that divides
        the model, the other ranks send their parts one tensor at a time, so rank 0 never holds more
        than one of them.

        Raises:
            CheckpointError: it could not be written.
        """
        from ronde.run.persist import export_weights

        self._parts.check_settled(f"run.export({str(path)!r})")
        with average.applied() if average is not None else nullcontext():
            export_weights(self._parts, Path(path))
