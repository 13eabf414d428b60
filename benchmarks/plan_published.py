"""Published plans of large models against the planner's choice: GPT-3 175B and Llama-3 405B.

    python benchmarks/plan_published.py

For each: the published plan with its measured and its predicted step, and the best plan of those
that Ronde carries out, with its predicted step and how long the search took. The model, its
runtime and its data sheet are those of ``plan_offline.py``. Nothing is fitted to these two.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), GPT-3 175B, 1,024 A100, batch 1,536, 140
TFLOP/s; Grattafiori et al. 2024 (arXiv 2407.21783), table 4, 16,384 H100, 16 M tokens, 400 TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import time

from plan_offline import plan_of, transformer
from ronde.plan import Plan
from ronde.predict.assumptions import MEAN_ERROR
from ronde.predict.candidates import supported
from ronde.predict.datasheets import cluster_of, device_named
from ronde.predict.predict import predict
from ronde.predict.prediction import Prediction
from ronde.predict.search import search

_COMMON = {"grad_accum": "", "net": "", "vocab": "", "untied": "", "fused": ""}
RUNS = [
    {
        **_COMMON,
        "framework": "Megatron-LM",
        "model": "GPT-3 175B",
        "gpu": "A100 80",
        "gpu_count": "1024",
        "params_b": "174.6",
        "layers": "96",
        "hidden": "12288",
        "heads": "96",
        "seq_len": "2048",
        "tp": "8",
        "pp": "8",
        "dp": "16",
        "virtual_pp": "",
        "zero_stage": "0",
        "micro_batch": "1",
        "global_batch": "1536",
        "act_ckpt": "full",
        "iter_time_s": "31.5",
    },
    {
        **_COMMON,
        "framework": "Megatron-LM",
        "model": "Llama-3 405B",
        "gpu": "H100",
        "gpu_count": "16384",
        "params_b": "405",
        "layers": "126",
        "hidden": "16384",
        "heads": "128",
        "seq_len": "8192",
        "tp": "8",
        "pp": "16",
        "dp": "128",
        "virtual_pp": "8",
        "zero_stage": "1",
        "micro_batch": "1",
        "global_batch": "2048",
        "act_ckpt": "none, with sequence parallel",
        "fused": "yes",
        "iter_time_s": "6.5",
    },
]


def shown(prediction: Prediction) -> str:
    """A plan's predicted step and memory."""
    sizes = f"{prediction.memory_bytes / 2**30:.0f} GiB, {prediction.verdict}"
    return f"predicted ≈ {prediction.step_seconds:.1f} s, {sizes}"


def main() -> None:
    print(f"step times are predicted within ± {MEAN_ERROR['sheet time']:.0%} on average\n")
    for row in RUNS:
        device, batch, count = device_named(row["gpu"]), int(row["global_batch"]), row["gpu_count"]
        cluster = cluster_of(device.name, int(count) // 8, 8)
        costs = transformer(row, device, batch)
        published = predict(plan_of(row, batch), costs, cluster)
        start = time.process_time()
        found = search(costs, cluster, int(count), like=Plan(precision="bf16"))
        seconds = time.process_time() - start
        spec = dataclasses.replace(published.plan, split_at=()).spec
        carried_out = supported(published.plan, costs, cluster)
        print(f"{row['model']} on {int(count):,} {device.name}")
        print(f"  published  {spec}: {row['iter_time_s']} s, {shown(published)}")
        print(f"             Ronde carries it out: {'yes' if carried_out else 'no'}")
        print(f"  chosen     {found.best.plan.spec}: {shown(found.best)}")
        print(f"             {found.considered:,} plans searched in {seconds:.0f} s of CPU\n")
        for family, best in found.families.items():
            print(f"    {family:32} {best.plan.spec}: {shown(best)}")
        print()


if __name__ == "__main__":
    main()
