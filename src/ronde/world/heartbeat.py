"""Where a worker is, in a small memory-mapped file: its launcher reads it and notices a hang.

Writing costs some stores into memory. The file holds whole numbers at fixed places, then texts: the
names of calls, and the last error that a call raised.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Beat", "Heartbeat", "heartbeat", "read_beat"]

_SIZE_BYTES = 4096
_NAMES, _NAME_BYTES, _NAME_COUNT = 256, 64, 48
_ERROR = _NAMES + _NAME_BYTES * _NAME_COUNT
_TICKS, _PID, _PHASE, _DOING, _BEGUN, _STEP, _STEPS, _CUDA, _WAITED, _LOADING, _LAST = range(11)
_PHASES = ("start-up", "training", "ended")


@dataclass(frozen=True)
class Beat:
    """What a worker wrote last.

    Attributes:
        ticks: grows with every sign of progress.
        pid: process number.
        phase: ``start-up``, ``training``, or ``ended``, when the script's loop is over.
        doing: the call of Ronde under way, as the script writes it; empty in the script's own code.
        begun: how many calls of the whole world have begun.
        step: optimizer steps of the run so far.
        steps: those of this process.
        cuda: whether it trains on a GPU.
        error: the last error that a call raised into the script; empty if none did.
        waited_seconds: waited in exchanges of gradients so far; below 0 if that is not known.
        loading_seconds: waited for batches so far.
        last_step: of the training; 0 if that is not known.
    """

    ticks: int
    pid: int
    phase: str
    doing: str
    begun: int
    step: int
    steps: int
    cuda: bool
    error: str
    waited_seconds: float = -1.0
    loading_seconds: float = 0.0
    last_step: int = 0


class Heartbeat:
    """The writing side.

    Args:
        folder: where the file ``heartbeat-RANK`` goes; None keeps it in memory only.
        rank: this worker's rank.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        if folder is None:
            self._memory = mmap.mmap(-1, _SIZE_BYTES)
        else:
            # renamed when it is whole: readers see an earlier worker's file, or this one's
            path = folder / f"heartbeat-{rank}"
            with path.with_suffix(".new").open("w+b") as file:
                file.truncate(_SIZE_BYTES)
                self._memory = mmap.mmap(file.fileno(), _SIZE_BYTES)
            path.with_suffix(".new").rename(path)
        self._slots = memoryview(self._memory).cast("q")
        self._slots[_PID] = os.getpid()
        self._names: dict[str, int] = {"": 0}
        self._folder, self._rank = folder, rank

    def doing(self, what: str, begun: int) -> None:
        """A call begins, or ends (then ``what`` is the one around it)."""
        slots = self._slots
        index = self._names.get(what)
        slots[_DOING] = self._add(what) if index is None else index
        slots[_BEGUN] = begun
        slots[_TICKS] += 1

    def tick(self) -> None:
        """Something was done inside a call that takes long."""
        self._slots[_TICKS] += 1

    def stepped(self, step: int, waited_seconds: float | None = None) -> None:
        """An optimizer step is done; ``waited_seconds`` of it were waited in exchanges."""
        slots = self._slots
        known = waited_seconds is not None and slots[_WAITED] >= 0  # by each training here
        slots[_WAITED] = slots[_WAITED] + int(1e6 * (waited_seconds or 0)) if known else -1
        slots[_STEP] = step
        slots[_STEPS] += 1
        slots[_PHASE] = 1
        slots[_TICKS] += 1

    def loaded(self, seconds: float) -> None:
        """A batch has come, for which this worker has waited so long."""
        self._slots[_LOADING] += int(1e6 * seconds)

    def ends_at(self, step: int) -> None:
        """The training's last step, as far as the script says it."""
        self._slots[_LAST] = step

    def ended(self) -> None:
        """The script's loop is over."""
        self._slots[_PHASE] = 2
        self._slots[_TICKS] += 1

    def failed(self, error: BaseException) -> None:
        """A call raised into the script, which may catch it."""
        text = f"{type(error).__name__}: {error}".encode()[: _SIZE_BYTES - _ERROR - 1]
        self._memory[_ERROR:_SIZE_BYTES] = text.ljust(_SIZE_BYTES - _ERROR, b"\0")

    def _add(self, what: str) -> int:
        index = len(self._names)
        if index >= _NAME_COUNT:
            return 0
        at = _NAMES + index * _NAME_BYTES
        # the last byte stays 0: a name that is cut never runs into the next one
        text = what.encode()[: _NAME_BYTES - 1]
        self._memory[at : at + len(text)] = text
        self._names[what] = index
        return index

    def answer(self, cuda: bool) -> None:
        """Let a thread answer the launcher's question where this worker is: it sleeps until then.

        faulthandler names the main thread's lines; this thread adds those of the others, and what
        only Python and torch know, the exchanges under way and the module whose code runs.
        """
        self._slots[_CUDA] = cuda
        if self._folder is None or not hasattr(os, "mkfifo"):
            return
        question = self._folder / f"ask-{self._rank}"
        with suppress(FileExistsError):
            os.mkfifo(question, 0o600)
        # read-write: it never ends because nobody has it open for writing
        descriptor = os.open(question, os.O_RDWR)
        threading.Thread(
            target=self._answer, args=(descriptor,), name="ronde-answers", daemon=True
        ).start()

    def _answer(self, descriptor: int) -> None:
        from ronde.world.whole_file import write_whole

        assert self._folder is not None
        file = self._folder / f"answer-{self._rank}"
        while token := os.read(descriptor, 64):
            with suppress(Exception):
                answer = {"threads": _threads(), "exchanges": _exchanges(), "module": _module()}
                said = {"token": token.decode(), **answer}
                write_whole(file, json.dumps(said))


def _threads() -> str:
    """The stacks of all threads but the main one and this one, as faulthandler writes them."""
    text, own = "", {threading.main_thread().ident, threading.get_ident()}
    for thread, innermost in sys._current_frames().items():
        if thread in own:
            continue
        text += f"Thread {thread:#x} (most recent call first):\n"
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            text += f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n'
            frame = frame.f_back
    return text


def _exchanges() -> list[dict[str, Any]]:
    """The last exchange of each process group, from torch's Flight Recorder: on by default."""
    import torch._C._distributed_c10d as c10d

    newest: dict[str, dict[str, Any]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        for entry in json.loads(dump()).get("entries", []) if dump else ():
            group = str(entry["process_group"][0])
            if group in newest and not newest[group]["done"] and not entry["retired"]:
                continue  # the oldest one that is not done
            newest[group] = {
                "group": group,
                "number": entry["record_id"] if entry["is_p2p"] else entry["collective_seq_id"],
                "pair": bool(entry["is_p2p"]),
                "name": str(entry["profiling_name"]).partition(":")[2],
                "sizes": entry["input_sizes"],
                "done": bool(entry["retired"]),
            }
    return list(newest.values())


def _module() -> str:
    """The innermost module of the model whose code the main thread runs: ``layer4.0``; or empty."""
    import torch

    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    modules: list[torch.nn.Module] = []
    while frame is not None:
        for name in ("module", "self"):
            if isinstance(value := frame.f_locals.get(name), torch.nn.Module):
                modules.append(value)
                break
        frame = frame.f_back
    if not modules:
        return ""
    root, inner = modules[-1], modules[0]
    return next((name for name, module in root.named_modules() if module is inner), "")


_made: Heartbeat | None = None


def heartbeat(rank: int) -> Heartbeat:
    """This process's heartbeat, made once; under ``ronde run``, its launcher reads it."""
    global _made
    if _made is None or _made._slots[_PID] != os.getpid():
        folder = os.environ.get("RONDE_WATCH_DIR")
        try:
            _made = Heartbeat(Path(folder) if folder else None, rank)
        except OSError:  # a full disk: nobody watches, and the training goes on
            _made = Heartbeat(None, rank)
    return _made


def read_beat(path: Path) -> Beat | None:
    """Read a worker's file; None if there is none yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _SIZE_BYTES:
        return None
    slots = memoryview(data).cast("q")
    at = _NAMES + _NAME_BYTES * min(max(slots[_DOING], 0), _NAME_COUNT - 1)
    return Beat(
        slots[_TICKS],
        slots[_PID],
        _PHASES[min(max(slots[_PHASE], 0), 2)],
        _text(data[at : at + _NAME_BYTES]) if slots[_DOING] else "",
        slots[_BEGUN],
        slots[_STEP],
        slots[_STEPS],
        bool(slots[_CUDA]),
        _text(data[_ERROR:]),
        slots[_WAITED] / 1e6 if slots[_STEPS] else -1.0,
        slots[_LOADING] / 1e6,
        slots[_LAST],
    )


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode(errors="replace")
