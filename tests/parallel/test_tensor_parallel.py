"""Tensor parallel: the same training as one process, for models of ours and of others; and what is
said where nothing can be split.

Run as a script, under ``ronde run``, it is one worker of these tests.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equality_cases import largest_difference
from processes import PATHS
from sampling import ALL

VOCABULARY, LENGTH, WIDTH, HEADS = 23, 6, 16, 4


# -- models of ours --------------------------------------------------------------------


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
        if bool((tokens[:, 0] < 3).any()):
            x = x + self.rare(x) * (tokens[:, :1, None] < 3)
        return self.head(x)


class Styled(nn.Module):
    """One block and a norm that the script's own plan runs on parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 22)

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


# -- cases -----------------------------------------------------------------------------


def _tokens(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]), batch[1]


def _logits(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], attention_mask=(batch[0] != 0).long()).logits, batch[1]


def _seq2seq(model: nn.Module, batch: Any) -> Any:
    return model(input_ids=batch[0], decoder_input_ids=batch[0].roll(1, 1)).logits, batch[1]


@dataclass(frozen=True)
class Model:
    """How a model is built and called, and which blocks of it are split in two."""

    build: Callable[[], nn.Module]
    forward: Callable[[nn.Module, Any], Any]
    blocks: int
    aside: str = "$^"  # parameters whose gradient is zero in exact arithmetic
    needs: str = "torch"
    styles: Callable[[], dict[str, Any]] | None = None


MODELS = {
    "gpt-fused": Model(lambda: GPT(FusedAttention, FusedMLP), _tokens, 4),
    "gpt-separate": Model(lambda: GPT(SeparateAttention, GatedMLP), _tokens, 4),
    "encoder": Model(Encoder, _tokens, 5),
    "encoder-post": Model(lambda: Encoder(norm_first=False), _tokens, 5),
    "encoder-decoder": Model(EncoderDecoder, _tokens, 5),
    "mlp": Model(MLP, _tokens, 2),
    "styled": Model(Styled, _tokens, 0, styles=_styles),
    "hooked": Model(Hooked, _tokens, 1),
    "reading": Model(Reading, _tokens, 1),
    "dropped": Model(Dropped, _tokens, 2),
    "gpt2": Model(
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
        _logits,
        4,
        needs="transformers",
    ),
    "llama": Model(_language("Llama/ForCausalLM", **_LLAMA), _logits, 4, needs="transformers"),
    "bert": Model(
        _language("Bert/ForMaskedLM", **_BERT, **_QUIET),
        _logits,
        4,
        r"key\.bias",
        needs="transformers",
    ),
    "t5": Model(
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
        _seq2seq,
        10,
        needs="transformers",
    ),
}


def mean_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def token_loss(output, target):
    """(sum, weight): only some targets count."""
    keep = target.flatten() > 4
    return (
        F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none") * keep
    ).sum(), keep.sum()


@dataclass(frozen=True)
class Case:
    model: str
    optimizer: str = "sgd"
    plan: str = "tensor=2"
    batch: int = 4
    n: int = 14
    micro: int | None = None
    weighted: bool = False
    clip: float | None = 0.5
    own: bool = False
    options: str = ""
    precision: str = "fp32"
    warm: bool = False  # the optimizer has state before
    thaw: bool = False  # frozen layers are trained from the sixth step on
    steps: int = 10

    @property
    def name(self) -> str:
        return "-".join(str(v) for v in dataclasses.astuple(self))

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = MODELS[self.model].build().to(torch.float64)
        model.train()
        with torch.no_grad():
            # nothing starts at zero: no layer is left out of the comparison
            for p in model.parameters():
                if not p.any():
                    p.normal_(0, 0.1)
        if self.optimizer == "sgd":
            return model, torch.optim.SGD(
                model.parameters(),
                lr=0.1,
                momentum=0.9,
                **({self.options: True} if self.options else {}),
            )
        small = [p for p in model.parameters() if p.ndim < 2]
        large = [p for p in model.parameters() if p.ndim >= 2]
        extra = {self.options: True} if self.options else {}
        optimizer = torch.optim.AdamW(
            [{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 2e-3}],
            lr=5e-3,
            **extra,
        )
        if self.warm:
            mean_loss(*MODELS[self.model].forward(model, self.data()[:4])).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def data(self) -> TensorDataset:
        g = torch.Generator().manual_seed(5)
        tokens = torch.randint(1, VOCABULARY, (self.n, LENGTH), generator=g)
        tokens[::3, -1] = 0
        return TensorDataset(tokens, tokens.roll(-1, 1).clone())

    def loss(self):
        return token_loss if self.weighted else mean_loss


def _thaw(case: Case, model: nn.Module, steps: int) -> None:
    if case.thaw and steps == 5:
        for p in model.parameters():
            p.requires_grad_(True)


def plain_loop(case: Case) -> dict[str, torch.Tensor]:
    """One process, whole batches, nothing of Ronde."""
    model, optimizer = case.build()
    losses: list[torch.Tensor] = []
    while len(losses) < case.steps:
        for batch in itertools.islice(
            DataLoader(case.data(), case.batch), case.steps - len(losses)
        ):
            optimizer.zero_grad()
            loss = case.loss()(*MODELS[case.model].forward(model, batch))
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            loss.backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            losses.append(loss.detach())
            _thaw(case, model, len(losses))
    return {**dict(model.named_parameters()), "losses": torch.stack(losses)}


def ronde_loop(case: Case) -> tuple[dict[str, torch.Tensor], Any]:
    import ronde

    model, optimizer = case.build()
    forward = MODELS[case.model].forward
    before = [len(g["params"]) for g in optimizer.param_groups]
    run = ronde.distribute(
        model,
        optimizer,
        DataLoader(case.data(), case.batch, shuffle=False),
        loss=case.loss(),
        forward=forward,
        clip_norm=case.clip,
        micro_batch=case.micro,
        plan=case.plan,
        precision=case.precision,
        tensor_plan=MODELS[case.model].styles and MODELS[case.model].styles(),
    )
    assert run.model is model and run.optimizer is optimizer
    assert [len(g["params"]) for g in optimizer.param_groups] == before
    losses: list[torch.Tensor] = []
    while len(losses) < case.steps:
        for batch in itertools.islice(run.batches(), case.steps - len(losses)):
            if case.own:
                for micro in batch if isinstance(batch, ronde.MicroBatches) else [batch]:
                    run.backward(case.loss()(*forward(run.model, micro)))
                losses.append(run.update())
            else:
                losses.append(run.step(batch))
            _thaw(case, model, len(losses))
    named = {
        n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()
    }
    return {**named, "losses": torch.stack(losses)}, run


def _boxes(model: nn.Module) -> None:
    """A checkpoint asks each divided parameter which box of the whole is here."""
    for name, p in model.named_parameters():
        if hasattr(p, "full_tensor"):
            (chunk,) = p.__create_chunk_list__()
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert p.full_tensor()[box].equal(p.to_local()), f"{name}: {p.placements}"


def refusals() -> dict[str, str]:
    """What is said where it cannot be done."""
    import ronde

    def refused(model: nn.Module, **options: Any) -> str:
        data = TensorDataset(
            torch.randint(VOCABULARY, (8, LENGTH)), torch.randint(VOCABULARY, (8, LENGTH))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            ronde.distribute(
                model,
                optimizer,
                data,
                batch_size=4,
                **{"loss": mean_loss, "plan": "tensor=2", **options},
            )
        except ronde.ArgumentError as error:
            return str(error)
        return ""

    torch.manual_seed(0)
    odd = nn.Sequential(
        nn.Embedding(VOCABULARY, 5), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, VOCABULARY)
    )
    return {
        "nothing": refused(
            nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.LayerNorm(4), nn.Linear(4, VOCABULARY))
        ),
        "odd": refused(odd),
        "name": refused(odd, tensor_plan={"nowhere": _styles()["up"]}),
        "zero": refused(odd, plan="tensor=2,shard=optimizer"),
        "loss": refused(odd, loss=lambda output, target: output["logits"]),
    }


def worker(listing: str, out: str) -> None:
    import warnings

    import torch.distributed as dist

    import ronde

    facts = []
    for i, values in enumerate(json.loads(Path(listing).read_text())):
        case = Case(**values)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result, run = ronde_loop(case)
        for name, tensor in result.items():
            mine = tensor.detach().clone()
            dist.broadcast(mine, 0)
            assert mine.equal(tensor), (
                f"{case.name}: {name} differs between rank 0 and rank {run.rank}"
            )
        _boxes(run.model)
        divided = run.port.strategy.divided
        parts = sum(
            p.to_local().numel() if hasattr(p, "to_local") else p.numel()
            for p in run.model.parameters()
        )
        whole = sum(p.numel() for p in run.model.parameters())
        said = [str(w.message) for w in caught if str(w.message).startswith("tensor=")]
        evaluated = run.evaluate(case.data())["loss"]
        facts.append(
            {
                "blocks": len(divided.blocks),
                "here": parts / whole,
                "said": said,
                "evaluated": evaluated,
            }
        )
        if run.is_main:
            save_file(
                {k: v.detach().contiguous().clone() for k, v in result.items()},
                Path(out) / f"{i}.safetensors",
            )
        # here, where the libraries are imported
        if run.rank == run.world_size - 1 and case.model != "dropped":
            expected = plain_loop(case)
            save_file(
                {k: v.detach().contiguous().clone() for k, v in expected.items()},
                Path(out) / f"{i}-plain.safetensors",
            )
    said = refusals() if ronde.world().size == 2 else {}
    if ronde.world().is_main:
        (Path(out) / "facts.json").write_text(json.dumps({"cases": facts, "refusals": said}))


# -- tests -----------------------------------------------------------------------------


def _imports(cases: list[Case]) -> list[str]:
    needs = {MODELS[c.model].needs for c in cases}
    return ["torch.distributed.tensor.parallel", *sorted(n for n in needs if n)]


def _train(cases: list[Case], workers: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    from processes import forked, python

    listing, out = folder / "cases.json", folder / "out"
    out.mkdir()
    listing.write_text(json.dumps([dataclasses.asdict(c) for c in cases]))
    done = python(
        forked(Path(__file__), workers, listing, out, imports=_imports(cases))[1:],
        folder,
        timeout=170,
        env={"PYTHONPATH": PATHS, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, json.loads((out / "facts.json").read_text())


def _compare(cases: list[Case], workers: int, folder: Path) -> dict[str, Any]:
    """Train all cases, compare each with a plain loop; what the workers said beside."""
    out, facts = _train(cases, workers, folder)
    wrong = []
    for i, (case, fact) in enumerate(zip(cases, facts["cases"], strict=True)):
        where, apart = "not compared: it is random", 0.0
        if case.model != "dropped":
            apart, where = largest_difference(
                load_file(out / f"{i}.safetensors"),
                load_file(out / f"{i}-plain.safetensors"),
                aside=MODELS[case.model].aside,
            )
        print(
            f"{workers} workers {case.name}: {apart:.1e} ({where}), {fact['blocks']} "
            f"blocks, {fact['here']:.2f} of the parameters here"
        )
        if not apart <= 1e-10:
            wrong.append(f"{case.name}: {where} differs by {apart:.1e}")
        if fact["blocks"] != MODELS[case.model].blocks:
            wrong.append(
                f"{case.name}: {fact['blocks']} blocks were split, "
                f"{MODELS[case.model].blocks} expected"
            )
        if not fact["here"] < 1 or not math.isfinite(fact["evaluated"]):
            wrong.append(f"{case.name}: {fact}")
    assert not wrong, "\n".join(wrong)
    return facts


OURS = [
    Case("gpt-fused", "adamw", "tensor=2,recompute=full"),
    Case("gpt-fused", weighted=True, micro=1),
    Case("gpt-separate", "adamw", micro=2, warm=True),
    Case("gpt-separate", "adamw", weighted=True, own=True, options="foreach"),
    # float64: only the scaling of gradients is fp16's
    Case("gpt-separate", "adamw", precision="fp16", options="fused"),
    Case("gpt-separate", "adamw", "tensor=2,recompute=selective"),
    Case("encoder"),
    Case("encoder-post"),
    Case("encoder-decoder"),
    Case("mlp", "adamw", thaw=True),
    Case("mlp", clip=None, own=True),
    Case("styled", "adamw", options="foreach"),
    Case("hooked"),
    Case("reading"),
    Case("dropped"),
]
OTHERS = [
    Case("gpt2"),
    Case("llama", "adamw", micro=2),
    Case("bert"),
    Case("t5", "adamw"),
]
REPLICAS = [
    Case("gpt-separate", "adamw", micro=1),
    Case("gpt-fused", weighted=True),
    Case("mlp", "adamw", batch=1, n=3),  # a replica without samples
    Case("mlp", "adamw", micro=1, own=True, thaw=True),
    Case("encoder"),
]
SHARDS = [
    Case("gpt-separate", "adamw", "tensor=2,shard=parameters", micro=1),
    Case("gpt-fused", "sgd", "tensor=2,shard=parameters", weighted=True, options="foreach"),
    Case("encoder", "sgd", "tensor=2,shard=parameters", own=True),
    Case("gpt-separate", "adamw", "tensor=2,shard=gradients", batch=1, n=3, precision="fp16"),
]


# Every kind of block and of option, each at least once; RONDE_TEST_ALL=1 for all of them.
if not ALL:
    OTHERS = [c for c in OTHERS if c.model in ("llama", "t5")]
    REPLICAS, SHARDS = [REPLICAS[i] for i in (2, 3)], SHARDS[:1]


def test_the_same_training_by_two_workers_that_hold_the_model_together(tmp_path):
    facts = _compare(OURS, 2, tmp_path)
    said = {case.model: fact["said"] for case, fact in zip(OURS, facts["cases"], strict=True)}
    assert "'second' (mlp): the gradient of" in said["hooked"][0]
    assert "'tied' (mlp): 'tied.c.weight' is also read outside" in said["reading"][0]
    assert "'detached' (mlp): 'detached.c.weight' is also read outside" in said["reading"][0]
    assert not said["encoder"]
    refused = facts["refusals"]
    assert "no attention and no MLP was found in Sequential" in refused["nothing"]
    assert "'Sequential' (mlp): 7 features: not divisible by 2" in refused["odd"]
    assert "tensor_plan" in refused["odd"] and "nowhere" in refused["name"]
    assert "shard='gradients'" in refused["zero"]
    assert "a forward pass and a loss over two samples, which failed (IndexError" in refused["loss"]


def test_the_same_training_of_models_that_nobody_here_wrote(tmp_path):
    pytest.importorskip("transformers")
    _compare(OTHERS, 2, tmp_path)


def test_the_same_training_with_replicas_and_shards(tmp_path):
    _compare([*REPLICAS, *SHARDS], 4, tmp_path)


def test_the_comparison_can_fail():
    case = Case("gpt-separate", "adamw")
    other = dataclasses.replace(case, batch=3)
    assert largest_difference(plain_loop(case), plain_loop(other))[0] > 1e-4


# -- what is recognised, in one process ------------------------------------------------


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
        return self.down(hidden)


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("mixes", "its part differs from the whole"),
        ("leaves", "also goes elsewhere (Sum)"),
        ("width", "must match the size"),
        ("tied", "'1.up.weight' is tied to '1.again.weight'"),
        ("read", "'1.down.weight' is also read outside of its layer's call"),
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


if __name__ == "__main__":
    worker(*sys.argv[1:])
