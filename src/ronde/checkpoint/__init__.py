"""Save, verify, resume: safetensors and a JSON manifest of sizes and digests, whole or not at all, never a pickle.

Offers :func:`write`, :func:`verify`, :func:`find_valid` (files), and the state of models, optimizers and generators as
tensors by name.
"""

from ronde.checkpoint.encode import decode, encode
from ronde.checkpoint.files import Checkpoint, export, find_valid, list_checkpoints, verify, write
from ronde.checkpoint.state import (
    load_model,
    load_optimizer,
    model_state,
    optimizer_state,
    random_state,
    restore_random,
)

__all__ = [
    "Checkpoint",
    "decode",
    "encode",
    "export",
    "find_valid",
    "list_checkpoints",
    "load_model",
    "load_optimizer",
    "model_state",
    "optimizer_state",
    "random_state",
    "restore_random",
    "verify",
    "write",
]
