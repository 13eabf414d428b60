"""Fit and apply a recipe on 10 million rows of 20 columns, beside scikit-learn, in one run.

    python benchmarks/tables.py [--rows 10000000] [--threads 2]

Each figure is of a process of its own: seconds, and the peak of its resident memory. The recipe
reads Parquet; scikit-learn is given a frame that is in memory already, and its seconds do not count
the reading.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUMBERS, LEVELS = 15, 5


def make(folder: Path, rows: int, files: int = 10) -> None:
    """Parquet files of 15 number columns with gaps, and 5 of texts."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part in range(files):
        draw = np.random.default_rng(part)
        n = rows // files
        columns = {}
        for i in range(NUMBERS):
            values = draw.lognormal(3, 1, n) if i % 3 else draw.normal(50, 20, n)
            columns[f"x{i}"] = pa.array(values, mask=draw.random(n) < 0.05)
        for i in range(LEVELS):
            codes = pa.array((draw.zipf(1.5, n) % 50).astype("i4"))
            levels = pa.array([f"level {j}" for j in range(50)])
            columns[f"c{i}"] = pa.DictionaryArray.from_arrays(codes, levels).cast(pa.string())
        pq.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=1 << 17)


def steps() -> dict[str, dict[str, object]]:
    """Mean, scale, and codes: what the pipeline of scikit-learn below does too."""
    numbers = {f"x{i}": {"impute": "mean", "scale": "standard"} for i in range(NUMBERS)}
    return {**numbers, **{f"c{i}": {"codes": True} for i in range(LEVELS)}}


def of_ronde(folder: Path, threads: int) -> dict[str, float]:
    """Fit on DuckDB; apply batch by batch on one core."""
    from ronde.tables import Recipe

    files = sorted(folder.glob("*.parquet"))
    began, first = time.perf_counter(), time.process_time()
    recipe = Recipe(steps()).fit(files, threads=threads)
    fitted, cpu = time.perf_counter(), time.process_time()
    rows = sum(batch.num_rows for file in files[:2] for batch in recipe.batches(file))
    applied, of_cpu = time.perf_counter() - fitted, time.process_time() - cpu
    return {
        "fit_seconds": fitted - began,
        "fit_cpu_seconds": cpu - first,
        "applied_rows_per_second": rows / applied,
        "applied_rows_per_cpu_second": rows / of_cpu,
    }


def of_sklearn(folder: Path, _: int) -> dict[str, float]:
    """Fit a ColumnTransformer on a frame in memory."""
    import pandas as pd
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OrdinalEncoder, StandardScaler

    frame = pd.read_parquet(folder)
    transformer = ColumnTransformer(
        [
            (
                "numbers",
                make_pipeline(SimpleImputer(), StandardScaler()),
                [f"x{i}" for i in range(NUMBERS)],
            ),
            ("levels", OrdinalEncoder(), [f"c{i}" for i in range(LEVELS)]),
        ],
    )
    began, first = time.perf_counter(), time.process_time()
    transformer.fit(frame)
    return {
        "fit_seconds": time.perf_counter() - began,
        "fit_cpu_seconds": time.process_time() - first,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["ronde", "sklearn"])
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.only:
        work = of_ronde if given.only == "ronde" else of_sklearn
        answer = work(given.folder, given.threads)
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps({**answer, "peak_mb": used.ru_maxrss / 1024}))
        return
    with tempfile.TemporaryDirectory() as place:
        make(Path(place), given.rows)
        for only in ("ronde", "sklearn", "ronde"):
            words = ["--only", only, "--folder", place, "--threads", str(given.threads)]
            done = subprocess.run(
                [sys.executable, __file__, *words], capture_output=True, text=True, check=False
            )
            print(only, done.stdout.strip() or done.stderr.strip()[-300:], flush=True)


if __name__ == "__main__":
    main()
