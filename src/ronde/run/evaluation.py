"""Evaluation: every sample counted once, on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ronde.data import stage
from ronde.loader import Feed, LoaderSettings, Taken, too_many
from ronde.parallel import Strategy
from ronde.plan import Layout, Place, Plan, Share, shares
from ronde.run.losses import LossCall
from ronde.world import ArgumentError, FeedError, World
from ronde.world.consensus import gather_json
from ronde.world.meshes import group_of
from ronde.world.tensors import map_leaves, map_tensors

__all__ = ["Evaluation", "gather_skipped", "on_device", "to_device"]


@stage("copy")
def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in a batch, whatever it is made of."""

    def move(v: Any) -> Any:
        return (
            v.to(device, non_blocking=True)
            if isinstance(v, torch.Tensor)
            else v.to(device)
            if _moves(v)
            else v
        )

    return map_leaves(move, value, leaf=_moves)


def _moves(value: Any) -> bool:
    """Whether a value has a ``to`` of its own: a packed sequence, transformers' BatchEncoding, a
    class of the script.
    """
    return isinstance(value, PackedSequence) or (
        not isinstance(value, list | tuple | dict) and callable(getattr(value, "to", None))
    )


def on_device(feed: Feed, share: Share, micros: list[Any], device: torch.device) -> list[Any]:
    """A share's micro-batches on the device, and with what the pipeline does to them there."""
    if device.type != "cpu":
        micros = [to_device(m, device) for m in micros]
    return feed.finish(share, micros)


def gather_skipped(feed: Feed, layout: Layout, me: World) -> list[tuple[int, str]]:
    """Bad samples of every worker since its feed began to read; of workers that read the same
    samples, one. A collective where any may be.

    Raises:
        FeedError: they are more than may be.
    """
    settings, of = feed.settings, feed.order.epoch_samples
    if settings.on_error != "skip":
        return []
    place = layout.place(me.rank)
    mine = feed.skipped if (place.pipeline, place.tensor) == (0, 0) else []
    found = [(int(i), str(text)) for each in gather_json(me, mine) for i, text in each]
    if len(found) > settings.max_skipped * of:
        raise FeedError(too_many(found, of, settings.max_skipped))
    return found


def _is_torchmetric(metric: Any) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def _sum_and_weight(name: str, value: Any, samples: int) -> tuple[float, float]:
    """What a plain metric returned, as a sum and its weight."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return float(value[0]), float(value[1])
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.numel() == 1:
            return float(value.reshape(())) * samples, float(samples)
        if value.shape[0] == samples:
            return float(value.double().sum()), float(value.numel())
        raise ArgumentError(
            f"metric {name!r} returned a tensor of shape {tuple(value.shape)} for {samples} "
            "samples: expected a mean (0-d), one value per sample, or (sum, weight)."
        )
    if isinstance(value, int | float):
        return float(value) * samples, float(samples)
    raise ArgumentError(
        f"metric {name!r} returned {type(value).__name__}: expected a number, a tensor, or "
        "(sum, weight)."
    )


def _forget(metric: Any) -> None:
    """Take a torchmetrics object's only update back, but keep the kinds of what it has collected.

    Its exchange gathers lists of tensors, and does not match if a rank that saw no sample has none
    of the type of the others'.
    """
    for part in metric.modules():
        for name, default in getattr(part, "_defaults", {}).items():
            state = getattr(part, name)
            if isinstance(state, list):
                setattr(
                    part,
                    name,
                    [value.reshape(-1)[:0] if value.dim() == 0 else value[:0] for value in state],
                )
            else:
                setattr(part, name, default.detach().clone().to(state.device))


class Evaluation:
    """Reads one data set for evaluation; kept between calls, so that its loading processes can be.

    Args:
        data: what the user gave.
        taken: how it is read.
        settings: how samples are fetched.
        say: told what was chosen where there was a choice; see :class:`Feed`.

    Attributes:
        skipped: after a run, ``(id, text)`` of samples of any worker that could not be used: they
            are left out.
    """

    def __init__(
        self,
        data: Any,
        taken: Taken,
        settings: LoaderSettings,
        plan: Plan,
        me: World,
        say: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.data = data
        self.taken = taken
        self.me = me
        # A DataLoader's own batch size means the same as in training: samples of all workers
        # together.
        self.batch_size = max(taken.batch_size or plan.batch_size, 1)
        self.micro_batch = plan.micro_batch if taken.batch_size is None else None
        self.feed = Feed(
            taken.dataset,
            taken.order,
            settings,
            plan.seed,
            evaluate=True,
            on_cpu=me.device.type == "cpu",
            say=say,
        )
        self.skipped: list[tuple[int, str]] = []
        self.layout = plan.layout
        # One worker of each replica: the last of its pipeline, the first of those that hold a layer
        # together.
        self.counting: Any = None
        if self.layout.replicas < me.size:
            last = self.layout.pipeline - 1
            self.counting = group_of(
                "counting",
                [self.layout.rank(Place(last, r, 0)) for r in range(self.layout.replicas)],
            )

    def run(
        self,
        model: nn.Module,
        loss: LossCall,
        metrics: dict[str, Any],
        autocast: Callable[[], AbstractContextManager[Any]],
        strategy: Strategy,
    ) -> tuple[dict[str, Any], int]:
        """Loss and metrics over the whole set, and how many samples they are of."""
        if "loss" in metrics:
            raise ArgumentError("a metric cannot be called 'loss': that name is the loss's own.")
        me, order = self.me, self.taken.order
        objects = {name: m for name, m in metrics.items() if _is_torchmetric(m)}
        plain = {name: m for name, m in metrics.items() if name not in objects}
        for name, metric in plain.items():
            if not callable(metric):
                raise ArgumentError(
                    f"metric {name!r} is {type(metric).__name__}: expected a callable or a "
                    "torchmetrics object."
                )
        for metric in objects.values():
            metric.to(me.device)
            metric.reset()
        # Row 0: the loss, then each plain metric: sums and weights in float64; the last cell counts
        # samples.
        sums = torch.zeros(2 * (1 + len(plain)) + 1, dtype=torch.float64)

        def mine() -> Any:
            replica = self.layout.place(me.rank).replica
            return shares(
                0,
                0,
                order.epoch_samples,
                self.batch_size,
                replica,
                self.layout.replicas,
                self.micro_batch,
            )

        def judge(batch: Any) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor | None]:
            with autocast():
                arguments = loss.arguments(model, batch)
                return arguments, *loss.check(loss.loss(*arguments))

        # torchmetrics exchanges what it has collected by itself: among those that have collected
        # something, each sample once.
        for metric in objects.values():
            for part in metric.modules():
                if hasattr(part, "process_group") and self.counting is not None:
                    part.process_group = self.counting
        counted = 0
        stand_in: Any = None
        spare: Any = None  # what the stand-in gave
        run_empty = strategy.run_empty_inference
        with torch.no_grad():
            for share, micros in self.feed.read(mine):
                left_out = self.feed.left_out or (0,) * len(micros)
                for batch, (low, high), missing in zip(
                    on_device(self.feed, share, micros, me.device),
                    share.micro,
                    left_out,
                    strict=True,
                ):
                    samples = high - low - missing
                    if not samples:
                        stand_in = batch
                        if run_empty:
                            spare = strategy.infer(judge, batch)
                        continue
                    judged = strategy.infer(judge, batch)
                    if judged is None or not strategy.counts:
                        continue  # it counts on another worker of this replica
                    arguments, value, weight = judged
                    counted += samples
                    sums[0] += float(value) if weight is not None else float(value) * samples
                    sums[1] += samples if weight is None else float(weight)
                    for i, (name, metric) in enumerate(plain.items(), 1):
                        total, of = _sum_and_weight(name, metric(*arguments), samples)
                        sums[2 * i] += total
                        sums[2 * i + 1] += of
                    for metric in objects.values():
                        metric.update(*arguments)
            sums[-1] = counted
            empty = bool(objects) and stand_in is not None and counted == 0
            judged = None
            if empty:
                judged = spare if run_empty else strategy.infer(judge, stand_in)
            if judged is not None and strategy.counts:
                arguments = judged[0]
                for metric in objects.values():
                    metric.update(*arguments)
                    _forget(metric)
            if me.size > 1:
                total_sums = sums.to(me.device)
                dist.all_reduce(total_sums)
                sums = total_sums.cpu()
        self.skipped = gather_skipped(self.feed, self.layout, me)
        values = sums.tolist()
        result: dict[str, Any] = {}
        for i, name in enumerate(["loss", *plain]):
            result[name] = values[2 * i] / values[2 * i + 1] if values[2 * i + 1] else float("nan")
        for name, metric in objects.items():
            if strategy.counts:
                # it exchanges its own states over all ranks
                result[name] = map_tensors(torch.Tensor.tolist, metric.compute())
            metric.reset()
        if objects and self.counting is not None:
            result = next(r for r in gather_json(me, result if strategy.counts else {}) if r)
        return result, int(values[-1])
