"""A small random BERT whose adapter is trained by peft, in float64: keeps the whole model of each
step, and at the end the adapter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

import ronde

WORDS, LENGTH, SAMPLES = 40, 7, 48


def samples():
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=draw)
    return torch.utils.data.TensorDataset(words, (words[:, 0] > words[:, 1]).long())


def base() -> BertForSequenceClassification:
    """The model that the adapter is for: its weights are the same wherever it is made."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config).double()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    model = get_peft_model(base(), LoraConfig(task_type="SEQ_CLS", r=3, lora_alpha=6))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) < 0.2 * sum(p.numel() for p in model.parameters())
    run = ronde.distribute(
        model.double(),
        torch.optim.AdamW(trained, lr=1e-2),
        samples(),
        loss=F.cross_entropy,
        forward=lambda model, batch: (model(input_ids=batch[0]).logits, batch[1]),
        batch_size=8,
        randomness="global",
    )

    def keep(when: str) -> None:
        with run.whole_model() as whole:
            if run.is_main:
                name = f"{when}-{ronde.world().size}-{run.state.step}.safetensors"
                save_file({k: v.clone() for k, v in whole.state_dict().items()}, name)

    for _ in run.epochs(2):
        for batch in run.batches():
            if run.state.step in (0, 5):
                keep("before")
            run.step(batch)
            keep("after")
    with run.whole_model() as whole:
        if run.is_main:
            whole.save_pretrained(f"adapter-{ronde.world().size}")


if __name__ == "__main__":
    main()
