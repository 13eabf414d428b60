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
import dataclasses
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ronde import ArgumentError
from ronde.plan import Plan
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.datasheets import Device, cluster_of, device_named, pass_seconds
from ronde.predict.predict import predict
from ronde.predict.prediction import Prediction

DATA = Path(__file__).parent / "data" / "published_runs.csv"
HALF = {"fp16", "bf16", "amp_bf16"}


@dataclass(frozen=True)
class Runtime:
    """How a framework stores, sends and runs a model.

    Attributes:
        weight, gradient, optimizer: bytes per parameter.
        gather_ratio, reduce_ratio: bytes sent per byte of them.
        fused: whether attention is one causal kernel.
        operators: dispatched in a block's forward pass.
        shared, divided: 16-bit values read and written, per token and hidden unit, by operators
            that tensor parallelism leaves whole (norms, dropout, residuals) and divides.
        scores: the same per attention score, where attention is not fused.
        logits: bytes read and written per logit.
        slower: than FlashAttention 2 its fused attention is.
        sends: whether tensor-parallel workers send a part each to the next stage.
    """

    weight: float
    gradient: float
    optimizer: float
    gather_ratio: float
    reduce_ratio: float
    fused: bool
    operators: int
    shared: float
    divided: float
    scores: float
    logits: float
    slower: float = 1.0
    sends: bool = False


MEGATRON = Runtime(2, 2, 12, 1.0, 1.0, False, 100, 11, 10, 6.5, 20)
RUNTIMES = {
    "Megatron-LM": dataclasses.replace(MEGATRON, sends=True),
    # ZeRO-1 keeps its part of the gradients in fp32 too.
    "Megatron-DeepSpeed": dataclasses.replace(MEGATRON, optimizer=16),
    "Composer": Runtime(4, 4, 8, 0.5, 0.5, True, 60, 15, 12, 0, 14, slower=1.5),
    "torchtitan": Runtime(4, 4, 8, 0.5, 1.0, True, 60, 10, 12, 0, 14),
}


def runtime_of(row: dict[str, str]) -> Runtime:
    name = next((n for n in RUNTIMES if row["framework"].startswith(n)), "Megatron-LM")
    found = RUNTIMES[name]
    return dataclasses.replace(found, fused=True, scores=0.0) if row.get("fused") else found


def transformer(row: dict[str, str], device: Device, batch: int) -> Costs:
    """A decoder by its sizes, as a model's own units would be counted: embedding, blocks, head."""
    layers, hidden, heads, sequence = (
        int(row[k]) for k in ("layers", "hidden", "heads", "seq_len")
    )
    runs = runtime_of(row)
    llama = "llama" in row["model"].lower()
    untied = llama or bool(row.get("untied"))
    vocabulary = int(row.get("vocab") or 0) or (
        128_256 if llama else 50_368 if "MPT" in row["model"] else 51_200
    )
    parameters = float(row["params_b"]) * 1e9
    block = (parameters - vocabulary * hidden * (2 if untied else 1)) / layers
    if not 4 * hidden * hidden < block < 40 * hidden * hidden:
        block = 12.0 * hidden * hidden
    tokens = sequence * hidden  # values of one sample
    scores = heads * sequence * sequence
    attention = 4.0 * sequence * tokens * (0.5 * runs.slower if runs.fused else 1.0)
    # 16-bit products need sizes that are multiples of 8.
    aligned = runs.fused or hidden // heads % 8 == 0
    shared, divided = 2.0 * runs.shared * tokens, 2.0 * runs.divided * tokens
    divided += 2.0 * runs.scores * scores
    kept = 10.0 * tokens, 24.0 * tokens + (0.0 if runs.fused else 5.0 * scores)
    # Selective recomputation: Korthikanti et al. 2022 keep all but the attention's core; torchtitan
    # keeps attention's result and every second matrix product's, and computes the rest again.
    per_op = row["framework"].startswith("torchtitan")
    again = (
        pass_seconds(device, block * sequence, shared + divided)
        if per_op
        else pass_seconds(device, attention, 2.0 * runs.scores * scores)
    )
    message = LinearCost(0, 2.0 * tokens)
    units = [
        Unit(
            f"layers.{i}",
            parameter_bytes=int(runs.weight * block),
            trainable_bytes=int(runs.gradient * block),
            optimizer_bytes=int(runs.optimizer * block),
            saved_bytes=LinearCost(0, sum(kept)),
            transient_bytes=LinearCost(0, 8.0 * tokens),
            forward_transient_bytes=LinearCost(0, 8.0 * tokens),
            backward_transient_bytes=LinearCost(0, 8.0 * tokens),
            crossing_bytes=message,
            crossing_grad_bytes=message,
            flops=2 * block * sequence + attention,
            attention_flops=attention if runs.fused else 0.0,
            vector_flops=0.0 if aligned else attention,
            moved_bytes=LinearCost(0, shared + divided),
            operations=runs.operators,
            tensors=12,
            tensor=1.0,
            tensor_reduce_bytes=LinearCost(0, 4.0 * tokens),
            tensor_reduces=2,
            tensor_moved_bytes=LinearCost(0, shared + divided / 2),
            tensor_saved_bytes=LinearCost(0, kept[0] + kept[1] / 2),
            tensor_forward_bytes=LinearCost(0, 6.0 * tokens),
            tensor_backward_bytes=LinearCost(0, 6.0 * tokens),
            selective_saved_bytes=LinearCost(0, (15.0 if per_op else 34.0) * tokens),
            selective_seconds=LinearCost(0, again),
        )
        for i in range(layers)
    ]
    table = vocabulary * hidden
    logits = sequence * vocabulary
    embed = Unit(
        "embed",
        parameter_bytes=int(runs.weight * table),
        trainable_bytes=int(runs.gradient * table),
        optimizer_bytes=int(runs.optimizer * table),
        saved_bytes=message,
        tensor_saved_bytes=message,
        crossing_bytes=message,
        crossing_grad_bytes=message,
        moved_bytes=LinearCost(0, 8.0 * tokens),
        tensor_moved_bytes=LinearCost(0, 8.0 * tokens),
        operations=10,
        tensor=1.0,
        tensor_reduce_bytes=message,
        tied=() if untied else ("table",),
        tied_bytes=0 if untied else int(runs.weight * table),
    )
    own = int(table) if untied else 0
    last = Unit(
        "head",
        parameter_bytes=int(runs.weight * own),
        trainable_bytes=int(runs.gradient * own),
        optimizer_bytes=int(runs.optimizer * own),
        saved_bytes=LinearCost(0, 6.0 * logits),
        tensor_saved_bytes=LinearCost(0, 3.0 * logits),
        forward_transient_bytes=LinearCost(0, 4.0 * logits),
        backward_transient_bytes=LinearCost(0, 4.0 * logits),
        tensor_forward_bytes=LinearCost(0, 2.0 * logits),
        tensor_backward_bytes=LinearCost(0, 2.0 * logits),
        flops=2.0 * table * sequence,
        moved_bytes=LinearCost(0, runs.logits * logits),
        tensor_moved_bytes=LinearCost(0, runs.logits * logits / 2),
        operations=40,
        tensor=1.0,
        tied=() if untied else ("table",),
        tied_bytes=0 if untied else int(runs.weight * table),
    )
    return Costs(
        (embed, *units, last),
        batch,
        optimizer="AdamW",
        sequence=sequence,
        measured_samples=(int(float(row["micro_batch"] or 1)),),
        tensor_measured=True,
        optimizer_transient_bytes=1.0,  # fused
        gather_ratio=runs.gather_ratio,
        reduce_ratio=runs.reduce_ratio,
        sends_block=True,
        send_ratio=1.0 / int(row["tp"] or 1) if runs.sends else 1.0,
    )


def starts_of(layers: int, stages: int) -> tuple[str, ...]:
    """Where published pipelines are cut: equal numbers of blocks; where those do not divide,
    embedding and head count as blocks.
    """
    extra = layers % stages != 0 and (layers + 2) % stages == 0
    slots = ["embed"] if extra else []
    slots += [f"layers.{i}" for i in range(layers)] + (["head"] if extra else [])
    return tuple(slots[s * len(slots) // stages] for s in range(1, stages))


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
        split_at=starts_of(int(row["layers"]), pipeline * virtual) if pipeline > 1 else (),
        tensor=tensor,
        sequence_parallel=tensor > 1 and "sequence" in row["act_ckpt"],
        recompute=recompute,
    )


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
    nodes = math.ceil(count / per_node)
    cluster = cluster_of(device.name, nodes, per_node, network=float(row.get("net") or 0))
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
