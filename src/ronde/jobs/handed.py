"""``ronde.items``: the items that a script works on, alone or as one of many workers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ronde.jobs.items import Items, find_items, load_items
from ronde.world import ArgumentError, CheckpointError, RondeError

if TYPE_CHECKING:
    import torch

__all__ = ["PIPES", "Chunk", "check_output_name", "items", "weights"]

PIPES = "RONDE_MAP_PIPES"
"""Variable by which a map's script finds its worker: the ledger's folder and two descriptors."""


@dataclass(eq=False)
class Chunk:
    """Some items, one after the other. Iterate it for their keys and records.

    Attributes:
        first: the place of its first item among all.
        last: one more than that of its last.
        folder: files written here are the chunk's too, each by its own name: name them by item.
    """

    first: int
    last: int
    folder: Path
    _items: Items
    _outputs: list[str] = field(default_factory=list)
    _progress: Callable[[], None] = lambda: None
    _ended: bool = False
    _open: int = 0

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for each in self._items.read(self.first, self.last):
            self._progress()
            yield each
        self._ended = True

    def batches(self, size: int) -> Iterator[list[tuple[Any, Any]]]:
        """Its keys and records in lists of ``size``; the last one may be shorter.

        Raises:
            ArgumentError: the size is below 1.
        """
        if size < 1:
            raise ArgumentError(f"batches: size {size}: expected 1 or more.")
        each = iter(self)
        while batch := list(itertools.islice(each, size)):
            yield batch

    @contextlib.contextmanager
    def output(self, name: str, mode: str = "w") -> Iterator[IO[Any]]:
        """Open an output: seen by others when the whole chunk is done, and joined in the order of
        the items.

        Args:
            name: of the file that all chunks together become.
            mode: ``"w"`` for text, ``"wb"`` for bytes.

        Raises:
            ArgumentError: another mode, a name that leads elsewhere, or one that is open already.
        """
        check_output_name(name)
        if mode not in ("w", "wb"):
            raise ArgumentError(f"output: mode {mode!r}: give 'w' or 'wb'.")
        if name in self._outputs:
            raise ArgumentError(f"output: {name} was opened before in this chunk: open it once.")
        self._outputs.append(name)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open += 1
        with open(path, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        self._open -= 1

    def end(self) -> list[str]:
        """Check that the loop did all of it. Returns the names of its outputs.

        Raises:
            RondeError: it left items, or an output open.
        """
        if not self._ended:
            raise RondeError(
                f"the loop left items of its chunk ({self.first} to {self.last - 1}): iterate "
                "each chunk to its end."
            )
        if self._open:
            raise RondeError("an output is still open: use `with chunk.output(…) as out`.")
        return self._outputs


def check_output_name(name: str) -> None:
    """Refuse a name that leads out of the folder, or is hidden.

    Raises:
        ArgumentError: it does.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or any(part.startswith(".") for part in parts):
        raise ArgumentError(f"output: {name!r} is no name of a file below the output folder.")


def items(source: str) -> Iterator[Chunk]:
    """The items of a job that shares nothing, in chunks.

    Alone, a script gets all of them in one chunk, and its outputs are in the current folder once
    the chunk is done. Under ``ronde map --items SOURCE script.py``, each worker gets chunks that
    no other has; ``--items`` says then which items there are.

    Args:
        source: as ``--items``: a pattern of files, ``lines:FILE``, ``rows:FILE.parquet``, or
            ``@FILE``.

    Raises:
        ArgumentError: there is no such file, or nothing in it.
        RondeError: the loop left items of a chunk.

    Example:

        for chunk in ronde.items("lines:reviews.txt"):
            with chunk.output("lengths.txt") as out:
                for number, line in chunk:
                    print(number, len(line), file=out)
    """
    if PIPES in os.environ:
        yield from _handed()
        return
    listed = find_items(source)
    # in the current folder, so that moving an output is one rename
    with tempfile.TemporaryDirectory(prefix=".ronde-items-", dir=".") as folder:
        chunk = Chunk(0, len(listed), Path(folder), listed)
        yield chunk
        chunk.end()
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                target = path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)


def weights(run: str) -> dict[str, torch.Tensor]:
    """The weights of a trained run, on the CPU, for ``model.load_state_dict``.

    Alone, a script gets those of the run's newest whole checkpoint. Under ``ronde map --model RUN``
    it gets those that were exported when the map was planned, the same ones in every worker.

    Args:
        run: name of a run in ``runs`` (or ``RONDE_RUNS``), or a path to its folder.

    Raises:
        CheckpointError: the run has no whole checkpoint, or one of several models.
        ArgumentError: ``ronde map`` was not told which run.

    Example:

        model.load_state_dict(ronde.weights("digits"))
    """
    from safetensors.torch import load_file

    from ronde.checkpoint import find_valid
    from ronde.jobs.map_plan import MODEL
    from ronde.watch import RunDir

    if PIPES in os.environ:
        file = Path(json.loads(os.environ[PIPES])[0]) / MODEL
        if not file.exists():
            raise ArgumentError(f"weights: tell ronde map which run: --model {run}.")
        return load_file(file)
    folder = Path(run) if "/" in run else Path(os.environ.get("RONDE_RUNS", "runs")) / run
    checkpoint, refused = find_valid(RunDir(folder).checkpoints)
    if checkpoint is None:
        reason = refused[0] if refused else f"there is none in {folder}"
        raise CheckpointError(f"weights: no whole checkpoint of {run}: {reason}.")
    return checkpoint.weights()


def _handed() -> Iterator[Chunk]:
    root, taken, answered = json.loads(os.environ[PIPES])
    listed = load_items(Path(root))
    said = 0.0

    def progress() -> None:  # an empty line
        nonlocal said
        if time.monotonic() - said > 0.2:  # far below any --limit
            said = time.monotonic()
            print(file=answers, flush=True)

    with open(taken, closefd=False) as orders, open(answered, "w", closefd=False) as answers:
        print("{}", file=answers, flush=True)  # it has come to its items
        for line in orders:
            order = json.loads(line)
            chunk = Chunk(order["first"], order["last"], Path(order["folder"]), listed)
            chunk._progress = progress
            yield chunk
            print(json.dumps({"outputs": chunk.end()}), file=answers, flush=True)
