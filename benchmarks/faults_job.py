"""The training that ``faults.py`` disturbs: small, in float64, and it notes each step it takes.

    faults_job.py OUT EPOCHS PAUSE

A line of ``OUT.steps``: seconds of the clock, step, rank, process, generation, then the ids of its
samples. ``OUT.nan`` makes the next loss NaN, once.
"""

import os
import sys
import time
from pathlib import Path

import torch

import ronde

SAMPLES, BATCH = 96, 8


class Samples(torch.utils.data.Dataset):
    x = torch.randn(SAMPLES, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int):
        return i, self.x[i], self.x[i].sum()


def main() -> None:
    out, epochs, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(output, target):
        value = torch.nn.functional.mse_loss(output.sum(1), target)
        planted = Path(f"{out}.nan")
        if planted.exists() and ronde.world().rank == ronde.world().size - 1:
            planted.unlink()
            value = value * float("nan")
        return value

    run = ronde.distribute(
        model,
        optimizer,
        Samples(),
        loss=loss,
        forward=lambda model, batch: (model(batch[1]), batch[2]),
        batch_size=BATCH,
        save_every=5,
    )
    own = os.environ["RONDE_GENERATION"]
    with open(f"{out}.steps", "a", buffering=1) as file:
        for _ in run.epochs(epochs):
            for batch in run.batches():
                run.step(batch)
                micros = batch if type(batch).__name__ == "MicroBatches" else [batch]
                ids = [i for micro in micros for i in micro[0].tolist()]
                print(time.time(), run.state.step, run.rank, os.getpid(), own, *ids, file=file)
                time.sleep(pause)
    run.export(out)


main()
