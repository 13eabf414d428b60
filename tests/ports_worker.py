"""Train ports of public scripts in worlds of forked ranks: ``python ports_worker.py JOB.json``.

A job is a list of cells. A cell is one script, on some workers, under a plan: ``plain.py`` itself,
``train.py`` to its end, or ``train.py`` killed at a step. What became of it goes to
``FOLDER/outcome.json``: trained, refused (with the sentence), killed, failed, or hung.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.utils.data
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import default_collate

import forked  # noqa: F401  (imports what the first optimizer does)
import ronde
from processes import free_port, rank_variables
from ronde.data import key_of
from ronde.feed import Order
from ronde.introspect import seed_all
from ronde.watch import Evaluated, StepRecorded, read

LIMIT = 120.0  # seconds that a cell may take, on a machine with much else to do
KILLED = 9


@dataclass
class Cell:
    """One training.

    Attributes:
        script: the path of ``plain.py`` or ``train.py``.
        folder: the cell's own; the script runs in it.
        kill_at: the optimizer step at which rank 0 dies, or 0.
        resume: go on in ``folder``.
        save_every: added to the arguments of ``ronde.distribute``.
    """

    script: str
    folder: str
    arguments: list[str] = dataclasses.field(default_factory=list)
    workers: int = 1
    plan: str = ""
    kill_at: int = 0
    resume: bool = False
    save_every: int = 0
    limit: float = LIMIT


# What a script owns besides its weights, from its variables: plain and train alike.
VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "word_lm": lambda g: [_kept(g, "best"), _rate(g)],
    "reinforce": lambda g: _kept(g, "average"),
    "simclr": lambda g: [_rate(g), g["scheduler"].last_epoch, g["score"]],
    "diffusion": lambda g: _rate(g),
    "imagenet": lambda g: [_kept(g, "best"), _rate(g), g["scheduler"].last_epoch],
    "gpt": lambda g: _rate(g),
}


def _kept(g: dict[str, Any], name: str) -> Any:
    return getattr(g["kept"], name) if "kept" in g else g[name]


def _rate(g: dict[str, Any]) -> float:
    return g["optimizer"].param_groups[0]["lr"]


def flat(value: Any) -> list[float]:
    """All numbers in it."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, list | tuple):
        return [number for each in value for number in flat(each)]
    return [] if value is None else [float(value)]


class KeyedLoader:
    """A DataLoader that reads in Ronde's order, with Ronde's random numbers for each sample.

    What the loop then draws for a batch (``torch.randn_like`` and the like) comes from each sample's
    own numbers, too. So a script that draws noise in its loop equals one that draws it per sample.
    """

    streams: ClassVar[list[torch.Generator]] = []  # of the samples of the last batch, for its loop

    def __init__(self, dataset, batch_size, shuffle=False, collate_fn=None, drop_last=False):
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.collate, self.drop_last = collate_fn or default_collate, drop_last
        self.epoch = 0

    def __len__(self):
        whole = len(self.dataset) / self.batch_size
        return math.floor(whole) if self.drop_last else math.ceil(whole)

    def __iter__(self):
        n = len(self.dataset)
        order = Order(n, 0, self.shuffle)
        epoch = self.epoch if self.shuffle else 0
        ids = order.ids(epoch, 0, n).tolist()
        self.epoch += 1
        for i in range(len(self)):
            chosen = ids[i * self.batch_size : (i + 1) * self.batch_size]
            keys = [key_of(0, 1, epoch, k) for k in chosen]
            samples, KeyedLoader.streams = [], []
            for k, key in zip(chosen, keys, strict=True):
                seed_all(key)
                samples.append(self.dataset[k])
            KeyedLoader.streams = [torch.Generator().manual_seed(key) for key in keys]
            yield self.collate(samples)


def _play_as_ronde(losses: list[float], counts: dict[str, int]) -> None:
    """Give a plain script Ronde's order and random numbers; note its losses."""
    randn, randint, backward = torch.randn, torch.randint, torch.Tensor.backward

    def per_sample(draw: Callable[..., torch.Tensor], count: int) -> torch.Tensor:
        assert count == len(KeyedLoader.streams)
        return torch.stack([draw(generator=stream) for stream in KeyedLoader.streams])

    def randn_like(like):
        return per_sample(lambda **k: randn(like.shape[1:], **k), len(like))

    def keyed_randn(*shape, **options):
        shape = tuple(shape[0]) if isinstance(shape[0], torch.Size) else shape
        if KeyedLoader.streams and shape[0] == len(KeyedLoader.streams) and not options:
            return per_sample(lambda **k: randn(shape[1:], **k), shape[0])
        return randn(*shape, **options)

    def keyed_randint(*bounds, **options):
        *bounds, shape = bounds
        if KeyedLoader.streams and len(shape) == 1 and not options:
            return per_sample(lambda **k: randint(*bounds, (), **k), *shape)
        if "samples" in counts and not options:  # no loader: one draw for each sample to come
            at = counts["at"]
            ids = Order(counts["samples"], 0, False).ids(0, at, at + shape[0]).tolist()
            counts["at"] += shape[0]
            streams = [torch.Generator().manual_seed(key_of(0, 1, 0, k)) for k in ids]
            return torch.stack([randint(*bounds, (), generator=stream) for stream in streams])
        return randint(*bounds, shape, **options)

    begun = True

    def noted(self, *arguments, **options):
        nonlocal begun
        if begun:
            losses.append(0.0)
        begun = False
        losses[-1] += float(self.detach())  # of several micro-batches, their sum
        return backward(self, *arguments, **options)

    def stepped(*_):
        nonlocal begun
        begun = True

    register_optimizer_step_post_hook(stepped)
    torch.utils.data.DataLoader = KeyedLoader
    torch.randn_like, torch.randn, torch.randint = randn_like, keyed_randn, keyed_randint
    torch.Tensor.backward = noted


def _train(cell: Cell, rank: int) -> dict[str, Any]:
    """In a rank: run the script, and say what came of it."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    script, folder = Path(cell.script), Path(cell.folder)
    name = script.parent.name
    sys.path.insert(0, str(script.parent))
    sys.argv = [cell.script, *cell.arguments]
    losses: list[float] = []
    if script.name == "plain.py":
        counts = {}
        if name == "reinforce":
            options = dict(zip(cell.arguments[::2], cell.arguments[1::2], strict=True))
            counts = {"at": 0, "samples": int(options["--updates"]) * int(options["--episodes"])}
        _play_as_ronde(losses, counts)
    os.environ.update({"RONDE_PROGRESS": "quiet", "RONDE_DEVICE": "cpu", "RONDE_PLAN": cell.plan})
    os.environ["RONDE_RUN_DIR"] = str(folder / "run")
    os.environ["RONDE_RESUME"] = "1" if cell.resume else "0"
    if not cell.plan:
        del os.environ["RONDE_PLAN"]
    distribute, steps = ronde.distribute, 0

    def often(*arguments, **options):
        if cell.save_every:
            options.setdefault("save_every", cell.save_every)
            options.setdefault("async_save", False)
        return distribute(*arguments, **options)

    def count(*_):
        nonlocal steps
        steps += 1
        if steps == cell.kill_at and rank == 0:
            os._exit(KILLED)

    ronde.distribute = often
    if cell.kill_at:
        register_optimizer_step_post_hook(count)
    g = runpy.run_path(cell.script, run_name="__main__")
    outcome: dict[str, Any] = {"values": flat(VALUES.get(name, lambda _: None)(g))}
    if script.name == "plain.py":
        state = dict(g["model"].state_dict())
        if "ema" in g:  # the script has copied it into the model
            names = [name for name, _ in g["model"].named_parameters()]
            state = dict(zip(("average." + n for n in names), g["ema"].shadow_params, strict=True))
        return outcome | {"losses": losses, "weights": {k: flat(v) for k, v in state.items()}}
    g["run"].export(folder / "final.safetensors")
    if "average" in g:
        g["run"].export(folder / "average.safetensors", average=g["average"])
    atexit._run_exitfuncs()  # the record's last lines
    if rank == 0:
        from safetensors.torch import load_file

        weights = load_file(folder / "final.safetensors")
        if "average" in g:
            averaged = load_file(folder / "average.safetensors")
            weights |= {"average." + name: value for name, value in averaged.items()}
        events = list(read(folder / "run" / "record.jsonl"))
        by_step = {e.step: e.loss for e in events if isinstance(e, StepRecorded)}
        outcome["losses"] = [by_step[step] for step in sorted(by_step)]
        judged = {
            (e.epoch, e.step): list(e.metrics.values()) for e in events if isinstance(e, Evaluated)
        }
        outcome["evaluations"] = [flat(judged[at]) for at in sorted(judged)]
        outcome["weights"] = {k: flat(v) for k, v in weights.items()}
    return outcome


def _rank(cell: Cell, rank: int, port: int) -> None:
    folder = Path(cell.folder)
    os.chdir(folder)
    for number in (1, 2):
        os.dup2(
            os.open(folder / f"rank-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), number
        )
    if cell.workers > 1:
        os.environ.update(rank_variables(rank, cell.workers, port))
    status = 1
    try:
        outcome, status = {"state": "trained", **_train(cell, rank)}, 0
    except ronde.RondeError as error:
        outcome = {"state": "refused", "text": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"state": "failed", "text": f"{type(error).__name__}: {error}"}
    partial = folder / f"rank-{rank}.partial"
    partial.write_text(json.dumps(outcome))
    partial.rename(folder / f"rank-{rank}.json")
    sys.stdout.flush()
    os._exit(status)


class World:
    """The ranks of a cell, while they run."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.begun = cell, time.monotonic()
        folder = Path(cell.folder)
        (folder / "run").mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank-*"):
            old.unlink()
        port, parent = free_port(), os.getpid()
        self.ranks: dict[int, int] = {}
        self.failed = 0.0
        for rank in range(cell.workers):
            pid = os.fork()
            if not pid:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                if os.getppid() == parent:
                    _rank(cell, rank, port)
                os._exit(1)
            self.ranks[pid] = rank

    def over(self) -> bool:
        """Whether it has ended. Ranks that a failed one leaves behind have a second to say so too."""
        for pid in list(self.ranks):
            ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
            if ended and not self._trained(self.ranks.pop(pid)):
                self.failed = self.failed or time.monotonic()
        if not self.ranks:
            return True
        now = time.monotonic()
        if now - self.begun < self.cell.limit and not (self.failed and now - self.failed > 1.5):
            return False
        for pid in self.ranks:
            os.kill(pid, signal.SIGKILL)
        for pid in self.ranks:
            os.waitpid(pid, 0)
        return True

    def _trained(self, rank: int) -> bool:
        said = Path(self.cell.folder) / f"rank-{rank}.json"
        return said.exists() and said.read_text().startswith('{"state": "trained"')

    def outcome(self) -> dict[str, Any]:
        folder, seconds = Path(self.cell.folder), time.monotonic() - self.begun
        said = [json.loads(p.read_text()) for p in sorted(folder.glob("rank-*.json"))]
        states = [each["state"] for each in said]
        if self.cell.kill_at and states.count("trained") < self.cell.workers:
            result: dict[str, Any] = {"state": "killed"}
        elif "failed" in states and "refused" not in states:
            result = said[states.index("failed")]
        elif "refused" in states:
            result = said[states.index("refused")]
        elif states.count("trained") == self.cell.workers:
            result = said[0]
        else:
            hung = sorted(self.ranks.values())
            result = {"state": "hung", "text": f"rank {hung} of {self.cell.workers}"}
        return {**result, "seconds": round(seconds, 1), "ranks": states}


def main() -> None:
    for name in filter(None, os.environ.get("PORT_IMPORTS", "").split(",")):
        with contextlib.suppress(ImportError):
            __import__(name)
    chains = [[Cell(**c) for c in chain] for chain in json.loads(Path(sys.argv[1]).read_text())]
    waiting, running = list(chains), []
    while waiting or running:
        while waiting and len(running) < 2:
            chain = waiting.pop(0)
            running.append((World(chain[0]), chain[1:]))
        for entry in list(running):
            world, rest = entry
            if not world.over():
                continue
            running.remove(entry)
            (Path(world.cell.folder) / "outcome.json").write_text(json.dumps(world.outcome()))
            if rest:
                waiting.insert(0, rest)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
