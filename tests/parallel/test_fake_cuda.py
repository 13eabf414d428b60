"""Every plan on a device ``cuda:0`` without a GPU (``fake_cuda``): the weights of plain steps, all
of it on the right device and in the right type, and no step that waits for the device.

What a real device does by itself (its kernels, streams, memory, NCCL) is not here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import fake_cuda
from processes import PATHS, TESTS
from sampling import ALL, some

CASES = [
    "1/offload=optimizer/fp32",
    "2/replicate,micro_batch=2/fp32",
    "2/replicate/fp16",
    "2/shard=optimizer,offload=optimizer/fp32",
    "2/shard=parameters,recompute=full/bf16",
    "2/shard=parameters,offload=parameters/fp32",
    "2/tensor=2/bf16",
    "2/pipeline=2,virtual=2,schedule=interleaved,micro_batch=2/fp32",
    "2/pipeline=2,recompute=full,micro_batch=2/bf16",
    "4/pipeline=2,shard=parameters,micro_batch=2/fp32",
    "4/pipeline=2,tensor=2,micro_batch=2/fp32",
]
MORE = [
    "1/recompute=selective/bf16",
    "2/shard=optimizer/fp32",
    "2/shard=gradients/fp32",
    "4/tensor=2/fp32",
    "2/shard=parameters,offload=optimizer/fp32",
    "1/replicate/bf16",
    "4/shard=parameters,shard_within=2/fp32",
    "1/replicate/fp32",
    "1/replicate/fp16",
    "4/pipeline=2,micro_batch=2/fp32",
    "2/replicate/bf16",
    "2/shard=parameters/fp32",
    "2/shard=parameters/fp16",
    "2/tensor=2/fp32",
    "2/pipeline=2,micro_batch=2/fp32",
    "2/pipeline=2,micro_batch=2/fp16",
    "4/pipeline=2,shard=optimizer,micro_batch=2/fp32",
    "4/pipeline=2,shard=gradients,micro_batch=2/fp32",
    "4/tensor=2,shard=parameters/fp32",
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the device with g++")
@pytest.mark.timeout(900 if ALL else 420)
def test_every_plan_on_a_device_that_must_not_be_waited_for(tmp_path):
    fake_cuda.build(tmp_path / "device.so")
    cases = [*some(CASES, 4), *(MORE if ALL else [])]
    out = tmp_path / "facts.jsonl"
    environment = {k: v for k, v in os.environ.items() if k != "RONDE_DEVICE"}
    done = subprocess.run(
        [
            sys.executable,
            str(TESTS / "fake_cuda_worker.py"),
            str(tmp_path / "device.so"),
            str(out),
            *cases,
        ],
        env={**environment, "PYTHONPATH": PATHS},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800 if ALL else 300,
    )
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in out.read_text().splitlines()]
    for case in cases:
        workers, plan, precision = case.split("/")
        ranks = [t for t in facts if t["case"] == case]
        assert len(ranks) == int(workers), f"{case}: a rank hangs\n{done.stderr[-3000:]}"
        for rank in ranks:
            assert "error" not in rank, rank.get("trace")
            assert rank["apart"] <= (1e-10 if precision == "fp32" else 0.02), rank
            # buffers stay on the device
            on_host = ["cpu"] if "offload=parameters" in plan else []
            assert rank["weights"] == [*on_host, "cuda"], rank
            assert rank["activations"] == ["cuda"], rank
            types = {"fp32": "torch.float64", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
            assert rank["types"] == [types[precision]], rank
