"""Pipeline × tensor × replicas, and × shard: the same training as a plain loop in one process."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from equality_cases import largest_difference
from pipeline_cases import launch, plain
from sampling import ALL, some

BOUND = 1e-10
GRID = "pipeline=2,tensor=2"


def case(kind: str, plan: str, **options) -> dict:
    return {"kind": kind, "plan": plan, "n": 22, "batch": 8, "steps": 4, **options}


FOUR = [
    case("GPT", f"{GRID},schedule=interleaved", clip=0.05, weighted=True, average=True),
    case("EncoderDecoder", GRID, weighted=True),
    case("GPT", f"{GRID},schedule=gpipe", optimizer="sgd"),
    case("GPT", f"{GRID},recompute=full", clip=0.05),
    case("GPT", f"{GRID},schedule=looped"),
    case("MLP", GRID, n=21),
]
EIGHT = [
    case("GPT", GRID, length=6, weighted=True, clip=0.05),
    case("EncoderDecoder", f"{GRID},shard=parameters,schedule=interleaved", clip=0.05),
    case("GPT", f"{GRID},shard=optimizer", average=True),
    case("GPT", GRID, clip=0.05, n=21),
    case("EncoderDecoder", f"{GRID},shard=optimizer", weighted=True),
    case("GPT", f"{GRID},shard=gradients", clip=0.05, weighted=True),
    case("GPT", f"{GRID},shard=parameters,schedule=interleaved", average=True),
    # a replica without a sample of the last batch
    case("MLP", f"{GRID},shard=gradients", n=9),
    case("EncoderDecoder", GRID, schedule="gpipe", weighted=True),
]
REFUSED = [
    case("GPT", GRID, split_at=["blocks.1.down"]),
    case("LSTM", GRID),
]
if not ALL:
    FOUR, EIGHT = FOUR[:2], EIGHT[:2]


@pytest.mark.timeout(600 if ALL else 180)
@pytest.mark.parametrize(("workers", "cases"), some([(4, FOUR), (8, EIGHT)], 2))
def test_three_dimensions_are_the_same_training(workers, cases, tmp_path):
    refused = REFUSED if workers == 4 else []
    out = launch([*cases, *refused], workers, tmp_path)
    for i, values in enumerate(cases):
        expected, name = plain(values), f"{values['kind']} {values['plan']}"
        held = [load_file(out / f"{i}-{rank}.safetensors") for rank in range(workers)]
        for rank, actual in enumerate(held):
            difference, where = largest_difference(actual, expected, part=True)
            assert difference <= BOUND, f"{name}, rank {rank}: {where} differs by {difference:.1e}"
        assert set().union(*held) == expected.keys(), name
        if not values.get("average"):
            assert len({frozenset(names) for names in held}) > 1, f"{name}: everyone holds all"
    for i, said in enumerate(
        (
            "no stage can begin at blocks.1.down: it lies between 'blocks.1.up' and "
            "'blocks.1.down', which workers split together",
            "tensor=2: nothing in the model can be split by 2",
        )
        if refused
        else (),
        len(cases),
    ):
        for rank in range(workers):
            assert said in (out / f"{i}-{rank}.error").read_text()
