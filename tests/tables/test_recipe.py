"""A recipe against a fit in plain Python, against scikit-learn, and on every engine: equal bits."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("narwhals")

import pyarrow.parquet as pq  # noqa: E402
from generated import generated  # noqa: E402
from naive import levels, number, target_mean  # noqa: E402

from ronde.tables import Recipe  # noqa: E402
from sampling import ALL  # noqa: E402

SEEDS = range(200 if ALL else 8)


def fits(table, recipe, folder):
    """The fitted recipe of each engine."""
    file = folder / "table.parquet"
    pq.write_table(table, file, row_group_size=64)
    yield "arrow", recipe.fit(table)
    yield "arrow, batches", recipe.fit(file, engine="arrow")
    for threads in (1, 2, 4) if ALL else (1, 4):
        yield f"duckdb, {threads} threads", recipe.fit(file, threads=threads)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_engine_finds_the_bits_of_the_naive_fit(tmp_path, seed):
    table, given = generated(seed)
    recipe = Recipe.of(given)
    texts = {}
    for name, fitted in fits(table, recipe, tmp_path):
        texts[name] = json.dumps(fitted.state, sort_keys=True)
    assert len(set(texts.values())) == 1, texts
    state = json.loads(texts["arrow"])["columns"]
    columns = table.to_pydict()
    for name in ("a", "b", "big", "gone"):
        for fact, value in number(columns[name], recipe.steps[name]).items():
            assert state[name][fact] == value, (name, fact)
    for name, least in (("ok", 1), ("job", 1), ("city", 3), ("level", 1)):
        counts = {v: c for v, c in levels(columns[name], least).items() if c}
        assert dict(state[name]["levels"]) == counts, name
    folds = fitted.apply(table, out_of_fold=True).to_pydict()
    job = recipe.steps["job"]["target_mean"]["smooth"]
    for name, smooth, count in (("job", job, 3), ("level", 20, 5)):
        wanted = target_mean(columns[name], columns["y"], columns["id"], smooth, count)
        assert folds[f"{name}_mean"] == wanted, name
    logs = np.array([v for v in columns["pay"] if v is not None])
    if len(logs):
        center = math.fsum(np.log1p(logs)) / len(logs)
        assert abs(state["pay"]["center"] - center) <= 1e-12 * max(1.0, abs(center))


def test_a_pipeline_of_scikit_learn_gives_the_same_numbers():
    sk = pytest.importorskip("sklearn")
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder, StandardScaler

    assert sk
    draw = np.random.default_rng(0)
    n = 5000
    a, b = draw.standard_cauchy(n), draw.normal(10, 1, n)
    a[draw.random(n) < 0.1] = np.nan
    city = draw.choice(["Rome", "Oslo", "Zürich"], n)
    table = pa.table({"a": a, "b": b, "city": city})
    steps = {
        "a": {"impute": "median", "scale": "standard"},
        "b": {"scale": "standard", "bins": 7},
        "city": {"one_hot": True},
    }
    made = Recipe(steps).fit(table).apply(table).to_pydict()
    peer = ColumnTransformer(
        [
            ("a", make_pipeline(StandardScaler(), SimpleImputer(strategy="median")), ["a"]),
            ("b", StandardScaler(), ["b"]),
            ("city", OneHotEncoder(sparse_output=False), ["city"]),
        ]
    )
    wanted = peer.fit_transform(table.to_pandas())
    names = ["a", "b", "city=Oslo", "city=Rome", "city=Zürich"]
    for column, name in zip(wanted.T, names, strict=True):
        assert np.abs(column - made[name]).max() <= 1e-12, name
    bins = KBinsDiscretizer(7, encode="ordinal", quantile_method="linear").fit(b[:, None])
    inner = bins.bin_edges_[0][1:-1]
    assert np.array_equal(made["b_bin"], 1 + np.searchsorted(inner, b, side="left"))


def test_what_duckdb_calls_no_nan_is_missing(tmp_path):
    """DuckDB 2.0.1: isnan() is false for all rows where a file's statistics know of no NaN."""
    values = np.arange(2000.0)
    values[::2] = np.nan
    pq.write_table(pa.table({"x": values}), tmp_path / "t.parquet")
    fitted = Recipe({"x": {"scale": "standard"}}).fit(tmp_path / "t.parquet")
    assert fitted.fitted["x"]["missing"] == 1000
    assert fitted.fitted["x"]["center"] == 1000.0


def test_new_missing_and_renamed_levels_are_code_0():
    train = pa.table({"city": ["Rome", "Oslo", "Rome", None], "n": pa.array([1, 2, 3, 3])})
    recipe = Recipe({"city": {"codes": True, "rare": 2}, "n": {"codes": True}}).fit(train)
    test = pa.table({"city": ["Oslo", None, "Rome", "Paris"], "n": [2.0, 3.0, None, 4.0]})
    assert recipe.apply(test).to_pydict() == {"city_code": [0, 0, 1, 0], "n_code": [2, 3, 0, 0]}


def test_frames_come_back_as_what_they_were():
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    table = pa.table({"age": [30.0, None, 50.0], "city": ["Rome", "Oslo", "Rome"]})
    recipe = Recipe({"age": {"scale": "standard"}, "city": {"codes": True}})
    wanted = {"age": [-1.0, 0.0, 1.0], "city_code": [2, 1, 2]}
    for frame, kind in (
        (table, pa.Table),
        (table.to_pandas(), pd.DataFrame),
        (pl.from_arrow(table), pl.DataFrame),
        (table.to_batches()[0], pa.RecordBatch),
    ):
        fitted = recipe.fit(frame)
        made = fitted.apply(frame)
        assert type(made) is kind
        assert pa.table({n: pa.array(made[n]) for n in wanted}).to_pydict() == wanted
        assert fitted.digest == recipe.fit(table).digest


def test_a_fitted_recipe_reads_back(tmp_path):
    table, given = generated(3)
    fitted = Recipe.of(given).fit(table)
    fitted.write(tmp_path / "recipe.json")
    again = Recipe.read(tmp_path / "recipe.json")
    assert again.digest == fitted.digest
    assert again.apply(table).equals(fitted.apply(table))
    fitted.write(tmp_path / "prepare.yaml")
    assert Recipe.read(tmp_path / "prepare.yaml").fit(table).digest == fitted.digest
