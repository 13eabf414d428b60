"""The training that ``faults.py`` disturbs: small, in float64, and it notes each step it takes.

    faults_job.py OUT EPOCHS PAUSE [ON_NAN]

A line of ``OUT.steps``: seconds of the clock, step, rank, process, generation, then the ids of its
samples. Files plant what no signal can: ``OUT.nan`` holds a step whose loss is NaN on the last
rank, each time that it comes; ``OUT.nan-once`` makes the next one NaN, once; ``OUT.bit`` flips a
bit of the last rank's weights, once. ``OUT.pause`` holds another pause.
"""

import os
import sys
import time
from pathlib import Path

import torch

import ronde

SAMPLES, BATCH, WIDTH = 96, 8, 12


class Samples(torch.utils.data.Dataset):
    x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int):
        return i, self.x[i], self.x[i].sin().sum()  # no linear model has no loss


def parts():
    """Model, optimizer and loss."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, lambda output, y: torch.nn.functional.mse_loss(output.sum(1), y)


def taken(file: Path) -> bool:
    """Whether the file is there; it is not any more then."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True


def main() -> None:
    out, epochs, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    model, optimizer, plain = parts()
    planted = Path(f"{out}.nan")
    bad = int(planted.read_text()) if planted.exists() else 0
    once, bit, slower = (Path(f"{out}.{name}") for name in ("nan-once", "bit", "pause"))

    me = ronde.world()
    last, coming = me.rank == me.size - 1, [0]  # the step that is being taken

    def loss(output, target):
        wrong = last and coming[0] and (coming[0] == bad or taken(once))
        return plain(output, target) * (float("nan") if wrong else 1.0)  # the same operations

    run = ronde.distribute(
        model,
        optimizer,
        Samples(),
        loss=loss,
        forward=lambda model, batch: (model(batch[1]), batch[2]),
        batch_size=BATCH,
        save_every=int(os.environ.get("SAVE_EVERY", "5")),
        on_nan=sys.argv[4] if len(sys.argv) > 4 else "error",
    )
    own = os.environ["RONDE_GENERATION"]
    with open(f"{out}.steps", "a", buffering=1) as file:
        for _ in run.epochs(epochs):
            for batch in run.batches():
                before = run.state.step
                coming[0] = before + 1
                run.step(batch)
                if run.state.step <= before:  # it has gone back: this step was not taken
                    continue
                micros = batch if type(batch).__name__ == "MicroBatches" else [batch]
                ids = [i for micro in micros for i in micro[0].tolist()]
                print(time.time(), run.state.step, run.rank, os.getpid(), own, *ids, file=file)
                if last and taken(bit):
                    held = next(p for p in run.model.parameters() if p.numel())
                    held.detach().view(torch.int64).view(-1)[3] ^= 1 << 40
                time.sleep(float(slower.read_text()) if slower.exists() else pause)
    run.export(out)


if __name__ == "__main__":
    main()
