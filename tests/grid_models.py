"""Models of transformers and diffusers, tiny, with random weights, and mixtures of experts,
implicit, multi-task and recurrent ones written for it.

Each builder gives a :class:`Case`: the model, its samples, and a loss that is a mean over samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

SAMPLES, WORDS, LENGTH = 13, 17, 6


@dataclass
class Case:
    model: nn.Module
    samples: dict[str, torch.Tensor]  # rows along the first dimension
    loss: Callable[[nn.Module, Any], torch.Tensor]  # of a batch, a mean over its samples


class Rows(Dataset):
    def __init__(self, samples: dict[str, torch.Tensor]):
        self.samples = samples

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return {k: v[i] for k, v in self.samples.items()}


BUILDERS: dict[str, Callable[[], Case]] = {}


def build(name: str) -> Case:
    """With the same weights and samples every time, in float64, without dropout."""
    torch.manual_seed(5)
    case = BUILDERS[name]()
    _calm(case.model)
    case.model.double().train()
    case.samples = {k: v.double() if v.is_floating_point() else v for k, v in case.samples.items()}
    return case


def widen() -> None:
    """Let models that compute some of their steps in float32 do so in float64, in this process."""

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def patched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})

        setattr(owner, name, call)

    torch.Tensor.float = lambda self, **kwargs: self.double(**kwargs)  # type: ignore[method-assign]
    for owner, name in ((torch.Tensor, "to"), (F, "softmax"), (F, "log_softmax")):
        patched(owner, name)


def _calm(model: nn.Module) -> None:
    """Workers draw other masks than one process, and statistics of a batch are not exact."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, nn.GroupNorm(1, module.num_features))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "drop" in name
                or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            ):
                setattr(module, name, 0.0)


# -- of our own ------------------------------------------------------------------------


def own(make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]) -> Any:
    def case() -> Case:
        model, samples = make()
        samples["y"] = torch.randint(0, 5, (SAMPLES,))
        return Case(model, samples, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))

    BUILDERS[f"own_{make.__name__}"] = case
    return make


def rows(width: int = 8) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SAMPLES, width)}


class Expert(nn.Sequential):
    def __init__(self, width: int = 8):
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class TopK(nn.Module):
    """Sparse dispatch: an expert without tokens is not called."""

    def __init__(self, experts: int = 4, k: int = 2):
        super().__init__()
        self.gate, self.k = nn.Linear(8, experts), k
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(self.k, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, place = (chosen == i).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(x[row]) * weight[row, place, None])
        return x + out


def trunk(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 5))


@own
def moe_topk():
    return trunk(*(TopK() for _ in range(3))), rows()


@own
def moe_switch():
    return trunk(TopK(6, 1), Expert(), TopK(6, 1)), rows()


class _Invert(torch.autograd.Function):
    """Additive coupling whose inputs are computed again from its outputs, as RevNet does; gradients
    of the weights are returned, so no block's backward is called by hand.
    """

    @staticmethod
    def forward(ctx, x, module, *weights):
        ctx.module = module
        with torch.no_grad():
            y = module.run(x)
        ctx.save_for_backward(y.detach())
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,), module = ctx.saved_tensors, ctx.module
        with torch.enable_grad():
            x = module.inverse(y).detach().requires_grad_()
            weights = list(module.parameters())
            grads = torch.autograd.grad(module.run(x), [x, *weights], gradient)
        return grads[0], None, *grads[1:]


class RevNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = Expert(4), Expert(4)

    def run(self, x):
        a, b = x.chunk(2, -1)
        a = a + self.f(b)
        return torch.cat([a, b + self.g(a)], -1)

    def inverse(self, y):
        with torch.no_grad():
            a, b = y.chunk(2, -1)
            b = b - self.g(a)
            return torch.cat([a - self.f(b), b], -1)

    def forward(self, x):
        return _Invert.apply(x, self, *self.parameters())


class Energy(nn.Module):
    """The gradient of an energy, taken in the forward pass: a backward pass through a backward."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            slope = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        return x - slope


@own
def implicit_energy():
    return trunk(Energy(), Expert(), Energy()), rows()


class ManyTasks(nn.Module):
    """A column of the batch chooses each row's head; heads without rows are not called."""

    def __init__(self, tasks: int = 3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.heads = nn.ModuleDict({f"task{i}": nn.Linear(8, 5) for i in range(tasks)})

    def forward(self, x):
        h = self.body(x)
        task = (x[:, 0] * 3).long().abs() % len(self.heads)
        out = h.new_zeros(len(x), 5)
        for i, head in enumerate(self.heads.values()):
            if (task == i).any():
                out = torch.where((task == i)[:, None], head(h), out)
        return out


@own
def tasks_by_row():
    return ManyTasks(), rows()


def sequence() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SAMPLES, LENGTH, 8)}


class Recurrent(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rnn = getattr(nn, kind)(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.last = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 5))

    def forward(self, x):
        return self.last(self.rnn(torch.tanh(self.first(x)))[0].mean(1))


class Adaptive(nn.Module):
    """A block called as often as the rows need (ACT): the number differs from batch to batch."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), Expert()
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        h, times = self.first(x), 1 + (x[:, 0].abs() * 2).long()
        for i in range(int(times.max())):
            h = torch.where((times > i)[:, None], h + torch.tanh(self.block(h)), h)
        return self.last(h)


@own
def recurrent_adaptive():
    return Adaptive(), rows()


class Tied(nn.Module):
    """An embedding that is also the head, and a layer that stands at two places."""

    def __init__(self):
        super().__init__()
        self.embed, self.same, self.between = nn.Embedding(5, 8), Expert(), Expert()
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x) + self.embed((x[:, 0] * 4).long().abs() % 5)
        h = h + self.same(h)
        h = h + self.same(self.between(h))
        return h @ self.embed.weight.T


@own
def tied_everywhere():
    return Tied(), rows()


class InPlaceResidual(nn.Module):
    """Each block's input is written into after it, and the backward pass does not need it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), Expert()) for _ in range(3))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h += block(h)
        return self.last(h)


@own
def in_place_residual():
    return InPlaceResidual(), rows()


# -- transformers ----------------------------------------------------------------------


def load_transformers() -> None:
    import transformers as t

    def add(
        name: str, model: str, samples: Callable[[], dict], call: Callable, /, **options
    ) -> None:
        def case() -> Case:
            made = getattr(t, model)
            config = made.config_class(**options)
            for part in ("_experts_implementation", "_attn_implementation"):
                if getattr(config, part, None) is not None or part.startswith("_exp"):
                    setattr(config, part, "eager")
            return Case(made(config), samples(), call)

        BUILDERS[name] = case

    def text() -> dict[str, torch.Tensor]:
        x = torch.randint(3, WORDS, (SAMPLES, LENGTH))
        return {"input_ids": x, "attention_mask": torch.ones_like(x)}

    def padded() -> dict[str, torch.Tensor]:
        batch = text()
        batch["attention_mask"][::3, -2:] = 0
        return batch

    def words(logits, b):
        return F.cross_entropy(logits.flatten(0, 1), b["input_ids"].flatten())

    def said(m, b):
        return words(m(**b).logits, b)

    def plain(m, b):
        """Without a mask."""
        return words(m(input_ids=b["input_ids"]).logits, b)

    def pairs(m, b):
        """Of an encoder and a decoder."""
        return words(m(**b, decoder_input_ids=b["input_ids"].roll(1, 1)).logits, b)

    small = {
        "vocab_size": WORDS,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    grouped = {**small, "num_key_value_heads": 2}
    for name in ("Olmo2", "Cohere"):
        add(name.lower(), f"{name}ForCausalLM", padded, said, **grouped)
    add("deepseek_v3", "DeepseekV3ForCausalLM", text, said, **grouped, n_routed_experts=4,
        n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=8, kv_lora_rank=4,
        q_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        first_k_dense_replace=1)  # fmt: skip
    add("gpt_oss", "GptOssForCausalLM", padded, said, **grouped, head_dim=4, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=4)  # fmt: skip
    add("mamba2", "Mamba2ForCausalLM", text, plain, vocab_size=WORDS, hidden_size=8, num_heads=4,
        head_dim=4, state_size=4, expand=2, n_groups=1, num_hidden_layers=2, chunk_size=4,
        use_cache=False)  # fmt: skip
    add("xlnet", "XLNetLMHeadModel", text, said, vocab_size=WORDS, d_model=8, n_layer=2, n_head=2,
        d_inner=16)  # fmt: skip
    pair = {"vocab_size": WORDS, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2}
    pair |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16}
    pair |= {"decoder_ffn_dim": 16, "max_position_embeddings": 16, "decoder_start_token_id": 1}
    pair |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    add("mbart", "MBartForConditionalGeneration", padded, pairs, **pair)
    t5 = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2}
    t5 |= {"num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    add("longt5", "LongT5ForConditionalGeneration", text, pairs, **t5, local_radius=3,
        encoder_attention_type="transient-global", global_block_size=2)  # fmt: skip

    def pictures() -> dict[str, torch.Tensor]:
        return {
            "pixel_values": torch.randn(SAMPLES, 3, 16, 16),
            "labels": torch.arange(SAMPLES) % 2,
        }

    def own_loss(m, b):
        return m(**b).loss

    eye = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "image_size": 16}
    eye |= {"num_attention_heads": 2, "patch_size": 8}
    add("beit", "BeitForImageClassification", pictures, own_loss, **eye)
    add("segformer", "SegformerForImageClassification", pictures, own_loss, hidden_sizes=[4, 8],
        depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2])  # fmt: skip


# -- diffusers -------------------------------------------------------------------------


def load_diffusers() -> None:
    import diffusers as d

    def add(name: str, model: str, samples: Callable[[], dict], **options) -> None:
        def loss(m, b):
            out = m(**b)
            out = out[0] if isinstance(out, tuple) else out.sample
            return (out - 0.3).pow(2).mean()

        BUILDERS[name] = lambda: Case(getattr(d, model)(**options), samples(), loss)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(SAMPLES, *shape)

    def times() -> torch.Tensor:
        return torch.arange(SAMPLES) % 7

    add("cogview3", "CogView3PlusTransformer2DModel", lambda: {
        "hidden_states": noise(4, 8, 8), "encoder_hidden_states": noise(3, 8),
        "timestep": times(), "original_size": noise(2).abs() * 10,
        "target_size": noise(2).abs() * 10, "crop_coords": noise(2).abs()}, patch_size=2,
        in_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=2, out_channels=4,
        text_embed_dim=8, time_embed_dim=8, condition_dim=2, pos_embed_max_size=8,
        sample_size=8)  # fmt: skip
    add("unet_2d_condition", "UNet2DConditionModel", lambda: {
        "sample": noise(4, 8, 8), "timestep": times(), "encoder_hidden_states": noise(5, 8)},
        sample_size=8, in_channels=4, out_channels=4, cross_attention_dim=8, attention_head_dim=4,
        block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))  # fmt: skip
    add("wan", "WanTransformer3DModel", lambda: {
        "hidden_states": noise(4, 2, 8, 8), "encoder_hidden_states": noise(3, 8),
        "timestep": times()}, patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12,
        in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=16, num_layers=2,
        cross_attn_norm=True, rope_max_seq_len=16)  # fmt: skip


LOADERS = {"transformers": load_transformers, "diffusers": load_diffusers}


@functools.cache
def foreign(package: str) -> list[str]:
    """Names of a package's models, which are among the builders from now on."""
    before = set(BUILDERS)
    LOADERS[package]()
    return [name for name in BUILDERS if name not in before]
