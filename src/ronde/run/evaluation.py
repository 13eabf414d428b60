"""Evaluation: every sample counted once, on any number of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from ronde.capture import GlobalDraws
from ronde.loader import (
    Feed,
    LoaderSettings,
    TakenOver,
    other_classes,
    pipeline_in,
    take_over,
)
from ronde.plan import Place, shares
from ronde.run import hooks
from ronde.run.callback import Callbacks, EvaluationResult
from ronde.run.checks import check_draw, check_same_samples
from ronde.run.loop import gather_skipped, on_device, skip_report
from ronde.run.losses import Rows, lengths
from ronde.run.parts import Gathering, Parts
from ronde.world import ArgumentError
from ronde.world.consensus import gather_json
from ronde.world.tensors import map_tensors

__all__ = ["Evaluations"]


def _is_torchmetric(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _sum_and_weight(name: str, value: Any, samples: float) -> tuple[float, float]:
    """The value of a plain metric, as a sum and its weight."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return float(value[0]), float(value[1])
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.numel() == 1:
            return float(value.reshape(())) * samples, float(samples)
        if value.shape[0] == samples:
            return float(value.double().sum()), float(value.numel())
        raise ArgumentError(
            f"metric {name!r} returned a tensor of shape {tuple(value.shape)} for {samples:g} "
            "samples: expected a mean (0-d), one value per sample, or (sum, weight)."
        )
    if isinstance(value, int | float):
        return float(value) * samples, float(samples)
    raise ArgumentError(
        f"metric {name!r} returned {type(value).__name__}: expected a number, a tensor, or "
        "(sum, weight)."
    )


def _clear_but_typed(metric: Any) -> None:
    """Empty a torchmetrics object and keep the types of its states: its exchange gathers lists of
    tensors, which must match on ranks that saw no sample.
    """
    for part in metric.modules():
        for name, default in getattr(part, "_defaults", {}).items():
            state = getattr(part, name)
            if isinstance(state, list):
                setattr(part, name, [v.reshape(-1)[:0] if v.dim() == 0 else v[:0] for v in state])
            else:
                setattr(part, name, default.detach().clone().to(state.device))


Judged = tuple[tuple[Any, ...], torch.Tensor, torch.Tensor | None]


class _Evaluation:
    """Reads one data set for evaluation; kept between calls, so that loading processes can stay.

    Attributes:
        skipped: ``(id, text)`` of samples of all workers that the last run left out.
    """

    def __init__(
        self,
        parts: Parts,
        gathering: Gathering,
        callbacks: Callbacks,
        data: Any,
        taken: TakenOver,
    ) -> None:
        self.data, self.taken = data, taken
        self._parts, self._gathering, self._callbacks = parts, gathering, callbacks
        self.me, plan = parts.world, parts.plan
        # As in training, a DataLoader's own batch size counts the samples of all workers.
        self.batch_size = max(taken.batch_size or plan.batch_size, 1)
        self.micro_batch = plan.micro_batch if taken.batch_size is None else None
        self.feed = Feed(
            taken.dataset,
            taken.order,
            _settings_for(data, taken, parts.data),
            plan.seed,
            evaluate=True,
            say=parts.report,
            compares=self.me.size > 1 and taken.fingerprint is None and not hooks.observed(),
        )
        self.skipped: list[tuple[int, str]] = []
        self.rows = Rows(asks=True, collates=True)
        self.layout = plan.layout
        # One worker of each replica counts: its last stage, and the first rank of a tensor group.
        self.counting: Any = None
        if self.layout.replicas < self.me.size:
            last = self.layout.pipeline - 1
            ranks = [self.layout.rank(Place(last, r, 0)) for r in range(self.layout.replicas)]
            from ronde.world.meshes import group_of

            self.counting = group_of("counting", ranks)

    def run(self, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Loss and metrics over the whole set, and its number of samples."""
        run, loss, strategy = self._parts, self._parts.loss, self._parts.strategy
        if self.taken.order.draw is not None:
            check_draw(self.me, self.taken.order, 0, "run.evaluate")
        tables = {name: m for name, m in metrics.items() if getattr(m, "takes_batch", False)}
        for table in tables.values():
            table.reset()
        plain, objects = self._prepare({n: m for n, m in metrics.items() if n not in tables})
        # Sum and weight of the loss, then of each plain metric; the last cell counts samples.
        sums = torch.zeros(2 * (1 + len(plain)) + 1, dtype=torch.float64)

        def judge(batch: Any) -> Judged:
            with run.autocast():
                arguments = loss.arguments(run.model, batch)
                return arguments, *loss.check(loss.loss(*arguments))

        with torch.no_grad():
            self._add_up(judge, plain, objects, tables, sums)
        unclear, self.rows.unclear = self.rows.unclear, ""
        if unclear and not loss.pairs:
            run.warn(unclear)
        if self.me.size > 1:
            on_device = sums.to(self.me.device)
            dist.all_reduce(on_device)
            sums = on_device.cpu()
        self.skipped = gather_skipped(self.feed, self.layout, self.me)
        values = sums.tolist()
        result: dict[str, Any] = {}
        for i, name in enumerate(["loss", *plain]):
            total, weight = values[2 * i], values[2 * i + 1]
            result[name] = total / weight if weight else float("nan")
        for name, metric in objects.items():
            if strategy.counts:
                # it exchanges its own states over all ranks
                result[name] = map_tensors(torch.Tensor.tolist, metric.compute())
            metric.reset()
        if objects and self.counting is not None:
            answers = gather_json(self.me, result if strategy.counts else {})
            result = next(answer for answer in answers if answer)
        for name, table in tables.items():
            table.merge(gather_json(self.me, table.state()))
            result[name] = table.compute()
        return result, int(values[-1])

    def _prepare(self, metrics: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Plain metrics, and torchmetrics objects ready to collect."""
        if "loss" in metrics:
            raise ArgumentError("a metric cannot be called 'loss': that name is the loss's own.")
        objects = {name: m for name, m in metrics.items() if _is_torchmetric(m)}
        plain = {name: m for name, m in metrics.items() if name not in objects}
        for name, metric in plain.items():
            if not callable(metric):
                raise ArgumentError(
                    f"metric {name!r} is {type(metric).__name__}: expected a callable or a "
                    "torchmetrics object."
                )
        for metric in objects.values():
            metric.to(self.me.device)
            metric.reset()
            # torchmetrics exchanges by itself: only among workers that count, each sample once
            for part in metric.modules():
                if hasattr(part, "process_group") and self.counting is not None:
                    part.process_group = self.counting
        return plain, objects

    def _add_up(
        self,
        judge: Callable[[Any], Judged],
        plain: dict[str, Any],
        objects: dict[str, Any],
        tables: dict[str, Any],
        sums: torch.Tensor,
    ) -> None:
        """Add up loss and metrics."""
        run, strategy, gathering = self._parts, self._parts.strategy, self._gathering
        stand_in: Any = None
        spare: Any = None  # judged on the stand-in
        # A loss that gathers the batch needs every worker.
        gathers = gathering.used is not False and run.plan.pipeline == 1 and run.world.size > 1
        run_empty = strategy.run_empty_inference or gathers
        for batch, samples, count in self._read():
            run.rendezvous.heartbeat.tick()
            gathering.evaluated = int(samples), count
            if not samples:
                stand_in = batch
                if run_empty:
                    spare = strategy.infer(judge, batch)
                continue
            judged = strategy.infer(judge, batch)
            if judged is None or not strategy.counts:
                continue  # it counts on another worker of this replica
            arguments, value, weight = judged
            sums[-1] += samples
            added = weight is not None or run.loss.reduction == "sum"
            sums[0] += float(value) if added else float(value) * samples
            sums[1] += samples if weight is None else float(weight)
            for i, (name, metric) in enumerate(plain.items(), 1):
                total, of = _sum_and_weight(name, metric(*arguments), samples)
                sums[2 * i] += total
                sums[2 * i + 1] += of
            for metric in objects.values():
                metric.update(*arguments)
            for table in tables.values():
                table.update(batch, *arguments)
        if objects and stand_in is not None and not sums[-1]:
            judged = spare if run_empty else strategy.infer(judge, stand_in)
            if judged is not None and strategy.counts:
                for metric in objects.values():
                    metric.update(*judged[0])
                    _clear_but_typed(metric)

    def _read(self) -> Iterator[tuple[Any, float, int]]:
        """Each micro-batch of this worker, how many of its samples are in it, and how many there
        are in its batch.
        """
        run, layout, order = self._parts, self.layout, self.taken.order
        samples, ends = order.samples_in(0), order.ends(0)
        replica = layout.place(self.me.rank).replica

        def mine() -> Any:
            size, replicas = self.batch_size, layout.replicas
            return shares(0, 0, samples, size, replica, replicas, self.micro_batch, ends=ends)

        for share, micros in self.feed.read(mine):
            if mixing := check_same_samples(self.me, self.feed.take_facts(), "run.evaluate"):
                run.warn(mixing)
            left_out = self.feed.left_out or (0,) * len(micros)
            ready = on_device(self.feed, share, micros, self.me.device)
            sizes = [lengths(batch) for batch in ready]
            counts = [h - low - n for (low, h), n in zip(share.micro, left_out, strict=True)]
            if self.rows.is_open:
                self.rows.settle(self.me, sizes, counts)
            for i, (low, high) in enumerate(share.micro):
                for call in self._callbacks.evaluation_batch:
                    call(run, share, low, high)
                rows = self.rows.in_evaluation(sizes[i], counts[i])
                yield ready[i], rows, len(ready)


class Evaluations:
    """The evaluations of one run, by data set."""

    def __init__(self, parts: Parts, gathering: Gathering, callbacks: Callbacks) -> None:
        self._parts, self._gathering, self._callbacks = parts, gathering, callbacks
        self._kept: dict[int, _Evaluation] = {}

    def evaluate(
        self, data: Any, metrics: Mapping[str, Any], name: str, stays: bool
    ) -> EvaluationResult:
        """Loss and metrics over a data set, on all ranks.

        Args:
            stays: whether its loading processes stay.
        """
        run = self._parts
        evaluation = self._of(data)
        run.strategy.sync_buffers()
        modes = [(module, module.training) for module in run.model.modules()]
        run.model.eval()
        for call in self._callbacks.evaluation_started:
            call(run)
        under_way = GlobalDraws.pause()
        try:
            result, samples = evaluation.run(metrics)
        finally:
            GlobalDraws.pause(under_way)
            self._gathering.evaluated = None
            for module, training in modes:
                module.training = training  # each its own: the script may have frozen a part
            if not stays:
                evaluation.feed.close()
        outcome = EvaluationResult(name, result, samples)
        if report := skip_report(
            evaluation.skipped, evaluation.taken.order.epoch_samples, "left out"
        ):
            run.warn(f"{'evaluation' if name == 'evaluate' else name}: {report}")
        for call in self._callbacks.evaluated:
            call(run, outcome)
        return outcome

    def close(self) -> None:
        """End their loading threads and processes. They start again at the next evaluation."""
        for evaluation in self._kept.values():
            evaluation.feed.close()

    def _of(self, data: Any) -> _Evaluation:
        """The evaluation of a data set: the one of an earlier call, or a new one."""
        run = self._parts
        evaluation = self._kept.get(id(data))
        if evaluation is not None and evaluation.data is data:
            if evaluation.taken.resized is None:
                return evaluation
            evaluation.feed.close()
        taken = take_over(
            data,
            seed=run.plan.seed,
            batch_size=None,
            shuffle=None,
            shuffle_dataset=False,
            drop_last=False,
            argument="evaluate's data",
            evaluate=True,
        )
        if (other := other_classes(run.data.dataset, data)) is not None:
            run.warn(
                f"evaluate: {other}. Have both count the same classes: feed.folder(…, like=train), "
                "feed.table(…, like=train)."
            )
        taken = hooks.observer.on_evaluation_data(run, taken)
        evaluation = _Evaluation(run, self._gathering, self._callbacks, data, taken)
        self._kept[id(data)] = evaluation
        if len(self._kept) > 4:  # a script may make a new DataLoader for each evaluation
            self._kept.pop(next(iter(self._kept))).feed.close()
        return evaluation


def _settings_for(data: Any, taken: TakenOver, training: TakenOver) -> LoaderSettings:
    """A DataLoader's own settings; for a bare data set, as many loaders as the training has."""
    if taken.dataset is not data:
        return taken.settings
    own, mine = taken.settings, training.settings
    plain = isinstance(data, IterableDataset) or pipeline_in(data) is None
    if plain and pipeline_in(training.dataset) is None:
        return mine  # the training's collate function is for such data too
    return dataclasses.replace(
        mine,
        collate=own.collate,
        finish=own.finish,
        on_error=own.on_error,
        max_skipped=own.max_skipped,
        init=None,
    )
