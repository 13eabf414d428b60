"""Predictions against published runs: step time and peak memory, error by source.

    python benchmarks/plan_offline.py [--rows] [CSV]

Costs come from a model's sizes alone, times from data sheets and the one rule of
``ronde.predict.datasheets``; nothing is fitted to a row or to a source. The rule's few constants
were revised by hand after its errors on these very rows had been seen (a first try, before that,
was 20 % off on average), so what is printed is in-sample: rows that are not in the file are the
real test. Only 16-bit runs without context or expert parallelism and with a known model are used.
``benchmarks/data/published_runs.csv`` holds the facts with their sources.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from ronde import ArgumentError
from ronde.plan import Plan
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.datasheets import Device, cluster_of, device_named, unit_seconds
from ronde.predict.predict import predict
from ronde.predict.prediction import Prediction

DATA = Path(__file__).parent / "data" / "published_runs.csv"
HALF = {"fp16", "bf16", "amp_bf16"}


def transformer(row: dict[str, str], device: Device, batch: int) -> Costs:
    """A decoder by its sizes: embedding, blocks, head. Mixed precision: fp32 weights and states,
    16-bit activations.
    """
    layers, hidden, heads, sequence = (
        int(row[k]) for k in ("layers", "hidden", "heads", "seq_len")
    )
    llama = "llama" in row["model"].lower()
    vocabulary = 128_256 if llama else 50_368 if "MPT" in row["model"] else 51_200
    parameters = float(row["params_b"]) * 1e9
    block = (parameters - vocabulary * hidden * (2 if llama else 1)) / layers
    if not 4 * hidden * hidden < block < 40 * hidden * hidden:
        block = 12.0 * hidden * hidden
    dense = 2 * block * sequence
    attention = 4 * sequence * sequence * hidden
    # causal, without the square of scores
    fused = row["framework"].startswith(("Composer", "torchtitan", "Megatron-Bridge"))
    attention *= 0.5 if fused else 1.0
    saved = sequence * hidden * (34 + (0 if fused else 5 * heads * sequence / hidden))
    fixed = unit_seconds(device, 0.0)

    def seconds(flops: float, moved: float, passes: float) -> LinearCost:
        return LinearCost(passes * fixed, passes * (unit_seconds(device, flops, moved) - fixed))

    # Attention's two products run at half the rate of the others; element-wise work moves 70 bytes
    # a token and hidden unit.
    moved = 70.0 * sequence * hidden + (0.0 if fused else 10.0 * heads * sequence * sequence)
    work = dense + 2 * attention
    # Selective recomputation: Korthikanti et al. 2022 keep all but the attention's core; torchtitan
    # keeps attention's result and every second matrix product's, and computes the rest again.
    per_op = row["framework"].startswith("torchtitan")
    kept = (15.0 if per_op else 34.0) * sequence * hidden
    again = (
        unit_seconds(device, 0.5 * dense, moved) - fixed
        if per_op
        else unit_seconds(device, 2 * attention) - fixed
    )
    message = LinearCost(0, 2.0 * sequence * hidden)
    bytes_each = 4  # fp32 weights, gradients; Adam's two moments
    units = [
        Unit(
            f"layers.{i}",
            seconds(work, moved, 1),
            seconds(work, moved, 2),
            int(bytes_each * block),
            int(bytes_each * block),
            int(2 * bytes_each * block),
            0,
            LinearCost(0, saved),
            LinearCost(0, 8.0 * sequence * hidden),
            message,
            message,
            flops=work,
            tensor=1.0,
            tensor_reduce_bytes=LinearCost(0, 4.0 * sequence * hidden),
            selective_saved_bytes=LinearCost(0, kept),
            selective_seconds=LinearCost(0, again),
        )
        for i in range(layers)
    ]
    table = bytes_each * vocabulary * hidden
    head = 2.0 * vocabulary * hidden * sequence
    embed = Unit(
        "embed",
        parameter_bytes=table,
        trainable_bytes=table,
        optimizer_bytes=2 * table,
        saved_bytes=message,
        crossing_bytes=message,
        crossing_grad_bytes=message,
        tensor=1.0,
    )
    own = table if llama else 0
    last = Unit(
        "head",
        seconds(head, 10.0 * sequence * vocabulary, 1),
        seconds(head, 10.0 * sequence * vocabulary, 2),
        own,
        own,
        2 * own,
        0,
        LinearCost(0, 6.0 * sequence * vocabulary),
        flops=head,
        tensor=1.0,
    )
    total = layers * block * bytes_each + table + own
    return Costs(
        (embed, *units, last),
        batch,
        optimizer_seconds=7
        * total
        / device.memory_bytes_per_second
        / 0.8,  # reads and writes of Adam
        optimizer="AdamW",
        sequence=sequence,
        base_bytes=2e9,
        device=device.name,
        measured_samples=(int(float(row["micro_batch"] or 1)),),
    )


def plan_of(row: dict[str, str], batch: int) -> Plan:
    tensor, pipeline, data = (int(row[k] or 1) for k in ("tp", "pp", "dp"))
    virtual = int(row["virtual_pp"]) if row["virtual_pp"].isdigit() and pipeline > 1 else 1
    zero = row["zero_stage"]
    shard = (
        {"1": "optimizer", "2": "gradients", "3": "parameters"}.get(zero, "none")
        if data > 1
        else "none"
    )
    recompute = (
        "full"
        if row["act_ckpt"] == "full"
        else "selective"
        if row["act_ckpt"].startswith("selective")
        else "none"
    )
    return Plan(
        workers=tensor * pipeline * data,
        batch_size=batch,
        micro_batch=int(float(row["micro_batch"])),
        precision="bf16",
        shard=shard,
        pipeline=pipeline,
        virtual=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        tensor=tensor,
        recompute=recompute,
    )


def halved(cluster: Cluster, row: dict[str, str]) -> Cluster:
    """16-bit messages: weights are gathered in bf16, and gradients reduced so too but by
    torchtitan, which reduces in fp32.
    """
    import dataclasses

    kinds = {"all_gather", "broadcast"} | (
        set() if row["framework"].startswith("torchtitan") else {"all_reduce", "reduce_scatter"}
    )
    links = {
        kind: {
            s: dataclasses.replace(f, beta=f.beta * 2) if kind in kinds else f
            for s, f in by.items()
        }
        for kind, by in cluster.links.items()
    }
    return dataclasses.replace(cluster, links=links)


def measured_seconds(row: dict[str, str], batch: int) -> float | None:
    if row["iter_time_s"]:
        return float(row["iter_time_s"])
    if row["tokens_per_s_per_gpu"]:
        return (
            batch
            * int(row["seq_len"])
            / (float(row["tokens_per_s_per_gpu"]) * int(row["gpu_count"]))
        )
    return None


def predicted(row: dict[str, str]) -> tuple[Prediction, float | None] | str:
    """The prediction and what was measured, or why there is none."""
    if row["precision"] not in HALF:
        return "not a 16-bit run"
    if row["cp"] not in ("", "1") or row["ep"] not in ("", "1"):
        return "context or expert parallel"
    if row["read_from_source"] != "yes":
        return "figures from memory"
    if not all(
        row[k]
        for k in (
            "layers",
            "hidden",
            "heads",
            "seq_len",
            "params_b",
            "micro_batch",
            "dp",
            "gpu_count",
        )
    ):
        return "sizes are missing"
    try:
        device = device_named(f"{row['gpu']} {row['gpu_mem_gb']}")
    except ArgumentError:
        return "device is not in the table"
    if row["gpu"] not in device.name:
        return "device is not in the table"
    data, accumulated = int(row["dp"]), float(row["grad_accum"] or 1)
    batch = int(row["global_batch"] or data * float(row["micro_batch"]) * accumulated)
    count = int(row["gpu_count"])
    per_node = int(row["gpus_per_node"]) if row["gpus_per_node"].isdigit() else device.per_node
    per_node = min(per_node, count)
    cluster = halved(cluster_of(device.name, math.ceil(count / per_node), per_node), row)
    try:
        return predict(
            plan_of(row, batch), transformer(row, device, batch), cluster
        ), measured_seconds(row, batch)
    except ArgumentError as error:
        return f"not a plan of Ronde's ({str(error)[:60]})"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("csv", nargs="?", type=Path, default=DATA)
    options.add_argument("--rows", action="store_true", help="every run by itself")
    asked = options.parse_args()
    times: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, list[float]] = defaultdict(list)
    left: dict[str, int] = defaultdict(int)
    with asked.csv.open() as file:
        for row in csv.DictReader(file):
            found = predicted(row)
            if isinstance(found, str):
                left[found] += 1
                continue
            made, seconds = found
            source = row["source"]
            if seconds:
                times[source].append(made.raw_step_seconds / seconds - 1)
            if row["peak_mem_gib"]:
                peaks[source].append(made.memory_bytes / 2**30 / float(row["peak_mem_gib"]) - 1)
            if asked.rows:
                peak = (
                    f", {made.memory_bytes / 2**30:.1f} GiB against {row['peak_mem_gib']}"
                    if row["peak_mem_gib"]
                    else ""
                )
                step = (
                    f"{made.raw_step_seconds:.3f} s against {seconds:.3f} "
                    f"({100 * times[source][-1]:+.0f} %)"
                    if seconds
                    else ""
                )
                print(
                    f"{row['id']:>4} {row['gpu']:5} × {row['gpu_count']:>4} "
                    f"{row['model'][:16]:16} {made.plan.spec[:60]:60} {step}{peak}"
                )
    for title, table in (("step time", times), ("peak memory", peaks)):
        print(
            f"\n{title}: error of the prediction\n{'source':60}   n  mean |e|  median |e|  "
            " mean e   p90 |e|"
        )
        for source, errors in [
            *sorted(table.items()),
            ("all", [e for es in table.values() for e in es]),
        ]:
            sizes = sorted(abs(e) for e in errors)
            if sizes:
                p90 = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
                mean, median = statistics.mean(sizes), statistics.median(sizes)
                print(
                    f"{source[:60]:60} {len(sizes):3}  {mean:7.1%}  {median:9.1%}  "
                    f"{statistics.mean(errors):+7.1%}  {p90:8.1%}"
                )
    print(
        "\nleft out: "
        + "; ".join(f"{n} {why}" for why, n in sorted(left.items(), key=lambda x: -x[1])),
        file=sys.stdout,
    )


if __name__ == "__main__":
    main()
