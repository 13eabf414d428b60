"""Whole copies of a divided model equal the model of one process; a lone call of it is an error."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from processes import TESTS, python
from sampling import ALL

PLANS = {
    "one": (1, "replicate"),
    "replicate": (2, "replicate"),
    "shard": (2, "shard=parameters"),
    "pipeline": (2, "pipeline=2"),
    "tensor": (2, "tensor=2"),
    "pairs": (4, "tensor=2"),
}
if ALL:
    PLANS["hybrid"] = (4, "pipeline=2,shard=parameters")
    PLANS["both"] = (4, "pipeline=2,tensor=2")
CALLED = "rank 0 called the model"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    base = tmp_path_factory.mktemp("whole")
    worlds = [[case, size, plan] for case, (size, plan) in PLANS.items()]
    command = [str(TESTS / "whole_model_worker.py"), json.dumps(worlds)]
    done = python(command, base, timeout=200, env={"RONDE_RUNS": "none"})
    assert done.returncode == 0, done.stdout + done.stderr

    def of(case: str):
        folder, size = base / case, PLANS[case][0]
        ranks = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(size)]
        return ranks, load_file(folder / "tensors.safetensors")

    return of


@pytest.mark.parametrize("case", PLANS)
def test_a_whole_copy_is_the_model_of_one_process(found, case):
    (one,), expected = found("one")
    ranks, tensors = found(case)
    assert tensors.keys() == expected.keys()
    assert {"b.scale", "b.shift", "decoded", "logits"} < tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-15, msg=name)
    for each in ranks:
        assert each["type"][:2] == ["Sampler", "GPT2LMHeadModel"]
        assert each["own"] == (case in ("one", "replicate"))
        assert each["type"][2] is False and each["plain"] and each["tied"]
        assert each["training"] == [True, True] and each["mode kept"]
        assert each["frozen"] == ["lm.transformer.wpe.weight"] and each["temperature"] == 0.5
        assert each["generated"] == one["generated"]
        assert each["main only"] and each["after an error"]
        assert each["loss"] == pytest.approx(one["loss"], rel=1e-12)
    assert ranks[0]["saved"] == [41, True]


@pytest.mark.parametrize("case", PLANS)
def test_save_pretrained_writes_the_whole_or_nothing(found, case):
    for each in found(case)[0]:
        if case in ("one", "replicate"):
            assert each["own save"] == "nothing: None"
        else:
            assert each["own save"].startswith("PlanError: save_pretrained() was called on the")
            assert 'run.whole_model(ranks="main")' in each["own save"]


@pytest.mark.parametrize("case", ("shard", "tensor"))
def test_a_lone_call_is_an_error_that_names_the_ranks(found, case):
    main, other = found(case)[0]
    plan = PLANS[case][1]
    cure = (
        f"Under plan='{plan},micro_batch=2', no rank can call the model alone: its layers "
        "communicate, so all ranks must call it. For a pass on one rank, let all ranks enter "
        "'with run.whole_model() as model:' and call that model, which communicates nothing."
    )
    went = f"{CALLED}, and rank 1 went on to run.step(batch). {cure}"
    assert main["alone, then a step"] == f"WorldError: {went}"
    assert main["called by all"] and other["called by all"]
    both = f"WorldError: {CALLED}; rank 1 called run.barrier(). {cure}"
    assert main["alone"] == other["alone"] == both
    module = "lm.transformer.h.1" + (
        ".attn" if case == "tensor" else ""
    )  # the first to communicate
    block = f"{CALLED}'s {module!r}; rank 1 called run.barrier(). {cure}"
    assert main["block alone"] == other["block alone"] == f"WorldError: {block}"
    assert main["other number of passes"] == other["other number of passes"] == both


@pytest.mark.parametrize("case", ("pipeline", "hybrid") if ALL else ("pipeline",))
def test_a_lone_call_in_a_pipeline_is_an_error_at_once(found, case):
    main = found(case)[0][0]
    for when in ("alone, then a step", "alone"):
        assert main[when].startswith("PlanError: the script calls the model itself")
        assert "(rank 0)" in main[when]
        assert "let all ranks enter 'with run.whole_model() as model:'" in main[when]


def test_ranks_that_share_layers_may_call_the_model_without_the_others(found):
    ranks, _ = found("pairs")
    assert all(each["pair"] and each["called by all"] for each in ranks)
    assert ranks[0]["alone"].startswith(
        "WorldError: rank 0 called the model, and rank 1 went on to run.barrier(). Under plan="
    )
    assert "so ranks 0, 1 must call it" in ranks[0]["alone"]
    assert ranks[0]["left"] == ranks[1]["alone"] == "nothing: None"  # all met at the barrier
