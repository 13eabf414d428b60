"""Writing into a part of a divided tensor, form by form: refused, or the same as on a whole one. ``python
forked.py -n 2 parts_worker.py``.
"""

from __future__ import annotations

import inspect
import textwrap

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ronde.parallel.dtensor_fixes import fix_dtensors
from ronde.world import PlanError, World


def forms(w, two=2.0):
    ones = torch.ones(2, 4, dtype=torch.float64)
    at = torch.tensor([1, 4])

    def set_data():
        w.data = w.data * 0.5

    def set_data_whole():
        w.data = torch.ones(6, 4, dtype=torch.float64)

    def set_rows():
        w[1:3] = w[4:6] * two

    def set_row():
        w[0] = 0.0

    def set_number():
        w[0, 1] = 5.0

    def set_mask():
        w[w < 0] = 0.0

    def set_columns():
        w.data[:, 1:3] = 0.0

    def twice():
        view = w[0]
        view.add_(1)
        view.mul_(3)

    return [
        lambda: w[0].zero_(),
        lambda: w[3:5].mul_(two),
        lambda: w[..., :2].mul_(two),
        lambda: w.t()[0].add_(1),
        lambda: w.T[1].copy_(w.T[2]),
        lambda: w.view(-1)[:5].zero_(),
        lambda: w.flatten()[2:9].mul_(two),
        lambda: w.diagonal().add_(1),
        lambda: w.chunk(2)[0].mul_(two),
        lambda: w.split(2)[1].mul_(two),
        lambda: w.narrow(0, 1, 3).mul_(two),
        lambda: w[0][:2].zero_(),
        lambda: w[-1].normal_(),
        lambda: torch.nn.init.ones_(w[2]),
        lambda: w[1:4, 1:3].copy_(torch.ones(3, 2)),
        lambda: w.index_add_(0, at, ones),
        lambda: w.index_fill_(0, at, 3.0),
        lambda: w.index_copy_(0, at, ones),
        lambda: w.scatter_(0, torch.tensor([[0, 1, 2, 3]]), 5.0),
        lambda: w.masked_fill_(w > 0, 1.0),
        set_data,
        set_data_whole,
        set_rows,
        set_row,
        set_number,
        set_mask,
        set_columns,
        twice,
    ]


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    fix_dtensors(World(rank, 2, rank, 2, 0, torch.device("cpu"), "process group", "here"))
    written = 0
    wrong = []
    torch.manual_seed(3)
    start = torch.randn(6, 4, dtype=torch.float64)
    for dim in (0, 1):
        for k, form in enumerate(forms(start)):
            plain = torch.nn.Parameter(start.clone())
            parts = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(dim)]))
            with torch.no_grad():
                torch.manual_seed(5)
                forms(plain)[k]()
                torch.manual_seed(5)
                try:
                    forms(parts)[k]()
                except PlanError as error:
                    assert "weight.full_tensor()" in str(error)
                    assert torch.equal(parts.full_tensor(), start)
                    continue
                written += 1
                if not torch.allclose(
                    parts.full_tensor(), plain, rtol=1e-12, atol=0
                ) or parts.placements != (Shard(dim),):
                    wrong.append(
                        f"dim {dim}, form {k}: {textwrap.dedent(inspect.getsource(form)).strip()}"
                    )
    assert written >= 10, written
    undivided = distribute_tensor(start.clone(), mesh, [Replicate()])
    undivided.index_fill_(0, torch.tensor([1, 4]), 3.0)  # nothing is lost of it
    assert torch.equal(undivided.full_tensor(), start.index_fill(0, torch.tensor([1, 4]), 3.0))
    assert not wrong, "\n".join(wrong)
    dist.destroy_process_group()


main()
