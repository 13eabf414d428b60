"""Data that were silently another training on several workers: now equal to one process, refused,
or said.
"""

from __future__ import annotations

import json

import pytest

from processes import PATHS, TESTS, forked, python
from sampling import ALL


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd_data")
    results = {}
    for workers in (1, 2, 3) if ALL else (1, 3):
        out = folder / f"{workers}.json"
        command = forked(TESTS / "odd_data_worker.py", workers, out)[1:]
        done = python(command, folder, 120, {"PYTHONPATH": PATHS})
        assert done.returncode == 0, done.stdout + done.stderr
        results[workers] = json.loads(out.read_text())
    return results


def others(found, name):
    return [workers for workers in (2, 3) if name in found.get(workers, ())]


def check_same(found, name):
    one = found[1][name]
    assert "error" not in one, one
    for workers in others(found, name):
        many = found[workers][name]
        assert "error" not in many, many
        for part in ("losses", "weights"):
            assert many[part] == pytest.approx(one[part], rel=1e-12, abs=1e-14), (workers, part)
        assert len(many["tested"]) == len(one["tested"])
        for mine, theirs in zip(many["tested"], one["tested"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12, abs=1e-14), workers


def test_an_epoch_that_the_script_sets_reaches_the_loaders(found):
    for name in ("epoch_of_processes_that_stay", "epoch_here"):
        check_same(found, name)
        assert found[1][name]["losses"] == found[1]["epoch_here"]["losses"]


def test_a_data_set_that_grows_is_refused(found):
    for workers in (1, 3):
        said = found[workers]["data_that_grow"]["error"]
        assert "the data set has 21 samples in epoch 2, and had 20 when" in said


def test_an_evaluation_follows_its_data_set(found):
    check_same(found, "test_data_that_grow")
    first, second = found[1]["test_data_that_grow"]["tested"]
    assert first != second


@pytest.mark.parametrize(
    "kind", ["", "_by_subset", "_stream_in_a_process", "_test_data", "_under_noise"]
)
def test_data_that_divide_themselves_are_refused(found, kind):
    assert "error" not in found[1][f"divided{kind}"]
    said = found[3][f"divided{kind}"]["error"]
    where = "run.evaluate" if kind == "_test_data" else "run.batches"
    assert said.startswith(
        f"WorldError: {where}: sample 0 of the data set is another one on rank 1"
    )


def test_whole_data_are_not_refused(found):
    check_same(found, "whole_stream")
    assert "error" not in found[3]["noise_of_each_rank"]


@pytest.mark.parametrize(
    "name",
    [
        "broken",
        "broken_late_in_parts",
        "broken_sharded",
        "broken_piped",
        "broken_tensor",
        "broken_own_loop",
        "broken_gathered",
        "broken_pairs",
        "broken_in_lists",
        "two_crops",
        "left_out_in_the_loop",
    ],
)
def test_a_mean_weighs_the_rows_that_are_there(found, name):
    check_same(found, name)
    assert not any(found[workers][name]["warned"] for workers in (1, *others(found, name)))


def test_an_evaluation_is_the_mean_over_the_rows_that_are_there(found):
    one = found[1]["broken"]
    assert one["tested"][-1]["loss"] == pytest.approx(one["direct"], rel=1e-12)


def test_rows_that_cannot_be_counted_are_said(found):
    assert not found[1]["left_out_without_a_trace"]["warned"]
    said = found[3]["left_out_without_a_trace"]["warned"]
    assert "a batch of 3 samples has tensors of 1, 2 rows: ronde cannot tell" in said[0]


MIXED = [
    "mixed_in_the_loop",
    "mixed_in_place",
    "mixed_in_a_step_of_parts",
    "mixed_in_forward",
    "mixed_before_a_pipeline",
    "mixed_in_an_own_loop",
    "mixed_in_collate",
    "cut_and_pasted",
    "scaled_by_the_batch",
]


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_are_mixed_within_a_share_are_said(found, name):
    assert bool(found[1][name]["warned"]) == (name == "mixed_in_a_step_of_parts")
    for workers in others(found, name):
        (said,) = found[workers][name]["warned"]
        whose = "collate_fn makes rows" if name == "mixed_in_collate" else "the script changes"
        assert said.startswith(whose) and "docs/whole-batch-losses.md#mixing-samples" in said


def test_a_buffer_of_the_loss_that_differs_is_said(found):
    assert not found[1]["centered_by_the_loss"]["warned"]
    (said,) = found[3]["centered_by_the_loss"]["warned"]
    assert "changes the buffer 'center of the loss' by the samples" in said
    assert "go on with their own" in said


EXACT = [
    "mixed_over_gathered_rows",
    "mixed_in_the_data",
    "packed_again",
    "scaled_by_constants",
    "several_calls",
    "written_by_the_loss",
    "counted_by_the_loss",
]


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_not_warned_of(found, name):
    check_same(found, name)
    assert not any(found[workers][name]["warned"] for workers in (1, *others(found, name)))
