"""What plain.py and train.py share: pairs of made-up sentences, and a small BERT."""

import random
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

WORDS = 200
PAD, CLS, SEP = WORDS, WORDS + 1, WORDS + 2


def sentence(draw: random.Random, topic: int) -> list[int]:
    """Some words; even ones are about topic 0, odd ones about topic 1."""
    return [2 * draw.randrange(WORDS // 2) + topic for _ in range(draw.randint(3, 10))]


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of sentences. The label says whether both are about topic 1."""
    draw, found = random.Random(seed), []
    for i in range(count):
        topics = (1, 1) if i % 2 else draw.choice([(0, 0), (0, 1), (1, 0)])
        first, second = (sentence(draw, topic) for topic in topics)
        tokens = [CLS, *first, SEP, *second, SEP]
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        found.append({"input_ids": tokens, "token_type_ids": types, "labels": i % 2})
    return found


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch, padded to its longest pair."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> Tensor:
        rows = [sample[name] + [value] * (longest - len(sample[name])) for sample in samples]
        return torch.tensor(rows)

    tokens = padded("input_ids", PAD)
    return {
        "input_ids": tokens,
        "token_type_ids": padded("token_type_ids", 0),
        "attention_mask": (tokens != PAD).long(),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def bert(width: int, layers: int, dropout: float) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=WORDS + 3, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=2 * width, max_position_embeddings=32, pad_token_id=PAD, num_labels=2,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with weight decay, and biases and norms without."""
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "Norm" in name]
    chosen = {id(p) for p in plain}
    decayed = [p for p in model.parameters() if id(p) not in chosen]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
