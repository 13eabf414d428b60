"""Keras scripts of Horovod's on the bridge: several ranks train as one does, in float64."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy
import pytest

from processes import TESTS, ronde_run
from sampling import ALL

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")
NO_FILES = {"RONDE_RUNS": "none", "KERAS_BACKEND": None}


def trained(tmp_path, workers: int):
    words = ["run", "--horovod", "--workers", str(workers)]
    script = str(TESTS / "horovod_keras_worker.py")
    done = ronde_run([*words, script, f"with{workers}"], tmp_path, 200, NO_FILES)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    curves = json.loads((tmp_path / f"with{workers}").read_text())
    return numpy.load(tmp_path / f"with{workers}.npz"), curves, done.stdout


def test_several_ranks_are_one(tmp_path):
    one, curves, _ = trained(tmp_path, 1)
    several, same, output = trained(tmp_path, 4 if ALL else 2)
    for name, weights in one.items():
        numpy.testing.assert_allclose(several[name], weights, rtol=0, atol=1e-12, err_msg=name)
        for metric, values in curves[name].items():
            numpy.testing.assert_allclose(same[name][metric], values, rtol=1e-6, err_msg=metric)
        numpy.testing.assert_allclose(
            same[name]["lr"], numpy.array(same[name]["lr"])[0] * numpy.array([1, 0.5, 0.25])
        )
    assert curves["warmup"]["lr"] == [0.5, 0.5]
    # with 4 ranks (1 + 3 · ½) / 4 of it, with 2 (1 + ½) / 2; then all
    assert same["warmup"]["lr"] == [0.3125 if ALL else 0.375, 0.5]
    assert "Epoch 2: the warm-up is over, the learning rate is 0.5." in output
    refused = [line for line in output.splitlines() if line.startswith("refused: ")]
    for line, sentence in zip(
        refused,
        [
            "backward_passes_per_step=2: give the optimizer gradient_accumulation_steps=2 instead.",
            "hvd.DistributedOptimizer has no argument 'speed'",
            "hvd.DistributedOptimizer takes a Keras optimizer, not SGD.",
            "Keras 3 has no global variables: give fit the callback "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(0).",
            "horovod.tensorflow.DistributedGradientTape: Ronde's bridge is for PyTorch and for "
            "Keras on its torch backend. ronde run --tensorflow starts scripts that use "
            "TensorFlow's own strategies.",
            "mixed_float16: each rank would skip steps by itself. Use mixed_bfloat16.",
        ],
        strict=True,
    ):
        assert line == f"refused: {sentence}"


def test_another_backend_is_refused(tmp_path):
    (tmp_path / "other.py").write_text("import horovod.keras\n")
    env = {**NO_FILES, "KERAS_BACKEND": "jax"}
    done = ronde_run(["run", "--horovod", "--workers", "1", "other.py"], tmp_path, 60, env)
    assert done.returncode == 1
    sentence = "horovod.keras runs on Keras's torch backend; this process uses 'jax'."
    assert sentence in done.stderr, done.stderr
