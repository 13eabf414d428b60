"""``ronde clarify explain``: why a saved model says what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ronde.algorithms.tree_model import TreeModel
from ronde.clarify.shapley import Explained, shapley_values
from ronde.measure.model_call import ModelCall, read_call, saved_model
from ronde.measure.study import answer_at_distribute, report_progress
from ronde.parallel import Work
from ronde.world import ArgumentError, RondeError
from ronde.world.paths import need

__all__ = [
    "by_text",
    "explain_trees",
    "install_explainer",
    "integrated_gradients",
    "read_tokenizer",
]

_PATCHES = 7  # of an image's side

Array = np.ndarray[Any, Any]


def install_explainer() -> None:
    """Observe this process, because of ``RONDE_STUDY=explain``."""
    answer_at_distribute(explain_rows)


def _score(model: nn.Module, output: int | None) -> Callable[[ModelCall], torch.Tensor]:
    """``[n]`` outputs of a call: of one class, or the only one."""

    def score(call: ModelCall) -> torch.Tensor:
        out = model(*call.args, **call.kwargs)
        leaves, _ = tree_flatten(out)
        first = next(v for v in leaves if isinstance(v, torch.Tensor))
        first = first.reshape(len(first), -1)
        if first.shape[1] > 1 and output is None:
            raise ArgumentError(
                f"the model has {first.shape[1]} outputs: --output N says which to explain."
            )
        if output is not None and not 0 <= output < first.shape[1]:
            raise ArgumentError(f"--output {output}: the model has {first.shape[1]} outputs.")
        return first[:, output or 0]

    return score


def _players(example: torch.Tensor) -> tuple[Array, str]:
    """The player of each element of a sample, and what a player is."""
    shape = tuple(example.shape)
    if len(shape) == 3 and min(shape[1:]) >= 2 * _PATCHES:
        rows, columns = (np.arange(n) * _PATCHES // n for n in shape[1:])
        grid = rows[:, None] * _PATCHES + columns[None, :]
        return np.broadcast_to(grid, shape).copy(), "patch"
    kind = "column" if example.is_floating_point() else "token"
    return np.arange(int(np.prod(shape))).reshape(shape), kind


def explain_rows(work: Work, calls: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Explain rows of a data file.

    Raises:
        ArgumentError: the data are not the model's, or the method is not for it.
    """
    model, _, call, _ = saved_model(work, calls, Path(options["checkpoint"]))
    background = call
    names: list[str] | None = None
    if options.get("data"):
        call, others = read_call(Path(options["data"]), model, call, "--data")
        names = others.get("names")
        names = names if isinstance(names, list) else None
    if len(call.tensors) != 1:
        raise ArgumentError(
            f"the model takes {len(call.tensors)} tensors; models with one are explained."
        )
    rows = min(int(options["rows"]), call.samples)
    part = call.rows(0, rows)
    players, kind = _players(part.tensors[0][0])
    model = model.double()  # the sum check would show float32's rounding, not the method's gap
    score = _score(model, options.get("output"))
    report_progress(f"explaining {rows} rows")
    if options["method"] == "ig":
        explained = integrated_gradients(model, score, part, background, players)
    else:

        def predict(values: Array) -> Array:
            given = part.with_tensor(torch.as_tensor(values)).double()
            with torch.no_grad():
                return score(given).numpy()

        # each coalition costs a call for each of them
        some = background.rows(0, min(16, background.samples)).tensors[0].numpy()
        samples = part.tensors[0].numpy()
        explained = shapley_values(predict, samples, some, players, budget=int(options["budget"]))
    values = explanation_values(explained, kind, names, players.shape)
    if kind == "token":
        values["tokens"] = part.tensors[0].reshape(rows, -1).tolist()
    return values


def explanation_values(
    explained: Explained, kind: str, names: list[str] | None, shape: tuple[int, ...]
) -> dict[str, Any]:
    """An explanation as plain JSON."""
    count = explained.values.shape[1]
    return {
        "kind": kind,
        "shape": list(shape),
        "names": list(names) if names else [f"{kind} {i}" for i in range(count)],
        "values": explained.values.tolist(),
        "base": explained.base.tolist(),
        "output": explained.output.tolist(),
        "gap": float(explained.gaps.max(initial=0.0)),
    }


def read_tokenizer(path: Path) -> Any:
    """The vocabulary of a ``tokenizer.json``, or of the folder that holds it.

    Raises:
        ArgumentError: the file is no tokenizer, or the package is not installed.
    """
    need("tokenizers", "finetune", "--tokenizer")
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no other class
        raise ArgumentError(f"--tokenizer {file}: {error}") from None


def by_text(values: dict[str, Any], vocabulary: Any) -> dict[str, Any]:
    """An explanation of tokens by their texts: values of the same text in a row are added.

    Args:
        values: of :func:`explain_rows`.
        vocabulary: of :func:`read_tokenizer`.

    Raises:
        ArgumentError: the model takes no tokens.
    """
    if "tokens" not in values:
        kind = values["kind"]
        raise ArgumentError(f"--tokenizer is for tokens: this model's values are of each {kind}.")
    texts = [[vocabulary.id_to_token(i) or str(i) for i in row] for row in values["tokens"]]
    names = list(dict.fromkeys(text for row in texts for text in row))
    place = {text: i for i, text in enumerate(names)}
    added = np.zeros((len(texts), len(names)))
    for row, (each, row_texts) in enumerate(zip(values["values"], texts, strict=True)):
        np.add.at(added[row], [place[text] for text in row_texts], each)
    return values | {"values": added.tolist(), "names": names, "shape": [len(names)]}


def integrated_gradients(
    model: nn.Module,
    score: Callable[[ModelCall], torch.Tensor],
    part: ModelCall,
    background: ModelCall,
    players: Array,
) -> Explained:
    """Integrated gradients (Sundararajan 2017) by captum, from the mean of the background, with
    steps doubled until the values add up; of tokens, over the first embedding, from zeros.

    Raises:
        ArgumentError: the model takes whole numbers and has no embedding.
    """
    need("captum", "explain", "--method ig")
    from captum.attr import IntegratedGradients, LayerIntegratedGradients

    inputs = part.double().tensors[0]

    def forward(values: torch.Tensor) -> torch.Tensor:
        return score(part.with_tensor(values))

    if inputs.is_floating_point():
        method: Any = IntegratedGradients(forward)
        start = background.double().tensors[0].mean(0, keepdim=True).expand_as(inputs)
    else:
        layers = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        if not layers:
            raise ArgumentError("--method ig: the model takes whole numbers and has no embedding.")
        method = LayerIntegratedGradients(forward, layers[0])
        start = torch.zeros_like(inputs)
    with torch.no_grad():
        output, base = (forward(v).double().numpy() for v in (inputs, start))
    steps = 32  # doubled until the values add up to 1e-4 of the output, at most to 1,024
    limit = 1e-4 * max(1.0, float(np.abs(output).max(initial=0.0)))
    while True:
        given = method.attribute(inputs, baselines=start, n_steps=steps, internal_batch_size=256)
        values = given.detach().double().numpy()
        if values.shape != tuple(inputs.shape):  # of an embedding: its last axis is summed
            values = values.sum(axis=-1)
        flat = np.zeros((len(values), int(players.max()) + 1))
        for player in range(flat.shape[1]):
            flat[:, player] = values[:, players == player].sum(axis=1)
        explained = Explained(flat, base, output)
        if float(explained.gaps.max(initial=0.0)) <= limit or steps >= 1024:
            return explained
        steps *= 2


def explain_trees(
    model: Path, samples: Array, names: list[str] | None = None
) -> tuple[Explained, list[str] | None]:
    """Exact SHAP values by the library that made a model file of trees.

    Args:
        model: of XGBoost (``.json``, ``.ubj``) or LightGBM (``.txt``).
        samples: ``[samples, columns]``.
        names: of the columns; they are put into the order of the model's.

    Returns:
        tuple: the values, and the names in their order.

    Raises:
        ArgumentError: the file is no such model, or was trained on other columns.
    """
    try:
        return _explain_trees(model, samples, names)
    except RondeError:
        raise
    except Exception as error:  # the libraries' own have no common base
        raise ArgumentError(f"{model}: {str(error).splitlines()[0][:200]}") from None


def _ordered(
    samples: Array, names: list[str] | None, known: list[str] | None
) -> tuple[Array, list[str] | None]:
    """Samples with their columns in the order of a model's."""
    if not names or not known:
        return samples, names
    if all(k == f"Column_{i}" for i, k in enumerate(known)):  # LightGBM was given none
        return samples, names
    if missing := [k for k in known if k not in names]:
        raise ArgumentError(f"the model was trained with column {missing[0]!r}; --data lacks it.")
    return samples[:, [names.index(k) for k in known]], known


def _explain_trees(
    model: Path, samples: Array, names: list[str] | None
) -> tuple[Explained, list[str] | None]:
    loaded = TreeModel.load(model, "lightgbm" if model.suffix == ".txt" else "xgboost")
    booster = loaded.booster
    samples, names = _ordered(samples, names, loaded.names)
    if loaded.library == "lightgbm":
        given = np.asarray(booster.predict(samples, pred_contrib=True))
        output = np.asarray(booster.predict(samples, raw_score=True))
    else:
        import xgboost

        data = xgboost.DMatrix(samples, feature_names=loaded.names)
        given = booster.predict(data, pred_contribs=True)
        output = booster.predict(data, output_margin=True)
    if given.ndim != 2 or given.shape[1] != samples.shape[1] + 1:
        raise ArgumentError(f"{model}: trees with one output are explained.")
    wide = given.astype(np.float64)
    return Explained(wide[:, :-1], wide[:, -1], output.astype(np.float64).reshape(-1)), names
