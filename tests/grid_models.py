"""Models beyond those of ``foreign_models``: of transformers, diffusers and monai, tiny, with random
weights, and mixtures of experts, implicit, multi-task and recurrent ones written for it.

Each builder gives a :class:`Case`: the model, its samples, and a loss that is a mean over samples.
"""

from __future__ import annotations

import math
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


class Soft(TopK):
    """Dense: every expert sees every token."""

    def forward(self, x):
        weight = self.gate(x).softmax(-1)
        return x + sum(w[:, None] * e(x) for w, e in zip(weight.T, self.experts, strict=True))


class Stacked(nn.Module):
    """Experts as one tensor, by batched products."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.gate = nn.Linear(8, experts)
        self.up = nn.Parameter(torch.randn(experts, 8, 16) / 3)
        self.down = nn.Parameter(torch.randn(experts, 16, 8) / 4)

    def forward(self, x):
        weight, best = self.gate(x).softmax(-1).max(-1)
        h = torch.einsum("bi,bio->bo", x, self.up[best])
        return x + weight[:, None] * torch.einsum("bi,bio->bo", F.gelu(h), self.down[best])


class Shared(TopK):
    """One expert for all, and routed ones (DeepSeek)."""

    def __init__(self):
        super().__init__(3, 1)
        self.shared = Expert()

    def forward(self, x):
        return super().forward(x) + self.shared(x)


def trunk(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *blocks, nn.LayerNorm(8), nn.Linear(8, 5))


@own
def moe_topk():
    return trunk(*(TopK() for _ in range(3))), rows()


@own
def moe_switch():
    return trunk(TopK(6, 1), Expert(), TopK(6, 1)), rows()


@own
def moe_soft():
    return trunk(Soft(), Soft()), rows()


@own
def moe_stacked():
    return trunk(Stacked(), Stacked()), rows()


@own
def moe_shared():
    return trunk(Shared(), Shared()), rows()


class Coupling(nn.Module):
    """Of a flow: invertible, through ordinary autograd."""

    def __init__(self):
        super().__init__()
        self.f, self.g = Expert(4), Expert(4)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        a = a + self.f(b)
        return torch.cat([a, b * torch.tanh(self.g(a)).exp()], -1)


@own
def reversible_flow():
    return trunk(*(Coupling() for _ in range(3))), rows()


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


@own
def reversible_revnet():
    return trunk(*(RevNet() for _ in range(3))), rows()


class FixedPoint(nn.Module):
    """Deep equilibrium, its gradient by one more step (Jacobian-free backward)."""

    def __init__(self):
        super().__init__()
        self.cell, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(12):
                z = torch.tanh(0.3 * self.cell(z) + x)
        return self.norm(torch.tanh(0.3 * self.cell(z) + x))


@own
def implicit_jacobian_free():
    return trunk(FixedPoint(), Expert(), FixedPoint()), rows()


class Ode(nn.Module):
    """Euler steps of one network: called many times in a pass."""

    def __init__(self):
        super().__init__()
        self.field = Expert()

    def forward(self, x):
        for _ in range(5):
            x = x + 0.2 * torch.tanh(self.field(x))
        return x


@own
def implicit_ode():
    return trunk(Ode(), Ode()), rows()


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


class AllTasks(ManyTasks):
    """Uncertainty-weighted sum of all heads (Kendall et al.)."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        h = self.body(x)
        heads = [head(h) for head in self.heads.values()]
        return sum(o * (-v).exp() + v.tanh() for o, v in zip(heads, self.log_variance, strict=True))


@own
def tasks_weighted():
    return AllTasks(), rows()


class CrossStitch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.ModuleList(Expert() for _ in range(3)) for _ in range(2))
        self.mix = nn.ParameterList(torch.eye(2) + 0.1 for _ in range(3))
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        u = v = x
        for a, b, mix in zip(self.a, self.b, self.mix, strict=True):
            u, v = (mix @ torch.stack([a(u), b(v)]).flatten(1)).view(2, *u.shape)
        return self.out(u + v)


@own
def tasks_cross_stitch():
    return CrossStitch(), rows()


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


@own
def recurrent_lstm():
    return Recurrent("LSTM"), sequence()


@own
def recurrent_gru():
    return Recurrent("GRU"), sequence()


class Unrolled(nn.Module):
    """Cells called at every step, attention over what they said before."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTMCell(8, 8), nn.GRUCell(8, 8)
        self.query, self.out = nn.Linear(8, 8), nn.Linear(16, 5)

    def forward(self, x):
        h, c = x.new_zeros(len(x), 8), x.new_zeros(len(x), 8)
        g, past = x.new_zeros(len(x), 8), []
        for t in range(x.shape[1]):
            h, c = self.first(x[:, t], (h, c))
            g = self.second(h, g)
            past.append(g)
        seen = torch.stack(past, 1)
        weight = (seen @ self.query(g)[..., None] / math.sqrt(8)).softmax(1)
        return self.out(torch.cat([g, (weight * seen).sum(1)], -1))


@own
def recurrent_unrolled():
    return Unrolled(), sequence()


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


class Hyper(nn.Module):
    """A layer whose weight another one makes."""

    def __init__(self):
        super().__init__()
        self.make, self.first, self.last = nn.Linear(8, 64), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        weight = self.make(x).view(-1, 8, 8) / 8
        return self.last(torch.tanh(weight @ self.first(x)[..., None])[..., 0])


@own
def hyper_network():
    return Hyper(), rows()


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


class WrittenScores(nn.Module):
    """A product is written into, as T5's attention scores are."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        scores = self.a(x) @ self.b(x).T
        scores = scores * torch.eye(len(x), dtype=x.dtype)
        h = self.c(x)
        h += scores.sum(1, keepdim=True)
        return x + torch.tanh(h)


@own
def written_scores():
    return trunk(*(WrittenScores() for _ in range(3))), rows()


class GroupNorms(nn.Module):
    """In channels_last, as diffusers' attention leaves pictures."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 8, 1), nn.Linear(8, 5)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(4))
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(4))

    def forward(self, x):
        h = self.first(x.view(-1, 2, 2, 2))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + layer(torch.tanh(norm(h.contiguous(memory_format=torch.channels_last))))
        return self.last(h.mean((2, 3)))


@own
def group_norms():
    return GroupNorms(), rows()


class Empty(nn.Module):
    """A weight without elements, as in MobileBert where two widths are the same."""

    def __init__(self):
        super().__init__()
        self.dense, self.none = Expert(), nn.Parameter(torch.zeros(8, 0))

    def forward(self, x):
        return x + self.dense(x) + torch.cat([self.none, x.new_zeros(8, 8)], 1).sum()


@own
def empty():
    return trunk(*(Empty() for _ in range(2))), rows()


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
    gpt = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
    gpt |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    add("gptj", "GPTJForCausalLM", text, said, **gpt, rotary_dim=2)
    add("codegen", "CodeGenForCausalLM", text, said, **{**gpt, "n_head": 4}, rotary_dim=2)
    add("gpt_bigcode", "GPTBigCodeForCausalLM", padded, said, **gpt)
    add("openai_gpt", "OpenAIGPTLMHeadModel", text, said, **gpt)
    for name in ("GPTNeo",):
        add(
            "gpt_neo",
            f"{name}ForCausalLM",
            padded,
            said,
            vocab_size=WORDS,
            hidden_size=8,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            max_position_embeddings=16,
        )
    for name in ("Olmo", "Olmo2", "Cohere", "StableLm", "Starcoder2", "Granite", "Nemotron"):
        add(name.lower(), f"{name}ForCausalLM", padded, said, **grouped)
    add("gemma3", "Gemma3ForCausalLM", padded, said, **grouped, head_dim=4, sliding_window=4)
    add("phi3", "Phi3ForCausalLM", padded, said, **grouped)
    add("glm4", "Glm4ForCausalLM", padded, said, **grouped, head_dim=4)
    add("persimmon", "PersimmonForCausalLM", padded, said, **grouped)
    add("mpt", "MptForCausalLM", padded, said, vocab_size=WORDS, d_model=8, n_heads=2, n_layers=2)
    add("modernbert", "ModernBertForMaskedLM", padded, said, **small, cls_token_id=1,
        sep_token_id=2)  # fmt: skip
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    add("qwen2_moe", "Qwen2MoeForCausalLM", padded, said, **grouped, **moe,
        shared_expert_intermediate_size=8, decoder_sparse_step=1)  # fmt: skip
    add("olmoe", "OlmoeForCausalLM", padded, said, **grouped, num_experts=4, num_experts_per_tok=2)
    add("granitemoe", "GraniteMoeForCausalLM", padded, said, **grouped, num_local_experts=4,
        num_experts_per_tok=2)  # fmt: skip
    add("deepseek_v3", "DeepseekV3ForCausalLM", text, said, **grouped, n_routed_experts=4,
        n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=8, kv_lora_rank=4,
        q_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        first_k_dense_replace=1)  # fmt: skip
    add("gpt_oss", "GptOssForCausalLM", padded, said, **grouped, head_dim=4, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=4)  # fmt: skip
    add("switch", "SwitchTransformersForConditionalGeneration", text, pairs, vocab_size=WORDS,
        d_model=8, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=3,
        expert_capacity=64, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, router_z_loss_coef=0.0,
        router_aux_loss_coef=0.0, router_jitter_noise=0.0)  # fmt: skip
    add("mamba2", "Mamba2ForCausalLM", text, plain, vocab_size=WORDS, hidden_size=8, num_heads=4,
        head_dim=4, state_size=4, expand=2, n_groups=1, num_hidden_layers=2, chunk_size=4,
        use_cache=False)  # fmt: skip
    add("jamba", "JambaForCausalLM", text, plain, **grouped, use_mamba_kernels=False,
        mamba_d_state=4, mamba_dt_rank=2, num_experts=2, num_experts_per_tok=1,
        expert_layer_period=2, attn_layer_period=2, attn_layer_offset=1, use_cache=False,
        )  # fmt: skip
    add("recurrent_gemma", "RecurrentGemmaForCausalLM", text, plain, **grouped, lru_width=8,
        head_dim=4, attention_window_size=4, use_cache=False)  # fmt: skip
    add("rwkv", "RwkvForCausalLM", text, plain, vocab_size=WORDS, hidden_size=8,
        attention_hidden_size=8, intermediate_size=16, num_hidden_layers=2, use_cache=False,
        context_length=16)  # fmt: skip
    add("xlnet", "XLNetLMHeadModel", text, said, vocab_size=WORDS, d_model=8, n_layer=2, n_head=2,
        d_inner=16)  # fmt: skip
    bert = {**small, "type_vocab_size": 2}
    add("mpnet", "MPNetForMaskedLM", padded, said, **bert)
    add("fnet", "FNetForMaskedLM", text, plain, **bert)
    add("nystromformer", "NystromformerForMaskedLM", text, said, **bert, num_landmarks=2,
        segment_means_seq_len=6, conv_kernel_size=3)  # fmt: skip
    add("squeezebert", "SqueezeBertForMaskedLM", padded, said, **bert, embedding_size=8,
        q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1, intermediate_groups=2,
        output_groups=2)  # fmt: skip
    add("mobilebert", "MobileBertForMaskedLM", padded, said, **bert, embedding_size=8,
        intra_bottleneck_size=4, true_hidden_size=4, num_feedforward_networks=2)  # fmt: skip
    add("convbert", "ConvBertForMaskedLM", padded, said, **bert, embedding_size=8, head_ratio=1,
        conv_kernel_size=3)  # fmt: skip
    add("funnel", "FunnelForMaskedLM", text, said, vocab_size=WORDS, block_sizes=[1, 1],
        num_decoder_layers=1, d_model=8, n_head=2, d_head=4, d_inner=16)  # fmt: skip
    add("roformer", "RoFormerForMaskedLM", padded, said, **bert, embedding_size=8)
    add("rembert", "RemBertForMaskedLM", padded, said, **bert, input_embedding_size=6,
        output_embedding_size=10)  # fmt: skip
    add("perceiver", "PerceiverForMaskedLM", text, lambda m, b: words(m(
        inputs=b["input_ids"]).logits, b), num_latents=3, d_latents=8, d_model=8,
        num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2,
        num_cross_attention_heads=2, qk_channels=8, v_channels=8, vocab_size=WORDS,
        max_position_embeddings=LENGTH)  # fmt: skip
    add("reformer", "ReformerModelWithLMHead", text, plain, attention_head_size=4,
        attn_layers=["local", "local"], local_attn_chunk_length=2, axial_pos_embds=False,
        feed_forward_size=16, hidden_size=8, num_attention_heads=2, vocab_size=WORDS,
        max_position_embeddings=16, is_decoder=True, num_hidden_layers=2,
        local_num_chunks_before=1, use_cache=False)  # fmt: skip
    pair = {"vocab_size": WORDS, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2}
    pair |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16}
    pair |= {"decoder_ffn_dim": 16, "max_position_embeddings": 16, "decoder_start_token_id": 1}
    pair |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name in ("Pegasus", "M2M100", "Blenderbot", "MBart"):
        add(name.lower(), f"{name}ForConditionalGeneration", padded, pairs, **pair)
    t5 = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2}
    t5 |= {"num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    add("umt5", "UMT5ForConditionalGeneration", padded, pairs, **t5)
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
    for name in ("Beit", "DeiT", "Dinov2WithRegisters", "ViTMSN"):
        add(name.lower(), f"{name}ForImageClassification", pictures, own_loss, **eye)
    add("poolformer", "PoolFormerForImageClassification", pictures, own_loss,
        hidden_sizes=[4, 8], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[3, 3],
        strides=[2, 2], padding=[1, 1])  # fmt: skip
    add("segformer", "SegformerForImageClassification", pictures, own_loss, hidden_sizes=[4, 8],
        depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2])  # fmt: skip
    add("focalnet", "FocalNetForImageClassification", pictures, own_loss, image_size=16,
        patch_size=4, embed_dim=4, depths=[1, 1], hidden_sizes=[4, 8], focal_levels=[1, 1],
        focal_windows=[3, 3])  # fmt: skip
    add("regnet", "RegNetForImageClassification", pictures, own_loss, embedding_size=4,
        hidden_sizes=[8, 8], depths=[1, 1], groups_width=4)  # fmt: skip
    add("pvt", "PvtForImageClassification", pictures, own_loss, image_size=16, hidden_sizes=[4, 8],
        depths=[1, 1], num_encoder_blocks=2, sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[1, 2],
        mlp_ratios=[2, 2])  # fmt: skip
    add("vivit", "VivitForVideoClassification", lambda: {
        "pixel_values": torch.randn(SAMPLES, 2, 3, 16, 16), "labels": torch.arange(SAMPLES) % 2},
        own_loss, **eye, num_frames=2, tubelet_size=[1, 8, 8])  # fmt: skip
    add("ast", "ASTForAudioClassification", lambda: {
        "input_values": torch.randn(SAMPLES, 16, 8), "labels": torch.arange(SAMPLES) % 2},
        own_loss, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        patch_size=4, frequency_stride=4, time_stride=4, max_length=16,
        num_mel_bins=8)  # fmt: skip
    add("patchtsmixer", "PatchTSMixerForPrediction", lambda: {
        "past_values": torch.randn(SAMPLES, 12, 2), "future_values": torch.randn(SAMPLES, 4, 2)},
        own_loss, num_input_channels=2, context_length=12, prediction_length=4, patch_length=4,
        patch_stride=4, d_model=8, num_layers=2, loss="mse", norm_mlp="LayerNorm",
        scaling=None)  # fmt: skip
    add("decision", "DecisionTransformerModel", lambda: {
        "states": torch.randn(SAMPLES, 4, 5), "actions": torch.randn(SAMPLES, 4, 3),
        "returns_to_go": torch.randn(SAMPLES, 4, 1),
        "timesteps": torch.arange(4).expand(SAMPLES, 4).clone()},
        lambda m, b: (m(**b).action_preds - b["actions"]).pow(2).mean(), state_dim=5, act_dim=3,
        hidden_size=8, max_ep_len=16, **{k: v for k, v in gpt.items() if k != "n_embd"},
        )  # fmt: skip


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
    add("aura_flow", "AuraFlowTransformer2DModel", lambda: {
        "hidden_states": noise(4, 8, 8), "encoder_hidden_states": noise(3, 8),
        "timestep": times()}, sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1,
        num_single_dit_layers=1, attention_head_dim=4, num_attention_heads=2,
        joint_attention_dim=8, caption_projection_dim=8, out_channels=4,
        pos_embed_max_size=16)  # fmt: skip
    add("sana", "SanaTransformer2DModel", lambda: {
        "hidden_states": noise(4, 8, 8), "encoder_hidden_states": noise(3, 8),
        "timestep": times()}, in_channels=4, out_channels=4, num_attention_heads=2,
        attention_head_dim=4, num_layers=2, num_cross_attention_heads=2,
        cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8, sample_size=8,
        patch_size=1)  # fmt: skip
    add("latte", "LatteTransformer3DModel", lambda: {
        "hidden_states": noise(4, 2, 8, 8), "encoder_hidden_states": noise(3, 8),
        "timestep": times()}, sample_size=8, num_layers=1, patch_size=2, attention_head_dim=4,
        num_attention_heads=2, caption_channels=8, in_channels=4, cross_attention_dim=8,
        out_channels=4, norm_type="ada_norm_single", video_length=2)  # fmt: skip
    add("cogvideo", "CogVideoXTransformer3DModel", lambda: {
        "hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(3, 8),
        "timestep": times()}, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        out_channels=4, time_embed_dim=2, text_embed_dim=8, num_layers=2, sample_width=8,
        sample_height=8, sample_frames=2, patch_size=2, temporal_compression_ratio=1,
        max_text_seq_length=3)  # fmt: skip
    add("wan", "WanTransformer3DModel", lambda: {
        "hidden_states": noise(4, 2, 8, 8), "encoder_hidden_states": noise(3, 8),
        "timestep": times()}, patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12,
        in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=16, num_layers=2,
        cross_attn_norm=True, rope_max_seq_len=16)  # fmt: skip
    add("asymmetric_kl", "AsymmetricAutoencoderKL", lambda: {"sample": noise(3, 16, 16)},
        down_block_types=("DownEncoderBlock2D",), down_block_out_channels=(8,),
        up_block_types=("UpDecoderBlock2D",), up_block_out_channels=(8,), norm_num_groups=4,
        latent_channels=4)  # fmt: skip
    add("autoencoder_dc", "AutoencoderDC", lambda: {"sample": noise(3, 16, 16)}, in_channels=3,
        latent_channels=4, encoder_block_out_channels=(4, 8), decoder_block_out_channels=(4, 8),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        encoder_block_types="ResBlock", decoder_block_types="ResBlock",
        encoder_qkv_multiscales=((), ()), decoder_qkv_multiscales=((), ()),
        attention_head_dim=4)  # fmt: skip


# -- monai -----------------------------------------------------------------------------


def load_monai() -> None:
    import monai.networks.nets as m

    def add(name: str, model: str, *shape: int, **options) -> None:
        def loss(net, b):
            out = net(b["x"])
            while isinstance(out, tuple | list):
                out = out[0]
            return (out - 0.3).pow(2).mean()

        BUILDERS[name] = lambda: Case(
            getattr(m, model)(**options), {"x": torch.randn(SAMPLES, *shape)}, loss
        )

    add("mednext", "MedNeXt", 1, 16, 16, spatial_dims=2, init_filters=4, in_channels=1,
        out_channels=2, encoder_expansion_ratio=2, decoder_expansion_ratio=2,
        bottleneck_expansion_ratio=2, blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1),
        kernel_size=3, norm_type="group")  # fmt: skip
    add("voxelmorph", "VoxelMorphUNet", 2, 16, 16, spatial_dims=2, in_channels=2,
        unet_out_channels=4, channels=(4, 4, 4, 4), final_conv_channels=(4,))  # fmt: skip
    add("diffusion_unet", "DiffusionModelUNet", 1, 8, 8, spatial_dims=2, in_channels=1,
        out_channels=1, channels=(8, 8), attention_levels=(False, True), num_res_blocks=1,
        num_head_channels=4, norm_num_groups=4)  # fmt: skip
    BUILDERS["diffusion_unet"] = _with_times(BUILDERS["diffusion_unet"])
    add("segresnet_vae", "SegResNetVAE", 1, 16, 16, spatial_dims=2, input_image_size=(16, 16),
        vae_estimate_std=False, vae_default_std=0.0, init_filters=8, in_channels=1, out_channels=2,
        blocks_down=(1, 1), blocks_up=(1,), vae_nz=4)  # fmt: skip
    add("spade_net", "AutoEncoder", 1, 16, 16, spatial_dims=2, in_channels=1, out_channels=1,
        channels=(4, 8), strides=(2, 2))  # fmt: skip
    add("local_net", "LocalNet", 1, 16, 16, spatial_dims=2, in_channels=1, out_channels=2,
        num_channel_initial=4, extract_levels=(0, 1))  # fmt: skip
    add("patch_discriminator", "PatchDiscriminator", 1, 16, 16, spatial_dims=2, channels=4,
        in_channels=1, num_layers_d=2)  # fmt: skip
    add("fully_connected", "FullyConnectedNet", 8, in_channels=8, out_channels=4,
        hidden_channels=(8, 12, 8), dropout=0.1)  # fmt: skip
    add("regressor", "Regressor", 1, 16, 16, in_shape=(1, 16, 16), out_shape=(2,),
        channels=(4, 8), strides=(2, 2))  # fmt: skip


def _with_times(make: Callable[[], Case]) -> Callable[[], Case]:
    def case() -> Case:
        made = make()
        made.samples["t"] = torch.arange(SAMPLES) % 7
        made.loss = lambda m, b: (m(b["x"], timesteps=b["t"]) - 0.3).pow(2).mean()
        return made

    return case


LOADERS = {"transformers": load_transformers, "diffusers": load_diffusers, "monai": load_monai}
