"""Call a function on several workers, from Python or a notebook: each runs this file."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.world import ArgumentError, WorldError
from ronde.world.processes import temporary_prefix
from ronde.world.whole_file import write_whole

__all__ = ["launch", "main"]


def _cloudpickle() -> Any:
    """The package, which sends functions by value; None where it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle


def _packed(call: tuple[Any, ...]) -> bytes:
    """The function and its arguments, by value where their module is not a file of their own."""
    function, cloudpickle = call[0], _cloudpickle()
    if cloudpickle is None and getattr(function, "__module__", "__main__") == "__main__":
        raise ArgumentError(
            f"{getattr(function, '__name__', function)!r} is defined in this notebook or "
            "script, and other processes cannot import it from there. Install cloudpickle "
            "(pip install '.[notebook]'), or define it in a module."
        )
    try:
        return bytes((cloudpickle or pickle).dumps(call))
    except Exception as error:
        raise ArgumentError(
            f"the function or an argument cannot be sent to other processes: {error}. Open files, "
            "locks, and models on a device stay here: make them inside the function."
        ) from error


def launch(
    function: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int | str = "auto",
) -> list[Any]:
    """Call a function on workers of this machine: fresh processes, as ``ronde run`` starts.

    Rank 0's output is shown here. An interrupt ends all workers.

    Args:
        function: what every worker calls; it may call :func:`ronde.distribute`. One that is defined
            in a notebook or in ``__main__`` needs the extra ``notebook``.
        args: its arguments, copied to every worker.
        kwargs: its keyword arguments.
        workers: how many; ``"auto"`` is one per GPU, or per usable core (at most 8).

    Returns:
        list: what the function returned, by rank.

    Raises:
        ArgumentError: more workers than devices, or something cannot be sent.
        WorldError: a worker was killed, or ended by itself.
        Exception: the first error of a worker, with a note that names its rank.

    Example::

        def train(lr):
            run = ronde.distribute(...)
            run.fit(epochs=2)
            return run.state.step

        steps = ronde.launch(train, (0.1,), workers=2)
    """
    import psutil

    from ronde.launch.job import Job
    from ronde.launch.local import check_workers, resolve_workers, run_here
    from ronde.launch.node import spare

    if not callable(function):
        raise ArgumentError(f"expected a function to call, not {type(function).__name__}.")
    count = resolve_workers(str(workers))
    check_workers(count)
    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
        place = Path(folder)
        (place / "call").write_bytes(_packed((function, tuple(args), dict(kwargs or {}))))
        (place / "path").write_text("\n".join(sys.path))
        command = [str(Path(__file__)), folder]
        spare(*(p.pid for p in psutil.Process().children()))  # the caller's own, no worker's
        outcome = run_here(Job(command, count), _show, lambda _: None)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.status:
            raise _error(place, outcome.rank, outcome.error or "", outcome.traceback)
        missing = [rank for rank in range(count) if not (place / f"result-{rank}").exists()]
        if missing:
            raise WorldError(f"rank {missing[0]} ended before the function returned.")
        return [_read(place / f"result-{rank}") for rank in range(count)]


def _show(data: bytes) -> None:
    sys.stdout.write(data.decode(errors="replace"))  # a notebook's, which is no file
    sys.stdout.flush()


def _read(path: Path) -> Any:
    """What a worker of this process has written into its private folder."""
    with path.open("rb") as file:
        return pickle.load(file)  # noqa: S301 (this process made the folder)


def _error(place: Path, rank: int | None, text: str, trace: str) -> BaseException:
    error: BaseException | None = None
    with contextlib.suppress(Exception):
        error = _read(place / f"error-{rank}")
    if not isinstance(error, BaseException):
        error = WorldError(f"rank {rank} failed first: {text}")
    error.add_note(f"rank {rank} failed first:\n{trace}" if trace else f"on rank {rank}")
    return error


def _write(path: Path, value: Any) -> None:
    write_whole(path, (_cloudpickle() or pickle).dumps(value))


def main() -> None:
    """On each worker: call what the folder on the command line holds, and write the result."""
    place, rank = Path(sys.argv[1]), os.environ["RANK"]
    del sys.path[0]  # this file's folder: its tensorflow.py is not the package of that name
    known = set(sys.path)
    # what is sent by name must be found where it was
    sys.path += [p for p in (place / "path").read_text().split("\n") if p not in known]
    call = (place / "call").read_bytes()
    function, args, kwargs = pickle.loads(call)  # noqa: S301 (the launcher wrote it)
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        # the launcher reports one that cannot be sent by its text
        with contextlib.suppress(Exception):
            _write(place / f"error-{rank}", error)
        raise
    try:
        _write(place / f"result-{rank}", result)
    except Exception as error:
        raise TypeError(f"the function's result cannot be sent back: {error}") from error


if __name__ == "__main__":
    main()
