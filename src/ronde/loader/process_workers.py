"""Loading processes: torch's DataLoader, with dead workers named between steps."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from typing import Any

from torch.utils.data import DataLoader

from ronde.loader.reader import CarriedError
from ronde.world import FeedError, world

_DYING_SECONDS = 2.0

_ours: set[int] = set()  # pids
_waiting = 0  # readers that are asking for a batch right now
_theirs: Any = None  # torch's handler of SIGCHLD


def _on_child(number: int, frame: Any) -> None:
    """Ignore torch's SIGCHLD error for our processes: it could strike in the middle of an optimizer
    step.

    The dead process is found when the next batch is requested.
    """
    try:
        _theirs(number, frame)
    except RuntimeError as error:
        pid = re.search(r"pid\D*(\d+)", str(error))
        if pid is None or int(pid.group(1)) not in _ours or _waiting:
            raise


def _settle_signal() -> None:
    global _theirs
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if (
        handler is not _on_child
        and getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"
    ):
        _theirs = handler
        signal.signal(signal.SIGCHLD, _on_child)


def _advice(code: int) -> str:
    if code == -signal.SIGKILL:
        return (
            "by hand, or by the system when memory ran out (see dmesg). Load with fewer processes, "
            "a smaller prefetch, or threads, which share their memory"
        )
    if code == -signal.SIGBUS:
        return (
            "most likely shared memory (/dev/shm) was full. Enlarge it (docker run --shm-size=8g), "
            "lower prefetch, or load with threads"
        )
    return (
        "the dataset, or a library it uses, ended the process. Read once in the training process "
        "(feed setting executor: none) to see where"
    )


def _death_message(workers: Sequence[Any], failed: bool = False) -> FeedError | None:
    """The message if a process has ended, or None.

    Args:
        failed: a batch that was asked for did not come. Status 0 is then no end like another:
            otherwise it is that of processes whose epoch has been read to its end, while the
            training still has batches of theirs.
    """
    for k, worker in enumerate(workers):
        code = None if worker.is_alive() else worker.exitcode
        if code is None or (code == 0 and not failed):
            continue
        how = f"ended with exit status {code}"
        if code < 0:
            how = f"was killed by signal {-code}"
            with suppress(ValueError):
                how += f" ({signal.Signals(-code).name})"
        return FeedError(
            f"loading process {k} of {len(workers)} (pid {worker.pid}) of training rank "
            f"{world().rank} {how}: {_advice(code)}."
        )
    return None


def _find_dead(workers: Sequence[Any], error: Exception) -> FeedError | None:
    """The process behind an error; a dying process takes a moment to be dead."""
    suspicious = not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker")
    until = time.monotonic() + (_DYING_SECONDS if suspicious else 0.0)
    while (dead := _death_message(workers, True)) is None and time.monotonic() < until:
        time.sleep(0.01)
    return dead


def batches(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Iterate over a DataLoader.

    Args:
        loader: whose processes load.

    Raises:
        FeedError: one of its processes died; which, of which rank, of what, and what to do.
    """
    global _waiting
    if loader.num_workers == 0:
        for batch in loader:
            yield _checked(batch)
        return
    get_temp_dir()  # theirs too then: each would leave one of its own behind
    iterator = iter(loader)
    workers = list(getattr(iterator, "_workers", ()))
    _settle_signal()
    _ours.update(worker.pid for worker in workers)
    try:
        while True:
            if (dead := _death_message(workers)) is not None:
                raise dead
            try:
                _waiting += 1
                try:
                    batch = next(iterator)
                finally:
                    _waiting -= 1
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if (dead := _find_dead(workers, error)) is not None:
                    raise dead from error
                raise
            yield _checked(batch)
            del batch
    finally:
        # Now, not when it is collected: an error's traceback may hold it, and what is collected as
        # part of a cycle cannot tell its processes to end, but waits 5 s for each.
        iterator._shutdown_workers()  # type: ignore[attr-defined]
        _ours.difference_update(worker.pid for worker in workers)


def _checked(batch: Any) -> Any:
    if type(batch) is CarriedError:
        raise batch.error()
    return batch
