"""``hvd.elastic``: state that is committed, rolled back after a failure, and shared by all ranks.

A failure that all ranks see (they disagree, an operation stalled) is undone inside the processes:
the state goes back to the last commit, the ranks connect again, and the function is called again.
When a process has died, ``ronde run --restarts`` starts all again: rank 0 has written each commit
to the run directory, and the state continues from there.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import queue
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ronde.horovod.bridge import HorovodInternalError
from ronde.horovod.lifecycle import init, rank, shutdown, size
from ronde.horovod.objects import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    pack_object,
    unpack_object,
)
from ronde.world import ArgumentError
from ronde.world.whole_file import refuse_fenced, write_whole

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "TorchState",
    "run",
]

_made = 0  # states of this process: the number of each is the same on all ranks


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went. ``skip_sync`` says that the state need not be shared again."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts have changed")
        self.skip_sync = skip_sync


class ObjectState:
    """Values that are committed, restored and shared together, as attributes.

    Args:
        kwargs: name -> first value; see :func:`ronde.horovod.objects.broadcast_object` for what can
            be shared.

    Example:
        >>> state = ObjectState(epoch=0)
        >>> state.epoch = 3
        >>> state.restore()
        >>> state.epoch
        0
    """

    def __init__(self, **kwargs: Any) -> None:
        global _made
        self._number, _made = _made, _made + 1
        self._saved_state = dict(kwargs)
        self._reset_callbacks: list[Callable[[], None]] = []
        self._host_updates: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.commits = 0
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these after each reset, for example to scale the learning rate anew."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """What happens after a reset: :meth:`reset`, and the callbacks."""
        self._host_updates = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update: int) -> None:
        """Note that hosts have changed (1: some came): the next commit says so to the loop. For
        scripts that learn of it themselves: a run's launcher sends none.
        """
        self._host_updates.put(update)

    def commit(self) -> None:
        """Save the state in memory and, if workers can be started again, in the run directory."""
        self.save()
        self.commits += 1
        self._write()
        self.check_host_updates()

    def _file(self) -> Path | None:
        """Where commits outlive this process; None if the run cannot be started again."""
        folder = os.environ.get("RONDE_RUN_DIR")
        if os.environ.get("RONDE_LEAVE") != "1" or not folder:
            return None
        return Path(folder) / f"horovod-state-{self._number}"

    def _write(self) -> None:
        file = self._file() if rank() == 0 else None
        if file is None:
            return
        data = pack_object(self.committed())
        if bytes(data[:1].numpy()) == b"E":
            unpack_object(data)  # raises what cannot be kept
        refuse_fenced()  # of a host that was out of reach while the run went on
        write_whole(file, data.numpy().tobytes())

    def continue_commit(self) -> bool:
        """Take over the last commit of the workers before these; whether there was one. Rank 0
        reads, and :meth:`sync` gives it to the others.

        Raises:
            ArgumentError: it is damaged, or of a state with other names.
        """
        file = self._file() if rank() == 0 and os.environ.get("RONDE_RESUME") == "1" else None
        if file is None or not file.exists():
            return False
        raw = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        try:
            commit = unpack_object(raw)
            mine = {kind: set(values) for kind, values in self.committed().items()}
            if {kind: set(values) for kind, values in commit.items()} != mine:
                raise ValueError(f"it has {sorted(map(sorted, commit.values()))}")
            self.take(commit)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ArgumentError(
                f"hvd.elastic: {file} cannot be continued: {error}. Delete it to begin anew."
            ) from None
        return True

    def committed(self) -> dict[str, Any]:
        """The last commit, as plain values and tensors."""
        return {"values": self._saved_state}

    def take(self, commit: dict[str, Any]) -> None:
        """Continue with what :meth:`committed` gave."""
        self._saved_state = commit["values"]
        self.restore()

    def check_host_updates(self) -> None:
        """Raise on all ranks if hosts have changed, as rank 0 sees it. A collective.

        Raises:
            HostsUpdatedInterrupt: hosts have changed.
        """
        updates = []
        while not self._host_updates.empty():
            updates.append(self._host_updates.get())
        if updates := broadcast_object(updates):
            raise HostsUpdatedInterrupt(all(update == 1 for update in updates))

    def save(self) -> None:
        """Save the attributes."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to what was saved last."""
        self._set_attributes()

    def sync(self) -> None:
        """Take rank 0's attributes on all ranks."""
        if self._saved_state:
            self._saved_state = broadcast_object(self._saved_state)
            self._set_attributes()

    def reset(self) -> None:
        """Prepare for other ranks; for classes of your own."""


class _Held:
    """A value with a state dictionary, the last copy of it, and how ranks take rank 0's."""

    def __init__(self, value: Any, share: Callable[[Any], None]) -> None:
        self.value, self._share = value, share
        self.save()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))  # it may keep what it is given

    def sync(self) -> None:
        self._share(self.value)
        self.save()

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a data set among the ranks, and divides what is left of it after a reset.

    Call :meth:`record_batch` after each batch, and :meth:`set_epoch` at the end of each epoch.

    Args:
        dataset: of constant size.
        shuffle: whether each epoch has an order of its own.
        seed: of the order, the same on all ranks.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of each rank as processed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Where the epoch stands."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where the epoch stood, on the ranks that there are now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        # rounded up: ranks with fewer batches would leave the others waiting
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = self.remaining_indices
        indices = indices + indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


_SHARES: dict[type, Callable[[Any], None]] = {
    torch.nn.Module: lambda model: broadcast_parameters(model.state_dict(), root_rank=0),
    torch.optim.Optimizer: lambda optimizer: broadcast_optimizer_state(optimizer, root_rank=0),
    ElasticSampler: lambda s: s.load_state_dict(broadcast_object(s.state_dict())),
}


class TorchState(ObjectState):
    """State of a training: models, optimizers, samplers, and plain values.

    Args:
        model: optional.
        optimizer: optional.
        kwargs: further models, optimizers, samplers and values, by name.

    Example:
        >>> state = hvd.elastic.TorchState(model, optimizer, epoch=0)  # doctest: +SKIP
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self._handlers: dict[str, _Held] = {}
        plain = {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            share = next((s for kind, s in _SHARES.items() if isinstance(value, kind)), None)
            if share is None:
                plain[name] = value
            else:
                self._handlers[name] = _Held(value, share)
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        super().__init__(**plain)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", ()):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def committed(self) -> dict[str, Any]:
        """See :meth:`ObjectState.committed`."""
        return {**super().committed(), "states": {n: h.saved for n, h in self._handlers.items()}}

    def take(self, commit: dict[str, Any]) -> None:
        """See :meth:`ObjectState.take`."""
        for name, handler in self._handlers.items():
            handler.saved = commit["states"][name]
        super().take(commit)

    def save(self) -> None:
        """Copy models, optimizers and samplers, and save the values."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state on all ranks."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it goes on after a failure.

    The function's first argument is a state. It is shared before each call, and rolled back to its
    last commit when an operation fails; workers that are started again continue with it. After 3
    failures without a commit between them, or ``HOROVOD_ELASTIC_RESET_LIMIT``, the error is raised.

    Example:
        >>> @hvd.elastic.run  # doctest: +SKIP
        ... def train(state): ...
    """

    @functools.wraps(function)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        # what fails each time would go on forever
        limit = int(os.environ.get("HOROVOD_ELASTIC_RESET_LIMIT", "") or 3)
        resets, committed, skip_sync = 0, -1, False
        if isinstance(state, ObjectState):
            state.continue_commit()
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return function(state, *args, **kwargs)
            except HorovodInternalError:
                commits = getattr(state, "commits", 0)
                resets = 1 if commits != committed else resets + 1
                committed = commits
                if resets > limit:
                    raise
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return wrapper
