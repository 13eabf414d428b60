"""Barrier, reduce, gather, rank 0 first: the same on all ranks, and errors instead of waiting."""

from __future__ import annotations

import json

import pytest

from processes import TESTS, ronde_run

SIZE = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    everything = {}
    for size in (1, SIZE):
        folder = tmp_path_factory.mktemp(f"collectives-{size}")
        script = str(TESTS / "collectives_worker.py")
        done = ronde_run(["run", "-n", str(size), "--runs", "none", script, str(folder)], folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("said once 0") == 1 and "said once 1" not in done.stdout
        ranks = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(size)]
        everything[size] = ranks
    return everything


def test_files_of_rank_0_are_there(found):
    for ranks in found.values():
        for rank, each in enumerate(ranks):
            assert each["barrier"] == each["main first"] == [0, 1, 2, 3]
            expected = [0, 1, 2, 3] if rank == 0 else "FileNotFoundError"
            assert each["without barrier"] == expected


def test_reduce_is_exact_and_the_same_on_all_ranks(found):
    for size, ranks in found.items():
        mine = range(1, size + 1)
        for each in ranks:
            assert each["int sum"] == sum(mine) * 10**20
            assert each["int max"] == size * 10**20
            assert each["int mean"] == sum(mine) * 10**20 / size
            floats = [1e16, 1.0][:size]
            assert each["float sum"] == sum(floats) and each["float max"] == 1e16
            assert each["float mean"] == sum(floats) / size
            assert each["nan max"] == each["nan sum"] == each["nan mean"] == (size > 1)
            rows = [[m, 0, 3 * (m - 1)] for m in mine]
            for kind in ("float32", "bfloat16", "float64", "int32", "uint8"):
                total = [sum(column) for column in zip(*rows, strict=True)]
                whole = kind in ("int32", "uint8")
                same = f"torch.{kind}"
                assert each[f"{kind} sum"] == ["torch.int64" if whole else same, total]
                largest = [max(column) for column in zip(*rows, strict=True)]
                assert each[f"{kind} max"] == [same, largest]
                mean = [t / size for t in total]
                assert each[f"{kind} mean"] == ["torch.float64" if whole else same, mean]
            flags = [[bool(v) for v in row] for row in rows]
            counts = [sum(column) for column in zip(*flags, strict=True)]
            assert each["bool sum"] == ["torch.int64", counts]
            assert each["bool max"] == ["torch.bool", [c > 0 for c in counts]]
            assert each["bool mean"] == ["torch.float64", [c / size for c in counts]]
            assert each["dict sum"] == [["b", "a"], float(sum(mine)), [[float(sum(mine))] * 2] * 2]
            assert each["nan in a tensor"] == [r < size for r in range(3)]
            assert each["no gradient"] is False
            assert each["objects"] == [
                {"rank": r, "path": [1.5, None, "a" * r]} for r in range(size)
            ]
            assert each == {**each, **{k: v for k, v in ranks[0].items() if " " + "sum" in k}}


def test_wrong_uses_are_errors_on_every_rank(found):
    for each in found[SIZE]:
        assert each["other op"] == (
            "WorldError: rank 0 called run.reduce(value, 'mean'); rank 1 called run.reduce(value, "
            "'sum'). Every rank must make the same calls, in the same order: look for what depends "
            "on the rank."
        )
        assert (
            'rank 0: "a tensor, float32 [2]"; rank 1: "a tensor, float32 [3]"'
            in (each["other shape"])
        )
        assert 'rank 0: "a number"; rank 1: "a tensor, float32 [2]"' in each["other type"]
        assert 'rank 0: {"n0": "a number"}; rank 1: {"n1": "a number"}' in each["other names"]
        assert (
            "rank 0 called run.gather_objects(obj); rank 1 called run.barrier()."
            in (each["other call"])
        )
        assert each["no number"].startswith("ArgumentError: ")
        assert "run.reduce: value is a str; expected a number, a tensor" in each["no number"]
        assert "must be one of mean, sum, max" in each["no op"]
        assert each["no json"].startswith("ArgumentError: ")
        assert "that is not a whole dense tensor" in each["sparse"]
        assert (
            "rank 0 called run.barrier(); rank 1 called run.main_first()"
            in (each["barrier inside"])
        )
        assert "'0.weight' was changed inside run.whole_model()" in each["changed inside"]
        assert "choose 'all' or 'main'" in each["ranks"]
    main, other = found[SIZE]
    assert "obj is a Tensor, which JSON does not hold" in main["no json"]
    assert "rank 0: run.gather_objects: obj is a Tensor" in other["no json"]
    assert main["main fails"].startswith("FileNotFoundError: ")
    assert other["main fails"].startswith(
        "WorldError: rank 0 failed in 'with run.main_first():', FileNotFoundError: "
    )
    assert "rank 0 called run.barrier(), and rank 1 went on to run." in main["step elsewhere"]
    assert "rank 0 called run.barrier(), and rank 1 ended its script." in main["ended"]


def test_one_rank_may_call_a_replicated_model(found):
    for ranks in found.values():
        for each in ranks:
            assert each["running mean moves"] and each["losses are finite"]
            assert each["weights alike"]
