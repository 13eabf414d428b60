"""Run a bundle's model: NumPy and ONNX Runtime, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ronde.ship.bundle import Bundle, ShipError, verify_bundle
from ronde.world import ArgumentError
from ronde.world.paths import need

__all__ = ["ShippedModel", "deviations", "first_line", "open_session", "stored_samples"]

MODEL, INT8, EXPECTED = "model.onnx", "model.int8.onnx", "expected.safetensors"
RECIPE = "recipe.json"


def open_session(model: Path | bytes, *, optimized: bool = True, threads: int = 0) -> Any:
    """An ONNX Runtime session on the CPU, from bytes: files that the model names are not read.

    Raises:
        ShipError: the model is damaged, or this ONNX Runtime cannot run it.
    """
    need("onnxruntime", "ship", "running an exported model")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # its exceptions say the same
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model if isinstance(model, bytes) else model.read_bytes()
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its own classes have no common base
        raise ShipError(f"ONNX Runtime refuses the model: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def stored_samples(bundle: Bundle) -> tuple[dict[str, np.ndarray[Any, Any]], list[Any]]:
    """The inputs and the expected outputs that a bundle holds."""
    from safetensors.numpy import load

    try:
        values = load((bundle.path / EXPECTED).read_bytes())
    except Exception as error:  # of safetensors, or no such file
        raise ShipError(f"{bundle.path} has no stored samples: {error}") from None
    inputs = {k.removeprefix("input."): v for k, v in values.items() if k.startswith("input.")}
    outputs = [values[f"output.{i}"] for i in range(len(values) - len(inputs))]
    return inputs, outputs


def deviations(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How far each value is from the one that is wanted. Equal infinities are not apart, nor two
    NaN; NaN is infinitely far from a number.
    """
    with np.errstate(invalid="ignore"):
        apart = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    apart = np.where((got == wanted) | (np.isnan(got) & np.isnan(wanted)), 0.0, apart)
    return np.where(np.isnan(apart), np.inf, apart)


class ShippedModel:
    """A model of a verified bundle.

    Args:
        path: the bundle.
        key: public key that must have signed it.
        int8: use the quantized model, if the bundle has one.

    Raises:
        ShipError: the bundle was changed, or has no such model.

    Example:
        >>> model = ShippedModel("bundle", key="public.pem")      # doctest: +SKIP
        >>> model.predict({"x": images})                          # doctest: +SKIP
    """

    def __init__(
        self, path: str | Path, key: str | Path | None = None, *, int8: bool = False
    ) -> None:
        # A link such as CURRENT may point elsewhere later: this model stays what it is.
        self.bundle = verify_bundle(Path(path).resolve(), Path(key) if key else None)
        name = INT8 if int8 else MODEL
        if name not in self.bundle.about["files"]:
            raise ShipError(f"{path} has no {name}.")
        self._session = open_session(self.bundle.path / name)
        self.inputs = {i.name: i for i in self._session.get_inputs()}
        self._recipe: Any = None
        if RECIPE in self.bundle.about["files"]:
            need("pyarrow", "tables", "a bundle with a recipe")
            from ronde.tables.recipe import Recipe

            self._recipe = Recipe.read(self.bundle.path / RECIPE)

    def predict(
        self, inputs: Mapping[str, Any] | Sequence[Any] | np.ndarray[Any, Any]
    ) -> list[np.ndarray[Any, Any]]:
        """Outputs of a batch.

        Args:
            inputs: name -> array, ``[samples, …]``; or one array, for a model with one input.

        Raises:
            ArgumentError: names, shapes, or types are not the model's.
            ShipError: the model fails on these values.
        """
        inputs = self.named(inputs)
        if inputs.keys() != self.inputs.keys():
            raise ArgumentError(
                f"the model takes {', '.join(self.inputs)}; there is "
                f"{', '.join(map(str, inputs)) or 'none'}."
            )
        ready = {name: self._array(name, value) for name, value in inputs.items()}
        try:
            return list(self._session.run(None, ready))
        except Exception as error:
            raise ShipError(f"the model fails: {first_line(error)}") from None

    def named(self, inputs: Any) -> Mapping[str, Any]:
        """Inputs by name: one array is that of a model with one input."""
        if isinstance(inputs, Mapping):
            return inputs
        if len(self.inputs) != 1:
            raise ArgumentError(f"the model takes {', '.join(self.inputs)}, by name.")
        return {next(iter(self.inputs)): inputs}

    def predict_rows(self, rows: Any) -> list[np.ndarray[Any, Any]]:
        """Outputs of rows of a table, prepared by the recipe that the model was trained with.

        Args:
            rows: a list of dictionaries, or a frame of pandas, Polars or Arrow.

        Raises:
            ShipError: the bundle has no recipe.
            ArgumentError: a column is missing, or of another type than in training.
        """
        return self.predict(self.prepare_rows(rows))

    def prepare_rows(self, rows: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The model's inputs for rows of a table."""
        if self._recipe is None:
            takes = ", ".join(self.inputs)
            raise ShipError(f"{self.bundle.path} has no recipe: its model takes {takes}.")
        import pyarrow as pa

        if isinstance(rows, list):
            if not rows or any(not isinstance(r, dict) or r.keys() != rows[0].keys() for r in rows):
                raise ArgumentError("rows: expected dictionaries, all with the same columns.")
            try:
                rows = pa.Table.from_pylist(rows)
            except pa.ArrowException as error:
                raise ArgumentError(f"rows: {error}") from None
        made = self._recipe.matrices(pa.table(self._recipe.apply(rows)), "rows")
        return dict(zip(self.inputs, (each for each in made if each.shape[1]), strict=True))

    def _array(self, name: str, value: Any) -> np.ndarray[Any, Any]:
        spec = self.inputs[name]
        name_of_kind = spec.type.removeprefix("tensor(").removesuffix(")")
        kind = np.dtype(_KINDS.get(name_of_kind, name_of_kind))
        try:
            given: np.ndarray[Any, Any] = np.asarray(value)
            array = given.astype(kind)
        except (ValueError, TypeError, OverflowError) as error:
            raise ArgumentError(f"input {name}: {error}") from None
        exact = kind.kind == "f" or (given.dtype.kind in "iub" and bool((array == given).all()))
        if given.dtype.kind not in "iubf" or not exact:
            raise ArgumentError(f"input {name} takes {kind}, and was given {given.dtype}.")
        wanted = spec.shape
        fits = array.ndim == len(wanted) and all(
            not isinstance(w, int) or w == n for w, n in zip(wanted, array.shape, strict=True)
        )
        if not fits:
            shape = ", ".join(map(str, wanted))
            raise ArgumentError(f"input {name} has shape {array.shape}; the model takes [{shape}].")
        return array

    def check(self) -> float:
        """Run the stored samples on this device.

        Returns:
            float: the largest difference from the outputs that were stored.

        Raises:
            ShipError: it is beyond the bundle's limit.
        """
        inputs, expected = stored_samples(self.bundle)
        worst = 0.0
        outputs = self.predict(inputs)
        limits = self.bundle.about.get("limits")
        if not isinstance(limits, list) or not len(limits) == len(expected) == len(outputs):
            raise ShipError(f"{self.bundle.path} lacks a limit or a stored value for an output.")
        for i, (got, wanted, limit) in enumerate(zip(outputs, expected, limits, strict=True)):
            off = float(deviations(got, wanted).max(initial=0.0))
            worst = max(worst, off)
            if not off <= limit:  # a limit of NaN allows nothing
                raise ShipError(
                    f"output {i} of the stored samples is off by {off:.2g} on this "
                    f"device; the limit is {limit:.2g}."
                )
        return worst


_KINDS = {"float": "float32", "double": "float64"}  # the others have NumPy's names
