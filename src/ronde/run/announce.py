"""Notes and warnings of a run before its first step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ronde.run.parts import Parts
from ronde.watch import SCHEMA_VERSION, RunDir, Started
from ronde.world import VERSION, World
from ronde.world.consensus import gather_json

if TYPE_CHECKING:
    from ronde.watch.sinks import Sending

__all__ = ["announce", "ask_git", "to_tensorboard"]


def announce(run: Parts, left_out: list[str]) -> None:
    """Record the start, and warn if the training is not the same as on one device."""
    me, directory, order = run.world, run.directory, run.data.order
    several = me.size > 1 and me.local_size != me.size
    hosts = dict(Counter(gather_json(me, me.host))) if several else {}
    run.watcher.event(
        Started(
            schema=SCHEMA_VERSION,
            run=directory.name if directory else "",
            script=sys.argv[0] if sys.argv else "",
            workers=me.size,
            device=torch.cuda.get_device_name(me.device) if me.device.type == "cuda" else "cpu",
            host=me.host,
            hosts=hosts if len(hosts) > 1 else {},
            launcher=os.environ.get("RONDE_LAUNCHER", me.launcher),
            model=type(run.model).__name__,
            parameters=sum(p.numel() for p in run.model.parameters()),
            optimizer=type(run.optimizer).__name__,
            samples=order.epoch_samples,
            steps_per_epoch=run.steps_per_epoch,
            threads=torch.get_num_threads(),
            plan=run.plan.to_dict(),
            smallest_batch=min(sizes) if (sizes := order.sizes(0)) else None,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "ronde": VERSION,
            },
            proof=_proof(run),
            arguments=sys.argv[1:],
            git=_code_version() if me.is_main and directory is not None else {},
            origin=directory.origin if directory is not None else "",
            command=json.loads(os.environ.get("RONDE_COMMAND", "[]")),
        )
    )
    _explain_growth(run)
    for note in run.data.notes:
        run.warn(note)
    if left_out:
        shown = ", ".join(map(repr, left_out[:5])) + (", …" if len(left_out) > 5 else "")
        other = "Only a second optimizer does that the script steps, and registers (run.register)"
        if not run.holds_all:
            other = f"Under plan={run.plan.spec!r}, a second optimizer cannot either"
        run.warn(
            f"{len(left_out)} trainable parameters are not in the optimizer given to "
            f"ronde.distribute, which does not train them: {shown}. {other}"
        )
    _explain_reducer(run)
    scaled = [
        name
        for name, m in run.model.named_modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None
    ]
    if scaled and run.plan.replicas > 1:
        run.warn(
            f"{scaled[0]!r} has max_norm, and each worker scales the rows that it looks up itself: "
            "this is not the same training as on one device. Leave max_norm out, and scale all "
            "rows after run.step(batch): weight.copy_(torch.renorm(weight, 2, 0, max_norm))",
            differs=True,
        )
    counted = [
        name
        for name, m in run.model.named_modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.scale_grad_by_freq
    ]
    if counted and max(run.plan.replicas, run.plan.accumulation) > 1:
        run.warn(
            f"{counted[0]!r} has scale_grad_by_freq, which counts rows within each worker's part "
            "or micro-batch: a row that occurs in several gets another gradient than on one "
            "device. Turn it off for the same training"
        )
    _warn_of_norms(run)


def _proof(run: Parts) -> str:
    """What ``ronde prove`` found out about this script under such a plan; empty if nothing."""
    proofs: dict[str, str] = json.loads(os.environ.get("RONDE_PROOFS", "{}"))
    if not proofs:
        return ""
    from ronde.watch.proofs import plan_kind

    return proofs.get(plan_kind(run.plan), "")


def _explain_reducer(run: Parts) -> None:
    if run.plan.reducer == "ring":
        return
    from ronde.plan import parse_reducer

    kind = parse_reducer(run.plan.reducer).kind
    if run.strategy.note:
        run.watcher.say(run.strategy.note)
    elif not kind.exact and run.world.size > 1:
        run.warn(
            f"reducer {run.plan.reducer!r} is lossy: {kind.effect}, so this is not the same "
            "training as on one device",
            differs=True,
        )


def _explain_growth(run: Parts) -> None:
    plan = run.plan
    if plan.batch == "grow" and plan.workers > 1:
        cite = {
            "linear": "linear scaling, Goyal et al. 2017",
            "sqrt": "square root, for adaptive optimizers",
            "none": "unchanged",
        }[plan.lr_rule]
        warm = f", warmed up over {plan.warmup_steps} steps" if plan.warmup_steps else ""
        run.watcher.say(
            f"batch='grow': {plan.workers} workers × {plan.batch_size // plan.workers} = "
            f"{plan.batch_size} samples per step; learning rate × {plan.lr_factor:g} ({cite}){warm}"
        )


def _warn_of_norms(run: Parts) -> None:
    plan = run.plan
    if plan.replicas == plan.accumulation == 1:
        return
    from ronde.parallel import batchnorms, spectral_norms

    norms = batchnorms(run.model)
    if norms and ((plan.replicas > 1 and not plan.sync_batchnorm) or plan.accumulation > 1):
        size = -(-plan.batch_size // plan.replicas)
        size = min(size, plan.micro_batch or size) * (plan.replicas if plan.sync_batchnorm else 1)
        can_sync = plan.replicas > 1 and plan.pipeline == 1 and not plan.sync_batchnorm
        cure = "; sync_batchnorm=True uses all workers'" if can_sync else ""
        more = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
        run.warn(
            f"batch normalization ({norms[0]!r}{more}) sees {size} samples at a time, not the "
            f"global batch of {plan.batch_size}: this is not the same training as on one "
            f"device{cure}",
            differs=True,
        )
    if plan.accumulation > 1 and (iterating := spectral_norms(run.model)):
        run.warn(
            f"spectral normalization ({iterating[0]!r}) iterates once in each forward pass, and a "
            f"step has {plan.accumulation} of them: this is not the same training as without "
            "micro-batches",
            differs=True,
        )


@functools.cache
def ask_git() -> subprocess.Popen[str] | None:
    """Ask git about the script's folder, once in this process; it answers meanwhile. None without
    git.
    """
    script = Path(sys.argv[0] if sys.argv else "")
    command = "git --no-optional-locks status --porcelain=v2 --branch --untracked-files=no"
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            command.split(),
            cwd=script.parent if script.is_file() else Path.cwd(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
    return None


@functools.cache
def _code_version() -> dict[str, Any]:
    """``commit``, and whether tracked files are ``dirty``; empty outside of a repository, or if git
    does not say it in a second.
    """
    if (process := ask_git()) is None:
        return {}
    try:
        lines = process.communicate(timeout=1.0)[0].splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {}
    commit = next((x.split()[-1] for x in lines if x.startswith("# branch.oid ")), "(initial)")
    if process.returncode or commit == "(initial)":
        return {}
    return {"commit": commit, "dirty": any(x[:1] != "#" for x in lines)}


_sending: dict[str, tuple[Sending, set[str]]] = {}
"""Run directory -> who sends it to TensorBoard, and its runs that go on."""


def to_tensorboard(
    directory: RunDir | None, asked: bool, me: World, part: str
) -> Callable[[], None]:
    """Send the record to TensorBoard from a process beside rank 0, if asked for; what to call when
    the run has ended. ``ronde run --to`` says 0 where it sends itself.
    """
    answer = os.environ.get("RONDE_TENSORBOARD")
    if answer == "0" or not me.is_main or directory is None:
        return lambda: None
    key = str(directory.path)
    if key not in _sending:
        if not asked and answer != "1":
            return lambda: None
        from ronde.watch.sinks import Sending, check_target_name

        check_target_name("tensorboard")
        sending = Sending(directory, ["tensorboard"], lambda text: print(text, file=sys.stderr))
        _sending[key] = sending, set()
        atexit.register(sending.close)  # registered before the run's own, so called after it
    sending, parts = _sending[key]
    parts.add(part)

    def ended() -> None:
        parts.discard(part)
        if not parts and key in _sending:
            del _sending[key]
            atexit.unregister(sending.close)
            sending.close()

    return ended
