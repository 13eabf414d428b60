"""Writing into a part of a divided tensor, form by form, against the same on a whole one. ``python
forked.py -n 2 parts_worker.py``.
"""

from __future__ import annotations

import inspect
import textwrap

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ronde.parallel.dtensor_fixes import fix_dtensors


def forms(w, two=2.0):
    ones = torch.ones(2, 4, dtype=torch.float64)
    at = torch.tensor([1, 4])

    def rows():
        for row in w:
            row.div_(row.norm())

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
        lambda: w.unbind(0)[3].zero_(),
        lambda: w[0][:2].zero_(),
        lambda: w[-1].normal_(),
        lambda: torch.nn.init.ones_(w[2]),
        lambda: w[1:4, 1:3].copy_(torch.ones(3, 2)),
        lambda: w.index_add_(0, at, ones),
        lambda: w.index_fill_(0, at, 3.0),
        lambda: w.index_copy_(0, at, ones),
        lambda: w.scatter_(0, torch.tensor([[0, 1, 2, 3]]), 5.0),
        lambda: w.masked_fill_(w > 0, 1.0),
        rows,
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
    fix_dtensors()
    wrong = []
    torch.manual_seed(3)
    start = torch.randn(6, 4, dtype=torch.float64)
    for dim in (0, 1):
        for k, form in enumerate(forms(start)):
            plain = torch.nn.Parameter(start.clone())
            parts = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(dim)]))
            with torch.no_grad():
                for tensor in (plain, parts):
                    torch.manual_seed(5)
                    forms(tensor)[k]()
                if not torch.allclose(
                    parts.full_tensor(), plain, rtol=1e-12, atol=0
                ) or parts.placements != (Shard(dim),):
                    wrong.append(
                        f"dim {dim}, form {k}: {textwrap.dedent(inspect.getsource(form)).strip()}"
                    )
        # Gradients are divided as their parameters are, and need no torch.no_grad().
        parts = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(dim)]))
        (parts * 2).sum().backward()
        parts.grad[:3].zero_()
        parts.grad[-2:] *= 0.5
        if parts.grad.full_tensor().sum(1).tolist() != [0, 0, 0, 8, 4, 4]:
            wrong.append(f"dim {dim}: a gradient's rows")
    assert not wrong, "\n".join(wrong)
    dist.destroy_process_group()


main()
