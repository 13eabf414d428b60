"""Predictions against published runs: step time, order of plans, and peak memory, by source.

    python benchmarks/plan_offline.py [--rows] [--held-out] [CSV ...]

A row's sizes become the work that ``ronde plan`` would count in such a model, and the product's
own rules put it on the device of a data sheet. Nothing is fitted to a row or to a source. Only
16-bit runs without context or expert parallelism and with a known model are used.
``benchmarks/data`` holds the facts with their sources.

The constants are physical (rates, 8 µs per operator, latency of collectives), but they were chosen
with these files in sight. ``--held-out`` chooses the one that matters most for small models, how
many operators a block of Megatron's dispatches, on every eighth vTrain run, and tries it on every
second of the others and on BLOOM. The other half of vTrain's runs and two more sources are in no
file.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ronde import ArgumentError
from ronde.plan import Plan
from ronde.predict.cluster import Cluster
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.datasheets import cluster_of, device_named
from ronde.predict.predict import predict
from ronde.predict.prediction import Prediction

DATA = Path(__file__).parent / "data"
FILES = [DATA / f"published_runs{kind}.csv" for kind in ("", "_more", "_3d")]
CLOSE = 0.05  # runs that differ by less have no order
NEEDED = ("layers", "hidden", "heads", "seq_len", "params_b", "micro_batch", "dp", "gpu_count")
HALF = {"fp16", "bf16", "amp_bf16"}


@dataclass(frozen=True)
class Runtime:
    """How a framework stores, sends and runs a model.

    Attributes:
        weight, gradient, optimizer: bytes per parameter.
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
    fused: bool
    operators: int
    shared: float
    divided: float
    scores: float
    logits: float
    slower: float = 1.0
    sends: bool = False


MEGATRON = Runtime(2, 2, 12, False, 100, 11, 10, 6.5, 20)
RUNTIMES = {
    "Megatron-LM": dataclasses.replace(MEGATRON, sends=True),
    # ZeRO-1 keeps its part of the gradients in fp32 too.
    "Megatron-DeepSpeed": dataclasses.replace(MEGATRON, optimizer=16),
    "Composer": Runtime(4, 4, 8, True, 60, 15, 12, 0, 14, slower=1.5),
    "Llama 3": Runtime(2, 4, 12, True, 60, 10, 12, 0, 14, sends=True),
    "torchtitan": Runtime(4, 4, 8, True, 60, 10, 12, 0, 14),
}


def runtime_of(row: dict[str, str]) -> Runtime:
    name = next((n for n in RUNTIMES if row["framework"].startswith(n)), "Megatron-LM")
    found = RUNTIMES[name]
    return dataclasses.replace(found, fused=True, scores=0.0) if row.get("fused") else found


def transformer(row: dict[str, str], batch: int) -> Costs:
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
    # keeps attention's result and every second matrix product's.
    per_op = row["framework"].startswith("torchtitan")
    selective = (15.0 if per_op else 34.0) * tokens
    message = LinearCost(0, 2.0 * tokens)
    sent = message.times(1 / int(row["tp"] or 1)) if runs.sends else message
    units = [
        Unit(
            f"layers.{i}",
            parameter_bytes=int(runs.weight * block),
            trainable_bytes=int(runs.gradient * block),
            optimizer_bytes=int(runs.optimizer * block),
            saved_bytes=LinearCost(0, sum(kept)),
            forward_transient_bytes=LinearCost(0, 8.0 * tokens),
            backward_transient_bytes=LinearCost(0, 8.0 * tokens),
            crossing_bytes=sent,
            crossing_grad_bytes=sent,
            flops=2 * block * sequence + attention,
            attention_flops=attention if runs.fused else 0.0,
            vector_flops=0.0 if aligned else attention,
            moved_bytes=LinearCost(0, shared + divided),
            operations=runs.operators,
            tensor=1.0,
            tensor_reduce_bytes=LinearCost(0, 4.0 * tokens),
            tensor_reduces=2,
            tensor_moved_bytes=LinearCost(0, shared + divided / 2),
            tensor_saved_bytes=LinearCost(0, kept[0] + kept[1] / 2),
            tensor_forward_bytes=LinearCost(0, 6.0 * tokens),
            tensor_backward_bytes=LinearCost(0, 6.0 * tokens),
            selective_saved_bytes=LinearCost(0, selective),
            selective_forward_bytes=LinearCost(0, 8.0 * tokens),
            selective_backward_bytes=LinearCost(0, 8.0 * tokens + sum(kept) - selective),
            full_saved_bytes=message,
            full_forward_bytes=LinearCost(0, 8.0 * tokens),
            full_backward_bytes=LinearCost(0, 6.0 * tokens + sum(kept)),
            block=f"layers.{i}",
            recomputed=True,
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
        selective_saved_bytes=message,
        full_saved_bytes=message,
        tensor_saved_bytes=message,
        crossing_bytes=sent,
        crossing_grad_bytes=sent,
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
        selective_saved_bytes=LinearCost(0, 6.0 * logits),
        full_saved_bytes=LinearCost(0, 6.0 * logits),
        tensor_saved_bytes=LinearCost(0, 3.0 * logits),
        forward_transient_bytes=LinearCost(0, 4.0 * logits),
        backward_transient_bytes=LinearCost(0, 4.0 * logits),
        selective_forward_bytes=LinearCost(0, 4.0 * logits),
        selective_backward_bytes=LinearCost(0, 4.0 * logits),
        full_forward_bytes=LinearCost(0, 4.0 * logits),
        full_backward_bytes=LinearCost(0, 4.0 * logits),
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
        again=("selective", "full"),
        optimizer_transient_bytes=1.0,  # fused
        sends_block=True,
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
    starts = starts_of(int(row["layers"]), pipeline * virtual) if pipeline > 1 else ()
    return Plan(
        workers=tensor * pipeline * data,
        batch_size=batch,
        micro_batch=int(float(row["micro_batch"])),
        precision="bf16",
        shard=shard,
        pipeline=pipeline,
        virtual=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        split_at=starts,
        tensor=tensor,
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


def case_of(row: dict[str, str]) -> tuple[Plan, Costs, Cluster] | str:
    """The published plan, the model's costs and the cluster, or why a row is not used."""
    if row["precision"] not in HALF:
        return "not a 16-bit run"
    if row["cp"] not in ("", "1") or row["ep"] not in ("", "1"):
        return "context or expert parallel"
    if row["read_from_source"] != "yes":
        return "figures from memory"
    if not all(row[k] for k in NEEDED):
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
    return plan_of(row, batch), transformer(row, batch), cluster


def predicted(row: dict[str, str]) -> tuple[Prediction, float | None] | str:
    """The prediction and what was measured, or why there is none."""
    case = case_of(row)
    if isinstance(case, str):
        return case
    try:
        return predict(*case), measured_seconds(row, case[1].batch_size)
    except ArgumentError as error:
        return f"not a plan of Ronde's ({str(error)[:60]})"


@dataclass(frozen=True)
class Case:
    """A run that was predicted."""

    row: dict[str, str]
    made: Prediction
    seconds: float | None

    @property
    def time_error(self) -> float | None:
        return self.made.step_seconds / self.seconds - 1 if self.seconds else None

    @property
    def memory_error(self) -> float | None:
        peak = self.row["peak_mem_gib"]
        return self.made.memory_bytes / 2**30 / float(peak) - 1 if peak else None

    @property
    def kind(self) -> str:
        """The dimensions that its plan has."""
        plan = self.made.plan
        parts = {
            "pipeline": plan.pipeline > 1,
            "tensor": plan.tensor > 1,
            "shard": plan.shard in ("gradients", "parameters"),
            "replicas": plan.replicas > 1 and plan.shard in ("none", "optimizer"),
        }
        return " × ".join(name for name, there in parts.items() if there) or "one device"

    def group(self) -> tuple[str, ...]:
        """Runs that a user would choose between: the same model and batch on the same devices."""
        same = ("source", "model", "params_b", "seq_len", "gpu", "gpu_mem_gb", "gpu_count")
        return (*(self.row[k] for k in same), str(self.made.plan.batch_size))


def ordered_pairs(cases: list[Case]) -> tuple[int, int]:
    """How many pairs of one group, more than 5 % apart, are predicted in the right order, of how
    many.
    """
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        if case.seconds:
            groups[case.group()].append(case)
    right = total = 0
    for group in groups.values():
        for a, b in itertools.combinations(group, 2):
            apart = (a.seconds or 0.0) / (b.seconds or 1.0)
            if a.made.plan == b.made.plan or 1 / (1 + CLOSE) <= apart <= 1 + CLOSE:
                continue
            total += 1
            right += (apart > 1) == (a.made.step_seconds > b.made.step_seconds)
    return right, total


def show(title: str, table: dict[str, list[Case]]) -> None:
    """Errors of time, order and memory, a line for each key."""
    print(
        f"\n{title:52} runs  mean |e|  median   bias  p90 |e|   pairs in order"
        "      memory |e|  bias"
    )
    for name, cases in table.items():
        errors = [e for c in cases if (e := c.time_error) is not None]
        peaks = [e for c in cases if (e := c.memory_error) is not None]
        if not errors and not peaks:
            continue
        line = f"{name[:52]:52} {len(errors):4}"
        if errors:
            sizes = sorted(map(abs, errors))
            p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
            line += f"  {statistics.mean(sizes):7.1%}  {statistics.median(sizes):6.1%} "
            line += f"{statistics.mean(errors):+6.1%}  {p90:7.1%}"
        right, total = ordered_pairs(cases)
        line += f"   {right / total:6.1%} of {total:4}" if total else " " * 17
        if peaks:
            mean = statistics.mean(map(abs, peaks))
            line += f"   {len(peaks):4}  {mean:6.1%} {statistics.mean(peaks):+6.1%}"
        print(line)


def load(files: list[Path]) -> tuple[list[Case], dict[str, int]]:
    """All runs that can be predicted, and how many cannot, by reason."""
    cases, left = [], defaultdict[str, int](int)
    for path in files:
        with path.open() as file:
            for row in csv.DictReader(file):
                found = predicted(row)
                if isinstance(found, str):
                    left[found] += 1
                else:
                    cases.append(Case(row, *found))
    return cases, left


def held_out() -> None:
    """Choose Megatron's operators per block on every eighth vTrain run; try them elsewhere."""
    with FILES[1].open() as file:
        rows = list(csv.DictReader(file))
    vtrain = [r for r in rows if r["source"].startswith("vTrain")]
    bloom = [r for r in rows if r["source"].startswith("BLOOM")]

    def error(some: list[dict[str, str]], operators: int) -> tuple[float, float]:
        before = dict(RUNTIMES)
        for name in ("Megatron-LM", "Megatron-DeepSpeed"):
            RUNTIMES[name] = dataclasses.replace(RUNTIMES[name], operators=operators)
        found = [f for r in some if not isinstance(f := predicted(r), str)]
        RUNTIMES.update(before)
        errors = [p.step_seconds / s - 1 for p, s in found if s]
        return statistics.mean(map(abs, errors)), statistics.mean(errors)

    tried = {n: error(vtrain[::8], n)[0] for n in (60, 80, 90, 100, 110, 120, 140)}
    best = min(tried, key=lambda n: tried[n])
    print(f"\nheld out: {best} operators a block, chosen on every eighth vTrain run")
    for name, some in (("vTrain, the other half", vtrain[1::2]), ("BLOOM", bloom)):
        mean, bias = error(some, best)
        print(f"  {name:24} {len(some):4} runs  mean |e| {mean:6.1%}  bias {bias:+6.1%}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("csv", nargs="*", type=Path, default=FILES)
    options.add_argument("--rows", action="store_true", help="every run by itself")
    options.add_argument(
        "--held-out", action="store_true", help="choose on one half, try elsewhere"
    )
    asked = options.parse_args()
    cases, left = load(asked.csv)
    by_source: dict[str, list[Case]] = defaultdict(list)
    by_kind: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_source[case.row["source"]].append(case)
        by_kind[case.kind].append(case)
        if asked.rows or case.row["source"] == "Three dimensions":
            row, made = case.row, case.made
            spec = made.plan.spec if not made.plan.split_at else _short(made.plan)
            seconds = f"{case.seconds:.3f} s ({case.time_error:+.0%})" if case.seconds else "-"
            memory = f"{made.memory_bytes / 2**30:.1f} GiB, {made.verdict}"
            print(
                f"{row['id']:>5} {row['gpu']:5} × {row['gpu_count']:>5} {row['model'][:18]:18} "
                f"{spec[:70]:70} ≈ {made.step_seconds:.3f} s, measured {seconds}, {memory}"
                + (f" against {row['peak_mem_gib'][:5]}" if row["peak_mem_gib"] else "")
            )
    show("source", {**dict(sorted(by_source.items())), "all": cases})
    show("kind of plan", dict(sorted(by_kind.items())))
    reasons = sorted(left.items(), key=lambda x: -x[1])
    print("\nleft out: " + "; ".join(f"{n} {why}" for why, n in reasons), file=sys.stdout)
    if asked.held_out:
        held_out()


def _short(plan: Plan) -> str:
    return dataclasses.replace(plan, split_at=()).spec


if __name__ == "__main__":
    main()
