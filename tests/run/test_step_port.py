"""The step port: steps on given batches leave a run bit for bit as it was."""

from __future__ import annotations

from processes import PATHS, forked, python

SCRIPT = """
import json, sys, torch
from torch import nn
from torch.utils.data import TensorDataset
import ronde
from ronde.plan import shares

generator = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(48, 6, generator=generator).double(), torch.randn(48, 1, generator=generator).double()
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), 0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
run = ronde.distribute(
    model, optimizer, data, loss=nn.functional.mse_loss, batch_size=8, scheduler=scheduler,
    sync_batchnorm=True,
)

def state():
    held = [*model.state_dict().values()]
    held += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    place = (vars(run.state).copy(), scheduler.last_epoch, [g["lr"] for g in optimizer.param_groups])
    return [t.clone() for t in held], torch.get_rng_state(), place

def equal(a, b):
    return (
        len(a[0]) == len(b[0])
        and all(torch.equal(x, y) for x, y in zip(a[0], b[0]))
        and torch.equal(a[1], b[1])
        and a[2] == b[2]
    )

losses = []
for epoch in run.epochs(2):
    for step, batch in enumerate(run.batches()):
        losses.append(float(run.step(batch)))
        if "measured" in sys.argv and step in (0, 3):
            before = state()
            port = run.port
            changed = False
            with port.restoring(), port.unwatched():
                port.prepare()
                place = run.plan.layout.place(run.rank)
                for share in list(shares(0, 0, 48, 8, place.replica, run.plan.replicas))[:3]:
                    low, high = share.micro[0]
                    micro = tuple(t[low:high] for t in data.tensors)
                    port.step(share, [micro])
                    assert port.last_step_seconds > 0
                changed = not equal(before, state())
            assert changed and equal(before, state()), (changed, run.rank)
if run.is_main:
    print(json.dumps(losses))
"""


def _losses(tmp_path, *words: str, workers: int) -> str:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = forked(script, workers, *words)
    done = python(command[1:], tmp_path, timeout=120, env={"PYTHONPATH": PATHS})
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("[")][-1]


def test_steps_on_given_batches_change_nothing(tmp_path):
    """On one process and on two: the training afterwards is the one without them."""
    for workers in (1, 2):
        plain = _losses(tmp_path, workers=workers)
        assert _losses(tmp_path, "measured", workers=workers) == plain
