"""A sound training script around one of several models: ``healthy.py NAME``."""

from __future__ import annotations

import itertools
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ronde

NAME = sys.argv[1]
torch.manual_seed(1)
VOCABULARY, LENGTH = 13, 9


class Residual(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.a, self.norm_a = nn.Conv2d(6, 6, 3, padding=1, bias=False), norm(6)
        # a bias before a normalisation: its gradient is zero
        self.b, self.norm_b = (
            nn.Conv2d(6, 6, 3, padding=1),
            norm(6),
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))
        return self.head(x.mean((2, 3)))


class GPT(nn.Module):
    """Tied embeddings, dropout, a mask that is a buffer."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 12), nn.Embedding(LENGTH, 12)
        self.norm, self.attention = (
            nn.LayerNorm(12),
            nn.MultiheadAttention(12, 2, dropout=dropout, batch_first=True),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 12)
        )
        self.head = nn.Linear(12, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1))

    def forward(self, t):
        n = t.shape[1]
        x = self.tokens(t) + self.places(torch.arange(n))
        h = self.norm(x)
        x = x + self.attention(h, h, h, attn_mask=self.mask[:n, :n], need_weights=False)[0]
        return self.head((x + self.mlp(x)).float())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 10, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, t):
        return self.head(self.lstm(self.tokens(t))[0][:, -1])


class Packed(nn.Module):
    """Sentences as a packed sequence, in an order that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.gru, self.head = (
            nn.Embedding(VOCABULARY, 8),
            nn.GRU(8, 10, batch_first=True),
            nn.Linear(10, 4),
        )

    def forward(self, t):
        lengths = t[:, 0] % (LENGTH - 1) + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            self.tokens(t), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.gru(packed)[1][-1])


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.body = nn.Transformer(12, 2, 1, 1, 24, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, source, target):
        padding, n = source == 0, target.shape[1]
        causal = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
        masks = {
            "tgt_mask": causal,
            "src_key_padding_mask": padding,
            "memory_key_padding_mask": padding,
            "tgt_key_padding_mask": padding,
        }
        if NAME == "padding":
            masks = {"tgt_mask": causal}
        return self.head(self.body(self.tokens(source), self.tokens(target), **masks))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(VOCABULARY, 8, mode="mean"), nn.Linear(8, 4)

    def forward(self, t):
        return self.head(self.bag(t))


def pixels(n):
    return torch.utils.data.TensorDataset(torch.randn(n, 1, 6, 6), torch.randint(0, 4, (n,)))


def features(n):
    return torch.utils.data.TensorDataset(torch.randn(n, 6), torch.randint(0, 4, (n,)))


def sentences(n):
    return torch.utils.data.TensorDataset(
        torch.randint(1, VOCABULARY, (n, LENGTH)), torch.randint(0, 4, (n,))
    )


class Padded(torch.utils.data.Dataset):
    """Sentences of unequal length: a batch is padded to its longest."""

    def __init__(self, n: int) -> None:
        self.rows = [
            torch.randint(1, VOCABULARY, (int(k),)) for k in torch.randint(2, LENGTH + 1, (n,))
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def padded(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def mlp(*sizes):
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def next_token(out, t):
    return F.cross_entropy(
        out[:, :-1].reshape(-1, VOCABULARY), t[:, 1:].reshape(-1), ignore_index=0, reduction="sum"
    ), (t[:, 1:] != 0).sum()


MODELS = {
    "mlp": lambda: (mlp(6, 17, 5, 4), features),
    "cnn": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 4)
        ),
        pixels,
    ),
    "residual": lambda: (Residual(nn.BatchNorm2d), pixels),
    "groupnorm": lambda: (Residual(lambda n: nn.GroupNorm(2, n)), pixels),
    "gpt": lambda: (GPT(), Padded),
    "lstm": lambda: (Recurrent(), sentences),
    "packed": lambda: (Packed(), sentences),
    "translator": lambda: (Translator(), Padded),
    "padding": lambda: (Translator(), Padded),  # not sound: the mask is forgotten
    "bag": lambda: (Bag(), sentences),
}
model, source = MODELS.get(NAME, MODELS["mlp"])()
data, test = source(44), source(13)
loss, forward, collate, options = F.cross_entropy, None, None, {}
parameters = model.parameters()
if NAME in ("gpt", "translator", "padding"):
    collate, loss = padded, next_token
    forward = (lambda m, t: (m(t, t), t)) if NAME != "gpt" else (lambda m, t: (m(t), t))
if NAME == "frozen":
    for p in model[0].parameters():
        p.requires_grad_(False)
    parameters = [p for p in parameters if p.requires_grad]
if NAME == "groups":
    parameters = [
        {"params": model[0].parameters(), "lr": 1e-3},
        {"params": model[2:].parameters(), "weight_decay": 0.1},
    ]
if NAME == "accumulated":
    options["micro_batch"] = 2
if NAME == "clipped":
    options["clip_norm"] = 0.05
if NAME == "grown":
    options["batch"] = "grow"
if NAME == "residual":
    options["sync_batchnorm"] = True
if NAME == "half":
    options["precision"] = "bf16"
optimizer = torch.optim.AdamW(parameters, lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
loader = torch.utils.data.DataLoader(
    data, batch_size=7, shuffle=True, collate_fn=collate, num_workers=2 if NAME == "cnn" else 0
)
run = ronde.distribute(
    model, optimizer, loader, loss=loss, forward=forward, scheduler=scheduler, **options
)
tests = torch.utils.data.DataLoader(test, batch_size=5, collate_fn=collate)
metrics = {} if forward else {"accuracy": lambda out, y: (out.argmax(1) == y).float()}

for _epoch in run.epochs(3):
    for batch in run.batches():
        if NAME == "own":
            x, y = batch
            loss_value = F.cross_entropy(run.model(x), y)
            run.backward(loss_value)
            run.update()
        else:
            run.step(batch)
    result = run.evaluate(tests, metrics=metrics)
    if run.is_main:
        print(result)
