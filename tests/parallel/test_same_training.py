"""N workers train as a plain loop of one process does, weight by weight, under every plan; or the
error says by name what stands against it.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from same_training import KINDS, Case, check, largest_difference, plain
from sampling import ALL, some

LEVELS = ("shard=optimizer", "shard=gradients", "shard=parameters")
INTERLEAVED = "pipeline=2,schedule=interleaved"
GRID = "pipeline=2,tensor=2"

# -- replicas --------------------------------------------------------------------------

REPLICAS = [
    Case("cnn", optimizer="sgd"),
    Case("cnn", micro=True),
    Case("transformer"),
    Case("transformer", optimizer="sgd", micro=True),
    Case("lstm", optimizer="sgd", micro=True),
    Case("lstm"),
    Case("unused", optimizer="sgd", clip=None),
    Case("unused", micro=True),
    Case("tokens"),
    Case("tokens", optimizer="sgd", micro=True),
    Case("cnn", optimizer="sgd", schedule=False, clip=None, batch=7),
    Case("cnn", batch=1, n=3),  # every batch smaller than the world
    Case("transformer", shuffle=True),
    Case("norm", optimizer="sgd", sync_batchnorm=True, n=24),
    Case("norm", sync_batchnorm=True, batch=7, n=23),
]
REPLICAS += [
    *(dataclasses.replace(case, dtype="float32") for case in REPLICAS[:8]),
    *(dataclasses.replace(REPLICAS[i], own_loop=True) for i in (1, 5, 8, 13, 14)),
]
REPLICAS = [dataclasses.replace(case, steps=20) for case in REPLICAS]

# a layer that the script replaces in the middle of an epoch, and puts back
SWAPS = [
    Case("uneven", plan, schedule=False, change="swaps", n=40) for plan in ("", "shard=optimizer")
]

# weights, and a scale, that a script must not see when it clips by itself
OWN = Case("tokens", own_loop=True, precision="fp16")

# -- shards ----------------------------------------------------------------------------

COMMON = [
    *(Case("uneven", plan, evaluate=True) for plan in LEVELS),
    *(Case("shared", plan) for plan in LEVELS),
    *(Case("shared-tokens", plan, "sgd", micro=True) for plan in LEVELS),
]
# Compared with each other, since one process computes these otherwise: in half precision it rounds
# otherwise, and it drops others out.
HALF = [
    Case("shared", plan, "sgd", precision=half, dtype="float32", steps=5, like=half)
    for half in ("fp16", "bf16")
    for plan in ("replicate", *LEVELS)
]
DROPOUT = [
    Case("dropout", plan, steps=4, like="dropout")
    for plan in ("shard", "shard,recompute=full", "shard,recompute=selective")
]
SHARDS = [
    *(Case("resnet", plan, "sgd", sync_batchnorm=True, n=24) for plan in LEVELS),
    *(Case("lstm", plan) for plan in LEVELS),
    *(Case("unused", plan, clip=None) for plan in LEVELS),
    Case("unused", "shard", "sgd", micro=True),
    *(Case("handed", plan, "sgd") for plan in LEVELS),
    Case("unseen", "shard"),
    Case("unseen", "shard", forward="method"),
    Case("uneven", "shard", "sgd", "fused", forward="twice"),
    *(Case("uneven", plan, change="freezes") for plan in LEVELS),
    Case("shared-tokens", "shard", own_loop=True, micro=True),
    Case("resnet", "shard", own_loop=True, sync_batchnorm=True, n=24, batch=7),
    Case("shared", "shard,recompute=full"),
    Case("shared", "shard=gradients,recompute=selective", "sgd", micro=True),
    Case("resnet", "shard,recompute=full", "sgd", sync_batchnorm=True, n=24),
    Case("resnet", "recompute=selective", "sgd", sync_batchnorm=True, n=24),
]
OPTIMIZERS = [
    *(
        Case("uneven", "shard=optimizer", o, steps=5)
        for o in ("Adafactor", "Rprop", "Adagrad", "ASGD", "NAdam")
    ),
    *(
        Case("uneven", "shard", o, steps=5)
        for o in ("Adagrad", "ASGD", "NAdam", "Adadelta", "RAdam", "RMSprop", "Adamax", "Adam")
    ),
]
SHARDS_OF_THREE = [
    *COMMON[::2],
    Case("resnet", "shard", sync_batchnorm=True, batch=7, n=23),
    Case("lstm", "shard", "sgd", batch=1, n=3, evaluate=True),
]
SHARDS_OF_FOUR = [
    COMMON[5],
    *(Case("shared-tokens", f"{level},shard_within=2", micro=True) for level in LEVELS),
    Case("uneven", "shard,shard_within=2", "sgd", "fused", evaluate=True, batch=5, n=13),
    Case(
        "resnet",
        "shard=gradients,shard_within=2,recompute=full",
        "sgd",
        sync_batchnorm=True,
        n=24,
    ),
]

# -- blocks that two workers hold together ---------------------------------------------

TENSOR = [
    Case("gpt-fused", "tensor=2,recompute=full", batch=4, n=14),
    Case("gpt-fused", "tensor=2,micro_batch=1", "sgd", weighted=True, batch=4, n=14),
    Case("gpt-separate", "tensor=2,micro_batch=2", warm=True, batch=4, n=14),
    Case("gpt-separate", "tensor=2", options="foreach", weighted=True, own_loop=True),
    # float64: only the scaling of gradients is fp16's
    Case("gpt-separate", "tensor=2", options="fused", precision="fp16"),
    Case("gpt-separate", "tensor=2,recompute=selective", batch=4, n=14),
    Case("encoder", "tensor=2", "sgd"),
    Case("encoder-post", "tensor=2", "sgd"),
    Case("encoder-decoder", "tensor=2", "sgd"),
    Case("mlp", "tensor=2", change="thaws"),
    Case("mlp", "tensor=2", "sgd", clip=None, own_loop=True),
    Case("styled", "tensor=2", options="foreach"),
    Case("hooked", "tensor=2", "sgd"),
    Case("reading", "tensor=2", "sgd"),
    Case("dropped", "tensor=2", "sgd", like="dropout by two"),
]
OTHERS = [
    Case("llama", "tensor=2,micro_batch=2"),
    Case("t5", "tensor=2"),
    Case("gpt2", "tensor=2", "sgd"),
    Case("bert", "tensor=2", "sgd"),
]
TENSOR_AND_REPLICAS = [
    Case("mlp", "tensor=2", batch=1, n=3),  # a replica without samples
    Case("mlp", "tensor=2,micro_batch=1", own_loop=True, change="thaws", batch=4),
    Case("gpt-separate", "tensor=2,shard=parameters,micro_batch=1", batch=4),
    Case("gpt-separate", "tensor=2,micro_batch=1", batch=4),
    Case("gpt-fused", "tensor=2", "sgd", weighted=True, batch=4),
    Case("encoder", "tensor=2", "sgd"),
    Case("gpt-fused", "tensor=2,shard=parameters", "sgd", "foreach", weighted=True, batch=4),
    Case("encoder", "tensor=2,shard=parameters", "sgd", own_loop=True),
    Case("gpt-separate", "tensor=2,shard=gradients", batch=1, n=3, precision="fp16"),
]

# -- pipelines -------------------------------------------------------------------------

PIPELINES = [
    Case("MLP", "pipeline=2"),
    Case("GPT", "pipeline=2", clip=0.05),
    Case("GPT", INTERLEAVED, "sgd"),
    Case("LSTM", INTERLEAVED),
    Case("Masked", f"{INTERLEAVED},micro_batch=2", weighted=True),
    Case("Branch", "pipeline=2", split_at=["aside"]),
    Case("MLP", "pipeline=2,schedule=gpipe", weighted=True, n=21),
    Case("Residual", "pipeline=2,schedule=looped"),
    Case("Residual", INTERLEAVED, "sgd", clip=0.05),
    Case("UNet", "pipeline=2"),
    Case("GPT", INTERLEAVED, weighted=True),
    Case("EncoderDecoder", "pipeline=2"),
    Case("LSTM", "pipeline=2", n=23),
    Case("Odd", "pipeline=2"),
    Case("Odd", f"{INTERLEAVED},micro_batch=3"),
    Case("Frozen", "pipeline=2", split_at=["last"]),
    # fewer samples than the pipeline has micro-batches
    Case("MLP", "pipeline=2,micro_batch=1", batch=3, n=4),
    Case("GPT", "pipeline=2,optimize=memory"),
    Case("GPT", "pipeline=2,micro_batch=8", split_at=["blocks.3"]),
    Case("GPT", "pipeline=2,recompute=full"),
    Case("Masked", "pipeline=2,micro_batch=1"),
    Case("Tables", "pipeline=2,micro_batch=1", clip=0.05),
    Case("Tables", "replicate,micro_batch=1", clip=0.05),
    Case("Mixture", "pipeline=2,micro_batch=2"),
    Case("Mixture", f"{INTERLEAVED},micro_batch=1"),
    Case("Dropping", "pipeline=2,micro_batch=1"),
    Case("Handed", "pipeline=2,micro_batch=2"),
    Case("Joined", f"{INTERLEAVED},micro_batch=2", split_at=["key", "later", "last"]),
    Case("Ending", f"{INTERLEAVED},micro_batch=2", split_at=["second", "aside", "read"]),
    Case("Fourier", "pipeline=2"),
]
PIPELINES_OF_FOUR = [
    Case("Residual", "pipeline=4,schedule=gpipe"),
    Case("GPT", "pipeline=4,schedule=interleaved"),
    Case("Residual", "pipeline=2", n=21),  # two replicas
    Case("GPT", "pipeline=2,shard=optimizer"),
    # a replica without a sample of the last batch
    Case("Residual", "pipeline=2,shard=parameters", clip=0.05, n=17),
    # experts that no sample of a micro-batch, a replica, or the whole batch chose
    Case("Mixture", "pipeline=2,shard=gradients,micro_batch=1", batch=4),
    Case("Tasks", "pipeline=2,shard=parameters,micro_batch=1"),
    Case("MLP", "pipeline=4"),
    Case("UNet", "pipeline=4", split_at=["down.1", "middle", "up.1"]),
    Case("EncoderDecoder", "pipeline=4"),
    Case("MLP", "pipeline=4,schedule=interleaved"),
    Case("GPT", INTERLEAVED, clip=0.05, n=21),
    Case("Odd", "pipeline=2", weighted=True),
    Case("Tables", "pipeline=4,micro_batch=1"),
    Case("UNet", INTERLEAVED, batch=3, n=7),
    Case("GPT", "pipeline=2,shard=gradients"),
    Case("MLP", "pipeline=2,shard=gradients", n=9),
    Case("EncoderDecoder", f"{INTERLEAVED},shard=parameters", weighted=True),
    Case("Mixture", "pipeline=2,shard=parameters,micro_batch=2", clip=0.05),
]
THREE_DIMENSIONS = [
    Case("GPT", f"{GRID},schedule=interleaved", clip=0.05, weighted=True, average=True, steps=4),
    Case("EncoderDecoder", GRID, weighted=True, steps=4),
    Case("GPT", f"{GRID},schedule=gpipe", "sgd", steps=4),
    Case("GPT", f"{GRID},recompute=full", clip=0.05, steps=4),
    Case("GPT", f"{GRID},schedule=looped", steps=4),
    Case("MLP", GRID, n=21, steps=4),
]
OF_EIGHT = [
    Case("GPT", GRID, weighted=True, clip=0.05, n=21, steps=4),
    Case("EncoderDecoder", f"{GRID},shard=parameters,schedule=interleaved", clip=0.05, steps=4),
    Case("GPT", f"{GRID},shard=optimizer", average=True, steps=4),
    Case("EncoderDecoder", f"{GRID},shard=optimizer", weighted=True, steps=4),
    Case("GPT", f"{GRID},shard=gradients", clip=0.05, weighted=True, steps=4),
    Case("GPT", f"{GRID},shard=parameters,schedule=interleaved", average=True, steps=4),
    # a replica without a sample of the last batch
    Case("MLP", f"{GRID},shard=gradients", n=9, steps=4),
    Case("EncoderDecoder", f"{GRID},schedule=gpipe", weighted=True, steps=4),
]

# -- refused ---------------------------------------------------------------------------

OPTIMIZER_ONLY = "shard='optimizer'"
REFUSED = [
    *(
        Case("matrices", "shard", name, refused=[name, OPTIMIZER_ONLY])
        for name in ("Adafactor", "Rprop", "Muon")
    ),
    Case("types", "shard", refused=["float32", "float64", OPTIMIZER_ONLY]),
    Case("sparse", "zero2", "sgd", refused=["'0'", "sparse=False"]),
    Case("uneven", "shard,shard_within=3", refused=["shard_within=3", "divisor", "2 replicas"]),
    Case("uneven", "shard,offload=parameters", refused=["offload='parameters'", "nothing to"]),
    Case("uneven", "zero1", "Prodigy", refused=["Prodigy", "shard='none'"]),
    Case("without-blocks", "tensor=2", refused=["no attention and no MLP was", "in Sequential"]),
    Case(
        "odd-features",
        "tensor=2",
        refused=["'Sequential' (mlp): 7 features: not divisible by 2", "tensor_plan"],
    ),
    Case("odd-names", "tensor=2", refused=["nowhere"]),
    Case("mlp", "tensor=2,shard=optimizer", refused=["shard='gradients'"]),
    Case(
        "mlp",
        "tensor=2",
        forward="logits",
        refused=["a forward pass and a loss over two samples, which failed (IndexError"],
    ),
    Case("shuffling", "shard", batch=4, refused=["rank 0: 'layers.2'", "rank 1: 'layers.1'"]),
    Case("skipping", "shard", refused=["rank 0: '2'", "rank 1: '4'", OPTIMIZER_ONLY]),
    Case("uneven", "shard", change="assigns", refused=["'weight' was replaced after"]),
    # a batch in which no sample counts: one process has no loss either
    Case("MLP", "pipeline=2", weighted=True, batch=1, refused=["the loss is nan in step"]),
    # the last of its processes: workers have exchanged what the others did not
    Case(
        "shuffling-late",
        "shard",
        batch=4,
        steps=40,
        refused=["different ways", "step 19", OPTIMIZER_ONLY],
    ),
]
REFUSED_OF_FOUR = [
    # sharded replicas gather a module's weights together: one that calls another would wait
    *(
        Case("Switch", f"pipeline=2,{shard}", batch=4, refused=["would call others", "=optimizer"])
        for shard in ("shard=gradients,micro_batch=1", "shard=parameters,micro_batch=2")
    ),
    Case(
        "GPT",
        GRID,
        split_at=["blocks.1.down"],
        refused=[
            "no stage can begin at blocks.1.down: it lies between 'blocks.1.up' and "
            "'blocks.1.down', which workers split together"
        ],
    ),
    Case("LSTM", GRID, refused=["tensor=2: nothing in the model can be split by 2"]),
]

# A sample of every kind of model and of option; RONDE_TEST_ALL=1 for all of them.
if not ALL:
    HALF, DROPOUT, OTHERS = [HALF[i] for i in (0, 3, 4, 7)], DROPOUT[::2], OTHERS[:2]
    TENSOR_AND_REPLICAS, THREE_DIMENSIONS = TENSOR_AND_REPLICAS[:3], THREE_DIMENSIONS[:2]
    PIPELINES, PIPELINES_OF_FOUR = PIPELINES[:6], PIPELINES_OF_FOUR[:7]
    SHARDS_OF_THREE, OF_EIGHT = [], OF_EIGHT[1:2]
    TENSOR = [case for i, case in enumerate(TENSOR) if i not in (1, 5, 7, 10)]
if not importlib.util.find_spec("transformers"):
    OTHERS = []

CASES = {
    1: [*some(REPLICAS, 5), SWAPS[0], OWN],
    2: [
        *SWAPS,
        OWN,
        *(REPLICAS if ALL else []),
        *some(COMMON, 4),
        *some(SHARDS, 10),
        *HALF,
        *DROPOUT,
        *some(OPTIMIZERS, 6),
        *TENSOR,
        *OTHERS,
        *PIPELINES,
        *REFUSED,
    ],
    3: [*some(REPLICAS, 3), *SHARDS_OF_THREE],
    4: [
        *SHARDS_OF_FOUR[0 if ALL else 5 :],
        *TENSOR_AND_REPLICAS,
        *PIPELINES_OF_FOUR,
        *THREE_DIMENSIONS,
        *REFUSED_OF_FOUR,
    ],
    8: OF_EIGHT,
}


@pytest.mark.timeout(1600 if ALL else 320)
@pytest.mark.parametrize("workers", CASES)
def test_the_same_training_under_every_plan(workers, tmp_path):
    cases = CASES[workers]
    imports = {KINDS[case.kind].needs for case in cases}
    imports |= {"torchmetrics.classification" for case in cases if case.evaluate}
    facts = check(cases, workers, tmp_path, sorted(imports))
    for case, everyone in zip(cases, facts, strict=True):
        check_memory(case, everyone)
        if everyone and "tensor=" in case.plan and "pipeline" not in case.plan:
            said = everyone[0]["said"]
            if case.kind == "hooked":
                assert "'second' (mlp): the gradient of" in said[0]
            elif case.kind == "reading":
                assert "'tied' (mlp): 'tied.c.weight' is also read outside" in said[0]
                assert "'detached' (mlp): 'detached.c.weight' is also read outside" in said[0]
            elif case.kind == "encoder":
                assert not said


def check_memory(case: Case, everyone: list[dict]) -> None:
    """Every worker holds its part only: of the optimizer's state, of the gradients, of the
    parameters.
    """
    if not everyone or "shard" not in case.plan or case.kind not in ("uneven", "shared"):
        return
    if case.change == "swaps":  # the optimizer keeps the state of both layers
        return
    workers = len(everyone)
    divided_by = 2 if "within" in case.plan else workers
    total = everyone[0]["parameters"]
    slack = 0.25 * total / divided_by + 40  # dimensions that do not divide evenly
    trained = plain_state(case)
    states = [held["state"] for held in everyone]
    assert sum(states) == trained * workers // divided_by, (case.name, everyone, trained)
    assert max(states) <= trained / divided_by + 2 * slack, (case.name, everyone)
    for field in ("local_parameters", "gradients"):
        most = max(held[field] for held in everyone)
        if "optimizer" in case.plan:
            assert most > 0.9 * total * (field == "local_parameters"), (case.name, everyone)
        else:
            assert most <= total / divided_by + slack, (case.name, field, everyone)


def plain_state(case: Case) -> int:
    """Elements of the optimizer's state after one step of one process."""
    model, optimizer, _ = case.build()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    values = [v for p, s in optimizer.state.items() if p.dim() for v in s.values()]
    return sum(v.numel() for v in values if torch.is_tensor(v) and v.dim())


@pytest.mark.parametrize(
    ("case", "change", "least"),
    [
        (Case("cnn", optimizer="sgd"), {"batch": 5}, 1e-3),
        (Case("shared", "shard"), {"clip": 0.11}, 1e-6),
        (Case("gpt-separate", "tensor=2"), {"batch": 3}, 1e-4),
    ],
)
def test_the_comparison_can_fail(case, change, least):
    other = dataclasses.replace(case, **change)
    assert largest_difference(plain(case), plain(other))[0] > least
