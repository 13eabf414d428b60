"""Models whose blocks are split between workers, ours and others', and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tiny_models import LENGTH, VOCABULARY, Kind, call

WIDTH, HEADS = 16, 4


class FusedAttention(nn.Module):
    """As nanoGPT's: one Linear for query, key and value, the width read from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for y in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class SeparateAttention(nn.Module):
    """Three Linears, fewer key heads, a learned scale inside the block, attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.groups = HEADS, 2
        self.ask = nn.Linear(WIDTH, WIDTH)
        self.find = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.carry = nn.Linear(WIDTH, WIDTH // 2)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH // HEADS))
        self.give = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.ask(x).view(b, t, self.heads, -1).transpose(1, 2) * self.scale
        k, v = (
            y.view(b, t, -1, WIDTH // HEADS).transpose(1, 2).repeat_interleave(self.groups, 1)
            for y in (self.find(x), self.carry(x))
        )
        scores = q @ k.transpose(-1, -2) + torch.full((t, t), float("-inf"), dtype=x.dtype).triu(1)
        return self.give((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(WIDTH, 20),
            nn.Linear(WIDTH, 20, bias=False),
            nn.Linear(20, WIDTH),
        )

    def forward(self, x):
        return self.c(F.silu(self.a(x)) * self.b(x))


class FusedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(WIDTH, 40), nn.Linear(20, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.a(x).chunk(2, -1)
        return self.c(F.gelu(gate) * up)


class GPT(nn.Module):
    """Embedding and head tied."""

    def __init__(self, attention, mlp) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.attentions = nn.ModuleList(attention() for _ in range(2))
        self.mlps = nn.ModuleList(mlp() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for i in range(2):
            x = x + self.attentions[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.head(x)


class Encoder(nn.Module):
    """torch's own layers, with masks."""

    def __init__(self, norm_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 20, 0.0, batch_first=True, norm_first=norm_first, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.see = nn.MultiheadAttention(WIDTH, HEADS, kdim=WIDTH, vdim=8)
        self.small = nn.Linear(WIDTH, 8)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.layers(self.embed(tokens), src_key_padding_mask=tokens == 0)
        y = x.transpose(0, 1)
        z, weights = self.see(y, y, self.small(y))  # the weights take part
        return self.head(x + z.transpose(0, 1) + weights @ x)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.both = nn.Transformer(WIDTH, HEADS, 1, 1, 20, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        return self.head(self.both(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True))


class MLP(nn.Module):
    """Uneven layers; some parameters are frozen, never used, or used by some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.Sequential(
            nn.Linear(6, 10),
            nn.ReLU(),
            nn.Linear(10, 9),
            nn.LayerNorm(9),
            nn.Linear(9, 14),
            nn.Tanh(),
            nn.Linear(14, 7),
            nn.ReLU(),
            nn.Linear(7, 12),
        )
        self.layers[2].requires_grad_(False)
        self.never, self.rare = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens):
        x = self.layers(self.embed(tokens))
        if bool((tokens[:, 0] < 7).any()):
            x = x + self.rare(x) * (tokens[:, :1, None] < 7)
        return self.head(x)


class Styled(nn.Module):
    """One block and a norm that the script's own plan runs on parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY - 1)

    def forward(self, tokens):
        return F.pad(self.head(self.norm(self.down(F.gelu(self.up(self.embed(tokens)))))), (0, 1))


def _styles() -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    return {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


class Hooked(nn.Module):
    """The forward pass of its second block can be split, its backward pass cannot: the gradient is
    divided by a sum over features.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = (
            GatedMLP(),
            nn.ModuleList([nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)]),
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.norm(self.first(self.embed(tokens)))
        hidden = self.second[0](x)
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g / g.abs().sum().clamp(min=1e-9))
        return self.head(self.norm(self.second[1](hidden)))


class Reading(nn.Module):
    """Weights of its first two blocks are read outside of their layers' calls too: with a gradient,
    and without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.tied, self.detached, self.plain = GatedMLP(), GatedMLP(), GatedMLP()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + F.linear(torch.tanh(self.tied(x)), self.tied.c.weight.t()) @ self.tied.c.weight.t()
        x = (
            x
            + F.linear(torch.tanh(self.detached(x)), self.detached.c.weight.detach().t())
            @ self.detached.c.weight.detach().t()
        )
        return self.head(x + self.plain(x))


class Dropped(nn.Module):
    """Dropout within the blocks and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, 0.3, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


# -- refused ---------------------------------------------------------------------------


def without_blocks() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.LayerNorm(4), nn.Linear(4, VOCABULARY))


def odd() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 5), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, VOCABULARY)
    )


# -- others' ---------------------------------------------------------------------------


def _language(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        sizes = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        kind, _, head = name.partition("/")
        return getattr(transformers, f"{kind}{head}")(
            getattr(transformers, f"{kind}Config")(**sizes, **settings)
        )

    return build


_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_BERT = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _even_words(model: nn.Module, batch: Any) -> Any:
    # SequenceParallel of torch gives each worker as many words
    return model(batch[0][:, 1:]), batch[1][:, 1:]


def _logits(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], attention_mask=(batch[0] != 0).long()).logits, batch[1]


def _seq2seq(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], decoder_input_ids=batch[0].roll(1, 1)).logits, batch[1]


MODELS = {
    "gpt-fused": Kind(lambda: GPT(FusedAttention, FusedMLP), "padded", call, 4),
    "gpt-separate": Kind(lambda: GPT(SeparateAttention, GatedMLP), "padded", call, 4),
    "encoder": Kind(Encoder, "padded", call, 5),
    "encoder-post": Kind(lambda: Encoder(norm_first=False), "padded", call, 5),
    "encoder-decoder": Kind(EncoderDecoder, "padded", call, 5),
    "mlp": Kind(MLP, "padded", call, 2),
    "styled": Kind(Styled, "padded", _even_words, 0, styles=_styles),
    "hooked": Kind(Hooked, "padded", call, 1),
    "reading": Kind(Reading, "padded", call, 1),
    "dropped": Kind(Dropped, "padded", call, 2),
    "without-blocks": Kind(without_blocks, "padded"),
    "odd-features": Kind(odd, "padded"),
    "odd-names": Kind(odd, "padded", styles=lambda: {"nowhere": _styles()["up"]}),
    "gpt2": Kind(
        _language(
            "GPT2/LMHeadModel",
            n_positions=12,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        "padded",
        _logits,
        4,
        needs="transformers",
    ),
    "llama": Kind(
        _language("Llama/ForCausalLM", **_LLAMA), "padded", _logits, 4, needs="transformers"
    ),
    "bert": Kind(
        _language("Bert/ForMaskedLM", **_BERT, **_QUIET),
        "padded",
        _logits,
        4,
        r"key\.bias",
        needs="transformers",
    ),
    "t5": Kind(
        _language(
            "T5/ForConditionalGeneration",
            d_model=16,
            d_kv=4,
            d_ff=20,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            dropout_rate=0.0,
        ),
        "padded",
        _seq2seq,
        10,
        needs="transformers",
    ),
}
