"""Which blocks of a model can be split between workers, and what is said where none can. That it
is the same training: test_same_training.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensor_models import GPT, WIDTH, FusedMLP, GatedMLP, SeparateAttention
from tiny_models import LENGTH, VOCABULARY


def _recognized(model: nn.Module, tensor: int = 2, x: torch.Tensor | None = None):
    from ronde.parallel.tensor_blocks import recognize

    model = model.double()
    given = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY if x is None else x
    return recognize(model, lambda: model(given).square().sum(), tensor)


def _inner(model: nn.Module) -> dict[str, Any]:
    return {
        n: (m.training, {k: v for k, v in vars(m).items() if not k.startswith("_")})
        for n, m in model.named_modules()
    }


def test_blocks_are_found_in_the_data_flow_and_the_model_is_left_alone():
    torch.manual_seed(0)
    model = GPT(SeparateAttention, FusedMLP)
    model.mlps[0].eval()
    model.mlps[1].a.weight.requires_grad_(False)
    before, drawn = _inner(model), torch.get_rng_state()
    result = _recognized(model)
    assert [(b.kind, b.column, b.row) for b in result.blocks[:2]] == [
        (
            "attention",
            ("attentions.0.ask", "attentions.0.find", "attentions.0.carry"),
            "attentions.0.give",
        ),
        ("mlp", ("mlps.0.a",), "mlps.0.c"),
    ]
    attention, mlp = result.blocks[:2]
    assert (attention.heads, attention.kv_heads, attention.inside) == (
        4,
        4,
        ("attentions.0.scale",),
    )
    assert attention.attributes == (("attentions.0", "heads"),)
    assert mlp.pieces == (2,)
    linear = WIDTH * (WIDTH + 1) + WIDTH * WIDTH // 2 + (WIDTH + 1) * WIDTH // 2 + WIDTH * WIDTH
    # its fused column stays whole
    assert attention.parameters == linear and mlp.parameters == 20 * WIDTH
    assert sum(b.parameters for b in result.blocks) == 2 * (linear + 20 * WIDTH)
    assert mlp.reduced_bytes == 2 * LENGTH * WIDTH * 8
    assert not result.refused
    assert _inner(model) == before and torch.get_rng_state().equal(drawn)
    assert not model.mlps[1].a.weight.requires_grad and all(
        p.grad is None for p in model.parameters()
    )


class _Bad(nn.Module):
    """A block that looks as if it could be split."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        if way == "tied":
            self.again = nn.Linear(WIDTH, 20)
            self.again.weight = self.up.weight

    def forward(self, x):
        hidden = self.up(x)
        if self.way == "mixes":
            hidden = hidden.cumsum(-1)
        if self.way == "leaves":
            return self.down(hidden) + hidden.sum()
        if self.way == "width":
            hidden = hidden * torch.ones(20, dtype=x.dtype)
        if self.way == "tied":
            return self.down(hidden) + self.again(x).sum()
        if self.way == "read":
            return self.down(hidden) + self.down.weight.sum()
        if self.way == "branch" and hidden.abs().max() > 1e6:  # not on the sample
            hidden = hidden / hidden.norm()
        if self.way == "limit":  # that the sample does not reach
            hidden = hidden / hidden.detach().abs().amax(-1, keepdim=True).clamp(min=1e6)
        if self.way == "switch":
            hidden = torch.where((hidden > 1e6).any(-1, keepdim=True), 0 * hidden, hidden)
        return self.down(hidden)


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("mixes", "its part differs from the whole"),
        ("leaves", "also goes elsewhere (Sum)"),
        ("width", "must match the size"),
        ("tied", "'1.up.weight' is tied to '1.again.weight'"),
        ("read", "'1.down.weight' is also read outside of its layer's call"),
        ("branch", "it reads a tensor's value between its layers (__bool__)"),
        ("limit", "it reduces over features between its layers (amax)"),
        ("switch", "it reduces over features between its layers (any)"),
    ],
)
def test_what_cannot_be_split_says_why(way, why):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), _Bad(way), nn.LayerNorm(WIDTH), GatedMLP()
    )
    result = _recognized(model)
    assert [b.row for b in result.blocks] == ["3.c"]
    (refused,) = result.refused
    assert refused.row == "1.down" and why in refused.why_not


def test_heads_and_features_that_do_not_divide():
    result = _recognized(GPT(SeparateAttention, GatedMLP), 5)
    assert [b.kind for b in result.blocks] == ["mlp", "mlp"]  # 20 features
    assert {b.why_not for b in result.refused} == {"heads 4: not divisible by 5"}
    assert not _recognized(nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 9))).blocks


def test_attention_whose_code_reads_the_width_from_elsewhere_stays_whole():
    """Everything in one module, the width taken from the residual stream: its MLPs are split, its
    attention says why not.
    """
    from tiny_models import Transformer

    torch.manual_seed(0)
    result = _recognized(Transformer(), x=torch.randint(13, (2, 7)))
    assert [b.column for b in result.blocks] == [("up0",), ("up1",)]
    assert [b.column for b in result.refused] == [("qkv0",), ("qkv1",)]
