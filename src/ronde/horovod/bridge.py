"""One rank's end of the bridge: announces operations, and runs them in the order that comes back.

A thread waits for the coordinator's orders and carries out the exchanges, so that an operation goes
on while the script computes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ronde.horovod.chrome_trace import ChromeTrace
from ronde.horovod.coordinator import Key, describe
from ronde.horovod.transfers import Team, contribute_zeros
from ronde.world import WorldError
from ronde.world.meshes import group_of

__all__ = ["Bridge", "Handle", "HorovodInternalError"]


class HorovodInternalError(WorldError):
    """An operation failed on all of its ranks: they disagree, one has ended, or it stalled."""


@dataclass(eq=False)
class Handle:
    """An operation in flight, for ``poll`` and ``synchronize``."""

    key: Key
    run: Callable[[dict[str, Any]], Any]
    tensors: Iterable[torch.Tensor] = ()
    single: bool = False  # the result is the first one of a list
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None
    event: Any = None  # the device's, when the input is ready


class Bridge:
    """Connects a rank to the coordinator.

    Args:
        rank: of this process.
        size: of the world; 1 connects nothing.
        device: of this worker.
        connection: a socket to the coordinator that has said hello; None with one rank.
        trace: of the timeline, on rank 0.
        generation: of the process groups: one on which an exchange was left unfinished is not used
            again.
    """

    poisoned = 0  # the generation that this process can no longer use

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        connection: socket.socket | None,
        trace: ChromeTrace,
        generation: int = 1,
    ) -> None:
        self.rank, self.size, self.device, self.trace = rank, size, device, trace
        self.generation = generation
        self.joins = 0  # how often all ranks have joined
        self.optimizers = 0
        everyone = tuple(range(size))
        group = self.group() if size > 1 else None
        self.teams: dict[int, Team] = {0: Team(everyone, rank, group)}
        self._connection = connection
        self._lock = threading.Lock()
        self._flying: dict[Key, Handle] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._join: Handle | None = None
        self._broken: str | None = None
        if connection is not None:
            # At Python's 5 ms, orders wait for a script that computes in Python: a step of a small
            # perceptron took 1.3 times as long as DDP's.
            sys.setswitchinterval(0.0005)
            self._thread = threading.Thread(target=self._serve, name="horovod", daemon=True)
            self._thread.start()

    def group(self, ranks: Sequence[int] | None = None) -> Any:
        """A process group that only the bridge uses. A collective over all ranks."""
        return group_of(f"horovod {self.generation}", ranks)

    # ------------------------------------------------------------------ the script's side

    def name(self, number: int, kind: str) -> str:
        """A name for an operation that the script gave none, the same on all ranks.

        Counted by process set and kind, and from zero again after each join: a rank that joined
        earlier has called fewer.
        """
        with self._lock:
            count = self._counts.get((number, kind), 0)
            self._counts[number, kind] = count + 1
        return f"unnamed.{self.joins}.{count}"

    def submit(
        self,
        key: Key,
        meta: dict[str, Any],
        run: Callable[[dict[str, Any]], Any],
        tensors: Iterable[torch.Tensor] = (),
    ) -> Handle:
        """Announce an operation.

        Args:
            key: process set, kind and name.
            meta: what all ranks must agree on, and under ``each`` what all shall know.
            run: carries it out on the order of the coordinator, and returns the result.
            tensors: that it reads, for the device's order.

        Raises:
            ValueError: an operation of this name is still in flight here.
            HorovodInternalError: the connection to the other ranks is gone.
        """
        handle = Handle(key, run, tensors)
        if self._connection is None:  # alone: nobody to agree with
            order: dict[str, Any] = {"go": key, "id": len(self.teams)}
            if "each" in meta:
                order["each"] = [meta["each"]]
            self.trace.begin(f"{key[1]}.{key[2]}", f"NEGOTIATE_{key[1].upper()}")
            self.trace.end(f"{key[1]}.{key[2]}")
            self._carry_out(handle, order)
            if handle.error is not None:
                raise handle.error
            return handle
        if self.device.type == "cuda" and any(t.is_cuda for t in tensors):
            # the script's stream may still compute the input
            handle.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            handle.event.record()
        with self._lock:
            self._check()
            if key in self._flying:
                raise ValueError(
                    f"{describe(key)} is still in flight on rank {self.rank}. Call "
                    "hvd.synchronize on it first, or give each operation its own name."
                )
            self._flying[key] = handle
            self._send({"do": key, "meta": meta})
        return handle

    def wait(self, handle: Handle) -> Any:
        """Wait for an operation; return its result or raise its error."""
        handle.done.wait()
        if handle.error is not None:
            raise handle.error
        return handle.result

    def join(self) -> int:
        """Contribute zeros to the others' reductions until all ranks have joined."""
        if self._connection is None:
            return self.rank
        handle = Handle((0, "join", ""), lambda _: None)
        with self._lock:
            self._check()
            self._join = handle
            self._send({"join": True})
        return int(self.wait(handle))

    def poison(self, why: str) -> None:
        """Make this bridge unusable, and its process groups too: an exchange is unfinished."""
        Bridge.poisoned = max(Bridge.poisoned, self.generation)
        self._break(why)

    def close(self) -> None:
        """Leave. What is in flight here and cannot complete fails."""
        if self._connection is None:
            return
        with contextlib.suppress(HorovodInternalError), self._lock:
            self._send({"bye": True})
        self._thread.join(10.0)  # for the exchanges that are under way
        if self._thread.is_alive():  # in an exchange that another rank has not begun
            self.poison("hvd.shutdown() was called")
        self._break("hvd.shutdown() was called")

    def _check(self) -> None:
        if self._broken is not None:
            raise HorovodInternalError(
                f"The ranks can no longer exchange: {self._broken}. Start the run again, or let "
                "hvd.elastic.run go back to the last commit."
            )

    def _send(self, message: dict[str, Any]) -> None:
        assert self._connection is not None
        try:
            self._connection.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            self._broken = f"rank 0 has ended ({error})"
            self._check()

    # ------------------------------------------------------------------ the thread's side

    def _serve(self) -> None:
        """Run the coordinator's orders one after the other, until it says goodbye."""
        assert self._connection is not None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if "bye" in message:
                        break
                    self._obey(message)
                else:
                    self._break("rank 0, which orders the operations, has ended")
        except (OSError, ValueError) as error:
            self._break(f"the connection to rank 0 broke ({error})")
        finally:
            self._connection.close()

    def _obey(self, message: dict[str, Any]) -> None:
        if "joined" in message:
            handle, self._join = self._join, None
            assert handle is not None
            if message["joined"] is None:
                handle.error = HorovodInternalError(message["error"])
            else:
                with self._lock:
                    self.joins += 1
                    self._counts.clear()
                handle.result = message["joined"]
            handle.done.set()
            return
        key: Key = tuple(message.get("go") or message["of"])
        if "meta" in message:
            try:
                contribute_zeros(self.teams[key[0]], message["meta"], self.device)
            except Exception as error:
                self.poison(f"{describe(key)} failed on rank {self.rank}: {error}")
            return
        with self._lock:
            handle = self._flying.pop(key, None)
        if handle is None:  # it has failed meanwhile
            return
        if "error" in message:
            handle.error = HorovodInternalError(message["error"])
            handle.done.set()
            return
        self._carry_out(handle, message)
        if handle.error is not None:
            self.poison(str(handle.error))

    def _carry_out(self, handle: Handle, order: dict[str, Any]) -> None:
        label = f"{handle.key[1]}.{handle.key[2]}"
        self.trace.begin(label, handle.key[1].upper())
        try:
            if handle.event is not None:
                handle.event.synchronize()
            handle.result = handle.run(order)
            if handle.event is not None:
                torch.cuda.current_stream().synchronize()  # the script's stream knows none of ours
        except Exception as error:
            handle.error = HorovodInternalError(
                f"{describe(handle.key)} failed on rank {self.rank}: {error}"
            )
            handle.error.__cause__ = error
        self.trace.end(label)
        handle.tensors, handle.run = (), _nothing  # a kept handle keeps no input in memory
        handle.done.set()

    def _break(self, why: str) -> None:
        with self._lock:
            self._broken = self._broken or why
            left = [*self._flying.values(), *([self._join] if self._join else [])]
            self._flying.clear()
            self._join = None
        for handle in left:
            handle.error = HorovodInternalError(f"{describe(handle.key)} did not complete: {why}.")
            handle.done.set()


def _nothing(_: dict[str, Any]) -> None:
    return None
