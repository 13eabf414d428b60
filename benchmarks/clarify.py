"""What does a table of bias metrics take? Rows by 3 facets, beside fairlearn's MetricFrame, which
computes selection rates, recalls and accuracies only.

    python benchmarks/clarify.py [--rows 10000000] [--peer-rows 1000000]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FACETS = ("sex", "region", "age >= 40")


def write_table(path: Path, rows: int) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    g = np.random.default_rng(0)
    label = g.integers(0, 2, rows)
    table = {
        "sex": pa.array(np.array(["F", "M"])[g.integers(0, 2, rows)]),
        "region": pa.array(np.array(["north", "south", "east", "west"])[g.integers(0, 4, rows)]),
        "age": g.integers(18, 80, rows),
        "label": label,
        "score": np.clip(label * 0.2 + g.random(rows) * 0.8, 0, 1),
    }
    pq.write_table(pa.table(table), path)


def ronde(path: str) -> dict[str, float]:
    from ronde.clarify import count_table

    counts, *_ = count_table(path, label="label", prediction="score", threshold=0.5, facets=FACETS)
    return {c.name: c.measures["DPPL"].value for c in counts.compare()}  # type: ignore[misc]


def fairlearn(path: str) -> dict[str, float]:
    import pandas as pd
    from fairlearn.metrics import MetricFrame, selection_rate, true_positive_rate
    from sklearn.metrics import accuracy_score

    t = pd.read_parquet(path)
    predicted = (t["score"] > 0.5).astype(int)
    metrics = {"selected": selection_rate, "recall": true_positive_rate, "right": accuracy_score}
    result = {}
    facets = {"sex": t["sex"], "region": t["region"], "age >= 40": t["age"] >= 40}
    for name, facet in facets.items():
        frame = MetricFrame(
            metrics=metrics, y_true=t["label"], y_pred=predicted, sensitive_features=facet
        )
        for value, share in frame.by_group["selected"].items():
            rest = predicted[facet != value].mean()
            result[name if value is True else f"{name} = {value}"] = float(rest - share)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--peer-rows", type=int, default=1_000_000, help="for fairlearn, and both")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        start = time.perf_counter()
        found = {"ronde": ronde, "fairlearn": fairlearn}[args.one](args.path)
        seconds = time.perf_counter() - start
        status = Path("/proc/self/status").read_text()  # ru_maxrss would be the parent's
        peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
        print(json.dumps([seconds, peak, found]))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for rows, names in (
            (args.rows, ("ronde",)),
            (args.peer_rows, ("ronde", "fairlearn")),
        ):
            path = Path(folder) / f"{rows}.parquet"
            write_table(path, rows)
            for name in names:
                command = [sys.executable, __file__, "--one", name, "--path", str(path)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                seconds, peak, results[name] = json.loads(done.stdout)
                print(f"{name:10} {rows:11,} rows {seconds:6.1f} s  {peak:7,.0f} MB", flush=True)
        shared = results["ronde"].keys() & results["fairlearn"].keys()
        worst = max(abs(results["ronde"][k] - results["fairlearn"][k]) for k in shared)
        print(f"worst difference of DPPL over {len(shared)} groups: {worst:.1e}")


if __name__ == "__main__":
    main()
