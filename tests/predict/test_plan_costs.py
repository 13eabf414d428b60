"""What a model costs in bytes, unit by unit: against hand counts, torch's own trackers and real
processes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cost_models import MSE, numbers, sgd, tokens_loss, words
from ronde.measure.cost_lines import line
from ronde.measure.memory_account import account, optimizer_bytes, weigh
from ronde.measure.model_units import find_chain
from ronde.run.losses import LossCall
from tiny_models import AttentionBlock, TiedGPT

# -- lines -----------------------------------------------------------------------------


def test_a_line_goes_through_its_points_and_never_below_nothing():
    assert line([(1, 3), (5, 11)]).at(3) == pytest.approx(7)
    assert line([(4, 8)]).at(2) == pytest.approx(4)
    falling = line([(1, 5.0), (2, 4.0)])
    assert falling.fixed >= 0 and falling.per_sample >= 0
    assert line([(1, 1.0), (2, 3.0)]).fixed == 0
    assert line([]).at(3) == 0


# -- the chain -------------------------------------------------------------------------


def names(model, loss, batch):
    return [link.name for link in find_chain(model, lambda: loss(model, batch))]


def test_repeated_blocks_are_units_and_the_loss_is_the_last():
    model = TiedGPT()
    assert names(model, LossCall(tokens_loss, None), words(2)) == [
        "tokens",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
        "(loss)",
    ]


def test_alike_blocks_have_one_digest_and_others_another():
    chain = find_chain(model := TiedGPT(), lambda: LossCall(tokens_loss, None)(model, words(2)))
    assert len({link.alike for link in chain if link.name.startswith("blocks")}) == 1
    assert len({link.alike for link in chain}) == 4


def test_a_model_without_parts_is_one_unit():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return x @ self.w

    costs = weigh(model := Bare(), sgd(model), MSE, numbers(8), 4)
    assert [u.name for u in costs.units] == ["", "(loss)"]
    assert costs.units[0].parameter_bytes == 8 * 8 * 4


# -- bytes -----------------------------------------------------------------------------


def test_linear_by_hand():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    costs = weigh(model, sgd(model), MSE, numbers(8), 64, sizes=[16, 64])
    first, relu, second, loss = costs.units
    assert [u.parameter_bytes for u in costs.units] == [(8 * 16 + 16) * 4, 0, (16 * 8 + 8) * 4, 0]
    # The batch itself is no activation; ReLU keeps its output, which the second layer keeps too;
    # the loss keeps its input.
    assert (first.saved_bytes.at(64), relu.saved_bytes.at(64)) == (0, 64 * 16 * 4)
    assert second.saved_bytes.at(64) + loss.saved_bytes.at(64) == pytest.approx(64 * 8 * 4, abs=8)
    assert (
        first.crossing_bytes.at(64),
        relu.crossing_bytes.at(64),
        second.crossing_bytes.at(64),
    ) == (64 * 16 * 4, 64 * 16 * 4, 64 * 8 * 4)
    assert loss.crossing_bytes.at(64) == 0
    assert (first.flops, second.flops) == (2 * 8 * 16, 2 * 16 * 8)
    assert [u.cut_after for u in costs.units] == [True, True, False, False]
    assert costs.input_bytes == (8 + 8) * 4
    assert costs.parameters == 8 * 16 + 16 + 16 * 8 + 8


def test_convolution_by_hand():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 64, 8)
    )
    costs = weigh(model, sgd(model), MSE, numbers(3, 8, 8), 8, sizes=[2, 8])
    conv, norm, flat, head = costs.units[:4]
    assert conv.parameter_bytes == (4 * 3 * 9 + 4) * 4 and norm.buffer_bytes == (4 + 4) * 4 + 8
    activation = 8 * 4 * 64 * 4
    assert conv.saved_bytes.at(8) == activation  # what normalisation reads
    assert norm.saved_bytes.at(8) == pytest.approx(activation, abs=64)
    assert flat.saved_bytes.at(8) == 0  # a view
    assert conv.flops == 2 * 3 * 9 * 4 * 64 and head.flops == 2 * 4 * 64 * 8


def real_saved(model, compute, batch):
    """Unique storages that torch itself saves, but for parameters and the batch."""
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers(), *batch]}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss, _ = compute(model, batch)
    return sum(s.nbytes() for s in found.values()), loss


@pytest.mark.parametrize(
    ("model", "compute", "batches"),
    [
        (
            nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)),
            MSE,
            numbers(8),
        ),
        (
            nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8)
            ),
            MSE,
            numbers(3, 8, 8),
        ),
        (TiedGPT(), LossCall(tokens_loss, None), words),
        (
            nn.Sequential(*(AttentionBlock(32) for _ in range(2))),
            LossCall(F.mse_loss, None),
            lambda b: (torch.randn(b, 8, 32), torch.randn(b, 8, 32)),
        ),
    ],
    ids=["mlp", "cnn", "gpt", "blocks"],
)
def test_saved_bytes_are_those_that_torch_saves(model, compute, batches):
    sizes = [4, 16]
    found = account(model, compute, batches, sizes)
    assert found.faked, found.reason
    for b in sizes:
        expected, _ = real_saved(model, compute, batches(b))
        ours = sum(u.saved for u in found.sizes[b])
        assert ours == pytest.approx(expected, rel=0.02, abs=256), b
    real = account(model, compute, batches, sizes, fake=False)
    assert [u.saved for u in real.sizes[16][:-1]] == pytest.approx(
        [u.saved for u in found.sizes[16][:-1]], abs=256
    )


def test_tied_weights_count_once_and_are_told():
    model = TiedGPT()
    costs = weigh(model, sgd(model), LossCall(tokens_loss, None), words, 8)
    assert (
        sum(u.parameter_bytes for u in costs.units)
        == sum(p.numel() for p in model.parameters()) * 4
    )
    tokens, head = costs.units[0], costs.units[-2]
    assert tokens.tied == head.tied == ("tokens.weight",)
    assert head.parameter_bytes == 0 and head.tied_grad_bytes == head.tied_bytes == 50 * 32 * 4
    # glue's go with the unit before
    assert (
        "places" in dict(model.named_parameters())
        and tokens.parameter_bytes == (50 * 32 + 16 * 32) * 4
    )
    assert not any(u.tied for u in costs.units[1:-2])


ADAM = 2 * 4 + 0  # bytes an element


@pytest.mark.parametrize(
    ("make", "per_element", "per_tensor"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 4, 0),
        (lambda p: torch.optim.AdamW(p), ADAM, 4),
        (lambda p: torch.optim.Adam(p, amsgrad=True), ADAM + 4, 4),
        (lambda p: torch.optim.Adagrad(p), 4, 4),
        (lambda p: torch.optim.RMSprop(p), 4, 4),
        (lambda p: torch.optim.AdamW(p, foreach=True), ADAM, 4),
    ],
    ids=["sgd", "momentum", "adamw", "amsgrad", "adagrad", "rmsprop", "foreach"],
)
def test_optimizer_bytes(make, per_element, per_tensor):
    model = TiedGPT()
    optimizer = make(model.parameters())
    found, _ = optimizer_bytes(model, optimizer)
    for name, p in model.named_parameters():
        assert found.get(name, 0) == p.numel() * per_element + per_tensor, name
