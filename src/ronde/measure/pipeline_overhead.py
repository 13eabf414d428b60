"""Time costs of a script's model that whole passes do not show, in one process.

These are the cuts of a pipeline and the many small tensors of an optimizer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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


def _clock(device: torch.device) -> Callable[[], float]:
    """CPU time with one compute thread, which leaves out being preempted; else wall time."""
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if one_thread else time.perf_counter


class _TwoStages:
    """A model cut in the middle, both stages in this process."""

    def __init__(self, work: Work, samples: int) -> None:
        self.work, self.batch = work, work.sample(samples)
        trace = follow(work.model, self.compute)
        points = trace.points()
        self.program = program(trace, bounds_of(trace, [points[len(points) // 2]]))

    def compute(self) -> Any:
        return self.work.compute(self.batch)

    def forward(self) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
        """The loss, and the tensors with gradients that cross the cut: as sent and as received."""
        first = StageRun(self.program, 0, {})
        first.run(self.compute)
        grads = self.program.gradients[0]
        received = {
            v: first.sent[v].detach().requires_grad_(v in grads) for v in self.program.sends[0]
        }
        loss = StageRun(self.program, 1, dict(received)).run(self.compute)[0]
        return loss, [first.sent[v] for v in grads], [received[v] for v in grads]


def action_seconds(work: Work, rounds: int = 7) -> float:
    """Seconds that a pipeline's runtime adds to a forward or backward pass of a micro-batch: one
    sample in two stages against the whole model. 0 if the model cannot be cut.
    """
    try:
        with untouched(work.model), watching():
            return _action_seconds(work, rounds)
    except Exception:
        return 0.0


def _action_seconds(work: Work, rounds: int) -> float:
    parameters = [p for p in work.model.parameters() if p.requires_grad]
    now = _clock(parameters[0].device)
    stages = _TwoStages(work, 1)

    def run_whole() -> None:
        stages.compute()[0].backward()

    def run_cut() -> None:
        loss, sent, received = stages.forward()
        loss.backward()
        torch.autograd.backward(sent, [t.grad for t in received])

    seconds: dict[Any, list[float]] = {run_whole: [], run_cut: []}
    for _ in range(rounds + 1):
        for run, times in seconds.items():
            _clear(parameters)
            start = now()
            run()
            times.append(now() - start)
    _clear(parameters)
    whole, cut = (statistics.median(times[1:]) for times in seconds.values())
    return max(0.0, cut - whole) / 4.0


def _clear(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = None


def split_seconds(work: Work, batch_size: int, rounds: int = 6) -> LinearCost:
    """Extra time of a whole backward pass in two parts, inputs then weights, as zero-bubble
    schedules run it. 0 if the model cannot be cut.

    Measured on the second half of the model, at one sample and at an eighth of the batch.
    """
    sizes = sorted({1, max(1, batch_size // 8)})
    try:
        with untouched(work.model), watching():
            return line([(n, 2.0 * _split_seconds(work, n, rounds)) for n in sizes])
    except Exception:
        return LinearCost()


def _split_seconds(work: Work, samples: int, rounds: int) -> float:
    stages = _TwoStages(work, samples)
    weights = [p for p in stages.program.parameters(1) if p.requires_grad]
    now = _clock(weights[0].device)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for split in (False, True):
            loss, _sent, received = stages.forward()
            _clear(weights)
            start = now()
            if split:
                ones = [torch.ones_like(loss)]
                _, groups = stage_backward_input(Once([loss]), ones, received, iter(weights))  # type: ignore[arg-type]
                stage_backward_weight(iter(weights), groups)
            else:
                loss.backward()
            seconds[split].append(now() - start)
    _clear(weights)
    whole, parts = (statistics.median(times[1:]) for times in seconds)
    return max(0.0, parts - whole)


def _corner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[(slice(0, 1),) * tensor.dim()].clone()


def optimizer_fixed_seconds(model: nn.Module, optimizer: Optimizer, rounds: int = 7) -> float:
    """Time an optimizer step in which each parameter is a single number: the part that does not
    depend on their size. 0 if that fails.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        copies: dict[int, torch.Tensor] = {
            id(p): nn.Parameter(_corner(p), p.requires_grad) for p in model.parameters()
        }
        small = copied_optimizer(optimizer, copies, _corner)
        for group in small.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        now = _clock(device)
        seconds = []
        for _ in range(rounds + 2):
            start = now()
            small.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(now() - start)
        return statistics.median(seconds[2:])
    except Exception:
        return 0.0


def clip_fixed_seconds(model: nn.Module, rounds: int = 7) -> float:
    """Time the clipping of gradients that are single numbers. 0 if that fails."""
    corners = [_corner(p) for p in model.parameters() if p.requires_grad]
    if not corners:
        return 0.0
    device = corners[0].device
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    try:
        for p in corners:
            p.grad = torch.ones_like(p)
        return least([time_clipping(corners, device) for _ in range(rounds + 2)][2:], one_thread)
    except Exception:
        return 0.0
