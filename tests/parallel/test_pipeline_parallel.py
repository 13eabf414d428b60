"""A pipeline is the same training: every schedule, on models of every shape, against a plain loop
in one process.
"""

from __future__ import annotations

import itertools
import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

import zygote
from equality_cases import largest_difference
from pipeline_cases import MODELS, launch, plain
from processes import forked
from sampling import ALL, some

BOUND = 1e-10


def case(kind: str, plan: str, **options) -> dict:
    return {"kind": kind, "plan": plan, "n": 22, "batch": 8, "steps": 10, **options}


TWO = [
    case("MLP", "pipeline=2"),
    case("MLP", "pipeline=2,schedule=gpipe", weighted=True, n=21),
    case("Residual", "pipeline=2,schedule=looped"),
    case("Residual", "pipeline=2,schedule=interleaved", optimizer="sgd", clip=0.05),
    case("UNet", "pipeline=2"),
    case("GPT", "pipeline=2", clip=0.05),
    case("GPT", "pipeline=2,schedule=interleaved", weighted=True),
    case("GPT", "pipeline=2,schedule=interleaved", optimizer="sgd"),
    case("EncoderDecoder", "pipeline=2"),
    case("LSTM", "pipeline=2", n=23),
    case("LSTM", "pipeline=2,schedule=interleaved"),
    case("Odd", "pipeline=2"),
    case("Odd", "pipeline=2,schedule=interleaved,micro_batch=3"),
    case("Frozen", "pipeline=2", split_at=["last"]),
    # fewer samples than the pipeline has micro-batches
    case("MLP", "pipeline=2,micro_batch=1", batch=3, n=4),
    case("GPT", "pipeline=2,optimize=memory"),
    case("GPT", "pipeline=2,micro_batch=8", split_at=["blocks.3"]),
    case("GPT", "pipeline=2,recompute=full"),
    case("Masked", "pipeline=2,micro_batch=1"),
    case("Masked", "pipeline=2,schedule=interleaved,micro_batch=2", weighted=True),
    case("Tables", "pipeline=2,micro_batch=1", clip=0.05),
    case("Tables", "replicate,micro_batch=1", clip=0.05),
    case("Mixture", "pipeline=2,micro_batch=2"),
    case("Mixture", "pipeline=2,schedule=interleaved,micro_batch=1"),
    case("Dropping", "pipeline=2,micro_batch=1"),
    case("Handed", "pipeline=2,micro_batch=2"),
    case(
        "Joined", "pipeline=2,schedule=interleaved,micro_batch=2", split_at=["key", "later", "last"]
    ),
    case("Branch", "pipeline=2", split_at=["aside"]),
    case(
        "Ending",
        "pipeline=2,schedule=interleaved,micro_batch=2",
        split_at=["second", "aside", "read"],
    ),
    case("Fourier", "pipeline=2"),
]
FOUR = [
    case("MLP", "pipeline=4"),
    case("Residual", "pipeline=4,schedule=gpipe"),
    case("UNet", "pipeline=4", split_at=["down.1", "middle", "up.1"]),
    case("GPT", "pipeline=4,schedule=interleaved"),
    case("EncoderDecoder", "pipeline=4"),
    case("MLP", "pipeline=4,schedule=interleaved"),
    case("Residual", "pipeline=2", n=21),  # two replicas
    case("GPT", "pipeline=2,schedule=interleaved", clip=0.05, n=21),
    case("Odd", "pipeline=2", weighted=True),
    case("Tables", "pipeline=4,micro_batch=1"),
    case("UNet", "pipeline=2,schedule=interleaved", batch=3, n=7),
    case("GPT", "pipeline=2,shard=optimizer"),
    case("GPT", "pipeline=2,shard=gradients"),
    # a replica without a sample of the last batch
    case("Residual", "pipeline=2,shard=parameters", clip=0.05, n=17),
    case("MLP", "pipeline=2,shard=gradients", n=9),
    case("EncoderDecoder", "pipeline=2,shard=parameters,schedule=interleaved", weighted=True),
    # experts that no sample of a micro-batch, a replica, or the whole batch chose
    case("Mixture", "pipeline=2,shard=gradients,micro_batch=1", batch=4),
    case("Mixture", "pipeline=2,shard=parameters,micro_batch=2", clip=0.05),
    case("Tasks", "pipeline=2,shard=parameters,micro_batch=1"),
]


# Every kind of model and every schedule, each at least once; RONDE_TEST_ALL=1 for all of them.
SAMPLE = {
    2: (0, 5, 7, 10, 19, 27),
    4: (1, 3, 6, 11, 13, 16, 18),
}
if not ALL:
    TWO, FOUR = ([cases[i] for i in SAMPLE[n]] for n, cases in ((2, TWO), (4, FOUR)))


@pytest.mark.parametrize(("workers", "cases"), some([(2, TWO), (4, FOUR)], 2))
def test_a_pipeline_is_the_same_training(workers, cases, tmp_path):
    failures = []
    out = launch(cases, workers, tmp_path)
    for i, values in enumerate(cases):
        ranks = [load_file(out / f"{i}-{rank}.safetensors") for rank in range(workers)]
        expected = plain(values)
        name = f"{values['kind']} {values['plan']}"
        for rank, held in enumerate(ranks):
            difference, where = largest_difference(held, expected, part=True)
            if not difference <= BOUND:
                failures.append(f"{name}, rank {rank}: {where} differs by {difference:.1e}")
        together = set().union(*ranks)
        if missing := expected.keys() - together:
            failures.append(f"{name}: nobody holds {sorted(missing)}")
        if "pipeline" in values["plan"]:
            weights = [set(held) - {"losses", "evaluation"} for held in ranks]
            if all(w == weights[0] for w in weights) and values["kind"] not in ("Frozen",):
                failures.append(f"{name}: every worker holds everything")
    assert not failures, "\n".join(failures)


def test_replicas_that_would_call_other_modules_are_refused(tmp_path):
    """Sharded replicas gather a module's weights together: one that calls another would wait."""
    cases = [
        case("Switch", "pipeline=2,shard=gradients,micro_batch=1", batch=4),
        case("Switch", "pipeline=2,shard=parameters,micro_batch=2", batch=4),
    ]
    out = launch(cases, 4, tmp_path)
    for i, rank in itertools.product(range(2), range(4)):
        text = (out / f"{i}-{rank}.error").read_text()
        assert "replicas would call others" in text and "shard=optimizer" in text


EXCHANGES = """
import sys, torch, torch.distributed as dist, ronde

class Model(torch.nn.Sequential):
    def forward(self, x):
        hidden = self[0](x).relu()
        dist.all_reduce(hidden.detach().mean(0))
        return self[1](hidden)

for plan in ("pipeline=2", "pipeline=2,split_at=1"):
    torch.manual_seed(0)
    model = Model(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        ronde.distribute(
            model, optimizer, data, loss=torch.nn.functional.mse_loss, plan=plan, batch_size=4
        )
    except ronde.ArgumentError as error:
        assert "calls a collective of torch.distributed (allreduce_)" in str(error), error
    else:
        sys.exit(f"{plan} was not refused")
"""


def test_a_model_that_exchanges_is_refused(tmp_path):
    """Rank 0 alone times the model: it would wait for ever."""
    (tmp_path / "exchanges.py").write_text(EXCHANGES)
    done = zygote.run(forked(tmp_path / "exchanges.py", 2), timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_where_it_is_cut(tmp_path):
    """The stages' modules are those named, or chosen; the sum of parameters is the model's."""
    cases = [
        case("GPT", "pipeline=2", split_at=["blocks.2"], steps=1),
        case("UNet", "pipeline=2", steps=1),
        case("GPT", "pipeline=2", split_at=["nowhere"]),
        case("GPT", "pipeline=2", split_at=["blocks.1", "blocks.2"]),
        case("MLP", "pipeline=2,schedule=interleaved,virtual=9"),
        case("Rescaled", "pipeline=2", steps=1),
    ]
    out = launch(cases, 2, tmp_path)
    with safe_open(out / "0-0.safetensors", "pt") as file:
        table = json.loads(file.metadata()["table"])
    assert [row["begins"] for row in table] == ["(start)", "blocks.2"]
    whole = sum(p.numel() for p in MODELS["GPT"]().parameters())
    tied = 13 * 12  # held by both
    assert sum(row["parameters"] for row in table) == whole + tied
    with safe_open(out / "1-1.safetensors", "pt") as file:
        table = json.loads(file.metadata()["table"])
    assert sum(row["parameters"] for row in table) == sum(
        p.numel() for p in MODELS["UNet"]().parameters()
    )
    texts = [(out / f"{i}-0.error").read_text() for i in (2, 3, 4, 5)]
    assert "nowhere" in texts[0]
    assert "names 2 modules" in texts[1]
    assert "cannot be cut into 18 stages" in texts[2]
    assert "writes into 'layers.10.weight', in stage 0" in texts[3]
    assert [
        (out / f"{i}-1.error").read_text() for i in (2, 3, 4, 5)
    ] == texts  # every rank says the same
