"""The call of a saved model: its arguments, as the script makes them or as a file has them."""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ronde import checkpoint
from ronde.parallel import Work
from ronde.world import ArgumentError, RondeError
from ronde.world.paths import need

__all__ = ["ModelCall", "call_of", "inference_copy", "read_call", "read_columns", "saved_model"]

_SAMPLES = 256  # of the training data, at most


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one forward pass.

    Attributes:
        args: positional.
        kwargs: by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """In the order in which an export names them."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def samples(self) -> int:
        """Of the batch: the first size of every tensor.

        Raises:
            RondeError: they differ.
        """
        sizes = {t.shape[0] if t.dim() else 0 for t in self.tensors}
        if len(sizes) != 1 or 0 in sizes:
            raise RondeError(
                "the model's inputs have no common batch: their first sizes are "
                f"{', '.join(map(str, sorted(sizes)))}."
            )
        return sizes.pop()

    def rows(self, low: int, high: int) -> ModelCall:
        """Some samples of the batch."""
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t[low:high], (self.args, self.kwargs))
        return ModelCall(args, kwargs)

    def with_tensor(self, value: torch.Tensor) -> ModelCall:
        """The same call with another value in the place of its only tensor."""
        args, kwargs = tree_map_only(torch.Tensor, lambda _: value, (self.args, self.kwargs))
        return ModelCall(args, kwargs)

    def double(self) -> ModelCall:
        """In float64."""

        def wide(t: torch.Tensor) -> torch.Tensor:
            return t.double() if t.is_floating_point() else t

        args, kwargs = tree_map_only(torch.Tensor, wide, (self.args, self.kwargs))
        return ModelCall(args, kwargs)


def call_of(model: nn.Module, use: Callable[[nn.Module], Any]) -> ModelCall:
    """The arguments with which a script calls its model.

    Args:
        use: calls it, once or more: the first call counts.

    Raises:
        RondeError: it does not.
    """
    calls: list[ModelCall] = []

    def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs))
        calls.append(ModelCall(args, kwargs))

    handle = model.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        with torch.no_grad():
            use(model)
    finally:
        handle.remove()
    if not calls:
        raise RondeError("the script computes its loss without calling the model: nothing to ship.")
    return calls[0]


def inference_copy(model: nn.Module) -> nn.Module:
    """A copy on the CPU, in evaluation mode."""
    return copy.deepcopy(model).cpu().eval()


def saved_model(
    work: Work, calls: Any, path: Path
) -> tuple[nn.Module, checkpoint.Checkpoint, ModelCall, tuple[Any, ...]]:
    """A script's model with the weights of a checkpoint, on the CPU, in evaluation mode.

    Args:
        work: of a study at ``distribute``, on one worker.
        calls: the script's forward and loss.
        path: of the checkpoint.

    Returns:
        tuple: the model, the checkpoint, the model's call for some training samples, and what else
        the loss takes for them.

    Raises:
        RondeError: the script builds another model.
    """
    saved = checkpoint.verify(path)
    try:
        meta = any(p.is_meta for p in work.model.parameters())
        work.model.load_state_dict(saved.weights(), assign=meta)
    except RuntimeError as error:
        raise RondeError(f"the script now builds another model: {error}") from None
    if any(b.is_meta for b in work.model.buffers()):
        raise RondeError("the model has buffers without values that no checkpoint holds.")
    model = inference_copy(work.model)
    batch = work.sample(max(2, min(_SAMPLES, max(work.sizes, default=2))))
    arguments: list[Any] = []
    call = call_of(model, lambda m: arguments.append(calls.arguments(m, batch)))
    return model, saved, call, tuple(arguments[0][1:])


def read_call(
    path: Path, model: nn.Module, call: ModelCall, option: str
) -> tuple[ModelCall, dict[str, Any]]:
    """The arguments in a file: of a ``.npz``, the arrays ``input`` (or ``input.0``, ``input.1``,
    …); of a table, its columns of numbers, as one input. Other arrays are returned by name.

    Raises:
        ArgumentError: it cannot be read, or the model takes no such arrays.
    """
    try:
        if path.suffix in (".parquet", ".csv"):
            values = read_columns(path)
        else:
            with np.load(path, allow_pickle=False) as file:
                values = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ArgumentError(
            f"{option} {path}: expected arrays in a .npz file, or a Parquet or CSV file: {error}"
        ) from None
    wanted = len(call.tensors)
    names = ["input"] if "input" in values else [f"input.{i}" for i in range(wanted)]
    if len(names) != wanted or any(n not in values for n in names):
        raise ArgumentError(
            f"{option} {path} has {', '.join(values)}; the model takes "
            + ("'input'" if wanted == 1 else ", ".join(f"'input.{i}'" for i in range(wanted)))
            + ", and 'target' holds the labels."
        )
    arrays = [
        torch.as_tensor(values[n]).to(t.dtype) for n, t in zip(names, call.tensors, strict=True)
    ]
    replaced = iter(arrays)
    args, kwargs = tree_map_only(torch.Tensor, lambda _: next(replaced), (call.args, call.kwargs))
    others = {name: v for name, v in values.items() if name not in names}
    given = ModelCall(args, kwargs)
    some = given.rows(0, 2)
    try:
        with torch.no_grad():
            model(*some.args, **some.kwargs)
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = [", ".join(str(tuple(t.shape[1:])) for t in c.tensors) for c in (given, call)]
        raise ArgumentError(
            f"{option} {path}: the model cannot take samples of shape {shapes[0]}; in training "
            f"they had {shapes[1]}. {str(error).splitlines()[0]}"
        ) from None
    return given, others


def read_columns(path: Path) -> dict[str, Any]:
    """The columns of numbers of a table as ``input``, their ``names``, ``target`` and ``slice``."""
    need("pyarrow", "tables", f"reading {path}")
    import pyarrow.csv
    import pyarrow.parquet

    csv = path.suffix == ".csv"
    table = pyarrow.csv.read_csv(path) if csv else pyarrow.parquet.read_table(path)
    others = {n: table[n].to_numpy() for n in ("target", "slice") if n in table.column_names}
    columns = {n: table[n].to_numpy() for n in table.column_names if n not in others}
    numbers = {n: v for n, v in columns.items() if v.dtype.kind in "iufb"}
    if not numbers:
        raise ValueError("it has no column of numbers")
    return {**others, "input": np.stack(list(numbers.values()), axis=1), "names": list(numbers)}
