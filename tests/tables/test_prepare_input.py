"""Files and frames that a careless fit would misread: each is read right, or refused."""

import contextlib

import numpy as np
import pytest

pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("narwhals")

import pyarrow.parquet as pq  # noqa: E402

from ronde.feed import table  # noqa: E402
from ronde.tables import Recipe  # noqa: E402
from ronde.tables.engines import Query, duckdb_engine  # noqa: E402
from ronde.tables.prepare_report import take_sample  # noqa: E402
from ronde.tables.spark import is_out_of_fold  # noqa: E402
from ronde.world import ArgumentError, RondeError  # noqa: E402

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


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ({"clip": {"min": -1}, "log": True}, r"log needs values above -1, and clip: min is -1\."),
        ({"impute": -2, "log": True}, r"log needs values above -1, and impute is -2\."),
        ({"clip": {"min": 5, "max": 1}}, r"clip: min 5 is above max 1\."),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(do, says):
    with pytest.raises(ArgumentError, match=says):
        Recipe({"x": do})


def test_the_open_side_of_a_clip_is_open_and_a_logarithm_is_finite():
    train, later = pa.table({"x": [0.0, 3.0, 5.0]}), pa.table({"x": [-7.0, 9.0]})

    def made(do):
        return Recipe({"x": do}).fit(train).apply(later)["x"].to_pylist()

    assert made({"clip": {"min": 0}}) == [0.0, 9.0]
    assert made({"clip": {"max": 4}}) == [-7.0, 4.0]
    # Below the smallest of the fit, a logarithm is that of the smallest.
    assert made({"clip": {"max": 3}, "log": True}) == pytest.approx(np.log1p([0.0, 3.0]))
    assert made({"clip": {"min": -0.5}, "log": True}) == pytest.approx(np.log1p([-0.5, 9.0]))
    assert made({"clip": {"min": 1}, "log": True, "scale": "minmax"})[0] == 0.0


@pytest.mark.parametrize("engine", ["duckdb", "arrow"])
def test_a_key_may_be_encoded_by_a_dictionary(engine):
    plain = pa.table({"id": [1, 2, 3, 4], "city": ["x", "x", "z", "z"], "y": [0.0, 1.0, 1.0, 0.0]})
    encoded = plain.set_column(0, "id", plain["id"].dictionary_encode())
    assert MEANS.fit(encoded, engine=engine).fitted == MEANS.fit(plain, engine=engine).fitted


@pytest.mark.parametrize("engine", ["duckdb", "arrow"])
@pytest.mark.parametrize("ids", [[1, None, 3, 4], [1, 2, 3, 2**63]])
def test_a_key_is_a_whole_number_in_each_row(tmp_path, engine, ids):
    file = write(
        tmp_path / "a.parquet",
        id=pa.array(ids, pa.uint64()),
        city=["x", "x", "z", "z"],
        y=[0.0, 1.0, 1.0, 0.0],
    )
    with pytest.raises(ArgumentError, match=r"'id' is missing, or 2\^63 or more, in a row: a key"):
        MEANS.fit(file, engine=engine)


@pytest.mark.parametrize("field", ["target", "key"])
def test_one_column_is_the_target_or_the_key(field):
    with pytest.raises(ArgumentError, match=rf"{field} \['a', 'b'\] is no name of a column\."):
        Recipe({"x": {}}, **{field: ["a", "b"]})


def test_a_frame_keeps_its_index_and_other_columns_do_not_matter():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame([[1.0, {1}, "a", "b"], [3.0, 2, "a", "b"]], columns=["x", "o", "z", "z"])
    frame.index = [7, 9]
    fitted = Recipe({"x": {"scale": "minmax"}}).fit(frame)
    made = fitted.apply(frame)
    assert made["x"].to_dict() == {7: 0.0, 9: 1.0}
    with pytest.raises(ArgumentError, match="has 'z' and 'z'"):
        Recipe({"z": {"codes": True}}).fit(frame)
    with pytest.raises(ArgumentError, match=r"no such column; did you mean 'x'"):
        Recipe({"xx": {}}).fit(frame)
    twice = pd.DataFrame([[1.0, 2.0]], columns=["x", "x"])
    for same in (twice, pa.table([[1.0], [2.0]], names=["x", "x"])):
        with pytest.raises(ArgumentError, match="the table has two columns named 'x'"):
            fitted.apply(same)


@pytest.mark.parametrize("engine", ["duckdb", "arrow"])
def test_a_file_with_two_columns_of_a_name_is_refused(tmp_path, engine):
    pq.write_table(pa.table([[1.0], [2.0]], names=["x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(ArgumentError, match=r"a\.parquet has 2 columns named 'x'"):
        Recipe({"x": {}}).fit(tmp_path / "a.parquet", engine=engine)


def test_no_rows_are_no_fit_and_an_empty_table(tmp_path):
    recipe = Recipe({"x": {"scale": "standard"}, **MEANS.steps}, target="y", key="id")
    rows = pa.table({"id": [0, 1], "x": [1.0, 3.0], "city": ["x", "z"], "y": [0.0, 1.0]})
    pq.write_table(rows, tmp_path / "full.parquet")
    fitted = recipe.fit(tmp_path / "full.parquet")
    pq.write_table(rows[:0], tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("id,x,city,y\n")
    files = [tmp_path / name for name in ("a.parquet", "a.csv")]
    empty = pa.record_batch([pa.array([], f.type) for f in rows.schema], schema=rows.schema)
    for data in (*files, rows[:0], empty, pa.Table.from_batches([], rows.schema)):
        for engine in ("duckdb", "arrow"):
            with pytest.raises(ArgumentError, match="the table has no rows"):
                recipe.fit(data, engine=engine)
        made = fitted.apply(data)
        assert (made.num_rows, made.schema.names) == (0, ["id", "y", "x", "city_mean"])


def test_files_of_two_widths_are_one_table(tmp_path):
    files = [
        write(tmp_path / "a.parquet", id=pa.array([1], pa.int32()), x=[1], y=pa.array([1])),
        write(tmp_path / "b.parquet", id=pa.array([2], pa.int64()), x=[3.0], y=pa.array([0.5])),
    ]
    fitted = Recipe({"x": {"scale": "minmax"}}, target="y", key="id").fit(files)
    made = fitted.apply(files).to_pydict()
    assert made == {"id": [1, 2], "y": [1.0, 0.5], "x": [0.0, 1.0]}
    assert take_sample(fitted, files).table["x"].to_pylist() == [1.0, 3.0]


def test_files_of_unlike_keys_are_refused_in_a_sentence(tmp_path):
    files = [
        write(tmp_path / "a.parquet", id=[1], x=[1]),
        write(tmp_path / "b.parquet", id=["2"], x=[3]),
    ]
    fitted = Recipe({"x": {"scale": "minmax"}}, key="id").fit(files)
    with pytest.raises(
        ArgumentError, match=r"'id' is int64 in .*a\.p.*, and string in .*b\.p.*Cast"
    ):
        fitted.apply(files)
    broken = write(tmp_path / "c.parquet", id=[0.5, 1.5], city=["x", "z"], y=[0.0, 1.0])
    for engine in ("duckdb", "arrow"):
        with pytest.raises(ArgumentError, match=r"c\.parquet has double: a key is a whole number"):
            MEANS.fit(broken, engine=engine)


def test_an_error_of_duckdb_is_a_sentence(cities):
    with contextlib.closing(duckdb_engine([cities[0]], None, {"id": "key"}, (), 1)) as engine:
        cities[0].unlink()
        with pytest.raises(RondeError, match=r"^DuckDB on 1 thread: "):
            engine.answer([Query({"n": ("len", None)})])


@pytest.mark.parametrize("engine", ["duckdb", "arrow", "spark"])
def test_a_level_is_text_in_all_files_or_in_none(tmp_path, engine):
    files = [write(tmp_path / "a.parquet", c=["x"]), write(tmp_path / "b.parquet", c=[2.0])]
    recipe = Recipe({"c": {"codes": True}})
    with pytest.raises(ArgumentError, match=r"'c' is string in .*a\.parquet, and double in .*b\.p"):
        recipe.fit(files, engine=engine)
    if engine == "spark":  # refused before Spark is asked
        return
    write(tmp_path / "b.parquet", c=pa.nulls(1))
    assert recipe.fit(files, engine=engine).fitted["c"]["levels"] == [["x", 1]]
