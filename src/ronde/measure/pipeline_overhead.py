"""Time two costs of a script's model that whole passes do not show, in one process.

These are the cuts of a pipeline and the many small tensors of an optimizer.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.optim import Optimizer

from ronde.capture import bounds_of, watching
from ronde.capture.follow import follow
from ronde.measure.cost_lines import line
from ronde.measure.optimizer_memory import copied_optimizer
from ronde.measure.stand_in import untouched
from ronde.measure.timed_model import least, time_clipping
from ronde.parallel import Work
from ronde.parallel.pipeline_parallel import Once
from ronde.parallel.stage_run import StageRun, program
from ronde.predict import LinearCost

__all__ = ["action_seconds", "clip_fixed_seconds", "optimizer_fixed_seconds", "split_seconds"]


def action_seconds(work: Work, rounds: int = 7) -> float:
    """What a pipeline's runtime adds to a forward or backward pass of a micro-batch: a sample in
    two stages against in one piece, both here.

    0 where it cannot be told: the model cannot be cut, or does not run so.
    """
    try:
        with untouched(work.model), watching():
            return _action_seconds(work, rounds)
    except Exception:
        return 0.0


def _action_seconds(work: Work, rounds: int) -> float:
    parameters = [p for p in work.model.parameters() if p.requires_grad]
    calm = parameters[0].device.type == "cpu" and torch.get_num_threads() == 1
    now = time.thread_time if calm else time.perf_counter
    batch = work.sample(1)

    def call() -> Any:
        return work.compute(batch)

    trace = follow(work.model, call)
    points = trace.points()
    made = program(trace, bounds_of(trace, [points[len(points) // 2]]))

    def clear() -> None:
        for p in parameters:
            p.grad = None

    def plain() -> None:
        call()[0].backward()

    def staged() -> None:
        first = StageRun(made, 0, {})
        first.run(call)
        received = {
            v: first.sent[v].detach().requires_grad_(v in made.gradients[0]) for v in made.sends[0]
        }
        second = StageRun(made, 1, dict(received))
        second.run(call)[0].backward()
        torch.autograd.backward(
            [first.sent[v] for v in made.gradients[0]],
            [received[v].grad for v in made.gradients[0]],
        )

    spent: dict[Any, list[float]] = {plain: [], staged: []}
    for _ in range(rounds + 1):
        for one in (plain, staged):
            clear()
            start = now()
            one()
            spent[one].append(now() - start)
    clear()
    whole, cut = (statistics.median(values[1:]) for values in spent.values())
    return max(0.0, cut - whole) / 4.0


def split_seconds(work: Work, batch_size: int, rounds: int = 6) -> LinearCost:
    """What it takes longer to run a whole model's backward pass in two parts, as zero-bubble
    schedules do: that of inputs, then that of weights.

    Measured on the second half of the model, at one sample and at an eighth of the batch. 0 where
    it cannot be told.
    """
    try:
        with untouched(work.model), watching():
            return line(
                [
                    (n, 2.0 * _split_seconds(work, n, rounds))
                    for n in sorted({1, max(1, batch_size // 8)})
                ]
            )
    except Exception:
        return LinearCost()


def _split_seconds(work: Work, samples: int, rounds: int) -> float:
    batch = work.sample(samples)

    def call() -> Any:
        return work.compute(batch)

    trace = follow(work.model, call)
    points = trace.points()
    made = program(trace, bounds_of(trace, [points[len(points) // 2]]))
    weights = [p for p in made.parameters(1) if p.requires_grad]
    calm = weights[0].device.type == "cpu" and torch.get_num_threads() == 1
    now = time.thread_time if calm else time.perf_counter
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for apart in (False, True):
            first = StageRun(made, 0, {})
            first.run(call)
            received = {
                v: first.sent[v].detach().requires_grad_(v in made.gradients[0])
                for v in made.sends[0]
            }
            loss = StageRun(made, 1, dict(received)).run(call)[0]
            for p in weights:
                p.grad = None
            start = now()
            if apart:
                inputs = [received[v] for v in made.gradients[0]]
                _, groups = stage_backward_input(
                    Once([loss]), [torch.ones_like(loss)], inputs, iter(weights)
                )  # type: ignore[arg-type]
                stage_backward_weight(iter(weights), groups)
            else:
                loss.backward()
            spent[apart].append(now() - start)
    for p in weights:
        p.grad = None
    whole, parts = (statistics.median(each[1:]) for each in spent)
    return max(0.0, parts - whole)


def optimizer_fixed_seconds(model: nn.Module, optimizer: Optimizer, rounds: int = 7) -> float:
    """One optimizer step over as many parameters as there are, each a single number: what does not
    depend on their size. 0 where that fails.
    """

    def corner(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()[(slice(0, 1),) * tensor.dim()].clone()

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        made: dict[int, torch.Tensor] = {
            id(p): nn.Parameter(corner(p), p.requires_grad) for p in model.parameters()
        }
        small = copied_optimizer(optimizer, made, corner)
        for group in small.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        calm = device.type == "cpu" and torch.get_num_threads() == 1
        now = time.thread_time if calm else time.perf_counter
        spent = []
        for _ in range(rounds + 2):
            start = now()
            small.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            spent.append(now() - start)
        return statistics.median(spent[2:])
    except Exception:
        return 0.0


def clip_fixed_seconds(model: nn.Module, rounds: int = 7) -> float:
    """Clipping as many gradients as there are parameters, each a single number: what does not
    depend on their size. 0 where that fails.
    """
    given = [p.detach()[(slice(0, 1),) * p.dim()] for p in model.parameters() if p.requires_grad]
    if not given:
        return 0.0
    device = given[0].device
    calm = device.type == "cpu" and torch.get_num_threads() == 1
    try:
        for p in given:
            p.grad = torch.ones_like(p)
        return least([time_clipping(given, device) for _ in range(rounds + 2)][2:], calm)
    except Exception:
        return 0.0
