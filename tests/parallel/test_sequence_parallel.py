"""Tokens between divided blocks are divided: the same training as a plain loop in one process, or
refused by name.
"""

from __future__ import annotations

import json
import os

import pytest
from safetensors.torch import load_file
from test_three_dimensions import BOUND, case, check_foreign, launch
from torch import nn

import zygote
from pipeline_cases import largest_difference, plain
from processes import PATHS, TESTS, forked
from ronde.parallel.sequence_parallel import layer_lists
from ronde.parallel.tensor_layers import Block
from sampling import ALL, long

SEQUENCE = "tensor=2,sequence_parallel"
EXACT = [
    case("GPT", f"{SEQUENCE},shard=parameters", length=6, clip=0.05),
    case("EncoderDecoder", f"pipeline=2,{SEQUENCE},schedule=interleaved", length=6, clip=0.05),
    case("GPT", f"{SEQUENCE},recompute=full", length=4, n=21, weighted=True, average=True),
    case("GPT", f"pipeline=2,{SEQUENCE},schedule=zero-bubble", length=6, weighted=True),
]
REFUSED = [
    (case("GPT", SEQUENCE), "layer 'blocks.0' takes 7 tokens (shape [2, 7, 12]), which 2 workers"),
    (case("MLP", SEQUENCE), "no nn.ModuleList or nn.Sequential of layers of one type"),
    (case("Mixing", SEQUENCE, length=6), "A layer mixes tokens, or reads how many there are"),
    (
        case("GPT", f"pipeline=2,{SEQUENCE}", length=6, split_at=["blocks.1.norm2"]),
        "no stage can begin at blocks.1.norm2: it lies inside 'blocks.1', whose tokens",
    ),
]


def test_a_divided_sequence_is_the_same_training_or_refused(tmp_path):
    exact = EXACT if ALL else EXACT[1:2]
    cases = [*exact, *(values for values, _ in REFUSED)]
    out = launch("pipeline_worker.py", 4, cases, tmp_path)
    for i, values in enumerate(exact):
        expected = plain(values)
        for rank in range(4):
            found = load_file(out / f"{i}-{rank}.safetensors")
            difference, where = largest_difference(found, expected)
            assert difference <= BOUND, f"{values}, rank {rank}: {where} by {difference:.1e}"
    for i, (values, said) in enumerate(REFUSED, len(exact)):
        for rank in range(4):
            text = (out / f"{i}-{rank}.error").read_text()
            assert said in text, (values, text)


@long
def test_models_nobody_here_wrote_with_a_divided_sequence(tmp_path):
    names = ("gpt2", "t5", "bart", "bert") if ALL else ("gpt2", "bart")
    check_foreign(2, [(name, SEQUENCE) for name in names], tmp_path)


def test_dropout_differs_between_tokens_and_no_layer_is_left_out(tmp_path):
    done = zygote.run(
        forked(TESTS / "sequence_worker.py", 2, tmp_path),
        env={**os.environ, "PYTHONPATH": PATHS, "RONDE_RUNS": "none"},
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (masks, losses, said), other = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert losses == other[1] and len(masks) == len(losses) == 4
    for one, two in zip(masks, other[0], strict=True):
        # half of the elements are dropped, and half of those on both: never the same ones
        both = sum(a == b for a, b in zip(one, two, strict=True)) / len(one)
        assert 0.3 < both < 0.7 and 0.3 < sum(one) / len(one) < 0.7
    assert said == other[2] and "leaves 'layers.1' out" in said


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["inner.0.a", "inner.1.a"], [["inner.0", "inner.1"]]),
        (["inner.0.a"], []),  # a layer without attention would mix its part only
        ([], []),
    ],
)
def test_lists_of_layers(paths, found):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)

    model = nn.ModuleDict({"inner": nn.ModuleList([Layer(), Layer()]), "last": nn.Linear(2, 2)})
    blocks = [Block(path, "attention", (f"{path}.q",), f"{path}.o") for path in paths]
    assert layer_lists(model, blocks) == found
