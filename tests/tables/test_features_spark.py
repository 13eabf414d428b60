"""Point-in-time joins on Spark: row for row those of DuckDB."""

import importlib.util
import shutil

import pytest

pytest.importorskip("duckdb")
if not (importlib.util.find_spec("pyspark") and shutil.which("java")):
    pytest.skip("Spark is absent: pip install '.[spark]', and Java", allow_module_level=True)

from feature_cases import HOUR, Case, same
from ronde.tables.online import Online
from sampling import some


@pytest.fixture(scope="module")
def spark():
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    # compiling the long queries takes longer than these few rows
    builder = builder.config("spark.sql.codegen.wholeStage", "false")
    builder = builder.config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    session = builder.config("spark.sql.shuffle.partitions", "3").getOrCreate()
    yield session
    session.stop()


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
    counts = store.publish(tmp_path / "spark.db", at=now, engine="spark")
    assert counts == store.publish(tmp_path / "duckdb.db", at=now)
    ours, theirs = Online(tmp_path / "spark.db"), Online(tmp_path / "duckdb.db")
    assert ours.tables() == theirs.tables()
    for table in counts:
        keys = sorted(ours.entities(table))
        assert keys == sorted(theirs.entities(table))
        for key in keys:
            entity = dict(zip(case.keys, key, strict=True))
            assert ours.read(table, entity, 0) == theirs.read(table, entity, 0)
    assert store.check(tmp_path / "duckdb.db", engine="spark").different == 0
