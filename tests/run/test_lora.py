"""An adapter that is trained beside frozen weights: divided among workers, resumed on others, and
loaded by peft alone.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from processes import TESTS, python
from sampling import some

pytest.importorskip("peft")
PAUSE, BATCH = 5, 8
WORKERS = some([4, 1], 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One worker trains to the end; two, with divided weights, pause; others go on."""
    place = tmp_path_factory.mktemp("lora")
    plan = {"RONDE_PLAN": "shard=parameters"}
    worlds = [["whole", 1, {}], ["two", 2, {**plan, "RONDE_UNTIL": str(PAUSE * BATCH)}]]
    for n in WORKERS:
        worlds.append([f"r{n}", n, {**(plan if n > 1 else {}), "RONDE_RESUME": "1"}])
    done = python([str(TESTS / "lora_worker.py"), json.dumps(worlds)], place, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_two_workers_divide_what_one_trains(folder):
    for step in range(1, PAUSE + 1):
        whole = load_file(folder / f"whole-after-{step}.safetensors")
        divided = load_file(folder / f"two-after-{step}.safetensors")
        assert divided.keys() == whole.keys()
        for name, value in divided.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("workers", WORKERS)
def test_every_element_is_resumed_on_another_number_of_workers(folder, workers):
    paused = load_file(folder / f"two-after-{PAUSE}.safetensors")
    resumed = load_file(folder / f"r{workers}-before-{PAUSE}.safetensors")
    start = load_file(folder / "two-before-0.safetensors")
    assert resumed.keys() == paused.keys() == start.keys()
    moved = {name for name, value in paused.items() if not torch.equal(value, start[name])}
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    assert sum("lora_" in name for name in moved) == 8  # A and B of query and value, two layers
    for name, value in paused.items():
        assert value.shape == start[name].shape and torch.equal(value, resumed[name]), name


@pytest.mark.parametrize("workers", WORKERS)
def test_the_adapter_loads_in_peft_alone(folder, workers):
    from peft import PeftModel

    import lora_worker

    words, _ = lora_worker.samples().tensors
    logits = []
    for name in ("adapter-whole", f"adapter-r{workers}"):
        model = PeftModel.from_pretrained(lora_worker.base(), folder / name).double().eval()
        with torch.no_grad():
            logits.append(model(input_ids=words).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        assert not torch.allclose(logits[0], lora_worker.base().eval()(input_ids=words).logits)
