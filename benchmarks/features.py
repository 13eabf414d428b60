"""Point-in-time joins at size: events x labels, the wide shape of feast#3003, and online reads.

    python benchmarks/features.py            10 million events, 1 million labels; minutes
    python benchmarks/features.py --events 1e6 --labels 1e5

Each part is a process of its own; seconds, processor seconds, and peak memory are printed.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_MEMORY = "1.2GB"

_SPECS = {
    "newest": "t: {path: events.parquet, entity: e, event_time: ts, arrival_time: arr, "
    "columns: [v0, v1, v2, v3, v4, v5, v6, v7]}",
    "windows": "t: {path: events.parquet, entity: e, event_time: ts, arrival_time: arr, "
    "windows: {n_7d: {count: 7d}, sum_30d: {sum: v0, over: 30d}}}",
    "wide": "t: {path: wide.parquet, entity: e, event_time: ts, columns: ["
    + ", ".join(f"c{k}" for k in range(1000))
    + "]}",
}


def make(folder: Path, events: int, labels: int) -> None:
    import duckdb

    db = duckdb.connect()
    entities = max(events // 50, 1)
    start, year = "TIMESTAMPTZ '2024-01-01 00:00:00+00'", 31_536_000
    moment = f"(hash(i * 7 + 1) % {year})::BIGINT"
    late = "(CASE WHEN hash(i * 11) % 10 = 0 THEN hash(i * 13) % 864000 ELSE hash(i * 13) % 60 END)"
    values = ", ".join(f"(hash(i * 17 + {k}) % 1000000) / 1000.0 AS v{k}" for k in range(8))
    db.execute(
        f"COPY (SELECT (hash(i) % {entities})::BIGINT AS e, {start} + to_seconds({moment}) AS ts, "
        f"{start} + to_seconds({moment} + {late}::BIGINT) AS arr, {values} "
        f"FROM range({events}) t(i)) TO '{folder}/events.parquet'"
    )
    db.execute(
        f"COPY (SELECT (hash(i * 19) % {entities + entities // 20})::BIGINT AS e, "
        f"{start} + to_seconds((hash(i * 23) % {year})::BIGINT) AS at "
        f"FROM range({labels}) t(i)) TO '{folder}/labels.parquet'"
    )
    wide = ", ".join(f"(hash(i * 1009 + {k}) % 1000)::INT AS c{k}" for k in range(1000))
    db.execute(
        f"COPY (SELECT i AS e, {start} AS ts, {wide} FROM range(17000) t(i)) "
        f"TO '{folder}/wide.parquet'"
    )
    db.execute(
        f"COPY (SELECT i AS e, {start} + INTERVAL 1 DAY AS at FROM range(17000) t(i)) "
        f"TO '{folder}/wide-labels.parquet'"
    )
    for name, text in _SPECS.items():
        (folder / f"{name}.yaml").write_text(text)


def join(folder: Path, name: str) -> dict[str, object]:
    from ronde.tables import FeatureStore

    labels = "wide-labels" if name == "wide" else "labels"
    store = FeatureStore(folder / f"{name}.yaml")
    done = store.join(folder / f"{labels}.parquet", "at", folder / "out.parquet", memory=_MEMORY)
    return {"labels": done.labels, "future": done.facts[0].future}


def read(folder: Path, entities: int) -> dict[str, object]:
    from ronde.tables import Online
    from ronde.tables.online import OnlineTable, publish_tables

    about = OnlineTable("t", {"e": "int"}, {"v": "float"}, {}, False, None, 0, True)
    publish_tables(folder / "o.db", [(about, ((i, 0, 0, i / 7) for i in range(entities)))])
    online, draw, times = Online(folder / "o.db"), random.Random(0), []
    for _ in range(20_000):
        key = draw.randrange(entities)
        began = time.perf_counter()
        assert online.get("t", e=key)["v"] == key / 7
        times.append(time.perf_counter() - began)
    times.sort()
    return {
        "entities": entities,
        "median_us": round(times[10_000] * 1e6),
        "p99_us": round(times[19_800] * 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=float, default=1e7)
    parser.add_argument("--labels", type=float, default=1e6)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        folder, name = Path(given.part[0]), given.part[1]
        began = time.perf_counter()
        found = read(folder, int(given.labels)) if name == "online" else join(folder, name)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = round(time.perf_counter() - began, 1)
        cpu, peak = round(used.ru_utime + used.ru_stime, 1), round(used.ru_maxrss / 1e6, 2)
        print(json.dumps({"part": name, "s": seconds, "cpu_s": cpu, "peak_GB": peak, **found}))
        return
    with tempfile.TemporaryDirectory() as place:
        make(Path(place), int(given.events), int(given.labels))
        for name in (*_SPECS, "online"):
            command = [sys.executable, __file__, "--labels", str(given.labels), "--part", place]
            subprocess.run([*command, name], check=True)


if __name__ == "__main__":
    main()
