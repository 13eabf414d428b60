"""Predict from raw rows with the exported file alone: its recipe prepares, its weights score."""

import sys

import numpy as np
import pandas
import torch
from safetensors.torch import load_file

from ronde import feed

model_file, rows_file = sys.argv[1:]
recipe, weights = feed.Recipe.read(model_file), load_file(model_file)
prepared = recipe.apply(pandas.read_csv(rows_file, parse_dates=["opened"]))
numbers = [each.name for each in recipe.outputs if not each.size]
codes = [each.name for each in recipe.outputs if each.size]
parts = [torch.from_numpy(prepared[numbers].to_numpy(np.float32))]
for i, name in enumerate(codes):
    parts.append(weights[f"embeddings.{i}.weight"][torch.tensor(prepared[name].to_numpy())])
hidden = torch.cat(parts, 1) @ weights["layers.0.weight"].T + weights["layers.0.bias"]
scores = torch.sigmoid(hidden.relu() @ weights["layers.2.weight"].T + weights["layers.2.bias"])
left = pandas.read_csv(rows_file)["left"].to_numpy() > 0
print(f"{len(scores)} rows, accuracy {((scores[:, 0] > 0.5).numpy() == left).mean():.4f}")
