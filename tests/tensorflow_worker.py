"""``tensorflow_worker.py fit|loop|ps FILE [kill|hang]``: train a small network in float64 with
TensorFlow, under the strategy that ``TF_CONFIG`` asks for, and keep its weights.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy
import tensorflow as tf

mode, file, fault = sys.argv[1], sys.argv[2], "".join(sys.argv[3:])
rank = int(os.environ.get("RANK", "0"))
if mode == "ps":
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        kind, index = resolver.task_type, resolver.task_id
        tf.distribute.Server(resolver.cluster_spec(), job_name=kind, task_index=index).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
elif "TF_CONFIG" in os.environ:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before TensorFlow does anything
else:
    strategy = tf.distribute.get_strategy()

tf.keras.backend.set_floatx("float64")
generator = numpy.random.default_rng(0)
x = generator.normal(size=(240, 12))
y = (x @ generator.normal(size=(12, 3))).argmax(1)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(48).with_options(options)
each = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
with strategy.scope():
    first = tf.keras.initializers.GlorotUniform(seed=1)
    last = tf.keras.initializers.GlorotUniform(seed=2)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(24, "tanh", kernel_initializer=first, input_shape=(12,)),
            tf.keras.layers.Dense(3, kernel_initializer=last),
        ]
    )
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)


def update(images, labels, share):
    """One step of the optimizer on these samples."""
    with tf.GradientTape() as tape:
        value = tf.nn.compute_average_loss(each(labels, model(images, training=True)), None, share)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return value


class Fault(tf.keras.callbacks.Callback):
    """Kills rank 1 once, or lets it hang."""

    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        done = Path(f"{file}.{fault}")
        if rank == 1 and epoch == 2 and fault == "kill" and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and epoch == 2 and fault == "hang":
            time.sleep(999)


if mode == "fit":
    backup = Path(os.environ.get("RONDE_RUN_DIR", "."), "backup")
    kept = [tf.keras.callbacks.BackupAndRestore(str(backup))] if fault == "kill" else []
    model.fit(data, epochs=3, verbose=0, callbacks=[*kept, Fault()])
elif mode == "loop":

    @tf.function
    def step(batch):
        """One step on all workers."""
        values = strategy.run(lambda part: update(*part, 48), args=(batch,))
        return strategy.reduce("SUM", values, axis=None)

    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(data):
            step(batch)
else:
    coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step(number):
        """One step on one worker."""
        part = slice(number * 48, number * 48 + 48)
        return strategy.run(lambda: update(tf.constant(x)[part], tf.constant(y)[part], 48))

    for _ in range(3):
        for number in range(5):
            coordinator.schedule(step, args=(number,))
            coordinator.join()
if rank == 0:
    numpy.save(file, numpy.concatenate([v.ravel() for v in model.get_weights()]))
