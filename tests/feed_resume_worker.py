"""Train over a feed pipeline, write down every sample that is seen with its augmentation, and be
killed: used by test_loader_resume.py.

``feed_resume_worker.py DATA KIND KILL_STEP``: KIND is ``folder``, ``arrays`` or ``cached``; rank
``world_size - 1`` kills itself with SIGKILL after KILL_STEP steps (-1: never).
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import ronde
from ronde import feed

DATA, KIND, KILL = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def opened(sample):
    """A file's bytes -> its numbers and its own number, which is its name."""
    return np.frombuffer(sample.data, np.float64).copy(), int(sample.name.split(".")[0])


def unpacked(row):
    return np.array(row["x"], np.float64), int(row["id"])


def augment(sample):
    x, i = sample
    return torch.from_numpy(x[::-1].copy() if feed.rng().random() < 0.5 else x) + torch.from_numpy(
        feed.rng().normal(0, 0.1, 6)
    ), i


if KIND == "arrays":
    numbers = sorted(int(p.stem) for p in DATA.glob("*.bin"))
    rows = np.stack(
        [
            np.frombuffer((DATA / f"{i}.bin").read_bytes(), np.float64)
            for i in sorted(numbers, key=str)
        ]
    )
    pipeline = feed.Pipeline(
        feed.arrays({"x": rows, "id": np.array(sorted(numbers, key=str))})
    ).map(unpacked, "decode")
else:
    pipeline = feed.Pipeline(feed.folder(DATA, labels=None)).map(opened, "decode")
if KIND == "cached":
    pipeline = pipeline.cache("decode", limit="1MiB")
pipeline = pipeline.map(augment, "augment")

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = ronde.distribute(
    model,
    optimizer,
    pipeline,
    loss=F.cross_entropy,
    batch_size=6,
    seed=5,
    save_every=2,
    async_save=False,  # which step is resumed is not left to chance
    shuffle=True,
)
log = os.open(os.environ["SEEN"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.write(log, f"begin {run.rank} {run.state.step}\n".encode())
for _ in run.epochs(3):
    for x, i in run.batches():
        step = run.state.step
        # A worker whose share is empty gets a stand-in: what counts is the share.
        low, high = run.port.parts.place.share.micro[0]
        for row, number in zip(x[: high - low], i[: high - low].tolist(), strict=True):
            digest = hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()[:16]
            os.write(log, f"{step} {number} {digest}\n".encode())
        run.step((x, i % 3))
        if run.state.step == KILL and run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
if run.is_main:
    torch.save({k: v.clone() for k, v in model.state_dict().items()}, os.environ["SEEN"] + ".pt")
