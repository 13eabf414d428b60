"""What kind of loss is it? Losses of torch, transformers, diffusers and torchmetrics are told
apart, and asking leaves nothing behind.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ronde.introspect import SavedState
from ronde.run.first_steps_check import kind_of_loss, undisturbed
from ronde.run.losses import LossCall

N = 16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, of: int = 5) -> torch.Tensor:
    return torch.randint(0, of, shape, generator=torch.Generator().manual_seed(7))


LOGITS = draw(N, 5).requires_grad_()
TOKENS = draw(N, 7, 5).requires_grad_()
Y = classes(N)
PADDED = classes(N, 7)
for _row, _length in enumerate(classes(N, of=6).tolist()):
    PADDED[_row, _length + 1 :] = -100
Z = F.normalize(draw(N, 9)).requires_grad_()
Z2 = F.normalize(draw(N, 9, seed=1)).requires_grad_()
P = torch.sigmoid(draw(N, 3, 4, 4)).detach().requires_grad_()
IMAGES = torch.sigmoid(draw(N, 1, 16, 16)).requires_grad_()
MASK = (draw(N, 3, 4, 4, seed=3) > 0).float()


def kind_of(loss, *arguments, samples: int = N) -> str:
    check = LossCall(loss, None).check
    with undisturbed(loss):
        return kind_of_loss(lambda values: check(loss(*values)), arguments, samples)


def token_loss(logits, target, **how):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **how)


def token_pair(logits, target):
    return token_loss(logits, target, reduction="sum"), (target != -100).sum()


def nt_xent(a, b, temperature=0.5):
    z = torch.cat([a, b])
    n = len(a)
    similar = z @ z.T / temperature
    similar = similar.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def supervised_contrastive(z, y):
    n = len(z)
    others = ~torch.eye(n, dtype=torch.bool)
    logs = torch.log_softmax((z @ z.T / 0.2).masked_fill(~others, -1e9), 1)
    positive = (y[:, None] == y) & others
    return -(logs * positive).sum(1).div(positive.sum(1).clamp(min=1)).mean()


def dice(p, target):
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def dice_of_each(p, target):
    inside = (p * target).flatten(1).sum(1)
    return (1 - (2 * inside + 1) / (p.flatten(1).sum(1) + target.flatten(1).sum(1) + 1)).mean()


def focal(logits, target, gamma=2.0):
    ce = F.cross_entropy(logits, target, reduction="none")
    return ((1 - torch.exp(-ce)) ** gamma * ce).mean()


def vae(x, target, mu, logvar):
    kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp())
    return F.binary_cross_entropy(x, target, reduction="sum") + kld.sum()


def normalized(out, target):
    return (((out - out.mean(0)) / out.std(0) - target) ** 2).mean()


def clip(text, image):
    from transformers.models.clip.modeling_clip import image_text_contrastive_loss

    return image_text_contrastive_loss(text @ image.T * 10)


def causal(logits, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, labels, vocab_size=5)


def noise(prediction, target, weights):
    """Diffusion with min-SNR weights per sample, as in diffusers' examples."""
    each = F.mse_loss(prediction, target, reduction="none")
    return (each.mean(dim=list(range(1, each.ndim))) * weights).mean()


def ssim(p, target):
    from torchmetrics.functional.image import structural_similarity_index_measure

    return 1 - structural_similarity_index_measure(p, target, data_range=1.0)


X4, T4 = draw(N, 5, seed=4), draw(N, 5, seed=5)
OUT = draw(N, 5, seed=6).requires_grad_()
CTC = (
    F.log_softmax(draw(20, N, 6), 2).requires_grad_(),
    classes(N, 4) + 1,
    torch.full((N,), 20),
    classes(N, of=3) + 2,
)
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.3, 2.0, 1.0])
VAE = (torch.sigmoid(OUT).detach(), torch.sigmoid(T4), draw(N, 3), draw(N, 3, seed=2))

LOSSES = {
    "cross entropy": ("mean", nn.CrossEntropyLoss(), LOGITS, Y),
    "cross entropy, sum": ("sum", nn.CrossEntropyLoss(reduction="sum"), LOGITS, Y),
    "cross entropy, class weights": ("other", nn.CrossEntropyLoss(CLASS_WEIGHTS), LOGITS, Y),
    "tokens, flattened": ("mean", F.cross_entropy, TOKENS.flatten(0, 1), classes(N * 7)),
    "tokens, padded": ("other", token_loss, TOKENS, PADDED),
    "tokens, flattened and padded": (
        "other",
        F.cross_entropy,
        TOKENS.flatten(0, 1),
        PADDED.flatten(),
    ),
    "tokens, time first": ("mean", token_loss, TOKENS.transpose(0, 1), classes(7, N)),
    "tokens, (sum, weight)": ("pair", token_pair, TOKENS, PADDED),
    "(mean, weight)": (
        "other",
        lambda o, y: (token_loss(o, y), (y != -100).sum()),
        TOKENS,
        PADDED,
    ),
    "MSE, sum": ("sum", nn.MSELoss(reduction="sum"), OUT, T4),
    "MSE, sum, with a penalty": (
        "other",
        lambda o, y: F.mse_loss(o, y, reduction="sum") + 3,
        OUT,
        T4,
    ),
    "BCE with logits, pos_weight": (
        "mean",
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(4.0)),
        OUT,
        (T4 > 0).float(),
    ),
    "CTC": ("mean", F.ctc_loss, *CTC),
    "triplet": ("mean", nn.TripletMarginLoss(), OUT, X4, T4),
    "Dice over the batch": ("other", dice, P, MASK),
    "Dice of each sample": ("mean", dice_of_each, P, MASK),
    "focal": ("mean", focal, LOGITS, Y),
    "SimCLR": ("other", nt_xent, Z, Z2),
    "SimCLR, both views in one": ("other", lambda z: nt_xent(*z.chunk(2)), torch.cat([Z, Z2])),
    "supervised contrastive": ("other", supervised_contrastive, Z, Y),
    "CLIP (transformers)": ("other", clip, Z, Z2),
    "causal language model (transformers), padded": ("other", causal, TOKENS, PADDED),
    "noise (diffusers)": ("mean", noise, OUT, T4, Y.float() + 1),
    "SSIM (torchmetrics)": ("mean", ssim, IMAGES, IMAGES.detach().flip(0)),
    "VAE, sums": ("sum", vae, *VAE),
    "batch-normalized": ("other", normalized, OUT, T4),
    "two views of a sample, one target": (
        "unknown",
        lambda o, y: F.cross_entropy(o, torch.cat([y, y])),
        torch.cat([LOGITS, LOGITS.detach() + X4]),
        Y,
    ),
    "the same for all samples": ("flat", F.cross_entropy, torch.zeros(N, 5), Y),
    "a list of targets": ("unknown", lambda o, t: o.mean(), OUT, [torch.zeros(2)] * N),
    "dropout in the loss": ("unknown", lambda o, t: F.mse_loss(F.dropout(o, 0.5), t), OUT, T4),
    "computed in the model": ("unknown", lambda loss: loss, torch.tensor(1.5)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_told_apart(name):
    expected, loss, *arguments = LOSSES[name]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    generators = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert kind_of(loss, *arguments) == expected
    for a, b in zip(arguments, before, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), str(np.random.get_state()))


baseline = torch.zeros(())


def reinforce(logits, target):
    global baseline
    losses = F.cross_entropy(logits, target, reduction="none")
    baseline = 0.9 * baseline + 0.1 * losses.detach().mean()
    return (losses - baseline).mean()


def test_a_tensor_that_the_loss_sets_is_put_back():
    before = baseline
    kind_of(reinforce, LOGITS, Y)
    assert baseline is before and not baseline


@pytest.mark.parametrize("steps", [False, True])
def test_counters_and_scripted_or_quantized_parts_are_put_back(steps):
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.BatchNorm1d(2)).eval())
    model.seen = Counter(pairs=2)
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    with SavedState(model, steps=steps):
        model.train()
        model(draw(4, 2))
        model.seen["odd"] += 1
    assert model.training and not model[1].training
    assert not model[1].running_mean.any()
    assert model.seen == Counter(pairs=2)
    assert model.codes.dequantize().tolist() == [1, 1]


def test_nothing_of_a_librarys_module_is_put_back(monkeypatch):
    with SavedState(np.array, steps=True):  # whose object is NumPy's own module
        monkeypatch.setattr(np.array.__self__, "met", 1, raising=False)
    assert np.array.__self__.met == 1
