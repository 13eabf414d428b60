"""A trained model of boosted trees, in its library's own format."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ronde.algorithms.table_rows import Levels, as_frame, encode_frame
from ronde.world import ArgumentError

__all__ = ["TreeModel"]

_LEVELS = "ronde_categories"
_OF_WORKERS = re.compile(
    r"\[(machines|num_machines|local_listen_port|num_threads|num_iterations): .*\]\n"
)


def import_library(name: str) -> Any:
    """XGBoost or LightGBM."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ArgumentError(
            f"library={name!r} needs {name}: pip install '.[trees]' in a clone of Ronde."
        ) from None


@dataclass
class TreeModel:
    """A model of boosted trees.

    Attributes:
        booster: the ``xgboost.Booster`` or ``lightgbm.Booster``.
        library: which of them.
        names: columns that it predicts from.
        levels: categorical column -> its values in the order of their codes.
        rounds: how many rounds of trees it has.
        metrics: of the best round, over all validation rows.
    """

    booster: Any
    library: str
    names: list[str]
    levels: Levels
    rounds: int
    metrics: dict[str, float]

    @classmethod
    def of_xgboost(cls, booster: Any, levels: Levels | None = None) -> TreeModel:
        """Around a booster; its file gets the categories as an attribute."""
        if levels:
            booster.set_attr(**{_LEVELS: json.dumps(levels)})
        known = levels or json.loads(booster.attr(_LEVELS) or "{}")
        names = booster.feature_names
        return cls(booster, "xgboost", names, known, booster.num_boosted_rounds(), {})

    @classmethod
    def of_lightgbm(
        cls, text: str, objective: str, base: Sequence[float], levels: Levels
    ) -> TreeModel:
        """Of a model trained on given gradients: name its objective and put ``base``, the margin
        that it began with, into the first trees.
        """
        lgb = import_library("lightgbm")
        text = _OF_WORKERS.sub("", text)
        text = text.replace(
            "\nparameters:\n", f"\nparameters:\n[{_LEVELS}: {json.dumps(levels)}]\n"
        )
        text = text.replace("\nmax_feature_idx=", f"\nobjective={objective}\nmax_feature_idx=", 1)
        booster = lgb.Booster(model_str=text)
        for tree, value in enumerate(base[: booster.num_trees()]):
            # a round has one tree for each class
            for leaf in range(booster.dump_model(1)["tree_info"][tree]["num_leaves"]):
                booster.set_leaf_output(tree, leaf, booster.get_leaf_output(tree, leaf) + value)
        return cls(
            booster, "lightgbm", booster.feature_name(), levels, booster.current_iteration(), {}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the library's own file: JSON (XGBoost) or text (LightGBM)."""
        self.booster.save_model(str(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str], library: str = "xgboost") -> TreeModel:
        """Read what :meth:`save` wrote."""
        if not Path(path).is_file():
            raise ArgumentError(f"{path} is not a file.")
        if library == "xgboost":
            return cls.of_xgboost(import_library("xgboost").Booster(model_file=str(path)))
        booster = import_library("lightgbm").Booster(model_file=str(path))
        match = re.search(rf"^\[{_LEVELS}: (.*)\]$", Path(path).read_text(), re.M)
        levels = json.loads(match[1]) if match else {}
        return cls(
            booster, library, booster.feature_name(), levels, booster.current_iteration(), {}
        )

    def predict(self, data: Any) -> npt.NDArray[Any]:
        """Probabilities (of class 1, or (n, classes)) or values, one a row.

        Args:
            data: (n, columns) array, or a table with the columns of the training. Categories that
                the training did not have count as missing.
        """
        if isinstance(data, np.ndarray):
            x = data.astype(np.float32)
        else:
            x = encode_frame(as_frame(data), self.names, self.levels)
        if self.library == "lightgbm":
            return np.asarray(self.booster.predict(x))
        types = ["c" if name in self.levels else "q" for name in self.names]
        matrix = import_library("xgboost").DMatrix(
            x, feature_names=self.names, feature_types=types, enable_categorical=True
        )
        return np.asarray(self.booster.predict(matrix))
