"""A run that is stopped and resumed, on the same or another number of workers, is the run that was
never stopped.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from safetensors.torch import load_file

import processes
from sampling import ALL

SCRIPT = textwrap.dedent(
    """
    import os, sys, torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, Dataset
    import ronde

    STOP = int(sys.argv[1])

    class Rows(Dataset):  # 37 samples, batches of 8: the last one is short; the augmentation draws
        def __len__(self): return 37
        def __getitem__(self, i):
            g = torch.Generator().manual_seed(i)
            return torch.randn(6, generator=g, dtype=torch.float64) + 0.1 * torch.randn(6, dtype=torch.float64), i, i % 3

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4), torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])],
        [4],
    )
    seen = []

    def forward(model, batch):
        x, i, y = batch
        if model.training:
            seen.append(sorted(i.tolist()))
        return model(x), y

    run = ronde.distribute(model, optimizer, DataLoader(Rows(), 8, shuffle=True, num_workers=int(os.environ.get("LOADERS", 0))),
                           loss=F.cross_entropy, forward=forward, scheduler=scheduler, clip_norm=1.0, seed=5, save_every=3,
                           async_save=False)  # which step is resumed is not left to chance
    for epoch in run.epochs(4):
        for batch in run.batches():
            run.step(batch)
            run.log({"lr": optimizer.param_groups[0]["lr"], "seen": seen[-1]})
            if run.state.step == STOP:
                run.port.parts.watcher.flush()
                os._exit(9)  # as if killed, on every rank
        run.evaluate(Rows(), {})
    run.export(run.dir.path / "final.safetensors")
    """
)


def ronde_run(folder: Path, *arguments: str, fails: bool = False, **env: str) -> str:
    done = processes.ronde_run(["run", *arguments], folder, 100, env)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def curve(folder: Path, name: str) -> dict[int, float]:
    """Losses by step, as ``ronde show --json`` tells them."""
    shown = processes.ronde_run(["show", name, "--json"], folder).stdout
    return {int(step): loss for step, loss in json.loads(shown)["curve"]}


def close(a: dict[int, float], b: dict[int, float], bound: float) -> bool:
    return a.keys() == b.keys() and all(abs(a[s] - b[s]) <= bound * max(1.0, abs(b[s])) for s in b)


def weights_differ(folder: Path, a: str, b: str) -> float:
    one, two = (load_file(folder / "runs" / n / "final.safetensors") for n in (a, b))
    assert one.keys() == two.keys()
    return max(float((one[k] - two[k]).abs().max() / two[k].abs().max()) for k in two)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reference run that is never stopped."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "train.py").write_text(SCRIPT)
    ronde_run(folder, "-q", "-n", "1", "--name", "whole", "train.py", "-1")
    return folder


# 20 steps in all, 5 an epoch. Stopping at 8 leaves the checkpoint of step 6 (in the middle of an
# epoch) and two void steps.
RESUMED = [(2, 2, 8, 0), (2, 1, 5, 2), (1, 3, 13, 0), (3, 2, 17, 1)]


@pytest.mark.parametrize(("first", "second", "stop", "loaders"), RESUMED if ALL else RESUMED[1:2])
def test_resumed_on_another_number_of_workers(folder, first, second, stop, loaders):
    name = f"r-{first}-{second}-{stop}"
    env = {"LOADERS": str(loaders)}
    begin = ["-q", "-n", str(first), "--name", name, "train.py", str(stop)]
    ronde_run(folder, *begin, fails=True, **env)
    said = ronde_run(folder, "-n", str(second), "--name", name, "--resume", "train.py", "-1", **env)
    assert f"at step {stop - stop % 3}" in said
    assert close(curve(folder, name), curve(folder, "whole"), 1e-12)
    assert weights_differ(folder, name, "whole") <= 1e-12


def test_a_damaged_checkpoint_is_passed_over(folder):
    ronde_run(folder, "-q", "-n", "2", "--name", "damaged", "train.py", "8", fails=True)
    newest = max((folder / "runs/damaged/checkpoints").iterdir())
    assert newest.name == "step-000000006"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-3] ^= 4
    (newest / "model.safetensors").write_bytes(data)
    said = ronde_run(folder, "-n", "2", "--name", "damaged", "--resume", "train.py", "-1")
    assert "does not match its digest" in said
    assert "at step 3" in said
    assert close(curve(folder, "damaged"), curve(folder, "whole"), 1e-12)


def test_another_training_is_not_resumed(folder):
    ronde_run(folder, "-q", "-n", "1", "--name", "other", "train.py", "8", fails=True)
    before = (folder / "runs/other/record.jsonl").read_text()
    changed = (folder / "train.py").read_text()
    changes = (
        ("seed=5", "seed=6", "seed was 5 then and is 6 now"),
        ("Linear(6, 16)", "Linear(6, 17)", "the checkpoint is of another model"),
        ("optim.AdamW", "optim.Adam", "the checkpoint is of AdamW"),
        ("return 37", "return 36", "samples in the data set was 37 then and is 36 now"),
        ("Rows(), 8", "Rows(), 9", "batch_size was 8 then and is 9 now"),
    )
    for old, new, text in changes if ALL else changes[:1]:
        path = folder / "changed.py"
        path.write_text(
            changed.replace(old, new).replace(
                "Linear(16, 3)", "Linear(17, 3)" if "17" in new else "Linear(16, 3)"
            )
        )
        said = ronde_run(
            folder, "-n", "1", "--name", "other", "--resume", "changed.py", "-1", fails=True
        )
        assert text in said, said
    assert sorted(p.name for p in (folder / "runs/other/checkpoints").iterdir()) == [
        "step-000000003",
        "step-000000006",
    ]
    assert (folder / "runs/other/record.jsonl").read_text().startswith(before)
