"""Files and frames that a careless fit would misread: each is read right, or refused."""

import pytest

pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("narwhals")

import pyarrow.parquet as pq  # noqa: E402

from ronde.feed import table  # noqa: E402
from ronde.tables import Recipe  # noqa: E402
from ronde.tables.spark import is_out_of_fold  # noqa: E402
from ronde.world import ArgumentError  # noqa: E402

MEANS = Recipe({"city": {"target_mean": {"folds": 2}}}, target="y", key="id")


def write(path, **columns):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def cities(tmp_path):
    """Two files of the same rows, in another order."""
    rows = {"id": [0, 1, 2, 3], "city": ["x", "x", "z", "z"], "y": [0.0, 1.0, 1.0, 0.0]}
    back = {name: values[::-1] for name, values in rows.items()}
    return write(tmp_path / "a.parquet", **rows), write(tmp_path / "c.parquet", **back)


def test_a_cache_of_means_is_of_the_files_of_the_fit(cities, tmp_path):
    a, c = cities
    here, elsewhere = MEANS.fit(a), MEANS.fit(c)
    assert here.digest == elsewhere.digest
    means = []
    for fitted in (elsewhere, here):
        rows = table(a, recipe=fitted, cache=tmp_path / "cache")
        inputs, _ = rows.collate(rows.__getitems__([0, 1]))
        means.append(inputs[:, 0].tolist())
    wanted = [
        fitted.apply(pq.read_table(a), out_of_fold=fold)
        for fitted, fold in ((here, False), (here, True))
    ]
    assert means == [pytest.approx(each["city_mean"].to_pylist()[:2]) for each in wanted]
    assert means[0] != means[1]


def test_spark_knows_the_files_of_the_fit(cities):
    a, c = cities
    fitted = MEANS.fit(a)
    assert is_out_of_fold(fitted, [str(a)])
    assert not is_out_of_fold(fitted, [str(c)])
    for paths, says in (
        ([str(a), str(c)], r"fitted on .*a\.parquet and not on .*c\.parquet: --engine spark"),
        (["s3a://lake/a"], r"cannot tell whether s3a://lake/a holds the rows of the fit"),
    ):
        with pytest.raises(ArgumentError, match=says):
            is_out_of_fold(fitted, paths)


@pytest.mark.parametrize("engine", ["duckdb", "arrow"])
def test_a_path_is_no_glob_and_its_folders_are_no_columns(tmp_path, engine):
    write(tmp_path / "p1.parquet", month=[50.0])
    file = write(tmp_path / "month=01" / "p[1].parquet", month=[7.0])
    state = Recipe({"month": {"scale": "minmax"}}).fit(file, engine=engine).fitted
    assert state["month"]["max"] == 7.0
    write(tmp_path / "month=01" / "p1.parquet", month=[90.0])
    assert Recipe({"month": {}}).fit(file, engine=engine).fitted["month"]["max"] == 7.0


@pytest.mark.parametrize("engine", ["duckdb", "arrow"])
def test_names_that_differ_in_case_are_refused(tmp_path, engine):
    file = write(tmp_path / "a.parquet", Age=[1.0], age=[2.0])
    with pytest.raises(
        ArgumentError, match="has 'Age' and 'age', and DuckDB and Spark ignore case"
    ):
        Recipe({"age": {}}).fit(file, engine=engine)
