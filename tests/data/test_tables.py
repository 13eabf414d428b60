"""Tables against pyarrow's own values, row by row."""

import math
import pickle
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader

from feeding import read, take, with_executor
from ronde import feed
from ronde.world import ArgumentError, SampleError

N = 1000


def columns(seed=0, n=N):
    rng = np.random.default_rng(seed)
    gone = rng.random(n) < 0.1
    return pa.table(
        {
            "price": pa.array(
                [None if g else float(v) for g, v in zip(gone, rng.normal(50, 9, n), strict=True)],
                type=pa.float64(),
            ),
            "rooms": pa.array(rng.integers(0, 9, n), type=pa.int16()),
            "new": pa.array(rng.random(n) < 0.5),
            "nan": pa.array(
                np.where(rng.random(n) < 0.2, np.nan, rng.normal(0, 1, n)), type=pa.float32()
            ),
            "city": pa.array(
                [
                    None if i % 13 == 0 else ("Rome", "Oslo", "Bern")[int(i % 3)]
                    for i in rng.integers(0, 60, n)
                ]
            ),
            "zone": pa.array(rng.integers(-3, 30, n), type=pa.int64()),
            "kind": pa.array(
                [("a", "b")[int(i)] for i in rng.integers(0, 2, n)]
            ).dictionary_encode(),
            "y": pa.array(rng.normal(0, 1, n)),
            "count": pa.array(rng.integers(0, 5, n)),
            "label": pa.array([("yes", "no", "maybe")[int(i)] for i in rng.integers(0, 3, n)]),
        }
    )


NUMERIC, CATEGORICAL = ["price", "rooms", "nan"], ["city", "zone", "kind"]
STEPS = {name: {} for name in NUMERIC} | {name: {"codes": True} for name in CATEGORICAL}


def fitted(path, target=None, steps=STEPS):
    return feed.Recipe(steps, target).fit(path, engine="arrow")


def write(table, path):
    if path.suffix == ".csv":
        pa.csv.write_csv(
            table.set_column(
                table.column_names.index("kind"), "kind", table["kind"].cast(pa.string())
            ),
            path,
        )
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path, chunksize=300)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    else:
        pa.parquet.write_table(table, path, row_group_size=300)
    return path


def oracle(table):
    """Row by row, in plain Python: numbers, codes, and the means that fill."""
    rows = table.to_pylist()
    means, levels = {}, {}
    for name in NUMERIC:
        known = [float(r[name]) for r in rows if r[name] is not None and not math.isnan(r[name])]
        means[name] = sum(known) / len(known)
    for name in CATEGORICAL:
        levels[name] = [None, *sorted({r[name] for r in rows if r[name] is not None})]
    numbers = [
        [means[n] if r[n] is None or math.isnan(r[n]) else float(r[n]) for n in NUMERIC]
        for r in rows
    ]
    codes = [[levels[n].index(r[n]) for n in CATEGORICAL] for r in rows]
    return torch.tensor(numbers, dtype=torch.float32), torch.tensor(codes), means


@pytest.mark.parametrize("suffix", ["parquet", "csv", "feather", "arrow"])
def test_every_row_against_pyarrow(tmp_path, suffix):
    table = columns()
    path = write(table, tmp_path / f"t.{suffix}")
    numbers, codes, _ = oracle(table)
    data = feed.table(path, recipe=fitted(path, "y"), cache=tmp_path / "cache")
    assert len(data) == N
    assert data.source.sizes == [4, 34, 3]
    wanted = np.random.default_rng(1).integers(0, N, 50).tolist()
    (x, c), y = data.collate(data.__getitems__(wanted))
    assert (x.dtype, c.dtype, y.dtype) == (torch.float32, torch.int64, torch.float32)
    assert torch.allclose(x, numbers[wanted], rtol=1e-6)
    assert torch.equal(c, codes[wanted])
    assert torch.allclose(y, torch.tensor(table["y"].to_pylist())[wanted])
    one = data[wanted[0]]
    assert torch.equal(one[0][0], x[0])
    assert torch.equal(one[0][1], c[0])
    assert one[1] == y[0]
    # rows that were read one by one
    assert torch.equal(data.collate([data[i] for i in wanted])[0][1], c)


def test_targets(tmp_path):
    table = columns()
    path = write(table, tmp_path / "t.parquet")
    recipe = fitted(path, "count", {"rooms": {}})
    kinds = {"y": torch.float32, "count": torch.int64, "label": torch.int64, "new": torch.int64}
    for name, dtype in kinds.items():
        data = feed.table(path, recipe=recipe, target=name, cache=tmp_path / "c")
        x, y = data.collate(data.__getitems__(range(N)))
        assert x.shape == (N, 1)
        assert y.dtype == dtype
        classes = data.source.classes
        values = [classes[i] for i in y.tolist()] if classes else y.tolist()
        expected = table[name].to_pylist()
        assert values == (pytest.approx(expected) if name == "y" else expected)
    alone = feed.table(path, recipe=fitted(path, None, {"kind": {"codes": True}}), cache=tmp_path)
    assert alone.collate(alone.__getitems__([0, 1]))[0].shape == (2, 1)
    assert alone[0][0].shape == (1,)


def test_a_test_table_has_the_recipe_and_the_classes_of_the_training_table(tmp_path):
    train, test = columns(0), columns(1)
    test = test.set_column(
        test.column_names.index("city"), "city", pa.array(["Paris", "Bern"] * (N // 2))
    )
    path = write(train, tmp_path / "a.parquet")
    first = feed.table(path, recipe=fitted(path, "label"), cache=tmp_path / "c")
    other = feed.table(write(test, tmp_path / "b.parquet"), like=first, cache=tmp_path / "c")
    (x, codes), y = other.collate(other.__getitems__(range(N)))
    assert codes[:, 0].tolist() == [0, 1] * (N // 2)  # the training table has no Paris
    assert [first.source.classes[i] for i in y.tolist()] == test["label"].to_pylist()
    means, prices = oracle(train)[2], test["price"].to_pylist()
    assert {round(x[i, 0].item(), 3) for i in range(N) if prices[i] is None} == {
        round(means["price"], 3)
    }
    bad = test.set_column(9, "label", pa.array(["yes"] * 7 + ["never"] * (N - 7)))
    with pytest.raises(
        ArgumentError, match=r"'label' is an unknown class \('never'\); the first such row .* is 7"
    ):
        feed.table(write(bad, tmp_path / "b.parquet"), like=first, cache=tmp_path / "c")


def test_several_files_and_any_number_of_workers(tmp_path):
    parts = [columns(seed, n) for seed, n in ((0, 30), (1, 1), (2, 77))]
    for i, part in enumerate(parts):
        write(part, tmp_path / f"part{i}.parquet")
    whole = pa.concat_tables([p.set_column(6, "kind", p["kind"].cast(pa.string())) for p in parts])
    paths = str(tmp_path / "part*.parquet")
    recipe = fitted(paths, "count", {"rooms": {}, "zone": {"codes": True}})
    data = feed.table(paths, recipe=recipe, cache=tmp_path / "c")
    taken = take(data, seed=3)
    order = taken.order.ids(0, 0, len(data)).tolist()
    first = read(with_executor(taken, "none"), batch=16)
    assert [int(v) for (x, _), _ in first for v in x[:, 0]] == [
        whole["rooms"].to_pylist()[i] for i in order
    ]
    for workers in (1, 2):
        found = read(with_executor(taken, "processes", workers), batch=16)
        for ((x, c), y), ((x0, c0), y0) in zip(found, first, strict=True):
            assert torch.equal(x, x0) and torch.equal(c, c0) and torch.equal(y, y0)
    plain = [y for _, y in DataLoader(data, 16)]
    assert torch.cat(plain).tolist() == whole["count"].to_pylist()
    assert torch.equal(pickle.loads(pickle.dumps(data))[5][0][0], data[5][0][0])  # noqa: S301


def test_tables_say_what_is_wrong(tmp_path):
    path, cache = write(columns(), tmp_path / "t.parquet"), tmp_path / "c"
    recipe = fitted(path, None, {"rooms": {}})
    (tmp_path / "bad.parquet").write_bytes(path.read_bytes()[:500])
    (tmp_path / "bad.csv").write_text("rooms,b\n1,2\nx,3\n")
    (tmp_path / "empty.csv").write_text("rooms,b\n")
    (tmp_path / "t.xlsx").write_text("no")
    (tmp_path / "far.csv").write_text("rooms,y\n1,0.5\n2,inf\n")
    (tmp_path / "big.csv").write_text("rooms,y\n1,0.5\n2,1e39\n")
    (tmp_path / "1.csv").write_text("rooms,y\n1,0.5\n")
    (tmp_path / "2.csv").write_text("rooms,y\n1,a\n")
    for says, where, more in (
        (r"takes the columns from recipe=, a fitted one: feed\.Recipe", path, {"recipe": None}),
        (r"numeric= is unknown; it takes the columns from recipe=", path, {"numeric": ["rooms"]}),
        (r"like= takes a table from feed\.table", path, {"like": 3}),
        (r"target 'rooms' is among columns", path, {"target": "rooms"}),
        (r"t\.parquet has no column 'cost', which is the target", path, {"target": "cost"}),
        ("target 'price' is missing, or no finite number; the first", path, {"target": "price"}),
        (r"far\.csv: the target 'y' .* such row of the table is 1", "far.csv", {"target": "y"}),
        (r"^feed\.table: the column 'y' holds 1e\+39, beyond float32", "big.csv", {"target": "y"}),
        (r"2\.csv: the target 'y' is text: expected number", "[12].csv", {"target": "y"}),
        (r"bad\.parquet cannot be read", "bad.parquet", {}),
        (r"bad\.csv cannot be read: .*'x'", "bad.csv", {}),
        (r"empty\.csv holds no row", "empty.csv", {}),
        ("is none of .parquet", "t.xlsx", {}),
        (r"reads local files, not URLs: copy memory://x/t\.csv here", "memory://x/t.csv", {}),
    ):
        place = where if "://" in str(where) else tmp_path / where
        with pytest.raises((ArgumentError, SampleError), match=says):
            feed.table(place, **{"recipe": recipe, "cache": cache, **more})
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    path = write(columns(), tmp_path / "t.parquet")
    recipe = fitted(path, None, {"rooms": {}})

    def full(*_):
        raise OSError("4096 requested and 0 written")

    monkeypatch.setattr(sys.modules["ronde.data.tabular"], "_build", full)
    with pytest.raises(
        ArgumentError, match=r"kept: the disk is full \(.*folder on another disk with cache="
    ):
        feed.table(path, recipe=recipe, cache=tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())
    monkeypatch.undo()
    data = feed.table(path, recipe=recipe, cache=tmp_path / "kept")
    (numeric,) = (tmp_path / "kept").glob("*/numeric")
    numeric.write_bytes(numeric.read_bytes()[:-1])
    with pytest.raises(ArgumentError, match=r"missing or damaged .* Run again to rebuild it"):
        data.source.read([0])
    assert len(feed.table(path, recipe=recipe, cache=tmp_path / "kept")[0][0]) == 1
