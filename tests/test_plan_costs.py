"""What a model costs and what links give: bytes against hand counts and real processes, times against known sleeps."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from cost_models import PEAKS, Block, Sleep, Tied, tokens_loss
from processes import child, forked, marked, python, ronde, ronde_run
from ronde.parallel import Work
from ronde.plan import Added, Cluster, Costs, Plan
from ronde.run.losses import LossCall
from ronde.study import links
from ronde.study.beside import action_seconds, clip_fixed_seconds, optimizer_fixed_seconds, split_seconds
from ronde.study.chain import Link, find_chain, take
from ronde.study.forecast import gauge
from ronde.study.measure import NoisyMachine, Subject, measure
from ronde.study.memory import account, chain_peak, line, optimizer_bytes, peak, weigh
from ronde.study.noise import Gate
from ronde.study.resident import measured_peak
from ronde.study.runtime import fit_added
from ronde.world import ArgumentError

MSE = LossCall(F.mse_loss, None)


def numbers(*shape, out=8):
    return lambda b: (torch.randn(b, *shape), torch.randn(b, out))


def words(b):
    return torch.randint(50, (b, 16)), torch.randint(50, (b, 16))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


# -- lines ---------------------------------------------------------------------------------------------------------------------------


def test_a_line_goes_through_its_points_and_never_below_nothing():
    assert line([(1, 3), (5, 11)]).at(3) == pytest.approx(7)
    assert line([(4, 8)]).at(2) == pytest.approx(4)
    falling = line([(1, 5.0), (2, 4.0)])
    assert falling.fixed >= 0 and falling.per_sample >= 0
    assert line([(1, 1.0), (2, 3.0)]).fixed == 0
    assert line([]).at(3) == 0


# -- the chain -----------------------------------------------------------------------------------------------------------------------


def names(model, loss, batch):
    return [link.name for link in find_chain(model, lambda: loss(model, batch))]


def test_repeated_blocks_are_units_and_the_loss_is_the_last():
    model = Tied()
    assert names(model, LossCall(tokens_loss, None), words(2)) == ["tokens", "blocks.0", "blocks.1", "blocks.2", "head", "(loss)"]


def test_alike_blocks_have_one_digest_and_others_another():
    chain = find_chain(model := Tied(), lambda: LossCall(tokens_loss, None)(model, words(2)))
    assert len({link.alike for link in chain if link.name.startswith("blocks")}) == 1
    assert len({link.alike for link in chain}) == 4


def test_layers_called_in_another_order_than_they_were_made_stand_as_they_run():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.unused, self.first = nn.Linear(8, 8), nn.Linear(3, 3), nn.Linear(4, 8)

        def forward(self, x):
            return self.second(self.first(x))

    assert names(Swapped(), MSE, numbers(4)(2)) == ["first", "second", "(loss)"]


def test_a_layer_that_runs_again_holds_together_what_lies_between():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

        def forward(self, x):
            return self.c(self.a(self.act(self.b(self.act(self.a(x))))))

    chain = find_chain(model := Again(), lambda: MSE(model, numbers(8)(2)))
    why = {link.name: link.why_not for link in chain}
    assert "runs again later" in why["a"] and "runs again later" in why["act"]
    assert why["b"] == ""  # by the time the next one begins, all is done
    assert {link.name: link.calls for link in chain}["a"] == 2


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


def test_take_cuts_whatever_a_batch_is_made_of():
    batch = {"a": torch.arange(6), "b": [list("abcdef"), (torch.ones(6, 2), 3)], "c": torch.ones(5)}
    cut = take(batch, 2, 6)
    assert cut["a"].tolist() == [0, 1] and cut["b"][0] == ["a", "b"] and cut["b"][1][0].shape == (2, 2) and cut["c"].shape == (5,)
    with pytest.raises(ArgumentError, match="nothing in a batch"):
        take(torch.ones(5), 2, 6)


# -- bytes ---------------------------------------------------------------------------------------------------------------------------


def test_linear_by_hand():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    costs = weigh(model, sgd(model), MSE, numbers(8), 64, sizes=[16, 64])
    first, relu, second, loss = costs.units
    assert [u.parameter_bytes for u in costs.units] == [(8 * 16 + 16) * 4, 0, (16 * 8 + 8) * 4, 0]
    # The batch itself is no activation; ReLU keeps its output, which the second layer keeps too; the loss keeps its input.
    assert (first.saved_bytes.at(64), relu.saved_bytes.at(64)) == (0, 64 * 16 * 4)
    assert second.saved_bytes.at(64) + loss.saved_bytes.at(64) == pytest.approx(64 * 8 * 4, abs=8)
    assert (first.crossing_bytes.at(64), relu.crossing_bytes.at(64), second.crossing_bytes.at(64)) == (64 * 16 * 4, 64 * 16 * 4, 64 * 8 * 4)
    assert loss.crossing_bytes.at(64) == 0
    assert (first.flops, second.flops) == (2 * 8 * 16, 2 * 16 * 8)
    assert [u.cut_after for u in costs.units] == [True, True, False, False]
    assert costs.input_bytes == (8 + 8) * 4
    assert costs.parameters == 8 * 16 + 16 + 16 * 8 + 8


def test_convolution_by_hand():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 64, 8))
    costs = weigh(model, sgd(model), MSE, numbers(3, 8, 8), 8, sizes=[2, 8])
    conv, norm, flat, head = costs.units[:4]
    assert conv.parameter_bytes == (4 * 3 * 9 + 4) * 4 and norm.buffer_bytes == (4 + 4) * 4 + 8
    assert norm.batchnorm and not conv.batchnorm
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
        (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), MSE, numbers(8)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8)), MSE, numbers(3, 8, 8)),
        (Tied(), LossCall(tokens_loss, None), words),
        (
            nn.Sequential(*(Block(32) for _ in range(2))),
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
    assert [u.saved for u in real.sizes[16][:-1]] == pytest.approx([u.saved for u in found.sizes[16][:-1]], abs=256)


def test_tied_weights_count_once_and_are_told():
    model = Tied()
    costs = weigh(model, sgd(model), LossCall(tokens_loss, None), words, 8)
    assert sum(u.parameter_bytes for u in costs.units) == sum(p.numel() for p in model.parameters()) * 4
    tokens, head = costs.units[0], costs.units[-2]
    assert tokens.tied == head.tied == ("tokens.weight",)
    assert head.parameter_bytes == 0 and head.tied_grad_bytes == head.tied_bytes == 50 * 32 * 4
    assert (
        "places" in dict(model.named_parameters()) and tokens.parameter_bytes == (50 * 32 + 16 * 32) * 4
    )  # glue's go with the unit before
    assert not any(u.tied for u in costs.units[1:-2])


def test_weights_that_a_function_uses_belong_to_their_module():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 8)
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return F.linear(self.layer(x), self.table.weight)

    costs = weigh(model := Functional(), sgd(model), MSE, numbers(8), 4)
    assert sum(u.parameter_bytes for u in costs.units) == (64 + 64 + 8) * 4


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
    model = Tied()
    optimizer = make(model.parameters())
    found, _ = optimizer_bytes(model, optimizer)
    for name, p in model.named_parameters():
        assert found.get(name, 0) == p.numel() * per_element + per_tensor, name


def test_optimizer_bytes_of_frozen_parameters_and_of_state_that_is_there():
    model = Tied()
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    LossCall(tokens_loss, None)(model, words(2))[0].backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    costs = weigh(model, optimizer, LossCall(tokens_loss, None), words, 4)
    assert [u.optimizer_bytes for u in costs.units[1:4]] == [0, 0, 0]
    assert costs.units[0].optimizer_bytes == 2 * costs.units[0].parameter_bytes + 8
    assert sum(u.trainable_bytes for u in costs.units) == costs.units[0].parameter_bytes
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(torch.equal(before["state"][k]["exp_avg"], after["state"][k]["exp_avg"]) for k in before["state"])
    assert all(float(s["step"]) == 1 for s in after["state"].values())


def test_an_optimizer_that_cannot_be_tried_is_told_and_counted_as_nothing():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("not today")

    model = nn.Linear(8, 8)
    costs = weigh(model, Odd(model.parameters(), 0.1), MSE, numbers(8), 4)
    assert any("Odd" in note and "not today" in note for note in costs.notes)


def test_a_model_that_reads_values_is_weighed_for_real():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.a(x)
            return self.b(x) if float(x.abs().sum()) >= 0 else x

    model = Reads()
    before = copy.deepcopy(model.state_dict())
    costs = weigh(model, sgd(model), MSE, numbers(8), 8)
    assert any("real run" in note for note in costs.notes)
    assert [u.name for u in costs.units] == ["a", "b", "(loss)"]
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items()) and all(p.grad is None for p in model.parameters())


def test_masks_and_lengths_that_a_model_looks_at_do_not_need_a_real_run():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x):
            return self.net(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))

    found = account(Masked(), LossCall(F.mse_loss, None), lambda b: (torch.randn(b, 4, 16), torch.randn(b, 4, 16)), [2, 4])
    assert found.faked, found.reason
    assert [link.name for link in found.chain] == ["net.layers.0", "net.layers.1", "(loss)"]


def test_the_chain_adds_up_to_the_whole_that_torchs_own_tracker_finds():
    model = Tied(width=64, layers=3)
    optimizer = torch.optim.AdamW(model.parameters())
    compute = LossCall(tokens_loss, None)
    costs = weigh(model, optimizer, compute, words, 32)
    for b in (8, 32):
        assert chain_peak(costs, b) == pytest.approx(
            peak(model, optimizer, compute, words(b))["Total"], rel=0.05
        )  # it rounds up to 512 bytes
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", list(PEAKS))
def test_predicted_peak_against_that_of_a_process(name):
    build, shape, samples = PEAKS[name]
    model = build()

    def batches(b):
        return torch.randn(b, *shape), torch.randint(10, (b,))

    costs = weigh(model, torch.optim.AdamW(model.parameters()), LossCall(F.cross_entropy, None), batches, samples)
    predicted = chain_peak(costs, samples)
    target = f"{Path(__file__).with_name('cost_models.py')}:train"
    measured = measured_peak(target, name, cwd=Path(__file__).parent)
    assert measured.peak_bytes > 140 << 20
    assert predicted == pytest.approx(measured.peak_bytes, rel=0.08)


# -- times ---------------------------------------------------------------------------------------------------------------------------


def test_sleeping_layers_are_told_apart():
    model = nn.Sequential(Sleep(0.02, 0.01), Sleep(0.005, 0.03), Sleep(0.01, 0.02))
    costs = measure(model, sgd(model), MSE, numbers(8), 8, samples=[2, 8], seconds=0.3, on_noise="note", reference=lambda: 0.004)
    forward = [u.forward_seconds.at(8) for u in costs.units[:3]]
    back = [u.backward_seconds.at(8) for u in costs.units[:3]]
    assert forward[0] >= 0.015 and forward[0] > forward[2] > forward[1]
    assert back[1] >= 0.025 and back[1] > back[2] > back[0]
    assert costs.measured_samples == (2, 8) and costs.threads == torch.get_num_threads()
    assert costs.device.startswith("cpu") and costs.whole_factor > 0


def test_what_is_computed_again_is_timed_with_its_blocks_computed_again():
    # A block whose forward pass sleeps does so again in its backward pass, as its last layer keeps what the sleeping one returns.
    model = nn.Sequential(*(nn.Sequential(Sleep(0.01, 0.001), nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 8))
    own = [vars(m).get("forward") for m in model.modules()]
    costs = measure(model, sgd(model), MSE, numbers(8), 8, samples=[2, 8], seconds=0.3, on_noise="note", reference=lambda: 0.004)
    assert {u.block for u in costs.units if u.recomputed} == {"0", "1", "2"} and costs.again == ("selective", "full")
    assert costs.again_seconds["full"].at(8) >= 0.025
    assert [vars(m).get("forward") for m in model.modules()] == own
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


class Shorter(nn.Module):
    """Runs less when it is computed again."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x):
        return self.inner(x).sin().cos() if torch._C._current_graph_task_id() == -1 else x


def test_a_block_that_cannot_be_computed_again_is_measured_without():
    model = nn.Sequential(Shorter(), Shorter(), nn.Linear(8, 8))
    costs = measure(model, sgd(model), MSE, numbers(8), 8, samples=[2, 8], seconds=0.3, on_noise="note", reference=lambda: 0.004)
    assert costs.again == () and costs.again_seconds == {} and costs.units[0].forward_seconds.at(8) > 0
    with contextlib.ExitStack() as stack:
        chain = [Link(u.name, u.alike) for u in costs.units]
        subject = Subject(stack, model, sgd(model), MSE, chain, torch.device("cpu"), contextlib.nullcontext)
        assert subject.again(("full",), {4: numbers(8)(4)}, 0.1) == {}
    assert len(subject.notes) == 1 and "recompute=full could not be timed (CheckpointError" in subject.notes[0]
    assert not any("forward" in vars(m) for m in model.modules())


def test_what_tensor_parallelism_divides_is_timed_and_weighed():
    torch.manual_seed(0)
    # A block's columns and its row lie in different modules.
    model = nn.Sequential(nn.Linear(16, 256), nn.Sequential(nn.GELU(), nn.Linear(256, 16)), nn.LayerNorm(16))
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    work = Work(model, optimizer, lambda b: MSE(model, b), numbers(16, out=16))
    costs = gauge(work, Plan(workers=1, batch_size=64), MSE, None, True, lambda _: None)
    by_name = {u.name: u for u in costs.units}
    assert (
        costs.tensor_measured
        and by_name["0"].tensor == 1
        and by_name["1.1"].tensor == 256 * 16 / (256 * 16 + 16)
        and by_name["2"].tensor == 0
    )
    assert by_name["1.0"].tensor == 1 and by_name["2"].tensor_reduce_bytes.at(1) == 0 and by_name["1.1"].tensor_reduce_bytes.at(1) == 16 * 4
    # GELU keeps the hidden features, of which a worker has half.
    assert by_name["0"].saved_bytes.at(64) + by_name["1.0"].saved_bytes.at(64) == pytest.approx(2 * 64 * 256 * 4, rel=0.1)
    halves = by_name["0"].tensor_saved_bytes.at(64) + by_name["1.0"].tensor_saved_bytes.at(64)
    assert halves == pytest.approx(64 * 256 * 4, rel=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * 6 and not any("forward" in vars(m) for m in model.modules())


class Awkward(nn.Module):
    """Several inputs, a recurrent layer, batch normalisation, dropout, state of its own, an odd output."""

    def __init__(self):
        super().__init__()
        self.seen = 0
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.norm, self.drop, self.frozen = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.head = nn.Linear(16, 8)

    def forward(self, x, extra):
        self.seen += 1
        _, (h, _) = self.rnn(x)
        h = self.drop(self.frozen(self.norm(h[0])))
        random.random(), np.random.rand()
        return {"out": (self.head(torch.cat([h, extra], 1)),), "more": None}


def test_nothing_of_the_script_changes_bit_by_bit():
    torch.manual_seed(3)
    model = Awkward()
    model.frozen.eval()
    model.head.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compute = LossCall(lambda out, y: F.mse_loss(out["out"][0], y), lambda m, batch: (m(batch["x"], batch["e"]), batch["y"]))
    batch = {"x": torch.randn(8, 4, 8), "e": torch.randn(8, 8), "y": torch.randn(8, 8)}
    compute(model, batch)[0].backward()
    optimizer.step()
    scheduler.step()
    compute(model, batch)[0].backward()

    def snapshot():
        return {
            **{f"w {k}": v.clone() for k, v in model.state_dict().items()},
            **{f"g {k}": p.grad.clone() for k, p in model.named_parameters() if p.grad is not None},
            **{f"o {i} {k}": torch.as_tensor(v).clone() for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()},
            **{f"v {k}": torch.tensor(b._version) for k, b in model.named_buffers()},
            "rng": torch.get_rng_state(),
            "batch": torch.cat([t.flatten() for t in batch.values()]),
        }

    identity = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    flags, hooks = [m.training for m in model.modules()], [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    before, python_state, numpy_state = snapshot(), random.getstate(), np.random.get_state()[1].tolist()
    step = optimizer.step
    threads, seen, rate = torch.get_num_threads(), model.seen, optimizer.param_groups[0]["lr"]
    costs = measure(model, optimizer, compute, batch, 8, seconds=0.2, threads=1, on_noise="note", reference=lambda: 0.004)
    after = snapshot()
    assert list(before) == list(after)
    assert all(torch.equal(before[k], after[k]) for k in before), [k for k in before if not torch.equal(before[k], after[k])]
    assert all(p is q and p.grad is g and p.requires_grad == r for q, (p, g, r) in zip(model.parameters(), identity, strict=True))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python_state, numpy_state)
    assert [m.training for m in model.modules()] == flags
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert (torch.get_num_threads(), model.seen, optimizer.param_groups[0]["lr"]) == (threads, seen, rate)
    assert optimizer.step is step
    assert [u.name for u in costs.units] == ["rnn", "norm", "frozen", "drop", "head", "(loss)"]
    assert costs.units[0].flops > 0 and costs.optimizer_seconds > 0


def test_a_model_that_cannot_be_copied_stands_in_for_itself_and_stays_as_it_was():
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = 0
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def __deepcopy__(self, memo):
            raise TypeError("a lock cannot be copied")

        def forward(self, x):
            self.seen += 1
            return self.norm(self.layer(x))

    model = Locked()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    costs = measure(model, torch.optim.Adam(parameters), MSE, numbers(8), 8, seconds=0.1, on_noise="note", reference=lambda: 0.004)
    assert [u.name for u in costs.units] == ["layer", "norm", "(loss)"] and costs.optimizer_seconds > 0
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items()) and model.seen == 0
    assert all(p is q and p.grad is None for p, q in zip(parameters, model.parameters(), strict=True))
    assert all(p is q for p, q in zip(buffers, model.buffers(), strict=True))


class Keeping(nn.Module):
    """Leaves something behind that the loss reads from the script's own model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(8, 8), None

    def forward(self, x):
        self.kept = self.inner(x)
        return x + self.kept


class Latents(nn.Module):
    """Begins with a parameter, as a Perceiver does."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.first, self.last = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.first(self.latents.expand(len(x), 3, 8)).mean(1) + x)


def slope(model, batch):
    x = batch[0].detach().requires_grad_(True)
    out = model(x)
    return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0], batch[1]


def scripts_that_look_at_their_model():
    keeping = nn.Sequential(Keeping(), Keeping(), nn.Linear(8, 1))
    last = keeping[1]
    yield "global", keeping, LossCall(lambda out, y: F.mse_loss(out, y) + keeping[0].kept.square().mean() + last.kept.square().mean(), None)
    yield "latents", Latents(), MSE
    layers = [nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1)]
    yield "slope", nn.Sequential(*layers), LossCall(lambda out, slope, y: F.mse_loss(out, y) + slope.square().mean(), slope)
    yield "compiled", torch.compile(nn.Sequential(*layers), backend="eager"), MSE


@pytest.mark.parametrize(
    ("name", "model", "compute"), list(scripts_that_look_at_their_model()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_models_that_are_looked_at_or_look_at_themselves_are_measured_and_stay_as_they_were(name, model, compute):
    weights = [p.detach().clone() for p in model.parameters()]
    costs = measure(model, sgd(model), compute, numbers(8), 8, seconds=0.1, on_noise="note", reference=lambda: 0.004)
    assert sum(u.parameter_bytes for u in costs.units) == 4 * sum(w.numel() for w in weights)
    assert sum(u.flops for u in costs.units) > 0 and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert name != "global" or all(m.kept is None for m in model[:2])


def test_tied_and_repeated_blocks_are_measured():
    model = Tied()
    costs = measure(
        model, sgd(model), LossCall(tokens_loss, None), words, 8, samples=[2, 8], seconds=0.2, on_noise="note", reference=lambda: 0.004
    )
    assert all(u.forward_seconds.at(8) > 0 and u.backward_seconds.at(8) > 0 for u in costs.units)
    assert costs.sequence == 16


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ArgumentError, match="meta"):
        measure(model, sgd(model), MSE, numbers(4, out=4), 4)


# -- the noise gate ------------------------------------------------------------------------------------------------------------------


def gate_of(readings):
    values = iter(readings)
    return Gate(lambda: next(values), watch_others=False)


def test_the_gate_leaves_out_disturbed_rounds_also_when_the_best_comes_later():
    gate = gate_of([1.2] * 4 + [1.0, 1.05, 1.3, 1.2] + [1.0] * 4)
    gate.begin(4)
    for _ in range(4):
        gate.round()
    gate.end(4)
    assert gate.good() == [True, True, False, False]
    assert gate.drift == pytest.approx(1 / 6)
    assert not gate.refuses(0.0, too_few=False) and gate.refuses(0.2, too_few=False)
    assert "too busy" in str(gate.error("times"))


def test_a_disturbed_clock_is_refused_and_says_how_disturbed():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    count = iter(range(10**9))

    def disturbed():  # quiet before, then twice as slow for good
        return 0.004 if next(count) < 5 else 0.008

    with pytest.raises(NoisyMachine, match=r"too busy.*\+100%") as raised:
        measure(model, sgd(model), MSE, numbers(8), 8, seconds=0.1, reference=disturbed)
    assert raised.value.level > 0.5
    count = iter(range(10**9))
    costs = measure(model, sgd(model), MSE, numbers(8), 8, seconds=0.1, reference=disturbed, on_noise="note")
    assert costs.noise > 0.5 and any("too busy" in note for note in costs.notes)


# -- links ---------------------------------------------------------------------------------------------------------------------------


def test_a_link_is_fitted_by_a_line():
    fit = links.fit_link([(1e4, 0.0012), (1e6, 0.011), (1e7, 0.101)], ranks=4)
    assert fit.alpha == pytest.approx(0.001, rel=0.2) and fit.beta == pytest.approx(1e8, rel=0.05) and fit.ranks == 4 and fit.residual < 0.1


def test_what_is_added_is_never_below_nothing():
    rows = [(size, n, 2e-3 + 1e-5 * n - 1e-11 * size, 1e-2) for size in (1e4, 1e6, 1e7) for n in (2, 16)]
    fit = fit_added(rows)
    assert (
        fit.byte == 0
        and fit.tensor == pytest.approx(1e-5, rel=0.05)
        and fit(1e6, 10, 3) == pytest.approx(6e-3, rel=0.1)
        and fit(0, 10) == 0
    )
    assert fit_added([(size, n, -s, 1.0) for size, n, s, _ in rows]) == Added()


def test_what_does_not_come_from_the_size_of_parameters():
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    assert 0 < optimizer_fixed_seconds(model, optimizer) < 0.1 and not optimizer.state
    assert 0 < clip_fixed_seconds(model) < 0.1
    data = torch.zeros(4, 300)
    work = Work(model, optimizer, lambda batch: (model(batch).square().mean(), None), lambda n: data[:n])
    assert 0 <= action_seconds(work) < 0.1 and 0 <= split_seconds(work, 4).at(4) < 0.1
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    single = nn.Linear(3, 3)  # cannot be cut
    assert split_seconds(Work(single, optimizer, lambda batch: (single(batch).mean(), None), lambda n: data[:n, :3]), 4).at(4) == 0.0
    assert action_seconds(Work(single, optimizer, lambda batch: (single(batch).mean(), None), lambda n: data[:n, :3])) == 0.0


def bench(tmp_path, *args, timeout=150.0):
    return ronde_run(["bench", "cluster", *args], tmp_path, timeout)  # that no process is left, it sees itself


def test_bench_cluster_writes_a_file_that_plans_read(tmp_path):
    done = bench(tmp_path, "--workers", "2", "--quick", "--accept-noise", "--output", "c.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    found = Cluster.load(tmp_path / "c.yaml")
    assert set(found.links) == set(links.COLLECTIVES)
    for by in found.links.values():
        assert set(by) == {"node"} and by["node"].beta > 1e6 and by["node"].alpha >= 0 and by["node"].ranks == 2
    assert (found.nodes, found.devices_per_node, found.device) == (1, 2, "cpu")
    assert found.base_bytes > 50 << 20 and found.memory_bytes > 1 << 28
    assert "all_reduce" in done.stdout and "written to c.yaml" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.yaml"]


def test_bench_cluster_tells_what_is_wrong_before_it_starts_anything(tmp_path):
    for args, said in (
        (["--workers", "0"], "expected a whole number"),
        (["--workers", "1000"], "more workers than devices"),
        (["--output", "no/where.yaml"], "does not exist"),
    ):
        done = bench(tmp_path, *args)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert "ronde bench cluster --workers 2" in bench(tmp_path, "--help").stdout


def test_ctrl_c_leaves_no_process_and_no_file(tmp_path):
    with child(ronde("bench", "cluster", "--workers", "2", "--accept-noise"), tmp_path) as started:
        limit = time.monotonic() + 60
        while len(marked(started.mark)) < 3 and time.monotonic() < limit:
            time.sleep(0.1)
        time.sleep(1.0)
        started.process.send_signal(signal.SIGINT)
        done = started.done(30)
    assert done.returncode == 130 and "nothing was written" in done.stderr, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_this_machines_links_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RONDE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("RONDE_DEVICE", "cpu")
    monkeypatch.setattr(links, "TOLERANCE", 100.0)  # of the one who keeps it: tests run on busy machines
    told = []
    first = links.default_cluster(2, tell=told.append)
    assert len(told) == 1 and first.devices == 2 and set(first.links) == set(links.COLLECTIVES)

    def fail(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert links.default_cluster(2) == first
    (kept,) = (tmp_path / "state").iterdir()
    assert kept.suffix == ".yaml"
    monkeypatch.setattr(links, "_METHOD", links._METHOD + 1)  # what an earlier version kept is measured again
    with pytest.raises(AssertionError, match="measured again"):
        links.default_cluster(2)


TOGETHER = """
import dataclasses, sys
from pathlib import Path

import torch
from torch import nn

import ronde.run.entry
import ronde.run.losses
from ronde.parallel import Work
from ronde.plan import Plan
from ronde.study import forecast

me = ronde.run.entry.connect()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
x, y = torch.randn(16, 32), torch.randn(16, 8)
work = Work(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda b: (nn.functional.mse_loss(model(b[0]), b[1]), None),
    lambda n: (x[:n], y[:n]),
)
plain = forecast.measure
forecast.measure = lambda *a, **k: dataclasses.replace(plain(*a, **k), measured_samples=(1, 4, 16) if me.is_main else (1, 2, 8))
before = {k: v.clone() for k, v in model.state_dict().items()}
calls = ronde.run.losses.LossCall(nn.functional.mse_loss, None)
costs = forecast.gauge(work, Plan(batch_size=16, workers=2), calls, None, True, lambda _: None)
assert costs.clip_seconds == costs.clip_fixed_seconds == 0
clipped = forecast.gauge(work, Plan(batch_size=16, workers=2, clip_norm=1.0), calls, None, True, lambda _: None)
assert clipped.clip_seconds >= clipped.clip_fixed_seconds > 0
assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and all(p.grad is None for p in model.parameters())
assert costs.contention >= 1 and costs.lockstep >= 1 and costs.accumulate_seconds >= 0
assert costs.optimizer_seconds > 0  # of an optimizer that keeps nothing
assert all(u.forward_seconds.at(8) > 0 for u in costs.units if u.parameter_bytes)
Path(sys.argv[1], str(me.rank)).touch()
"""


def test_workers_that_measure_together_agree_on_sizes_and_leave_the_model_alone(tmp_path):
    (tmp_path / "together.py").write_text(TOGETHER)
    done = python(forked(tmp_path / "together.py", 2, tmp_path)[1:], tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()


def test_no_pipeline_is_planned_where_none_could_be_cut():
    class Packed(nn.Module):
        """What the recurrent layer is given cannot be sent, and so the head's place is no cut either."""

        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x):
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.rnn(packed)[1][-1])

    def places(model, data, **asked):
        batch = data, torch.zeros(len(data), 1)
        work = Work(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            lambda b: ((model(b[0]) - b[1]).square().mean(), None),
            lambda n: tuple(t[:n] for t in batch),
        )
        calls = LossCall(nn.functional.mse_loss, None)
        costs = gauge(work, Plan(batch_size=8, **asked), calls, 1, True, lambda _: None)
        return sum(u.cut_after for u in costs.units[:-1]), costs.notes

    count, notes = places(Packed(), torch.randn(8, 5, 3))
    assert count == 0 and any(n.startswith("no pipeline: there is no place to cut the model") for n in notes)
    count, notes = places(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), torch.randn(8, 3))
    assert count == 3 and not any("no pipeline" in n for n in notes)
    normed = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)))
    assert places(normed, torch.randn(8, 3))[0] > 0
    count, notes = places(normed, torch.randn(8, 3), sync_batchnorm=True)
    assert count == 0 and any(n.startswith("no pipeline: sync_batchnorm=True") for n in notes)


LOOPS = {
    "own": ("for x in run.batches():\n        run.backward(run.model(x).mean())\n        run.update()", True),
    "keyword": ("run.backward(loss=one)\n    run.update()", True),
    "attribute": ("self.run.backward(one)\n    self.run.update()", True),
    "step": ("for x in run.batches():\n        loss = run.step(x)", False),
    "either": ("run.step(x) if fast else run.backward(x)\n    run.update()", False),
    "torch": ("loss.backward()\n    optimizer.step()\n    metrics.update()", False),
    "function": ("class Twice(torch.autograd.Function):\n        def backward(ctx, g): return g\n    seen.update()", False),
    "trainer": ("self.backward(loss)\n    self.update()\n    self.run.step(x)", False),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("place", ["train.py", "engine.py"])
def test_a_script_that_owns_its_loop_is_known_by_its_source(tmp_path, loop, place):
    text, owns = LOOPS[loop]
    asks = "from ronde.study.loops import own_loop\nprint(own_loop())\n"
    (tmp_path / "train.py").write_text(f"import engine\n{asks}")
    (tmp_path / "engine.py").write_text("")
    with (tmp_path / place).open("a") as file:
        file.write(f"def train(self):\n    {text}\n")
    done = python(["train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert bool(re.fullmatch(rf"{place}:\d+", done.stdout.strip())) == owns, done.stdout


AUTO = """
import sys, torch, ronde
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(4)))
data = torch.utils.data.TensorDataset(torch.randn(320, 24), torch.randn(320, 24))
run = ronde.distribute(model, torch.optim.AdamW(model.parameters(), 1e-3), data, loss=nn.functional.mse_loss, batch_size=8, clip_norm=1.0, plan=sys.argv[1])
for epoch in run.epochs(1):
    for batch in run.batches():
        run.step(batch)
run.export(sys.argv[2])
"""


def test_a_plan_that_chooses_itself_trains_the_same_and_corrects_the_next_prediction(tmp_path):
    (tmp_path / "train.py").write_text(AUTO)
    told = []
    for workers, plan in (("1", "replicate"), ("2", "auto"), ("2", "auto")):
        out = tmp_path / f"{plan}.safetensors"
        env = {"RONDE_STATE": str(tmp_path / "state")}
        done = ronde_run(["run", "--workers", workers, "--runs", "none", "train.py", plan, str(out)], tmp_path, 120, env)
        assert done.returncode == 0, done.stdout + done.stderr
        told.append(done.stdout + done.stderr)
    whole, chosen = (load_file(tmp_path / f"{plan}.safetensors") for plan in ("replicate", "auto"))
    assert whole.keys() == chosen.keys() and all(torch.allclose(whole[k], chosen[k], rtol=1e-4, atol=1e-6) for k in whole)
    for text in told[1:]:
        assert re.search(r"plan \S+: Split", text) and re.search(
            r"predicted [\d.]+ m?s a step.*, measured [\d.]+ m?s \([+-]\d+%\)", text
        ), text
        assert "the next prediction of" in text
    kept = json.loads((tmp_path / "state" / "corrections.json").read_text())
    (families,) = kept.values()
    assert sum(len(rows) for rows in families.values()) == 2
    assert all(row["predicted_seconds"] > 0 and row["measured_seconds"] > 0 for rows in families.values() for row in rows)
    if len(families) == 1:
        assert "as corrected by earlier runs" in told[2]


def test_a_script_that_fails_does_so_before_this_machines_links_are_measured(tmp_path):
    (tmp_path / "train.py").write_text("import ronde\nopen('missing.csv')\n")
    done = ronde_run(["plan", "train.py"], tmp_path, 60, {"RONDE_STATE": str(tmp_path / "state")})
    assert done.returncode not in (0, None) and "failed before its model was measured" in done.stderr and "missing.csv" in done.stderr
    assert "links" not in done.stderr and not (tmp_path / "state").exists()


def test_no_pipeline_is_planned_for_a_script_that_owns_its_loop(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, ronde\n"
        "from torch import nn\n"
        "model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))\n"
        "data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 64))\n"
        "more = torch.ones(32 << 20)\n"
        "run = ronde.distribute(model, torch.optim.SGD(model.parameters(), 0.1), data, loss=nn.functional.mse_loss, batch_size=8)\n"
        "for epoch in run.epochs(1):\n"
        "    for x, y in run.batches():\n"
        "        run.backward(nn.functional.mse_loss(run.model(x), y))\n"
        "        run.update()\n"
    )
    done = ronde_run(["plan", "-n", "2", "--accept-noise", "--json", "plan.json", "train.py"], tmp_path, 90)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert "no pipeline: the script owns its loop (run.backward, train.py:9)" in json.dumps(found)
    assert not any("pipeline" in family for family in found["families"]), found["families"]
    # What the script holds beside its model counts, and so do the libraries of a worker.
    assert 128 << 20 <= found["costs"]["script_bytes"] < 200 << 20
    assert found["plans"][0]["memory"]["base"] == pytest.approx(found["costs"]["script_bytes"] + found["cluster"]["base_bytes"])
    assert found["cluster"]["base_bytes"] > 250 << 20
