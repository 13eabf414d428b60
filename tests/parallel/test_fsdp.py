"""Recomputation: bit for bit the first pass, and less memory; an update over plain tensors is that
over DTensors. That a sharded training is the same: test_same_training.py.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ronde
from ronde.parallel import recompute
from same_training import KINDS, mean_loss
from sampling import some
from sharded_models import SharedGPT, Uneven
from tiny_models import CLASSES, LENGTH, VOCABULARY, Kind, Samples


class Counter(nn.Module):
    """Reads a buffer that it changes in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.inner(x) * (1 + 0.1 * self.seen)


def trained(model: nn.Module, data, steps: int = 4) -> tuple[list[torch.Tensor], dict]:
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad = None
    gradients = []
    for i in range(steps):
        loss = mean_loss(model(data.x[i * 4 : i * 4 + 4]), data.y[i * 4 : i * 4 + 4])
        loss.backward()
        gradients.append(loss.detach())
    return [
        *gradients,
        *(p.grad for p in model.parameters() if p.grad is not None),
    ], model.state_dict()


@pytest.mark.parametrize(
    ("kind", "level"),
    some(list(itertools.product(["dropout", "resnet", "counter"], ["full", "selective"])), 5),
)
def test_recomputed_activations_are_those_of_the_first_pass(kind, level):
    """Dropout, running statistics and counting buffers included: bit for bit, and no name
    changes.
    """
    torch.manual_seed(0)
    counting = Kind(lambda: nn.Sequential(Counter(), Counter(), nn.Linear(6, CLASSES)))
    chosen = KINDS.get(kind, counting)
    model, data = chosen.build().double(), Samples(chosen.samples, 16, torch.float64)
    again = copy.deepcopy(model)
    names = recompute.apply(again, level)
    assert names and list(again.state_dict()) == list(model.state_dict())
    third = copy.deepcopy(again)  # a copy runs itself, not what it was copied from
    (wanted, state), (actual, state_again), (copied, _) = (
        trained(model, data),
        trained(again, data),
        trained(third, data),
    )
    assert len(wanted) == len(actual) and all(
        a.equal(b) for a, b in zip(wanted, actual, strict=True)
    )
    assert all(a.equal(b) for a, b in zip(wanted, copied, strict=True))
    assert all(state[k].equal(state_again[k]) for k in state)


class Alive(TorchDispatchMode):
    """Bytes of the results that outlive the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.made.append(weakref.ref(t.untyped_storage()))
        return result

    def bytes(self, model: nn.Module) -> int:
        own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        alive = {s.data_ptr(): s.nbytes() for s in (ref() for ref in self.made) if s is not None}
        return sum(n for place, n in alive.items() if place not in own)


def test_recomputation_keeps_less():
    kept = {}
    tokens = torch.randint(VOCABULARY, (8, LENGTH))
    for level in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = SharedGPT(0.1, width=24)
        recompute.apply(model, level)
        with Alive() as alive:
            out = model(tokens)
        kept[level] = alive.bytes(model)
        del out
    print(kept)
    assert kept["full"] < 0.4 * kept["none"]
    assert kept["full"] < kept["selective"] < 0.8 * kept["none"]


def test_recomputation_says_where_it_cannot():
    with pytest.warns(UserWarning, match="Linear has no block"):
        assert recompute.apply(nn.Linear(3, 3), "full") == []
    with pytest.raises(ronde.RondeError, match="some"):
        recompute.apply(Uneven(), "some")

    class Late(Counter):  # a buffer that begins to change after the first pass
        def forward(self, x):
            if self.inner[0].weight.grad is not None:
                self.seen += 1
            return self.inner(x)

    model = nn.Sequential(Late())
    recompute.apply(model, "full")
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(ronde.RondeError, match="'seen' in block '0'"):
        model(torch.ones(2, 6))


STEP_LOCALLY = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from ronde.parallel.fsdp import adopt
from ronde.parallel.fsdp_repairs import ELEMENTWISE

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

class Own(torch.optim.AdamW):
    pass

for make in [*(getattr(torch.optim, name) for name in sorted(ELEMENTWISE)), Own]:
    actual = []
    for local in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        settings = {"momentum": 0.9} if make in (torch.optim.SGD, torch.optim.RMSprop) else {}
        fully_shard(model, mesh=mesh)
        optimizer = make(model.parameters(), lr=0.1, **settings)
        seen = []
        if local:
            adopt(optimizer, {})
            adopt(optimizer, {})
        optimizer.register_step_pre_hook(lambda o, *_: seen.extend(isinstance(p, DTensor) for g in o.param_groups for p in g["params"]))
        states = []
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                optimizer.step(lambda: model(torch.ones(2, 5)).square().sum().backward())
            else:
                model(torch.ones(2, 5)).square().sum().backward()
                optimizer.step()
            assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
            assert set(optimizer.state) == set(model.parameters()), make
            states.append([v for p in model.parameters() for v in optimizer.state[p].values()])
            assert all(isinstance(v, DTensor) == bool(v.dim()) for v in states[-1] if torch.is_tensor(v)), make
        narrowed = local and make is not Own
        assert seen == [not narrowed] * 2 + [True] * 2 + [not narrowed] * 2, (make, seen)  # a closure makes gradients within the step
        assert sum(isinstance(h.__self__, object) for h in optimizer._optimizer_step_pre_hooks.values() if hasattr(h, "__self__")) == narrowed
        actual.append([p.full_tensor() for p in model.parameters()] + [v.full_tensor() for v in states[-1] if isinstance(v, DTensor)])
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True)), make
print("equal")
"""


def test_an_update_over_plain_tensors_is_that_over_dtensors_bit_by_bit():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEP_LOCALLY],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
