"""The run directory, record, and checkpoints of a training without a torch model."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ronde import checkpoint
from ronde.run.group import end_process, open_run_dir
from ronde.run.leave import leaving
from ronde.watch import (
    SCHEMA_VERSION,
    Checkpointed,
    Ended,
    Evaluated,
    Record,
    Resumed,
    Started,
    Watcher,
    choose_display,
)
from ronde.world import VERSION, CheckpointError, World
from ronde.world.consensus import broadcast_json

__all__ = ["BoostingRecord"]


class BoostingRecord:
    """Records and saves the rounds of a training, on rank 0.

    Args:
        name: of the run directory.
        facts: what a checkpoint must agree with, as JSON holds it.
    """

    def __init__(self, me: World, name: str | None, facts: Mapping[str, Any]) -> None:
        self._me, self._facts = me, dict(facts)
        self.directory, self._resumes = open_run_dir(me, name, alone=True)
        record = Record(self.directory.record) if me.is_main and self.directory else None
        self._watcher = Watcher(record, choose_display(me.is_main), me.is_main)
        self._leaving = leaving(me) if os.environ.get("RONDE_LEAVE") == "1" else None
        self._rows, self._began, self._rounds = 0, time.monotonic(), 0

    def begin(self, model: str, rows: int, note: str) -> None:
        """Record the start."""
        me, self._rows = self._me, rows
        self._watcher.event(
            Started(
                schema=SCHEMA_VERSION,
                run=self.directory.name if self.directory else "",
                script=sys.argv[0] if sys.argv else "",
                workers=me.size,
                device="cpu",
                host=me.host,
                launcher=os.environ.get("RONDE_LAUNCHER", me.launcher),
                model=model,
                parameters=0,
                optimizer="boosting",
                samples=rows,
                steps_per_epoch=1,
                threads=torch.get_num_threads(),
                plan={},
                versions={"python": platform.python_version(), "ronde": VERSION},
                arguments=sys.argv[1:],
                command=json.loads(os.environ.get("RONDE_COMMAND", "[]")),
            )
        )
        self._watcher.say(note)

    def resume(self) -> tuple[int, bytes | None, dict[str, Any]]:
        """Rounds done, model, and state of the newest checkpoint. A collective."""
        answer: dict[str, Any] = {}
        newest = None
        if self._me.is_main and self._resumes and self.directory:
            newest, refused = checkpoint.find_valid(self.directory.checkpoints)
            for text in refused:
                self._watcher.warn(text)
            if newest:
                answer = {"state": newest.state, "name": newest.path.name}
            elif refused:
                answer = {"error": f"nothing to resume: no checkpoint is whole. {refused[0]}"}
        answer = broadcast_json(self._me, answer)
        if "error" in answer:
            raise CheckpointError(answer["error"])
        state = answer.get("state")
        if self._resumes:
            self._watcher.event(
                Resumed(
                    step=state["step"] if state else 0,
                    epoch=0,
                    samples=0,
                    checkpoint=f"checkpoints/{answer['name']}" if state else "",
                    workers=self._me.size,
                    written_by_workers=state["workers"] if state else 0,
                )
            )
        if state is None:
            return 0, None, {}
        # as a checkpoint holds them: tuples are lists there
        for key, value in json.loads(json.dumps(self._facts)).items():
            if state.get("facts", {}).get(key) != value:
                raise CheckpointError(
                    f"{answer['name']} was written with {key} {state.get('facts', {}).get(key)}, "
                    f"and now it is {value}. Resume with the same arguments and data."
                )
        # rank 0 alone reads the file: other hosts may not see its disk
        size = broadcast_json(
            self._me, newest.load("booster.safetensors")["booster"].numel() if newest else None
        )
        content = torch.empty(size, dtype=torch.uint8)
        if newest:
            content = newest.load("booster.safetensors")["booster"]
        if self._me.size > 1:
            dist.broadcast(content, 0)
        self._watcher.say(f"resumed at round {state['step']}")
        self._rounds = state["step"]
        return state["step"], content.numpy().tobytes(), state

    def step(self, rounds: int, loss: float, rate: float, metrics: Mapping[str, float]) -> None:
        """Record a round."""
        self._rounds = rounds
        samples = rounds * self._rows
        self._watcher.step(rounds, 0, torch.tensor(loss), rate, samples, self._rows)
        if metrics:
            self._watcher.event(
                Evaluated(step=rounds, epoch=0, samples=self._rows, metrics=dict(metrics))
            )

    def save(self, rounds: int, content: bytes, state: Mapping[str, Any], keep: int) -> None:
        """Write a checkpoint, on rank 0."""
        if not self._me.is_main or self.directory is None:
            return
        began = time.monotonic()
        # a tensor may be written to, and bytes may not
        booster = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        path = checkpoint.write(
            self.directory.checkpoints,
            rounds,
            {"booster.safetensors": {"booster": booster}},
            {"step": rounds, "workers": self._me.size, "facts": self._facts, **state},
            keep,
        )
        seconds = time.monotonic() - began
        self._watcher.event(
            Checkpointed(
                step=rounds,
                path=f"checkpoints/{path.name}",
                bytes=len(content),
                seconds=seconds,
                stall_seconds=seconds,
            )
        )

    def leaves(self, rounds: int) -> bool:
        """Whether all ranks leave after this round, because one was asked to."""
        request = self._leaving
        return request is not None and request.asked and request.agreement.is_time(rounds)

    def leave(self) -> None:
        """End this process; a launcher with restarts starts it again."""
        self._end("interrupted")
        end_process(paused=False)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the end."""
        try:
            yield
        except Exception:
            self._end("failed")
            raise
        self._end("completed")

    def _end(self, status: str) -> None:
        watcher = self._watcher
        if watcher.closed:
            return
        watcher.event(
            Ended(
                status=status,
                step=self._rounds,
                epoch=0,
                samples=self._rounds * self._rows,
                samples_per_second=watcher.rate.samples_per_second,
                seconds=time.monotonic() - self._began,
            )
        )
        watcher.close()

    def finish(self, model: Any) -> None:
        """Write the model to the run directory, on rank 0."""
        if not self._me.is_main or self.directory is None:
            return
        path = self.directory.path / f"model.{'json' if model.library == 'xgboost' else 'txt'}"
        model.save(path)
        self._watcher.say(f"wrote {path}")
