"""Models that nobody here wrote, small and with random weights, and odd ones of our own: for
cutting them.

Each builder gives a :class:`Built`: the model in float64, a batch, ``call(model, batch)``, a scalar
loss, and another batch of another size.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

OWN: dict[str, Callable[[], Built]] = {}
TRANSFORMERS: dict[str, Callable[[], Built]] = {}
DIFFUSERS: dict[str, Callable[[], Built]] = {}
MONAI: dict[str, Callable[[], Built]] = {}


@dataclass
class Built:
    model: nn.Module
    batch: Any
    call: Callable[[nn.Module, Any], torch.Tensor]
    other: Any = None
    random: bool = False  # the pass draws random numbers
    # points (prefixes of their names) that may be missing with other weights or batches
    moving: tuple[str, ...] = field(default=())


def build(builders: dict[str, Callable[[], Built]], name: str) -> Built:
    """With weights that are always the same."""
    torch.manual_seed(0)
    built = builders[name]()
    built.model.double().train()
    return built


def own(make: Callable[[], Built]) -> Callable[[], Built]:
    OWN[make.__name__] = make
    return make


def image(samples: int, channels: int = 3, size: int = 8, dims: int = 2) -> torch.Tensor:
    return torch.randn(samples, channels, *[size] * dims, dtype=torch.float64)


def tokens(samples: int, length: int, vocabulary: int = 17) -> torch.Tensor:
    return torch.randint(2, vocabulary, (samples, length))


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).pow(2).mean()


def rows(samples: int, width: int = 6) -> torch.Tensor:
    return torch.randn(samples, width, dtype=torch.float64)


# -- of our own ------------------------------------------------------------------------


@own
def mlp() -> Built:
    widths = [6, 20, 8, 30, 5, 16, 5]
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return Built(nn.Sequential(*layers), rows(4), square, rows(3))


class ResidualCNN(nn.Module):
    def __init__(self, norm: bool = True):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(4, 6, 3, padding=1),
                nn.BatchNorm2d(6),
                nn.ReLU(inplace=True),
                nn.Conv2d(6, 4, 3, padding=1),
            )
            for _ in range(4)
        )
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            y = block(h)
            y += h
            h = self.act(y)
        return self.head(h.mean((2, 3)))


@own
def residual_cnn() -> Built:
    return Built(ResidualCNN(), image(3), square, image(2, size=6))


@own
def unet() -> Built:
    from tiny_models import UNet

    return Built(UNet(), image(3, 1), square, image(2, 1))


def lm_loss(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


@own
def gpt_tied() -> Built:
    from tiny_models import GPT

    return Built(GPT(), tokens(3, 6, 13), lm_loss, tokens(2, 4, 13))


@own
def encoder_decoder() -> Built:
    from tiny_models import EncoderDecoder

    def call(model, batch):
        return F.cross_entropy(model(*batch)["logits"].flatten(0, 1), batch[1].flatten())

    return Built(
        EncoderDecoder(),
        (tokens(3, 6, 13), tokens(3, 5, 13)),
        call,
        (tokens(2, 4, 13), tokens(2, 6, 13)),
    )


class LSTM2(nn.Module):
    def __init__(self, packed: bool = False):
        super().__init__()
        self.packed = packed
        self.embed = nn.Embedding(17, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.second = nn.GRU(8, 7, batch_first=True)
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        x, lengths = x if self.packed else (x, None)
        h = self.embed(x)
        if self.packed:
            h = nn.utils.rnn.pack_padded_sequence(
                h, lengths, batch_first=True, enforce_sorted=False
            )
        h, _ = self.lstm(h)
        h, state = self.second(h)
        if self.packed:
            h, _ = nn.utils.rnn.pad_packed_sequence(h, batch_first=True)
        return self.head(h.mean(1)) + self.head(state[-1])


@own
def lstm_two_layer() -> Built:
    return Built(LSTM2(), tokens(3, 5), square, tokens(2, 7), random=True)


@own
def packed_sequence() -> Built:
    a, b = torch.tensor([5, 2, 4]), torch.tensor([3, 6])
    return Built(LSTM2(packed=True), (tokens(3, 5), a), square, (tokens(2, 6), b), random=True)


class CellLoop(nn.Module):
    """Results are written into a constant, step by step."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.first, self.second = nn.LSTMCell(6, 8), nn.GRUCell(8, 5)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        e = self.embed(x)
        h, c = e.new_zeros(len(x), 8), e.new_zeros(len(x), 8)
        g = torch.zeros(len(x), 5, dtype=e.dtype)
        out = torch.zeros(*x.shape, 5, dtype=e.dtype)
        for t in range(x.shape[1]):
            h, c = self.first(e[:, t], (h, c))
            g = self.second(h, g)
            out[:, t] = g
        return self.head(out)


@own
def cell_loop() -> Built:
    return Built(CellLoop(), tokens(3, 4), square, tokens(2, 4))


class ManyInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(3, 8)
        self.mix = nn.Bilinear(8, 8, 5)
        self.out = nn.ModuleDict({"mean": nn.Linear(5, 2), "std": nn.Linear(5, 2)})

    def forward(self, x, *, side, scale=1.0, names=("mean", "std")):
        a, b = F.gelu(self.a(x)), torch.tanh(self.b(side["y"]))
        h = self.mix(a, b) * scale
        return {name: self.out[name](h) for name in names} | {"hidden": h, "count": len(x)}


@own
def many_inputs_dict_output() -> Built:
    def call(model, batch):
        out = model(batch["x"], side={"y": batch["y"]}, scale=2.0)
        return (out["mean"] ** 2 + out["std"].exp()).mean() + out["hidden"].pow(2).sum() / out[
            "count"
        ]

    return Built(
        ManyInputs(), {"x": rows(4), "y": rows(4, 3)}, call, {"x": rows(2), "y": rows(2, 3)}
    )


class Routing(nn.Module):
    def __init__(self):
        super().__init__()
        self.paths = nn.ModuleDict(
            {k: nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for k in ("left", "right", "never")}
        )
        self.join = nn.Linear(6, 5)

    def forward(self, x):
        h = x
        for name in ("left", "right", "left"):
            h = h + self.paths[name](h)
        return self.join(h)


@own
def routing() -> Built:
    return Built(Routing(), rows(4), square, rows(3))


class Functional(nn.Module):
    """Weights used by functions; residuals of functions."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(6, 6) / 3) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(6))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(4))

    def forward(self, x):
        for w, norm in zip(self.w, self.norms, strict=True):
            x = x + F.silu(F.linear(norm(x), w * self.scale)) / math.sqrt(2)
            x = torch.where(x > 0, x, 0.1 * x)
        return x


@own
def functional_residuals() -> Built:
    return Built(Functional(), rows(4), square, rows(3))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        h = self.a(x)
        keep = h
        h += 1
        h.mul_(2)
        y = self.b(h)
        y += keep
        z = self.norm(y)
        y.add_(z.detach().mean())
        F.relu_(y)
        w = self.c(y)
        w[:, 0] = 0.5
        w[:, 1:3] += y[:, :2]
        return self.d(w) + y


@own
def in_place() -> Built:
    return Built(InPlace(), rows(4), square, rows(3))


class Tricks(nn.Module):
    """Indexing, filling, writing into, gathering."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.randn(8))
        self.register_buffer("rank", torch.arange(64).view(8, 8) % 3)

    def forward(self, x):
        pad = x < 4
        h = self.embed(x)
        h[pad] = self.empty
        h = self.a(h).masked_fill(pad[..., None], 0.25)
        h = torch.cat([h.roll(1, 1)[..., None, :], h.flip(-1)[..., None, :]], -2).flatten(-2)[
            ..., ::2
        ]
        bias = self.rank[: h.shape[1], : h.shape[1]].to(h.dtype)
        h = self.b(h) + (bias @ h).softmax(-1)
        first, *rest = h.unbind(1)
        out = torch.empty_like(h)
        out[:, 0] = first
        out[:, 1:] = torch.stack(rest, 1)
        out.index_add_(1, torch.tensor([0, 1]), h[:, :2])
        last = (~pad).sum(1).clamp(max=x.shape[1] - 1)
        picked = out[torch.arange(len(x)), last]
        picked = picked.scatter(1, x[:, :2], 0.5 * picked[:, :2])
        return self.c(picked), torch.einsum("btd,bd->bt", out, picked)


@own
def indexing() -> Built:
    def call(model, x):
        a, b = model(x)
        return a.pow(2).mean() + b.sin().sum()

    return Built(Tricks(), tokens(4, 6, 8), call, tokens(3, 5, 8))


class BatchBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.a(x)
        if x.sum() > 0:
            h = h.sin()
        h = self.b(h)
        if x.mean().item() > 100:
            h = h * 3
        return self.c(h) * float(x.abs().max())


@own
def branch_on_batch() -> Built:
    return Built(BatchBranch(), rows(4).abs(), square, rows(3).abs())


class ActivationBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        h = self.a(x)
        scale = 2.0 if h.mean() > 0 else 3.0
        h = torch.tanh(self.b(h)) * scale
        if h.abs().max() > 0:
            h = h + 1
        h = self.c(h) * (1 + int(h.sum() > 0))
        return self.d(h) * scale + h.detach().mean().item() + float(h.detach().numpy().max())


@own
def branch_on_activation() -> Built:
    return Built(ActivationBranch(), rows(4), square, rows(3))


class TakenLists(nn.Module):
    """Lists of numbers that come out of an activation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        scales = h.detach().abs().sum(0).tolist()
        h = torch.tanh(self.b(h)) * scales[0]
        return self.c(h) * (scales[1] + sum(map(sum, h.detach().tolist())))


@own
def taken_lists() -> Built:
    return Built(TakenLists(), rows(4), square, rows(3))


class Sizes(nn.Module):
    """Numbers that come out of the size of a tensor whose size an activation decides."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        above = h[h > 0]
        rows = (h.sum(1) > 0).nonzero()
        scale, shift = 1 + above.numel(), len(rows) + rows.shape[0] / 7 + above.size(0)
        return self.c(torch.tanh(self.b(h))) * scale + shift


@own
def sizes_by_activations() -> Built:
    return Built(Sizes(), rows(4), square, rows(3))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        from tiny_models import Mixture

        self.mixture = Mixture()

    def forward(self, x):
        return self.mixture(x)


@own
def mixture_of_experts() -> Built:
    return Built(Mixed(), rows(4), square, rows(3))


class Overlapping(nn.Module):
    """Another view of a constant than the one that is filled is filled later; constants of the same
    shape are looked up in between.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out = torch.zeros(len(x), 2, 3, dtype=x.dtype)
        view = out.view(len(x), 3, 2)
        out[:, 0] = x[:, :3]
        view[:, 1].add_(x[:, :2])
        at = torch.arange(3)
        k = at[:, None] + torch.arange(2)[None]
        view[:, :, 0:1].add_(x[:, 3:, None] * k.sum())
        return out.sum((1, 2)) + view.pow(2).sum((1, 2))


@own
def overlapping_views() -> Built:
    return Built(Overlapping(), rows(4), square, rows(3))


class Handing(nn.Module):
    """Constants and the batch go through modules that do nothing, some of them in evaluation
    only.
    """

    def __init__(self):
        super().__init__()
        self.stub, self.none, self.drop = nn.Identity(), nn.Dropout(0.0), nn.Dropout(0.1)
        self.pair = nn.Sequential(nn.Dropout(0.0), nn.Identity())
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        x = self.stub(x) * 2
        at = torch.arange(6, dtype=x.dtype)
        place = self.none(at / 6).sin() + self.pair(at).cos() + self.drop(at).sin()
        for layer in self.layers:
            x = torch.tanh(layer(x) + place)
        return self.stub(at).cos() * x


@own
def inputs_handed_back() -> Built:
    return Built(Handing(), rows(4), square, rows(3), random=True)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
            for _ in range(4)
        )
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        x = self.inp(x)
        for i, block in enumerate(self.blocks):

            def both(x, block=block):
                return x + block(x) * 0.5

            if i == 1:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
            elif self.training:
                x = checkpoint(both, x, use_reentrant=self.reentrant)
            else:
                x = both(x)
        return self.out(x)


@own
def checkpointed() -> Built:
    return Built(Checkpointed(False), rows(4), square, rows(3), random=True)


@own
def checkpointed_reentrant() -> Built:
    return Built(Checkpointed(True), rows(4), square, rows(3), random=True)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return x**3 * k, x.abs()

    @staticmethod
    def backward(ctx, grad, other):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * ctx.k * grad + other * x.sign(), None


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h, y = Cube.apply(self.a(x), 2.0)
        h, z = Cube.apply(self.b(h + y), 0.1)
        return self.c(h) + z


@own
def custom_function() -> Built:
    return Built(CustomFunction(), rows(4), square, rows(3))


class Twice(nn.Module):
    """One block called again and again."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        for _ in range(4):
            x = x + self.block(x)
        return self.out(x)


@own
def called_twice() -> Built:
    return Built(Twice(), rows(4), square, rows(3))


class Keeper(nn.Module):
    """Keeps a mask, a count, its last activation and a running mean in itself."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.mask = None
        self.calls = 0
        self.last = None
        self.log = []
        self.register_buffer("running", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.mask is None or self.mask.shape[0] != len(x):
            self.mask = torch.ones(len(x), 1, dtype=x.dtype).cumsum(0)
        self.calls += 1
        self.log.append(x.shape)
        h = self.lin(x) / self.mask
        self.last = h
        if self.training:
            self.running.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            self.seen += 1
        return h - self.running


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Keeper() for _ in range(4))
        self.out = nn.Linear(6, 5)

    def forward(self, x):
        self.cache = {}
        for i, part in enumerate(self.parts):
            x = torch.tanh(part(x))
            self.cache[i] = x
        return (
            self.out(x + self.parts[0].last)
            + self.cache[1].mean() / self.parts[0].calls * self.parts[0].calls
        )


@own
def state_in_self() -> Built:
    return Built(Stateful(), rows(4), square, rows(3))


@own
def torch_transformer() -> Built:
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.1, batch_first=True)

    def call(model, batch):
        a, b = batch
        return (
            model(
                a,
                b,
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(b.shape[1], dtype=b.dtype),
            )
            .pow(2)
            .mean()
        )

    def batch(n, s, t):
        return torch.randn(n, s, 8, dtype=torch.float64), torch.randn(n, t, 8, dtype=torch.float64)

    return Built(model, batch(3, 5, 4), call, batch(2, 3, 6), random=True)


class WithScript(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double())

    def forward(self, x):
        return self.c(self.b(torch.relu(self.a(x))))


@own
def scripted_child() -> Built:
    return Built(WithScript(), rows(4), square, rows(3))


class Dropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(F.dropout(torch.tanh(layer(x)), 0.2, self.training))
            if self.training:
                x = x + 0.1 * torch.randn_like(x) * torch.rand(len(x), 1, dtype=x.dtype)
        return x


@own
def dropouts() -> Built:
    return Built(Dropouts(), rows(4), square, rows(3), random=True)


class Hooked(nn.Module):
    """Features are collected by hooks; one hook changes an output, one an input."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.features = {}
        for i in (0, 2):
            self.blocks[i].register_forward_hook(
                lambda m, args, out, i=i: self.features.__setitem__(i, out)
            )
        self.blocks[1][0].register_forward_hook(lambda m, args, out: out * 2)
        self.blocks[3].register_forward_pre_hook(lambda m, args: (args[0] + 1,))

    def forward(self, x):
        self.features.clear()
        for block in self.blocks:
            x = block(x)
        return x + self.features[0] * self.features[2]


@own
def forward_hooks() -> Built:
    return Built(Hooked(), rows(4), square, rows(3))


class Methods(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.dec = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))

    def encode(self, x):
        mean, log = self.enc(x).chunk(2, -1)
        return torch.distributions.Normal(mean, (0.5 * log).exp())

    def decode(self, z):
        return self.dec(z)

    def forward(self, x):
        q = self.encode(x)
        z = q.rsample()
        kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0))
        return self.decode(z), kl


@own
def encode_decode_vae() -> Built:
    def call(model, x):
        y, kl = model(x)
        return F.mse_loss(y, x) + 0.1 * kl.mean()

    return Built(Methods(), rows(4), call, rows(3), random=True)


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.aside, self.never, self.stopped = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 6)
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)

    def forward(self, x):
        h = self.frozen(torch.tanh(self.a(x)))
        self.note = self.aside(h)
        with torch.no_grad():
            gate = self.stopped(h).sigmoid()
        return self.c(self.b(h) * gate), self.aside(h.detach())


@own
def auxiliary_and_frozen() -> Built:
    return Built(Auxiliary(), rows(4), lambda m, x: m(x)[0].pow(2).mean(), rows(3))


@own
def frozen_start() -> Built:
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())])
    model[:4].requires_grad_(False)
    return Built(model, rows(4), square, rows(3))


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6).double())
        self.c = nn.Linear(6, 6)
        self.d = nn.Linear(6, 6)
        self.d.weight = self.c.weight
        self.register_parameter("bias", nn.Parameter(torch.zeros(6)))

    def forward(self, x):
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))) + self.bias


@own
def parametrized_and_tied() -> Built:
    return Built(Parametrized(), rows(4), square, rows(3))


class Fused(nn.Module):
    """A user's module with weights of its own and no children, one that hands objects on, one that
    appends to a list.
    """

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(6) + 0.5)

        def forward(self, x, seen):
            seen.append(x.mean(-1))
            return x * self.w / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt(), seen

    def __init__(self):
        super().__init__()
        self.scales = nn.ModuleList(Fused.Scale() for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        seen = []
        for scale, linear in zip(self.scales, self.linears, strict=True):
            x, seen = scale(linear(x), seen)
        return x + torch.stack(seen).mean(0)[:, None]


@own
def own_weights_and_lists() -> Built:
    return Built(Fused(), rows(4), square, rows(3))


class Gradients(nn.Module):
    """Gradient hooks on activations; a context manager of its own; views handed on."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.5)
        u, v = h.chunk(2, -1)
        u = self.b(u)
        if torch.is_grad_enabled():
            u.register_hook(lambda g: g * 2)
        with contextlib.nullcontext():
            return self.c(u * v.sigmoid()) + h[:, ::2]


@own
def gradient_hooks() -> Built:
    return Built(Gradients(), rows(4), square, rows(3))


class Compiled(nn.Module):
    """A scripted function, blocks compiled in both ways."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)
        )
        self.b.compile(backend="eager")
        self.c = torch.compile(self.c, backend="eager")

    def forward(self, x):
        return self.d(twice_tanh(self.c(self.b(twice_tanh(self.a(x))))))


@torch.jit.script
def twice_tanh(x):
    return x.tanh() * 2


@own
def compiled_and_scripted() -> Built:
    return Built(Compiled(), rows(4), square, rows(3))


# -- transformers ----------------------------------------------------------------------


def load_transformers() -> None:
    import transformers as t

    def add(
        name: str,
        config: str,
        model: str,
        batch: Callable[[int, int], dict[str, Any]],
        other=(2, 4),
        loss=None,
        random=False,
        **options,
    ):
        def make() -> Built:
            settings = getattr(t, config)(**options)
            if hasattr(settings, "_attn_implementation") and name.endswith("_eager"):
                settings._attn_implementation = "eager"
            if "moe" in name or name == "mixtral":
                settings._experts_implementation = "eager"
            made = getattr(t, model)(settings)
            call = loss or (lambda m, b: m(**b).loss)
            return Built(made, batch(3, 6), call, batch(*other), random=random)

        TRANSFORMERS[name] = make

    def text(n, length):
        x = tokens(n, length)
        return {"input_ids": x, "labels": x}

    def padded(n, length):
        x = tokens(n, length)
        mask = torch.ones_like(x)
        mask[0, -2:] = 0
        return {"input_ids": x, "attention_mask": mask, "labels": x}

    def hidden(m, b):
        b = {k: v for k, v in b.items() if k != "labels"}
        return m(**b).last_hidden_state.pow(2).mean()

    small = {
        "vocab_size": 17,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    none = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    gpt = {"vocab_size": 17, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16, **none}
    add("gpt2", "GPT2Config", "GPT2LMHeadModel", text, random=True, **gpt)
    add(
        "gpt2_padded_eager",
        "GPT2Config",
        "GPT2LMHeadModel",
        padded,
        random=True,
        **gpt,
        use_cache=False,
    )
    add(
        "gpt_neox",
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        padded,
        **small,
        **none,
        max_position_embeddings=16,
    )
    llama = {**small, **none, "num_key_value_heads": 1, "max_position_embeddings": 16}
    add("llama", "LlamaConfig", "LlamaForCausalLM", text, **llama, use_cache=False)
    add("llama_cache", "LlamaConfig", "LlamaForCausalLM", padded, **llama)
    add("mistral", "MistralConfig", "MistralForCausalLM", padded, **llama, sliding_window=3)
    add("qwen2", "Qwen2Config", "Qwen2ForCausalLM", padded, **llama, tie_word_embeddings=True)
    add("qwen3", "Qwen3Config", "Qwen3ForCausalLM", padded, **llama, head_dim=4, use_cache=False)
    add("gemma2", "Gemma2Config", "Gemma2ForCausalLM", padded, **llama, head_dim=4, use_cache=False)
    add("phi", "PhiConfig", "PhiForCausalLM", padded, **small, **none, max_position_embeddings=16)
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    add("mixtral", "MixtralConfig", "MixtralForCausalLM", padded, **llama, **moe, use_cache=False)
    add(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        text,
        **llama,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    bert = {**small, "max_position_embeddings": 16, "pad_token_id": 0}
    add("bert", "BertConfig", "BertForMaskedLM", padded, random=True, **bert)
    add(
        "bert_classifier",
        "BertConfig",
        "BertForSequenceClassification",
        lambda n, s: {**padded(n, s), "labels": torch.arange(n) % 2},
        random=True,
        **bert,
    )
    add(
        "roberta",
        "RobertaConfig",
        "RobertaForMaskedLM",
        padded,
        random=True,
        **{**bert, "max_position_embeddings": 24},
    )
    add(
        "distilbert",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        padded,
        random=True,
        vocab_size=17,
        dim=8,
        n_layers=3,
        n_heads=2,
        hidden_dim=16,
        max_position_embeddings=16,
    )
    add(
        "albert",
        "AlbertConfig",
        "AlbertForMaskedLM",
        padded,
        random=True,
        **bert,
        embedding_size=6,
        num_hidden_groups=1,
    )
    add(
        "electra",
        "ElectraConfig",
        "ElectraForMaskedLM",
        padded,
        random=True,
        **bert,
        embedding_size=6,
    )
    add(
        "deberta",
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        padded,
        random=True,
        **bert,
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
    )
    t5 = {
        "vocab_size": 17,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 3,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        **none,
    }
    add("t5", "T5Config", "T5ForConditionalGeneration", padded, random=True, **t5)
    bart = {
        "vocab_size": 17,
        "d_model": 8,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "max_position_embeddings": 16,
        "decoder_start_token_id": 1,
        **none,
    }
    add("bart", "BartConfig", "BartForConditionalGeneration", padded, random=True, **bart)
    add(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        padded,
        random=True,
        vocab_size=17,
        hidden_size=8,
        ffn_dim=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        word_embed_proj_dim=8,
        max_position_embeddings=16,
        **none,
    )
    add(
        "bloom",
        "BloomConfig",
        "BloomForCausalLM",
        padded,
        vocab_size=17,
        hidden_size=8,
        n_layer=3,
        n_head=2,
        **none,
    )
    add(
        "falcon",
        "FalconConfig",
        "FalconForCausalLM",
        padded,
        vocab_size=17,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        **none,
    )
    add(
        "mamba",
        "MambaConfig",
        "MambaForCausalLM",
        text,
        vocab_size=17,
        hidden_size=8,
        state_size=4,
        num_hidden_layers=3,
        time_step_rank=2,
        use_cache=False,
        **none,
    )

    def pictures(n, size):
        return {"pixel_values": image(n, 3, 16), "labels": torch.arange(n) % 2}

    vit = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    add("vit", "ViTConfig", "ViTForImageClassification", pictures, **vit)
    add("dinov2", "Dinov2Config", "Dinov2ForImageClassification", pictures, **vit)
    add(
        "swin",
        "SwinConfig",
        "SwinForImageClassification",
        pictures,
        random=True,
        image_size=16,
        patch_size=2,
        embed_dim=4,
        depths=[1, 2],
        num_heads=[1, 2],
        window_size=4,
        drop_path_rate=0.1,
    )
    add(
        "convnext",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        pictures,
        random=True,
        patch_size=2,
        hidden_sizes=[4, 6],
        depths=[2, 2],
        num_stages=2,
        drop_path_rate=0.1,
    )
    add(
        "resnet",
        "ResNetConfig",
        "ResNetForImageClassification",
        pictures,
        embedding_size=4,
        hidden_sizes=[8, 8],
        depths=[2, 2],
    )

    def clip(n, s):
        return {"input_ids": tokens(n, s), "pixel_values": image(n, 3, 16), "return_loss": True}

    sub = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    add(
        "clip",
        "CLIPConfig",
        "CLIPModel",
        clip,
        text_config={**sub, "vocab_size": 17, "max_position_embeddings": 16, "eos_token_id": 16},
        vision_config={**sub, "image_size": 16, "patch_size": 8},
        projection_dim=6,
    )

    def sound(n, s):
        return {
            "input_features": torch.randn(n, 8, 20, dtype=torch.float64),
            "labels": tokens(n, s),
        }

    add(
        "whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        sound,
        random=True,
        **{k: v for k, v in bart.items() if k != "max_position_embeddings"},
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
    )

    def wave(n, s):
        return {
            "input_values": torch.randn(n, 60 + 10 * s, dtype=torch.float64),
            "labels": tokens(n, 3),
        }

    add(
        "wav2vec2",
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        wave,
        random=True,
        **small,
        conv_dim=(4, 4),
        conv_stride=(2, 2),
        conv_kernel=(4, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
        mask_time_prob=0.0,
        ctc_loss_reduction="mean",
        pad_token_id=0,
    )


# -- diffusers -------------------------------------------------------------------------


def load_diffusers() -> None:
    import diffusers as d

    def add(
        name: str,
        model: str,
        batch: Callable[[int], dict[str, Any]],
        call=None,
        random=False,
        other=2,
        **options,
    ):
        def default(m, b):
            out = m(**b)
            out = out.sample if hasattr(out, "sample") else out[0]
            return (out - 0.5).pow(2).mean()

        DIFFUSERS[name] = lambda: Built(
            getattr(d, model)(**options), batch(3), call or default, batch(other), random=random
        )

    def real(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    def noisy(n, channels=3, size=8, dims=2):
        return {"sample": real(n, channels, *[size] * dims), "timestep": torch.arange(n) + 3}

    two = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    add(
        "unet_2d",
        "UNet2DModel",
        noisy,
        sample_size=8,
        **two,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )
    condition = {**two, "in_channels": 4, "cross_attention_dim": 8, "attention_head_dim": 4}
    cross = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    add(
        "unet_2d_condition",
        "UNet2DConditionModel",
        lambda n: {**noisy(n, 4), "encoder_hidden_states": real(n, 5, 8)},
        sample_size=8,
        out_channels=4,
        **condition,
        **cross,
    )
    add(
        "unet_1d",
        "UNet1DModel",
        lambda n: noisy(n, 2, 16, 1),
        block_out_channels=(32, 32),
        in_channels=2,
        out_channels=2,
        extra_in_channels=64,
        sample_size=16,
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
        up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
    )
    add(
        "unet_3d_condition",
        "UNet3DConditionModel",
        lambda n: {
            "sample": real(n, 4, 2, 8, 8),
            "timestep": torch.arange(n),
            "encoder_hidden_states": real(n, 5, 8),
        },
        sample_size=8,
        out_channels=4,
        **condition,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    )
    control = {k: v for k, v in cross.items() if k != "up_block_types"}

    def residuals(m, b):
        down, middle = m(**b, return_dict=False)
        return sum((x - 0.1).pow(2).mean() for x in down) + (middle - 0.1).pow(2).mean()

    add(
        "controlnet",
        "ControlNetModel",
        lambda n: {
            **noisy(n, 4),
            "encoder_hidden_states": real(n, 5, 8),
            "controlnet_cond": real(n, 3, 64, 64),
        },
        residuals,
        **condition,
        **control,
        conditioning_embedding_out_channels=(4, 8, 8, 8),
    )
    vae = {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": 2,
    }

    def variational(m, b):
        posterior = m.encode(b["sample"]).latent_dist
        return (
            F.mse_loss(m.decode(posterior.sample()).sample, b["sample"])
            + 1e-3 * posterior.kl().mean()
        )

    add(
        "autoencoder_kl",
        "AutoencoderKL",
        lambda n: {"sample": real(n, 3, 8, 8)},
        variational,
        random=True,
        **vae,
    )
    add(
        "vq",
        "VQModel",
        lambda n: {"sample": real(n, 3, 8, 8)},
        lambda m, b: (lambda out: F.mse_loss(out.sample, b["sample"]) + out.commit_loss.mean())(
            m(**b)
        ),
        **{**vae, "latent_channels": 3},
        num_vq_embeddings=16,
    )
    dit = {
        "num_attention_heads": 2,
        "attention_head_dim": 4,
        "num_layers": 3,
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "norm_num_groups": 4,
    }
    add(
        "dit",
        "DiTTransformer2DModel",
        lambda n: {
            "hidden_states": real(n, 4, 8, 8),
            "timestep": torch.arange(n),
            "class_labels": torch.arange(n),
        },
        random=True,
        **dit,
        num_embeds_ada_norm=10,
    )
    add(
        "transformer_2d",
        "Transformer2DModel",
        lambda n: {"hidden_states": real(n, 4, 8, 8), "encoder_hidden_states": real(n, 5, 8)},
        **{k: v for k, v in dit.items() if k not in ("patch_size", "sample_size")},
        cross_attention_dim=8,
    )
    add(
        "pixart",
        "PixArtTransformer2DModel",
        lambda n: {
            "hidden_states": real(n, 4, 8, 8),
            "encoder_hidden_states": real(n, 5, 6),
            "timestep": torch.arange(n),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        **dit,
        cross_attention_dim=8,
        caption_channels=6,
        use_additional_conditions=False,
        out_channels=4,
    )
    add(
        "sd3",
        "SD3Transformer2DModel",
        lambda n: {
            "hidden_states": real(n, 4, 8, 8),
            "encoder_hidden_states": real(n, 5, 6),
            "pooled_projections": real(n, 7),
            "timestep": torch.arange(n),
        },
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=6,
        caption_projection_dim=8,
        pooled_projection_dim=7,
        pos_embed_max_size=8,
    )
    add(
        "flux",
        "FluxTransformer2DModel",
        lambda n: {
            "hidden_states": real(n, 16, 4),
            "encoder_hidden_states": real(n, 5, 6),
            "pooled_projections": real(n, 7),
            "timestep": torch.arange(n) / 10.0,
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(5, 3),
        },
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=6,
        pooled_projection_dim=7,
        axes_dims_rope=(2, 2, 4),
    )


# -- monai -----------------------------------------------------------------------------


def load_monai() -> None:
    import monai.networks.nets as m

    def add(
        name: str,
        model: str,
        *shape: int,
        call=None,
        random=False,
        samples=3,
        other=None,
        **options,
    ):
        def make() -> Built:
            def loss(net, x):
                out = net(x)
                while isinstance(out, tuple | list):
                    out = out[0]
                return (out - 0.3).pow(2).mean()

            def batch(n, s):
                return torch.randn(n, *s, dtype=torch.float64)

            return Built(
                getattr(m, model)(**options),
                batch(samples, shape),
                call or loss,
                batch(2, other or shape),
                random=random,
            )

        MONAI[name] = make

    plain = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    add(
        "unet",
        "UNet",
        1,
        16,
        16,
        other=(1, 8, 8),
        **plain,
        channels=(4, 8, 8),
        strides=(2, 2),
        num_res_units=1,
    )
    add("basic_unet", "BasicUNet", 1, 32, 32, **plain, features=(4, 4, 8, 8, 8, 4))
    add(
        "basic_unet_plus_plus", "BasicUNetPlusPlus", 1, 32, 32, **plain, features=(4, 4, 8, 8, 8, 4)
    )
    add(
        "unetr",
        "UNETR",
        1,
        32,
        32,
        **plain,
        img_size=32,
        feature_size=4,
        hidden_size=8,
        mlp_dim=16,
        num_heads=2,
        dropout_rate=0.1,
        random=True,
    )
    add(
        "swin_unetr",
        "SwinUNETR",
        1,
        64,
        64,
        **plain,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 2, 2),
        samples=2,
    )
    add(
        "segresnet",
        "SegResNet",
        1,
        16,
        16,
        other=(1, 8, 8),
        **plain,
        init_filters=8,
        blocks_down=(1, 1, 1),
        blocks_up=(1, 1),
        dropout_prob=0.1,
        random=True,
    )
    add(
        "dynunet",
        "DynUNet",
        1,
        16,
        16,
        **plain,
        kernel_size=(3, 3, 3),
        strides=(1, 2, 2),
        upsample_kernel_size=(2, 2),
        filters=(4, 8, 8),
        deep_supervision=True,
        deep_supr_num=1,
    )
    add(
        "vnet",
        "VNet",
        1,
        32,
        32,
        **plain,
        dropout_prob_down=0.1,
        dropout_prob_up=(0.1, 0.1),
        random=True,
        samples=2,
    )
    add("attention_unet", "AttentionUnet", 1, 16, 16, **plain, channels=(4, 8, 8), strides=(2, 2))
    add(
        "vit",
        "ViT",
        1,
        16,
        16,
        in_channels=1,
        img_size=(16, 16),
        patch_size=(8, 8),
        hidden_size=8,
        mlp_dim=16,
        num_layers=3,
        num_heads=2,
        classification=True,
        num_classes=3,
        spatial_dims=2,
    )
    add(
        "densenet",
        "DenseNet121",
        1,
        32,
        32,
        **plain,
        init_features=4,
        growth_rate=2,
        block_config=(2, 2, 2),
        bn_size=2,
    )
    add(
        "resnet",
        "ResNet",
        1,
        32,
        32,
        spatial_dims=2,
        n_input_channels=1,
        num_classes=2,
        block="basic",
        layers=[1, 1, 1, 1],
        block_inplanes=[4, 4, 8, 8],
    )
    add(
        "autoencoder",
        "AutoEncoder",
        1,
        16,
        16,
        **plain,
        channels=(4, 8),
        strides=(2, 2),
        num_inter_units=1,
        inter_channels=(8,),
    )
    add(
        "highresnet",
        "HighResNet",
        1,
        16,
        16,
        **plain,
        layer_params=(
            {"name": "conv_0", "n_features": 4, "kernel_size": 3},
            {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 2},
            {"name": "conv_2", "n_features": 4, "kernel_size": 1},
            {"name": "conv_3", "kernel_size": 1},
        ),
    )
    add(
        "efficientnet",
        "EfficientNet",
        1,
        32,
        32,
        blocks_args_str=["r1_k3_s11_e1_i32_o8_se0.25", "r2_k3_s22_e2_i8_o8_se0.25"],
        width_coefficient=0.3,
        depth_coefficient=1.0,
        spatial_dims=2,
        in_channels=1,
        num_classes=2,
        random=True,
    )
    add(
        "flexible_unet",
        "FlexibleUNet",
        1,
        64,
        64,
        in_channels=1,
        out_channels=2,
        backbone="resnet18",
        decoder_channels=(8, 8, 8, 4, 4),
        samples=2,
    )
    add(
        "senet",
        "SEResNet50",
        1,
        32,
        32,
        spatial_dims=2,
        in_channels=1,
        num_classes=2,
        layers=(1, 1, 1, 1),
        inplanes=8,
        samples=3,
    )
    add(
        "varautoencoder",
        "VarAutoEncoder",
        1,
        16,
        16,
        spatial_dims=2,
        in_shape=(1, 16, 16),
        out_channels=1,
        latent_size=3,
        channels=(4, 8),
        strides=(2, 2),
        random=True,
    )
    add(
        "global_net",
        "RegUNet",
        1,
        16,
        16,
        spatial_dims=2,
        in_channels=1,
        num_channel_initial=4,
        depth=2,
        out_channels=2,
    )
    add(
        "segresnet_ds",
        "SegResNetDS",
        1,
        16,
        16,
        spatial_dims=2,
        init_filters=8,
        in_channels=1,
        out_channels=2,
        blocks_down=(1, 1),
        dsdepth=1,
    )
