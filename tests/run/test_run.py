"""Every part of a Run, on 1, 2 and, where all is tested, 3 real workers: the results are those of
one.
"""

from __future__ import annotations

import json
import math

import pytest
from safetensors.torch import load_file

from processes import TESTS, forked, python
from sampling import ALL

MANY = (2, 3) if ALL else (2,)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    base, sizes = tmp_path_factory.mktemp("run"), (1, *MANY)
    worlds = ",".join(map(str, sizes))
    command = forked(TESTS / "run_worker.py", worlds, base / "{n}", imports=["torchmetrics"])
    done = python(command[1:], base, 150)
    assert done.returncode == 0, done.stdout + done.stderr
    (base / "said.txt").write_text(done.stdout)
    return base, {n: json.loads((base / str(n) / "results.json").read_text()) for n in sizes}


@pytest.mark.parametrize("workers", MANY)
def test_results_are_those_of_one_worker(found, workers):
    _, all_results = found
    one, many = all_results[1], all_results[workers]

    def same(a, b, where):
        if isinstance(a, dict):
            assert a.keys() == b.keys(), where
            for key in a:
                same(a[key], b[key], f"{where} / {key}")
        elif isinstance(a, list):
            assert len(a) == len(b), where
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                same(x, y, f"{where}[{i}]")
        elif isinstance(a, float) and isinstance(b, float):
            tolerance = 1e-6 if "tm_" in where else 1e-12  # torchmetrics computes in float32
            assert math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-15) or (
                math.isnan(a) and math.isnan(b)
            ), f"{where}: {a} {b}"
        else:
            assert a == b, where

    for key in one:
        if not key.startswith("grow"):
            same(one[key], many[key], key)


def test_evaluation_is_exact(found):
    _, all_results = found
    one = all_results[1]
    for n in (1, 2, 29, 64):
        values = one[f"evaluate {n}"]
        assert (
            values["accuracy"]
            == pytest.approx(values["per_sample"])
            == pytest.approx(values["pair"])
        )
        assert values["accuracy"] == pytest.approx(values["tm_accuracy"], abs=1e-6)
    for result in all_results.values():
        assert result["evaluate loader"]["loss"] == pytest.approx(
            result["by hand"]["loss"], rel=1e-12
        )
        assert result["evaluate loader"]["accuracy"] == pytest.approx(
            result["by hand"]["accuracy"], rel=1e-12
        )
        assert result["training mode kept"]


def test_counts_and_flags(found):
    _, all_results = found
    for workers, r in all_results.items():
        # 30 samples, batches of 8, two epochs; one more call when it is made (step 0)
        assert r["scheduler steps"] == 8
        assert r["state"] == [2, 8, 60]
        assert r["drop_last"] == [6, 48]
        assert r["tied"] and r["saved on main only"] and r["buffers alike"]
        assert r["buffers alike before each step"]
        assert r["after a break"] == [4, 4]
        assert r["grow a shared rate"] == [pytest.approx(0.1 * workers)] * 2
        assert r["frozen first"] and r["thawed later"]
        assert r["lazy"] == [[7, 5], [7], [3, 7], [3]]
        assert r["bf16"] and r["fp16"]
        assert r["grow SGD None"][:4] == [
            3 * workers,
            "linear",
            float(workers),
            4 if workers > 1 else 0,
        ]
        assert r["grow AdamW None"][:3] == [3 * workers, "sqrt", math.sqrt(workers)]
        assert r["grow SGD none"][1:4] == ["none", 1.0, 0]
        assert r["grow AdamW linear"][1:3] == ["linear", float(workers)]
        assert r["grow SGD None"][4] == pytest.approx(
            0.1 * workers * (1 + math.cos(math.pi / 100)) / 2
        )
        assert r["grow SGD None"][5] == math.ceil(30 / (3 * workers))


def test_export_has_the_scripts_own_names(found):
    base, _ = found
    exported = load_file(base / "2" / "tied.safetensors")
    assert set(exported) == {
        "a.weight",
        "a.bias",
        "b.weight",
        "b.bias",
        "frozen.weight",
        "frozen.bias",
    }
    assert exported["a.weight"].equal(exported["b.weight"])


def test_the_grow_rule_is_printed(found):
    base, _ = found
    said = (base / "said.txt").read_text()
    assert (
        "batch='grow': 2 workers × 3 = 6 samples per step; learning rate × 2 (linear "
        "scaling, Goyal et al. 2017), warmed up over 4 steps" in said
    )
    assert "square root, for adaptive optimizers" in said


def test_the_record_holds_what_was_logged(found):
    base, all_results = found
    record = base / "2" / "runs" / all_results[2]["dir"] / "record.jsonl"
    events = [json.loads(line) for line in record.read_text().splitlines()]
    logged = [e for e in events if e["type"] == "log"]
    assert logged[-1]["values"] == {"note": "hello", "tensor": 1.5}
    assert events[0]["type"] == "start" and events[0]["workers"] == 2
    assert [e["step"] for e in events if e["type"] == "step"] == list(range(1, 9))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_frozen_midway_stays_where_it_is(momentum, tmp_path, monkeypatch):
    """As in a plain loop, where zero_grad() forgets its last gradient."""
    import torch

    import ronde

    monkeypatch.setenv("RONDE_RUNS", "none")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
    run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=4)
    for i, batch in enumerate(run.batches()):
        run.step(batch)
        if i == 1:
            model[0].requires_grad_(False)
            kept = model[0].weight.clone()
    assert model[0].weight.equal(kept)
    assert model[0].weight.grad is None
