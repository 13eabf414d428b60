"""Every rank, under one plan after the other, trains a small language model, uses whole copies of
it, and calls the divided model alone. Rank 0 writes the copy's tensors, every rank its findings.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import ronde
from forked import fork


class Sampler(nn.Module):
    """A language model, with all that a copy must bring along."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=50,
                n_positions=16,
                n_embd=16,
                n_layer=3,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 50))
        self.register_buffer("shift", torch.linspace(0.0, 0.1, 50), persistent=False)
        self.temperature = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm(input_ids=ids, use_cache=False).logits * self.scale + self.shift

    def decode(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.lm.transformer(ids).last_hidden_state
        return self.lm.lm_head(hidden) / self.temperature


def refused(call) -> str:
    signal.alarm(10)  # ends the process: no rank may wait longer
    try:
        return f"nothing: {call()!r}"
    except (ronde.RondeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def main(out: Path) -> None:
    found: dict = {}
    torch.manual_seed(0)
    model = Sampler().double()
    model.lm.transformer.wpe.requires_grad_(False)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (16, 8), generator=g)
    run = ronde.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TensorDataset(ids),
        loss=lambda logits, y: F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
        forward=lambda model, batch: (model(batch[0]), batch[0]),
        batch_size=8,
        micro_batch=2,
    )
    plan, rank, size = run.plan, run.rank, run.world_size
    divided = size > 1 and (plan.pipeline > 1 or plan.tensor > 1 or plan.shard == "parameters")
    pair = plan.tensor > 1 and plan.replicas > 1  # those who share layers call the model together
    prompt = ids[:2, :3]

    model.temperature = 0.5
    for _ in run.epochs(1):
        for i, batch in enumerate(run.batches()):
            if i == 1 and divided and run.is_main:
                found["alone, then a step"] = refused(lambda: model(prompt))
            run.step(batch)

    # whole copies
    with run.whole_model() as whole:
        found["type"] = [type(whole).__name__, type(whole.lm).__name__, "forward" in vars(whole)]
        found["own"] = whole is model
        found["training"] = [whole.training, whole.lm.training]
        whole.eval()
        found["plain"] = all(type(p) is nn.Parameter for p in whole.parameters())
        found["tied"] = whole.lm.lm_head.weight is whole.lm.transformer.wte.weight
        frozen = [n for n, p in whole.named_parameters() if not p.requires_grad]
        found["frozen"] = frozen
        found["temperature"] = whole.temperature
        with torch.no_grad():
            for _ in range(1 + rank):  # as often as each rank likes
                logits = whole(prompt)
            options = {"max_new_tokens": 5, "do_sample": False}
            found["generated"] = whole.lm.generate(prompt, **options).tolist()
            tensors = {"logits": logits, "decoded": whole.decode(prompt)}
        tensors |= {f"p.{n}": p.detach() for n, p in whole.named_parameters()}
        tensors |= {f"b.{n}": b for n, b in whole.named_buffers()}
    found["mode kept"] = model.training and model.lm.training
    with run.whole_model("main", device="cpu") as whole:
        found["main only"] = (whole is not None) == run.is_main
        if whole is not None:
            whole.lm.save_pretrained(out / "pretrained")
            again = GPT2LMHeadModel.from_pretrained(out / "pretrained", dtype=torch.float64)
            same = [torch.equal(again.state_dict()[n], v) for n, v in whole.lm.state_dict().items()]
            found["saved"] = [len(same), all(same)]
            if divided:
                with torch.no_grad():
                    whole.scale.zero_()  # a copy: the training does not see it
    try:
        with run.whole_model() as whole:
            raise KeyError("inside")
    except KeyError:
        found["after an error"] = run.reduce(1, "sum") == size
    found["own save"] = refused(lambda: model.lm.save_pretrained(out / f"own-{rank}"))
    found["loss"] = run.evaluate(TensorDataset(ids))["loss"]

    # the divided model, called by all, or by some
    if divided and plan.pipeline == 1:
        with torch.no_grad():
            found["called by all"] = torch.allclose(
                model.eval()(prompt), tensors["logits"], rtol=1e-9
            )
            if pair:  # ranks that share layers may call the model without the others
                found["pair"] = rank > 1 or torch.allclose(
                    model(prompt), tensors["logits"], rtol=1e-9
                )
        model.train()
    if divided:
        barrier = run.barrier if not run.is_main else (lambda: model(prompt))
        if plan.pipeline > 1 and run.is_main:
            found["alone"] = refused(lambda: model(prompt))
        elif pair:
            found["alone"] = refused(barrier) if rank != 0 else refused(lambda: model(prompt))
            # rank 0 left the others at the barrier
            if run.is_main:
                found["left"] = refused(run.barrier)
        elif plan.pipeline == 1:
            found["alone"] = refused(barrier)
            block = model.lm.transformer.h[1]
            hidden = torch.zeros(1, 3, 16).double()
            if not run.is_main:
                block_or_barrier = run.barrier
            else:

                def block_or_barrier() -> None:
                    block(hidden)

            found["block alone"] = refused(block_or_barrier)

            def passes() -> None:  # as many as the rank's episode is long
                with torch.no_grad():
                    for _ in range(3 - rank):
                        model(prompt)
                run.barrier()

            found["other number of passes"] = refused(passes)
    run.gather_objects(rank)  # rank 0 holds the store: it ends last
    if run.is_main:
        save_file(
            {n: t.contiguous().clone() for n, t in tensors.items()}, out / "tensors.safetensors"
        )
    (out / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for case, size, plan in json.loads(sys.argv[1]):
        os.environ["RONDE_PLAN"] = plan
        Path(case).mkdir()
        fork(size, lambda folder=Path(case): main(folder.absolute()))
