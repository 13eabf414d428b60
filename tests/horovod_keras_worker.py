"""``horovod_keras_worker.py FILE``: train Keras models as Horovod scripts do, from other weights on
every rank, and keep what came of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import horovod.keras as hvd
import horovod.tensorflow
import horovod.tensorflow.keras
import numpy
import torch
from keras.src.backend.common import dtypes

import keras

assert horovod.tensorflow.keras is hvd and hvd.callbacks is sys.modules["horovod.keras"].callbacks
file = Path(sys.argv[1])
hvd.init()
rank, size = hvd.rank(), hvd.size()
keras.config.set_floatx("float64")
dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"  # Keras multiplies matrices in float32
generator = numpy.random.default_rng(0)
x = generator.normal(size=(192, 12))
y = (x @ generator.normal(size=(12, 3))).argmax(1)
x, y = x[rank::size], y[rank::size]
OPTIMIZERS = (
    keras.optimizers.SGD(0.05, momentum=0.9),
    keras.optimizers.Adam(0.01),
    keras.optimizers.Adadelta(0.5),
)


def fit(model, epochs, *callbacks):
    """Train with the batches that one process has."""
    given = {"batch_size": 48 // size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, validation_data=(x, y), callbacks=callbacks, **given).history


def flat(model):
    """All weights, which must be the same on all ranks."""
    weights = numpy.concatenate([w.ravel() for w in model.get_weights()])
    assert (hvd.allgather(weights[None]) == weights).all(), "the ranks differ"
    return weights


found, curves = {}, {}
for optimizer in OPTIMIZERS:
    keras.utils.set_random_seed(5 + rank)
    layers = [
        keras.layers.Dense(24, activation="tanh"),
        keras.layers.Dense(3, activation="softmax"),
    ]
    model = keras.Sequential([keras.layers.Input((12,)), *layers])
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert hvd.DistributedOptimizer(optimizer) is optimizer  # no second average
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    halved = hvd.callbacks.LearningRateScheduleCallback(None, lambda e: 0.5**e, start_epoch=1)
    everywhere = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    history = fit(model, 3, everywhere, hvd.callbacks.MetricAverageCallback(), halved)
    found[optimizer.name], curves[optimizer.name] = flat(model), history

if rank == 0:
    numpy.savez(f"{file}.npz", **found)
    model.save(f"{file}.keras")
hvd.allreduce(0.0, name="saved")
plain = keras.models.load_model(f"{file}.keras")
loaded = hvd.load_model(f"{file}.keras")
kinds = [type(m.optimizer) for m in (model, plain, loaded)]
assert len(set(kinds)) == 1, kinds
assert numpy.array_equal(flat(loaded), flat(model))
warmup = hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2, verbose=rank == 0)
curves["warmup"] = fit(loaded, 2, warmup)
flat(loaded)
if rank == 0:
    file.write_text(json.dumps(curves))

assert hvd.allreduce(rank) == (size - 1) / 2
assert hvd.allreduce(rank, average=False) == size * (size - 1) / 2
assert hvd.broadcast(float(rank), size - 1) == size - 1
assert isinstance(hvd.allreduce(torch.ones(2)), numpy.ndarray)
for wrong in (
    lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2),
    lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), speed=1),
    lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)])),
    lambda: hvd.broadcast_global_variables(0),
    lambda: horovod.tensorflow.DistributedGradientTape,
):
    try:
        wrong()
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        print(f"refused: {error}")
keras.config.set_dtype_policy("mixed_float16")
try:
    hvd.DistributedOptimizer(keras.optimizers.SGD())
except ValueError as error:
    print(f"refused: {error}")
