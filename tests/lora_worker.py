"""A small random BERT whose adapter is trained by peft, in float64, in one world after another:
keeps the whole model of each step, and at the end the adapter.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

import ronde
from forked import fork
from ronde.world.whole_file import AGAIN

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


def main(name: str) -> None:
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
        name=name,
    )

    def keep(when: str) -> None:
        with run.whole_model() as whole:
            if run.is_main:
                tensors = {k: v.clone() for k, v in whole.state_dict().items()}
                save_file(tensors, f"{name}-{when}-{run.state.step}.safetensors")

    for _ in run.epochs(2):
        for batch in run.batches():
            if run.state.step in (0, 5):
                keep("before")
            run.step(batch)
            keep("after")
    with run.whole_model() as whole:
        if run.is_main:
            whole.save_pretrained(f"adapter-{name}")


def world(name: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    try:
        main(name)
    except SystemExit as pause:
        assert pause.code == AGAIN
    atexit._run_exitfuncs()


if __name__ == "__main__":
    for name, workers, variables in json.loads(sys.argv[1]):
        if "RONDE_RESUME" in variables:
            shutil.copytree(Path("runs") / "two", Path("runs") / name)
        fork(workers, partial(world, name, variables))
