"""Where a model is cut, and what cannot be. That a pipeline is the same training:
test_same_training.py.
"""

from __future__ import annotations

import dataclasses

import zygote
from processes import forked
from same_training import Case, check
from tiny_models import GPT, UNet

INTERLEAVED = "pipeline=2,schedule=interleaved"

EXCHANGES = """
import sys, torch, torch.distributed as dist, ronde

class Model(torch.nn.Sequential):
    def forward(self, x):
        hidden = self[0](x).relu()
        dist.all_reduce(hidden.detach().mean(0))
        return self[1](hidden)

for plan in ("pipeline=2", "pipeline=2,split_at=1"):
    torch.manual_seed(0)
    model = Model(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        ronde.distribute(
            model, optimizer, data, loss=torch.nn.functional.mse_loss, plan=plan, batch_size=4
        )
    except ronde.ArgumentError as error:
        assert "calls a collective of torch.distributed (allreduce_)" in str(error), error
    else:
        sys.exit(f"{plan} was not refused")
"""


def test_a_model_that_exchanges_is_refused(tmp_path):
    """Rank 0 alone times the model: it would wait for ever."""
    (tmp_path / "exchanges.py").write_text(EXCHANGES)
    done = zygote.run(forked(tmp_path / "exchanges.py", 2), timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_where_it_is_cut(tmp_path):
    """The stages' modules are those named, or chosen; the sum of parameters is the model's."""
    chosen, named = Case("UNet", "pipeline=2", steps=1), Case("GPT", "pipeline=2", steps=1)
    refused = [
        dataclasses.replace(named, split_at=["nowhere"], refused=["nowhere"]),
        dataclasses.replace(named, split_at=["blocks.1", "blocks.2"], refused=["names 2 modules"]),
        Case("MLP", f"{INTERLEAVED},virtual=9", refused=["cannot be cut into 18 stages"]),
        Case("Rescaled", "pipeline=2", refused=["writes into 'layers.10.weight', in stage 0"]),
    ]
    cases = [dataclasses.replace(named, split_at=["blocks.2"]), chosen, *refused]
    (two, _), (one, _), *_ = check(cases, 2, tmp_path)
    assert [row["begins"] for row in two["table"]] == ["(start)", "blocks.2"]
    tied = 13 * 12  # held by both
    for facts, model, twice in ((two, GPT, tied), (one, UNet, 0)):
        whole = sum(p.numel() for p in model().parameters())
        assert sum(row["parameters"] for row in facts["table"]) == whole + twice
