"""Spark finds the bits that PyArrow finds, and joins row for row as DuckDB does."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("narwhals")
if not (importlib.util.find_spec("pyspark") and shutil.which("java")):
    pytest.skip("Spark is absent: pip install '.[spark]', and Java", allow_module_level=True)

from generated import generated

from feature_cases import HOUR, Case, same
from processes import PATHS, TESTS, child
from ronde.tables import Recipe
from sampling import long, some
from spark_recipes_worker import fit, start

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def spark():
    before = os.environ.copy()
    session = start("local[2]")
    yield session
    session.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.timeout(900)
def test_spark_finds_the_same_bits(spark):
    table, given = generated(3)
    assert fit(spark, 7, 3, True) == (Recipe.of(given).fit(table).digest, True)


@long
@pytest.mark.timeout(36000)
@pytest.mark.parametrize(
    ("master", "partitions"), [("local[2]", 4), ("local[2]", 7), ("local-cluster[2,1,1024]", 4)]
)
def test_spark_finds_the_same_bits_in_any_number_of_partitions(tmp_path, master, partitions):
    script = [sys.executable, str(TESTS / "spark_recipes_worker.py"), master, str(partitions)]
    paths = {"PYTHONPATH": f"{PATHS}:{HERE}", "SPARK_LOCAL_IP": "127.0.0.1"}
    with child([*script, *map(str, range(200))], tmp_path, paths) as started:
        done = started.done(36000)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [int(seed) for seed, _, _ in lines] == list(range(200))
    for seed, digest, rows_equal in lines:
        table, given = generated(int(seed))
        assert digest == Recipe.of(given).fit(table).digest, seed
        assert rows_equal == "True", seed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", some(range(21, 41), 20))
def test_spark_joins_and_publishes_what_duckdb_does(seed, tmp_path, spark):
    case = Case(seed)
    store = case.write(tmp_path)
    labels = tmp_path / "labels.parquet"
    expected = store.join(str(labels), at="at")
    joined = store.join(str(labels), at="at", engine="spark")
    assert joined.table.column_names == expected.table.column_names
    rows = zip(joined.table.to_pylist(), expected.table.to_pylist(), strict=True)
    for got, row in rows:
        same(got, row)
    assert joined.facts == expected.facts

    now = case.bare(case.start + 8 * HOUR).isoformat()
    counts = store.publish(tmp_path / "duckdb.db", at=now)
    checked = store.check(tmp_path / "duckdb.db", engine="spark")  # Spark publishes it again
    assert checked.entities == sum(counts.values())
    assert checked.different == 0, checked.differences
