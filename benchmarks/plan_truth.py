"""Predicted step times against measured ones: predicted before anything of the plan has run.

    python benchmarks/plan_truth.py                          loopback: real layers on 2 workers,
    sleeping layers on 4 python benchmarks/plan_truth.py --network 1gbit          two network
    namespaces with a shaped link between them (Linux, root) python benchmarks/plan_truth.py --json
    benchmarks/results/plan_truth.json

In each process group the layers and the links are measured first, with all workers at work; every
plan is predicted, and the predictions are written down; then the plans train in turn, in three
rounds. "After one step" is the geometric mean of a plan's prediction and its first measured step;
that step alone is reported too.

Reported: mean absolute error; the same beside what all plans of a group have in common (a host that
became faster or slower between measuring and training moves all of them); the share of pairs of
plans more than 5 % apart that are in the right order, and how far the chosen plan (the one that the
search ranks first) is from the best measured one. Sleeping layers stand for a device each, so that
four workers run on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PLANS = {
    2: [
        "replicate",
        "replicate,micro_batch=4",
        "shard=optimizer",
        "shard=gradients",
        "shard=parameters",
        "shard=parameters,recompute=full",
        "pipeline=2,schedule=gpipe,micro_batch=2",
        "pipeline=2,micro_batch=2",
        "pipeline=2,micro_batch=4",
        "pipeline=2,virtual=2,schedule=interleaved,micro_batch=2",
    ],
    4: [
        "replicate",
        "shard=parameters",
        "pipeline=4,schedule=gpipe,micro_batch=2",
        "pipeline=4,micro_batch=2",
        "pipeline=4,micro_batch=4",
        "pipeline=4,virtual=2,schedule=interleaved,micro_batch=2",
        "pipeline=4,virtual=2,schedule=looped,micro_batch=2",
        "pipeline=2,micro_batch=2",
        "pipeline=2,shard=optimizer,micro_batch=2",
    ],
}
CASES = {"transformer": 2, "mlp": 2, "sleep": 4, "uneven": 4}
WARM, STEPS, ROUNDS = 17, 8, 3  # a sharded plan looks at its first 16 passes
ATTEMPTS = 3  # at layers' costs, while the machine is disturbed


def build(kind: str) -> tuple[Any, Any, int]:
    """Model, data set, global batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, seconds: float) -> Any:
            ctx.seconds = seconds * x.shape[0]
            time.sleep(ctx.seconds)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            time.sleep(2 * ctx.seconds)
            return g.clone(), None

    class Layer(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)
            self.seconds = seconds

        def forward(self, x: Any) -> Any:
            return Sleep.apply(x @ self.weight, self.seconds)

    if kind == "transformer":
        layers = [nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(6)]
        return (
            nn.Sequential(*layers),
            torch.utils.data.TensorDataset(torch.randn(16, 64, 128), torch.randn(16, 64, 128)),
            16,
        )
    if kind == "mlp":
        widths = [256, 1024, 1024, 512, 2048, 512, 256]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        return (
            nn.Sequential(*layers),
            torch.utils.data.TensorDataset(torch.randn(64, 256), torch.randn(64, 256)),
            64,
        )
    seconds = (
        [0.001] * 8
        if kind == "sleep"
        else [0.0004, 0.002, 0.0008, 0.0016, 0.0004, 0.0012, 0.002, 0.0006]
    )
    return (
        nn.Sequential(*(Layer(s) for s in seconds)),
        torch.utils.data.TensorDataset(torch.randn(32, 64), torch.randn(32, 64)),
        32,
    )


def worker(kind: str, out: Path) -> None:
    import torch
    import torch.distributed as dist

    import ronde
    from ronde.measure import planner
    from ronde.measure.bench_links import DISTURBED_SHARE, calibrate
    from ronde.plan import Plan

    os.environ.setdefault("RONDE_RUNS", "none")

    def loss_of(output: Any, target: Any) -> Any:
        return (output - target).square().mean()

    def train(spec: str, steps: int) -> list[float]:
        """Seconds of each step after the first few."""
        model, data, batch = build(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        run = ronde.distribute(model, optimizer, data, loss=loss_of, batch_size=batch, plan=spec)
        seconds: list[float] = []
        while len(seconds) < WARM + steps:
            dist.barrier()
            start = time.perf_counter()
            for b in run.batches():
                run.step(b)
                dist.barrier()
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
        return seconds[WARM:]

    train("replicate", STEPS)  # warms kernels, allocator and connections
    from ronde.world.connect import connect

    me = connect()
    model, data, batch = build(kind)
    work = ronde.parallel.Work(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-5),
        lambda b: (loss_of(model(b[0]), b[1]), None),
        lambda n: data[:n],
    )
    calls = ronde.run.losses.LossCall(loss_of, None)
    costs, least = None, math.inf
    for _ in range(ATTEMPTS):
        dist.barrier()
        tried = planner.gauge(
            work, Plan(batch_size=batch, workers=me.size), calls, None, lambda _: None
        )
        noise = torch.tensor(tried.noise)
        dist.all_reduce(noise, dist.ReduceOp.MAX)
        if costs is None or float(noise) < least:
            costs, least = tried, float(noise)
        if least <= DISTURBED_SHARE:
            break
    assert costs is not None
    dist.barrier()
    cluster = calibrate(me)
    predicted = {spec: prediction_of(spec, costs, cluster) for spec in PLANS[me.size]}
    if me.is_main:
        out.with_suffix(".predicted").write_text(
            json.dumps({k: v["predicted"] for k, v in predicted.items()})
        )
    # Every plan in turn, round after round: a host has fast and slow seconds, and they differ by
    # more than plans do.
    taken: dict[str, list[float]] = {spec: [] for spec in PLANS[me.size]}
    for _ in range(ROUNDS):
        for spec, steps in taken.items():
            steps += train(spec, STEPS)
    rows = []
    for spec, kept in taken.items():
        rows.append(
            {
                "case": kind,
                "plan": spec,
                **predicted[spec],
                "first": kept[0],
                "measured": statistics.median(kept[1:]),
                "quartiles": statistics.quantiles(kept, n=4)[::2],
            }
        )
    if me.is_main:
        out.write_text(
            json.dumps(
                {
                    "rows": rows,
                    "noise": least,
                    "costs": costs.to_dict(),
                    "cluster": cluster.to_dict(),
                }
            )
        )


def prediction_of(spec: str, costs: Any, cluster: Any) -> dict[str, Any]:
    """A plan's seconds, by kind, and as the search ranks it."""
    from ronde.plan import Plan
    from ronde.predict.predict import predict
    from ronde.predict.search import rank_key

    parsed, batch = Plan.parse(spec), costs.batch_size
    share = -(-batch // (cluster.devices // (parsed.pipeline * parsed.tensor)))
    count = -(-share // parsed.micro_batch) if parsed.micro_batch else 1
    plan = dataclasses.replace(
        parsed, workers=cluster.devices, batch_size=batch, accumulation=count
    )
    made = predict(plan, costs, cluster)
    ranked = rank_key(made, "speed", max(costs.noise, cluster.noise))[1]
    return {"predicted": made.step_seconds, "terms": made.terms, "ranked": ranked}


def predict_again(file: Path) -> dict[str, Any]:
    """What was measured then, with the predictions of now."""
    from ronde.predict import Cluster, Costs

    kept: dict[str, Any] = json.loads(file.read_text())
    by_case = {(m["case"], m["network"]): m for m in kept["measured"]}
    for row in kept["rows"]:
        case = by_case[row["case"], row["network"]]
        costs, cluster = Costs.from_dict(case["costs"]), Cluster.from_dict(case["cluster"])
        row |= prediction_of(row["plan"], costs, cluster)
    return {**kept, "summary": report(kept["rows"])}


@contextlib.contextmanager
def namespaces(rate: str) -> Iterator[list[str]]:
    """Two network namespaces joined by a link of that rate; removed at the end."""
    names = [f"ronde{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        ends = [f"rd{os.getpid() % 10000}{end}" for end in "ab"]
        subprocess.run(
            ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], check=True
        )
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            subprocess.run(["ip", "link", "set", end, "netns", name], check=True)
            inside = ["ip", "netns", "exec", name]
            subprocess.run(
                [*inside, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", end], check=True
            )
            subprocess.run([*inside, "ip", "link", "set", end, "up"], check=True)
            subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
            shape = [
                "tc",
                "qdisc",
                "add",
                "dev",
                end,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "64kb",
                "latency",
                "200ms",
            ]
            subprocess.run([*inside, *shape], check=True)
            os.environ[f"_END{i}"] = end
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def start(kind: str, workers: int, network: str | None, out: Path) -> None:
    """One process group on one case."""
    own = [__file__, "--worker", kind, "--out", str(out)]
    if network is None:
        command = [
            sys.executable,
            "-m",
            "ronde",
            "run",
            "-q",
            "--runs",
            "none",
            "--workers",
            str(workers),
        ]
        subprocess.run([*command, *own], check=True, timeout=900)
        return
    with namespaces(network) as names, socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        processes = []
        for rank in range(workers):
            place = rank * 2 // workers
            variables = {
                "RANK": rank,
                "WORLD_SIZE": workers,
                "LOCAL_RANK": rank % (workers // 2),
                "LOCAL_WORLD_SIZE": workers // 2,
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": os.environ[f"_END{place}"],
                "OMP_NUM_THREADS": 1,
                "RONDE_RUNS": "none",
            }
            environment = {**os.environ, **{k: str(v) for k, v in variables.items()}}
            # A host's name of its own, so that it is another node.
            alone = [
                "unshare",
                "--uts",
                "--kill-child",
                "sh",
                "-c",
                'hostname "$0" && exec "$@"',
                names[place],
            ]
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", names[place], *alone, sys.executable, *own],
                    env=environment,
                )
            )
        try:
            limit = time.monotonic() + 1800
            while any(process.poll() is None for process in processes):
                failed = [process.returncode for process in processes if process.returncode]
                if failed or time.monotonic() > limit:
                    raise SystemExit(
                        f"a worker ended with {failed[0]}"
                        if failed
                        else "the workers took longer than half an hour"
                    )
                time.sleep(0.2)
            if any(process.returncode for process in processes):
                raise SystemExit("a worker failed")
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()


def report(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors, order and regret over all cases."""
    before = [abs(r["predicted"] / r["measured"] - 1) for r in rows]
    first = [abs(r["first"] / r["measured"] - 1) for r in rows]
    after = [abs(math.sqrt(r["predicted"] * r["first"]) / r["measured"] - 1) for r in rows]
    right = total = 0
    regrets = []
    relative: list[float] = []
    for _, group in itertools.groupby(rows, lambda r: (r["case"], r["network"])):
        group = list(group)
        for a, b in itertools.combinations(group, 2):
            if abs(a["measured"] / b["measured"] - 1) > 0.05:
                total += 1
                right += (a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"])
        ratios = [r["predicted"] / r["measured"] for r in group]
        relative += [abs(ratio / statistics.median(ratios) - 1) for ratio in ratios]
        best = min(r["measured"] for r in group)
        regrets.append(min(group, key=lambda r: r["ranked"])["measured"] / best - 1)
    return {
        "n": len(rows),
        "mean_error": statistics.mean(before),
        "mean_error_beside_drift": statistics.mean(relative),
        "mean_error_after_one_step": statistics.mean(after),
        "mean_error_of_the_first_step_alone": statistics.mean(first),
        "pairs": total,
        "pairs_in_order": right / max(1, total),
        "worst_regret": max(regrets),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--network",
        action="append",
        default=[],
        help="rate of a shaped link, as 1gbit; several times for several",
    )
    parser.add_argument("--no-loopback", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path, help="predict the runs of such a file again")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.out)
        return
    if given.again:
        found = predict_again(given.again)
        if given.json:
            given.json.write_text(json.dumps(found, indent=2) + "\n")
        print(json.dumps(found["summary"], indent=2))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or namespaces would stay
    rows: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    for network in [*([] if given.no_loopback else [None]), *given.network]:
        for kind in given.cases.split(","):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "rows.json"
                start(kind, CASES[kind], network, out)
                found = json.loads(out.read_text())
            measured.append(
                {
                    "case": kind,
                    "network": network or "loopback",
                    "costs": found["costs"],
                    "cluster": found["cluster"],
                }
            )
            for row in found["rows"]:
                rows.append({**row, "network": network or "loopback", "noise": found["noise"]})
                r = rows[-1]
                print(
                    f"{r['network']:9} {kind:12} {r['plan']:56} predicted "
                    f"{r['predicted'] * 1e3:8.1f} ms   "
                    f"measured {r['measured'] * 1e3:8.1f} ms   "
                    f"{r['predicted'] / r['measured'] - 1:+6.1%}",
                    flush=True,
                )
            if given.json:  # what is there stays, whatever becomes of the rest
                given.json.write_text(
                    json.dumps(
                        {"summary": report(rows), "rows": rows, "measured": measured}, indent=2
                    )
                    + "\n"
                )
    print(json.dumps(report(rows), indent=2))


if __name__ == "__main__":
    main()
