"""A pipeline's bubble against the schedule's theory, and its speed beside torch's own pipeline with
the same cut, in the same processes.

    python benchmarks/pipeline.py                  4 stages of sleeping layers, 2 stages of real
    ones python benchmarks/pipeline.py --rounds 10 --json benchmarks/results/pipeline.json

Sleeping layers stand for a device each, so that four stages run on two cores. Rounds are
interleaved (Ronde, torch, torch, Ronde, …); the ratio is the median over rounds of torch's step
time to Ronde's: above 1, Ronde is faster. Real layers, whose steps are short and noisy, have ten
times as many rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLEEP = {"forward": 0.030, "input": 0.030, "weights": 0.030}
"""Seconds of a layer's forward pass, and of its backward pass: for what it was given, and for its
weights.
"""
CASES = [
    # name, stages, micro-batches, schedule, sleeping
    ("sleeping, 4 stages, GPipe", 4, 8, "gpipe", True),
    ("sleeping, 4 stages, 1F1B", 4, 8, "1f1b", True),
    ("sleeping, 4 stages, interleaved ×2", 4, 8, "interleaved", True),
    ("transformer blocks, 2 stages, 1F1B", 2, 8, "1f1b", False),
    ("transformer blocks, 2 stages, GPipe", 2, 8, "gpipe", False),
]


def worker(out: Path, rounds: int, cases: list[int]) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    import ronde

    Layer = sleeping_layer()

    def loss_of(output, target):
        return (output - target).square().mean()

    torch.set_num_threads(1)
    found = []
    for index in cases:
        name, stages, micros, schedule, sleeping = CASES[index]
        if stages != ronde.world().size:
            continue
        torch.manual_seed(0)
        virtual = 2 if schedule == "interleaved" else 1
        count = stages * virtual
        if sleeping:
            layers = nn.Sequential(*(Layer(1 / virtual) for _ in range(count)))
            x = torch.randn(micros * 2, 8)
        else:
            layers = nn.Sequential(
                *(
                    nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
                    for _ in range(2 * count)
                )
            )
            x = torch.randn(micros * 2, 64, 128)
        per = len(layers) // count
        mine = ronde.world().rank
        twin = (
            nn.Sequential(*[layers[i] for i in range(mine * per, (mine + 1) * per)])
            if virtual == 1
            else None
        )
        import copy

        twin = copy.deepcopy(twin)
        optimizer = torch.optim.SGD(layers.parameters(), lr=1e-6)
        spec = f"pipeline={stages},virtual={virtual},schedule={schedule},micro_batch=2"
        names = [str(i * per) for i in range(1, count)]
        data = torch.utils.data.TensorDataset(x, x)
        run = ronde.distribute(
            layers, optimizer, data, loss=loss_of, batch_size=len(x), plan=spec, split_at=names
        )

        busy: list[float] = []

        def ours(run=run, busy=busy) -> float:
            for batch in run.batches():  # one a call: an epoch has one
                dist.barrier()
                slept[0] = 0.0
                start = time.perf_counter()
                run.step(batch)
                dist.barrier()
                seconds = time.perf_counter() - start
                busy.append(slept[0] / seconds)
                return seconds
            raise AssertionError

        theirs = None
        if virtual == 1 and schedule in ("gpipe", "1f1b"):
            stage = PipelineStage(twin, mine, stages, torch.device("cpu"))
            made = (Schedule1F1B if schedule == "1f1b" else ScheduleGPipe)(
                stage, micros, loss_fn=loss_of
            )
            step = torch.optim.SGD(twin.parameters(), lr=1e-6)

            def theirs(made=made, step=step, x=x, mine=mine, stages=stages) -> float:
                dist.barrier()
                start = time.perf_counter()
                step.zero_grad()
                if mine == 0:
                    made.step(x)
                elif mine == stages - 1:
                    made.step(target=x)
                else:
                    made.step()
                step.step()
                dist.barrier()
                return time.perf_counter() - start

        a, b = [], []
        times = rounds if sleeping else 10 * rounds
        for r in range(times + 2):
            first = ours() if r % 2 else None
            two = theirs() if theirs else float("nan")
            one = ours() if first is None else first
            if r >= 2:
                a.append(one)
                b.append(two)
        theory = {
            "gpipe": (stages - 1) / (micros + stages - 1),
            "1f1b": (stages - 1) / (micros + stages - 1),
            "interleaved": (stages - 1) / (virtual * micros + stages - 1),
        }.get(schedule)
        result = {
            "case": name,
            "ronde_seconds": statistics.median(a),
            "torch_seconds": statistics.median(b) if theirs else None,
            "ratio": statistics.median(y / x for x, y in zip(a, b, strict=True))
            if theirs
            else None,
            "bubble": 1 - statistics.median(busy[2:]) if sleeping else None,
            "theory": theory if sleeping else None,
            "rounds": times,
        }
        found.append(result)
    if ronde.world().is_main:
        out.write_text(json.dumps(found))


# of SLEEP / 3, layer by layer: a pyramid, as of a CNN
UNEVEN = (
    2.0,
    1.5,
    1.5,
    1.0,
    1.0,
    0.6,
    0.6,
    0.4,
    0.4,
    0.3,
    0.3,
    0.2,
)


slept = [0.0]


def rest(seconds: float) -> None:
    """Sleep, and note for how long it really was."""
    if not seconds:
        return
    start = time.perf_counter()
    time.sleep(seconds)
    slept[0] += time.perf_counter() - start


def sleeping_layer():
    """A layer that sleeps, forwards and backwards."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seconds, back):
            ctx.back = back
            rest(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            rest(ctx.back)
            return g.clone(), None, None

    class Layer(nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.share = share

        def forward(self, x):
            weights = Sleep.apply(self.scale, 0.0, SLEEP["weights"] * self.share)
            return Sleep.apply(
                x * weights, SLEEP["forward"] * self.share, SLEEP["input"] * self.share
            )

    return Layer


def cut_worker(out: Path, rounds: int) -> None:
    """The cut that is chosen, against as many layers in every stage, and against the best of all
    cuts under the true costs.
    """
    import itertools

    import torch
    import torch.distributed as dist
    from torch import nn

    import ronde

    torch.set_num_threads(1)
    stages, micros = ronde.world().size, 8
    Layer = sleeping_layer()

    def made(split: list[str] | None):
        torch.manual_seed(0)
        layers = nn.Sequential(*(Layer(u / 3) for u in UNEVEN))
        x = torch.randn(micros * 2, 8)
        optimizer = torch.optim.SGD(layers.parameters(), lr=1e-6)
        data = torch.utils.data.TensorDataset(x, x)
        plan = f"pipeline={stages},micro_batch=2"
        loss = torch.nn.functional.mse_loss
        return ronde.distribute(
            layers, optimizer, data, loss=loss, batch_size=len(x), plan=plan, split_at=split
        )

    per = len(UNEVEN) // stages
    runs = {"chosen": made(None), "equal count": made([str(i * per) for i in range(1, stages)])}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for r in range(rounds + 1):
        for name, run in runs.items():
            for batch in run.batches():
                dist.barrier()
                start = time.perf_counter()
                run.step(batch)
                dist.barrier()
                if r:
                    times[name].append(time.perf_counter() - start)

    def slowest(bounds) -> float:
        return max(sum(UNEVEN[a:b]) for a, b in itertools.pairwise([0, *bounds, len(UNEVEN)]))

    best = min(slowest(c) for c in itertools.combinations(range(1, len(UNEVEN)), stages - 1))
    begins = [int(row["begins"]) for row in runs["chosen"].port.strategy.table()[1:]]
    if ronde.world().is_main:
        found = {
            "stages": stages,
            "chosen": begins,
            "slowest_stage_over_optimum": slowest(begins) / best,
            "chosen_seconds": statistics.median(times["chosen"]),
            "equal_count_seconds": statistics.median(times["equal count"]),
            "speed_up": statistics.median(
                b / a for a, b in zip(times["chosen"], times["equal count"], strict=True)
            ),
            "rounds": rounds,
        }
        out.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cut", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker and given.cut:
        cut_worker(given.worker, given.rounds)
        return
    if given.worker:
        worker(given.worker, given.rounds, list(range(len(CASES))))
        return
    rows = []
    for workers in (4, 2):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
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
                __file__,
            ]
            subprocess.run(
                [*command, "--rounds", str(given.rounds), "--worker", str(out)],
                check=True,
                env={**os.environ},
            )
            rows += json.loads(out.read_text())
    cuts = []
    for workers in (4, 6):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
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
                __file__,
                "--cut",
            ]
            subprocess.run(
                [*command, "--rounds", str(given.rounds), "--worker", str(out)],
                check=True,
                env={**os.environ},
            )
            cuts.append(json.loads(out.read_text()))
    print(f"{'':40} {'Ronde':>9} {'torch':>9} {'ratio':>6} {'bubble':>7} {'theory':>7}")
    for r in rows:
        seconds = [
            f"{r[k] * 1e3:.1f} ms" if r[k] else "–" for k in ("ronde_seconds", "torch_seconds")
        ]
        ratio = f"{r['ratio']:.2f}" if r["ratio"] else "–"
        shares = [f"{100 * r[k]:.1f} %" if r[k] is not None else "–" for k in ("bubble", "theory")]
        print(
            f"{r['case']:40} {seconds[0]:>9} {seconds[1]:>9} {ratio:>6} {shares[0]:>7} "
            f"{shares[1]:>7}"
        )
    for c in cuts:
        print(
            f"uneven layers, {c['stages']} stages: slowest stage "
            f"{c['slowest_stage_over_optimum']:.2f} × the best of all cuts, "
            f"{c['speed_up']:.2f} × the speed of a cut by count"
        )
    if given.json:
        given.json.write_text(json.dumps({"schedules": rows, "cuts": cuts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
