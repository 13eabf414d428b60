"""A model whose work is only counted holds little memory, and is divided as the whole one is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from ronde.measure.light_weights import NoInitialValues, short_lists, small_values
from ronde.measure.tensor_units import _blocks, _in_short


def resident() -> int:
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_initial_values_of_large_weights_take_no_memory():
    before, random = resident(), torch.get_rng_state()
    with NoInitialValues():
        layers = [nn.Linear(4096, 8192), nn.Embedding(16384, 4096)]
        nn.init.trunc_normal_(layers[0].weight)
        layers[1].weight.data.normal_(0, 0.02)
        small = nn.Linear(8, 8)
    assert (
        resident() - before
        < 64 << 20
        < 300 << 20
        < sum(p.numel() * 4 for layer in layers for p in layer.parameters())
    )
    assert small.weight.std() > 0.1 and not torch.equal(random, torch.get_rng_state())
    with small_values(layers[0]), torch.no_grad():
        rows = layers[0](torch.eye(3, 4096))
        assert rows.std(1).min() > 0 and len({*rows[0].tolist()}) > 8000
    assert layers[0].weight.is_contiguous()
    nn.init.trunc_normal_(fresh := torch.empty(1024, 1024))  # it is as it was
    assert fresh.std() > 0.5


class Layer(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(x)))


def test_blocks_found_in_two_layers_and_few_tokens_are_those_of_the_whole_model():
    torch.manual_seed(0)
    tokens = 96
    model = nn.ModuleDict({"table": nn.Embedding(32, 16), "body": nn.Sequential()})
    for _ in range(5):
        model["body"].append(Layer())

    def compute(batch):
        out = model["body"](model["table"](batch))
        return out.square().mean(), 1.0

    work = SimpleNamespace(
        model=model, sample=lambda n: torch.randint(32, (n, tokens)), compute=compute
    )
    whole = _blocks(work, work.sample(2))
    short = _in_short(work, tokens)
    assert len(whole) == 10 and {b.kind for b in whole} == {"mlp", "attention"}
    near = {b.row: replace(b, reduced_bytes=round(b.reduced_bytes)) for b in short}
    assert near == {b.row: replace(b, reduced_bytes=round(b.reduced_bytes)) for b in whole}
    with short_lists(model) as lengths:
        assert lengths == {"body": 5} and len(model["body"]) == 2
    assert len(model["body"]) == 5
