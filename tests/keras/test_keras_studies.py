"""Commands that look at a script find a Keras model in it, as they find one of torch."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from processes import ronde_run
from sampling import long

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="needs the extra keras")

SCRIPT = """
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

import ronde

L = keras.layers
model = keras.Sequential([L.Input((16,)), *(L.Dense(64, "relu") for _ in range(4)), L.Dense(5)])
x = torch.randn(600, 16, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
run = ronde.distribute(model, keras.optimizers.AdamW(0.01), data, loss=loss, batch_size=20)
for _ in run.epochs(100):
    for batch in run.batches():
        run.step(batch)
"""


KEYS = {"plan": "sentence", "doctor": "stages", "scale": "rows", "prove": "plans"}


@long
@pytest.mark.parametrize("verb", ["plan", "doctor", "scale", "prove"])
def test_a_keras_model_is_studied(tmp_path, verb):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [verb, "--json", "told.json"]
    done = ronde_run([*words, "train.py"], tmp_path, 170, {"RONDE_DEVICE": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told[KEYS[verb]], told
