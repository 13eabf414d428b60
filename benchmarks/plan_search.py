"""How long the search takes for 4,096 devices and a chain of 96 layers, and how much memory (bars:
10 s, 500 MB).

    python benchmarks/plan_search.py [--devices 4096] [--layers 96] [--flips]

Prints wall and processor seconds and the peak of this process, torch's import (for its schedules)
included.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from ronde.predict.answer import explain, render_answer
from ronde.predict.cluster import Cluster, LinkFit
from ronde.predict.costs import Costs, LinearCost, Unit
from ronde.predict.search import search
from ronde.watch import plain_console


def model(layers: int, hidden: int, sequence: int, batch: int) -> Costs:
    """A GPT by formula, at 400 TFLOP/s: the search's time depends on its length and its sizes, not
    on where they come from.
    """
    flops = 4e14
    parameters = 12 * hidden * hidden
    work = 2 * parameters * sequence + 4 * sequence * sequence * hidden
    message = LinearCost(0, 2 * sequence * hidden)
    blocks = [
        Unit(
            f"layers.{i}",
            LinearCost(2e-5, work / flops),
            LinearCost(4e-5, 2 * work / flops),
            4 * parameters,
            4 * parameters,
            8 * parameters,
            0,
            LinearCost(0, 34 * sequence * hidden),
            message,
            message,
            tensor=1.0,
            tensor_time=1.0,
            tensor_reduce_bytes=LinearCost(0, 4 * sequence * hidden),
            tensor_saved_bytes=LinearCost(0, 21 * sequence * hidden),
            full_saved_bytes=message,
            full_backward_bytes=LinearCost(0, 32 * sequence * hidden),
            selective_saved_bytes=LinearCost(0, 17 * sequence * hidden),
            selective_backward_bytes=LinearCost(0, 17 * sequence * hidden),
            block=f"layers.{i}",
            recomputed=True,
        )
        for i in range(layers)
    ]
    table = 4 * 50_304 * hidden
    embed = Unit(
        "embed",
        LinearCost(1e-5, 1e-5),
        LinearCost(1e-5, 1e-5),
        table,
        table,
        2 * table,
        0,
        message,
        crossing_bytes=message,
        crossing_grad_bytes=message,
    )
    work = 2 * 50_304 * hidden * sequence
    head = Unit(
        "head",
        LinearCost(2e-5, work / flops),
        LinearCost(2e-5, 2 * work / flops),
        table,
        table,
        2 * table,
        0,
        LinearCost(0, 6 * sequence * 50_304),
    )
    return Costs(
        (embed, *blocks, head),
        batch,
        input_bytes=16 * sequence,
        optimizer_seconds=layers * parameters * 16 / 2e12,
        optimizer="AdamW",
        sequence=sequence,
        measured_samples=(1, 2),
        tensor_divides=hidden // 128,
        again=("selective", "full"),
    )


def cluster(devices: int) -> Cluster:
    node, wide = LinkFit(2e-5, 2.5e11, 8, assumed=True), LinkFit(6e-5, 1.5e11, 16, assumed=True)
    links = {
        kind: {"node": node, "cluster": wide}
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    }
    links["send"] = {
        "node": LinkFit(1e-5, 2e11, 2, assumed=True),
        "cluster": LinkFit(2e-5, 4e10, 2, assumed=True),
    }
    return Cluster(
        "data sheet",
        max(1, devices // 8),
        min(8, devices),
        "80 GB device",
        80e9,
        links=links,
        overlap=0.9,
        interference=1.1,
        base_bytes=2e9,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--devices", type=int, default=4096)
    options.add_argument("--layers", type=int, default=96)
    options.add_argument("--hidden", type=int, default=8192)
    options.add_argument("--sequence", type=int, default=2048)
    options.add_argument("--batch", type=int, default=16_384)
    options.add_argument(
        "--flips", action="store_true", help="also search for when the answer would flip"
    )
    asked = options.parse_args()
    costs, machines = (
        model(asked.layers, asked.hidden, asked.sequence, asked.batch),
        cluster(asked.devices),
    )
    wall, processor = time.perf_counter(), time.process_time()
    found = search(costs, machines, asked.devices)
    searched = {
        "wall_seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
    }
    wall, processor = time.perf_counter(), time.process_time()
    told = explain(found, costs, machines, with_flips=asked.flips)
    if asked.flips:
        searched.update(
            flips_wall_seconds=time.perf_counter() - wall,
            flips_processor_seconds=time.process_time() - processor,
        )
    plain_console().print(render_answer(told))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "devices": asked.devices,
                "layers": asked.layers,
                "plans": found.considered,
                "simulated": found.simulated,
                **{k: round(v, 2) for k, v in searched.items()},
                "peak_mib": round(peak),
            }
        )
    )


if __name__ == "__main__":
    main()
