"""Measures gradients, updates, weights, and layers' outputs every so many steps: ``--watch``.

Each worker takes norms of the parts that it holds; a part that several hold is one worker's. So one
sum over all ranks is exact under every plan, and the cost falls with replicas. Nothing here changes
the training, and what fails is told once.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ronde.run.callback import Callback, StepView
from ronde.run.layer_outputs import LayerOutputs
from ronde.run.parts import Parts
from ronde.run.tensor_norms import TensorNorms
from ronde.watch.health_record import HEALTH, HealthFile, rounded
from ronde.world.consensus import gather_json
from ronde.world.tensors import named_tensors

__all__ = ["Health", "code_place"]

_FIRST_STEPS = 10  # whose layers are measured, for how weights were initialized
_EARLY_STEPS = 20  # all measured
_LAYERS_EVERY_STEPS = 8  # measured steps
_MOST_BYTES = 16 << 20  # of the file; then half as many steps are measured
_MOST_CLASSES = 1000  # whose samples are counted


class Health(Callback):
    """See the module.

    Args:
        every: steps from one measurement to the next.
        ends: whether the run ends at a loss that is not finite.
    """

    def __init__(self, run: Parts, every: int, ends: bool) -> None:
        assert run.directory is not None
        self._me, self._ends = run.world, ends
        path = run.directory.path / HEALTH
        self._file = HealthFile(path)
        self._bytes = path.stat().st_size if run.world.is_main and path.exists() else 0
        if run.world.is_main:
            run.watcher.before_flush = self._file.flush
        self._every = every
        self._flags: list[Any] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._tensors: TensorNorms | None = None
        self._agreed = False  # on the layers
        self._described = False  # whether a line says what the numbers are
        self._layers = LayerOutputs(run.model, run.plan, run.world)
        self._counts: torch.Tensor | None = None
        self._measures = self._opens = self._ready = False
        self._failed = False

    def batch_taken(self, step: StepView) -> None:
        """Decide whether this step is measured. A collective at the first one."""
        number = step.number + 1
        self._measures = number <= _EARLY_STEPS or number % self._every == 0
        self._ready = False
        if not self._measures:
            return
        every = self._every * _LAYERS_EVERY_STEPS
        self._opens = number <= _FIRST_STEPS or number % every == 0
        self._prepare(step.parts)
        # a resume learns which layers there are
        if (self._opens or not self._agreed) and step.share.samples:
            self._attempt(self._layers.open)

    def _prepare(self, run: Parts) -> TensorNorms:
        """The tensors as they are now. A collective where they have changed, which they do on all
        ranks.
        """
        flags: list[Any] = [p.requires_grad for p in self._parameters]
        flags += map(id, run.strategy.parameters)
        if self._tensors is None or flags != self._flags:
            if self._tensors is None:
                self._bytes = gather_json(run.world, self._bytes)[0]
            self._tensors, self._described = TensorNorms(run), False
            self._parameters = list(run.model.parameters())
            self._flags = [p.requires_grad for p in self._parameters]
            self._flags += map(id, run.strategy.parameters)
        return self._tensors

    def after_exchange(self, step: StepView) -> None:
        """The passes have ended. A collective where the run ends now."""
        if self._measures:
            self._layers.close()
        if not self._ends or self._me.device.type != "cpu":  # a device would be waited for
            return
        lost = not math.isfinite(step.loss)
        if step.parts.plan.tensor > 1:  # a rank may be alone with such a loss
            if not self._measures:
                return
            flag = torch.tensor(float(lost))
            self._exchange(flag, dist.ReduceOp.MAX)
            lost = bool(flag)
        if lost:
            self._explain(step)

    def _explain(self, step: StepView) -> None:
        """Write whose loss is not finite, and which layer's outputs were the first."""
        run, layers, number = step.parts, self._layers, step.number + 1
        tensors, local = self._prepare(run), run.strategy.local_loss
        lost = local is not None and not math.isfinite(local)
        plan = run.plan
        self._attempt(layers.open)  # before the passes: a rank that fails takes part
        if step.share.global_samples >= plan.replicas and not layers.left_out:
            for micro in step.micros:
                with torch.no_grad():
                    run.strategy.infer(lambda batch: run.loss(run.model, batch), micro)
        layers.close()
        everyone = gather_json(self._me, [lost, layers.first_bad()])
        if self._me.is_main:
            nothing = [None] * len(tensors.names)
            columns = dict.fromkeys(("gradient", "weight", "update", "same"), nothing)
            bad = [rank for rank, (lost, _) in enumerate(everyone) if lost]
            replicas = {plan.layout.place(rank).replica for rank in bad}
            places = [(rank, plan.layout.place(rank)) for rank in range(self._me.size)]
            # ranks are numbered stage by stage: the first is the first in forward order
            layers_of_ranks = [everyone[r][1] for r, place in places if place.replica in replicas]
            first = next(filter(None, layers_of_ranks), None)
            line = {**_about(step), **columns, "bad_ranks": bad, "first_bad": first}
            self._describe(run, tensors, number)
            self._file.hold(None, lambda _: [line])
            run.watcher.flush()

    def before_clip(self, step: StepView) -> None:
        """Take the gradients as they are averaged."""
        if self._measures and self._tensors is not None:
            self._ready = True
            self._attempt(self._tensors.gradients)
            self._attempt(self._tensors.keep)

    def after_update(self, step: StepView) -> None:
        """Take updates and weights, and exchange all. A collective."""
        tensors, me, number = self._tensors, self._me, step.number + 1
        if not (self._measures and self._ready) or tensors is None:
            return
        if not self._agreed:
            self._agreed, self._described = True, False
            self._layers.agree()
        opens = self._opens and bool(self._layers.names)
        self._attempt(tensors.updates)
        own = torch.zeros(1 + 2 * me.size, dtype=torch.float64, device=me.device)
        own[0] = self._failed
        if (lost := step.parts.strategy.local_loss) is not None:
            own[1 + me.rank] = ~lost.detach().isfinite()
        layers = self._layers.sums() if opens else own[:0]
        if opens:
            own[1 + me.size + me.rank] = ~layers.isfinite().all()
        flat = torch.cat([own, tensors.values.flatten(), layers.flatten()])
        self._exchange(flat, dist.ReduceOp.SUM)
        if opens:
            largest = partial(self._exchange, op=dist.ReduceOp.MAX)
            flat = torch.cat([flat, self._layers.dead(largest)])
        if me.is_main:
            self._describe(step.parts, tensors, number)
            shown = self._layers if opens else None
            self._file.hold(flat, partial(health_lines, _about(step), tensors.all, me.size, shown))
            if self._opens:
                self._attempt(self._look_at_batch, step)
        self._bytes += 4 * 8 * len(tensors.names)  # a number takes about 8 bytes
        if self._bytes > _MOST_BYTES:
            self._bytes, self._every, self._described = 0, 2 * self._every, False

    def ended(self, parts: Parts, status: str) -> None:
        """See :class:`Callback`."""
        self._layers.close()

    def _attempt(self, call: Callable[..., None], *args: Any) -> None:
        """A worker that cannot measure still takes part in exchanges."""
        if self._failed:
            return
        try:
            with torch.no_grad():
                call(*args)
        except Exception as error:
            self._failed = True
            sentence = f"rank {self._me.rank} cannot measure ({type(error).__name__}: {error})"
            print(f"ronde: {sentence}; training continues", file=sys.stderr)

    def _exchange(self, values: torch.Tensor, op: Any) -> None:
        if self._me.size > 1:
            dist.all_reduce(values, op)

    def _describe(self, run: Parts, tensors: TensorNorms, number: int) -> None:
        """Hold the line that says what the numbers of later ones are, where that has changed."""
        if self._described:
            return
        self._described = True
        layers = self._layers
        line = {
            "type": "tensors",
            "step": number,
            "every": self._every,
            "start": run.watcher.began,
            "names": tensors.names,
            "places": [code_place(run.model, n) for n in tensors.names],
            "elements": [p.numel() for p in tensors.all.values()],
            "frozen": [not p.requires_grad for p in tensors.all.values()],
            "layers": layers.names,
            "layer_kinds": layers.kinds,
            "layer_places": [code_place(run.model, n) for n in layers.names],
            "left_out": layers.left_out,
        }
        self._file.hold(None, lambda _: [line])

    def _look_at_batch(self, step: StepView) -> None:
        """Hold what rank 0's part of the batch is like."""
        tensors = [t for _, t in named_tensors(step.micros[0])] if step.micros else []
        floats = next((t for t in tensors if t.is_floating_point() and len(t) > 1), None)
        if floats is not None:
            x = floats.detach().double()
            constant = (x.amax(0) == x.amin(0)).double().mean()
            facts = torch.stack([x.mean(), x.std(), constant])
            self._file.hold(facts, partial(inputs_line, step.number + 1))
        classes = tensors[-1] if len(tensors) > 1 else None
        if classes is not None and classes.ndim == 1 and classes.dtype == torch.int64:
            valid = (classes >= 0) & (classes < _MOST_CLASSES)
            counts = classes.new_zeros(_MOST_CLASSES)  # bincount would wait for a device
            counts.scatter_add_(0, classes.clamp(0, _MOST_CLASSES - 1), valid.to(counts))
            self._counts = counts if self._counts is None else self._counts + counts
            self._file.hold(self._counts, partial(targets_line, step.number + 1))


def _about(step: StepView) -> dict[str, Any]:
    first, share = step.parts.state.samples, step.share
    samples: Sequence[int] = [first, first + share.global_samples]
    return {"type": "health", "step": step.number + 1, "epoch": share.epoch, "samples": samples}


# -- the lines of health.jsonl ---------------------------------------------------------


def health_lines(
    about: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    ranks: int,
    layers: LayerOutputs | None,
    values: Sequence[float],
) -> list[dict[str, Any]]:
    """The lines of a measured step.

    Args:
        about: what the line has besides numbers.
        tensors: all parameters by name.
        layers: None where they were not measured.
        values: of all ranks together: how many cannot measure, for each rank whether its loss and
            its layers are not finite; squares of gradients, weights, and updates, and
            equal elements, of all tensors; sums of layers; dead units.

    Raises:
        RuntimeError: a rank could not measure.
    """
    if values[0]:
        raise RuntimeError(f"{values[0]:.0f} of {ranks} ranks cannot measure this training")
    count, at = len(tensors), 1 + 2 * ranks
    gradients, weights, updates, equal = (
        values[at + i * count : at + (i + 1) * count] for i in range(4)
    )
    at += 4 * count
    frozen = [not p.requires_grad for p in tensors.values()]

    def norms(squares: Sequence[float]) -> list[float | None]:
        each = zip(squares, frozen, strict=True)
        return [None if none or square < 0 else math.sqrt(square) for square, none in each]

    columns_of_tensors = {
        "gradient": norms(gradients),
        "weight": norms(weights),
        "update": norms(updates),
    }
    parts = zip(equal, tensors.values(), frozen, strict=True)
    columns_of_tensors["same"] = [
        None if none or not p.numel() else n / p.numel() for n, p, none in parts
    ]
    bad = [r for r in range(ranks) if values[1 + r] or values[1 + ranks + r]]
    if not bad and any(
        g is not None and not math.isfinite(g) for g in columns_of_tensors["gradient"]
    ):
        bad = list(range(ranks))  # they were averaged: whose it was is not known
    lines = [{**about, **_rounded(columns_of_tensors), "bad_ranks": bad, "first_bad": None}]
    if layers is not None:
        end = at + 3 * len(layers.names)
        columns, lines[0]["first_bad"] = layers.describe(values[at:end], values[end:])
        lines.append({"type": "activations", "step": about["step"], **_rounded(columns)})
    return lines


def _rounded(columns: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    return {name: [rounded(x) for x in column] for name, column in columns.items()}


def inputs_line(step: int, facts: Sequence[float]) -> list[dict[str, Any]]:
    """The line of a batch's mean, standard deviation, and fraction of constant features."""
    columns = dict(zip(("mean", "std", "constant"), map(rounded, facts), strict=True))
    return [{"type": "inputs", "step": step, **columns}]


def targets_line(step: int, counts: Sequence[float]) -> list[dict[str, Any]]:
    """The line of samples per class."""
    most = max((i for i, n in enumerate(counts) if n), default=-1)
    return [{"type": "targets", "step": step, "counts": [int(n) for n in counts[: most + 1]]}]


def code_place(model: nn.Module, name: str) -> str:
    """``FILE:LINE`` of the line that makes a layer, in the innermost class of the script's own that
    holds it, or of that class; empty without such a class.

    Args:
        name: of a parameter or a module, as ``state_dict()`` has it.

    Example:
        >>> code_place(torch.nn.Sequential(torch.nn.Linear(2, 2)), "0.weight")
        ''
    """
    owner, attribute, module = None, "", model
    for piece in [*name.split("."), ""]:
        if not type(module).__module__.startswith("torch."):
            owner, attribute = type(module), piece
        if not isinstance(child := getattr(module, piece, None), nn.Module):
            break
        module = child
    if owner is None:
        return ""
    try:
        file, (lines, first) = inspect.getsourcefile(owner), inspect.getsourcelines(owner)
    except (OSError, TypeError):  # made by exec, or in a notebook that is gone
        return ""
    made = re.compile(rf"\bself\.{re.escape(attribute)}\b[^=]*=[^=]")
    at = next((i for i, line in enumerate(lines) if attribute and made.search(line)), 0)
    path = Path(file or "")
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name
    return f"{here}:{first + at}"
