"""Tables against pyarrow's own values, row by row."""

import math
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader

from ronde import feed
from ronde.plan.batch import shares
from ronde.world import ArgumentError, SampleError


def read(pipeline, workers=0, batch=3):
    taken = feed.take_over(
        pipeline, seed=3, batch_size=None, shuffle=True, shuffle_dataset=True, drop_last=False
    )
    taken = feed.apply_settings(
        taken, feed.FeedSettings(executor="processes" if workers else "none", workers=workers)
    )
    loader = feed.Feed(taken.dataset, taken.order, taken.settings, 3)
    order = taken.order.ids(0, 0, len(pipeline)).tolist()
    return order, [
        micros[0] for _, micros in loader.read(lambda: shares(0, 0, len(pipeline), batch, 0, 1))
    ]


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


NUMERIC, CATEGORICAL = ["price", "rooms", "new", "nan"], ["city", "zone", "kind"]


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


def oracle(table, missing="mean"):
    """Row by row, in plain Python."""
    rows = table.to_pylist()
    means = {}
    for name in NUMERIC:
        known = [float(r[name]) for r in rows if r[name] is not None and not math.isnan(r[name])]
        means[name] = sum(known) / len(known)
    vocabularies = {
        "city": sorted({r["city"] for r in rows if r["city"] is not None}),
        "zone": [str(v) for v in sorted({r["zone"] for r in rows})],
        "kind": ["a", "b"],
    }
    numbers = []
    for r in rows:
        fill = means if missing == "mean" else dict.fromkeys(NUMERIC, missing)
        numbers.append(
            [fill[n] if r[n] is None or math.isnan(r[n]) else float(r[n]) for n in NUMERIC]
        )
    codes = [
        [0 if r[n] is None else 1 + vocabularies[n].index(str(r[n])) for n in CATEGORICAL]
        for r in rows
    ]
    return torch.tensor(numbers, dtype=torch.float32), torch.tensor(codes), means, vocabularies


@pytest.mark.parametrize("suffix", ["parquet", "csv", "feather", "arrow"])
def test_every_row_against_pyarrow(tmp_path, suffix):
    table = columns()
    path = write(table, tmp_path / f"t.{suffix}")
    numbers, codes, means, vocabularies = oracle(table)
    data = feed.table(
        path,
        numeric=NUMERIC[:2] + NUMERIC[3:],
        categorical=CATEGORICAL,
        target="y",
        cache=tmp_path / "cache",
    )
    assert (
        len(data) == N
        and data.source.vocabularies == vocabularies
        and data.source.sizes == [4, 34, 3]
    )
    assert [round(data.source.mean[k], 6) for k in (0, 2)] == [
        round(means[n], 6) for n in ("price", "nan")
    ]
    wanted = np.random.default_rng(1).integers(0, N, 50).tolist()
    (x, c), y = data.collate(data.__getitems__(wanted))
    assert x.dtype == torch.float32 and c.dtype == torch.int64 and y.dtype == torch.float32
    assert torch.allclose(x, numbers[wanted][:, [0, 1, 3]], rtol=1e-6) and torch.equal(
        c, codes[wanted]
    )
    assert torch.allclose(y, torch.tensor(table["y"].to_pylist())[wanted])
    one = data[wanted[0]]
    assert torch.equal(one[0][0], x[0]) and torch.equal(one[0][1], c[0]) and one[1] == y[0]
    # rows that were read one by one
    assert torch.equal(data.collate([data[i] for i in wanted])[0][1], c)
    gone = table["price"].null_count
    assert (
        data.source.missing["price"] == gone > 0
        and data.source.missing["city"] == table["city"].null_count > 0
    )


def test_targets(tmp_path):
    table = columns()
    path = write(table, tmp_path / "t.parquet")
    for name, dtype in (
        ("y", torch.float32),
        ("count", torch.int64),
        ("label", torch.int64),
        ("new", torch.int64),
    ):
        data = feed.table(path, numeric=["rooms"], target=name, cache=tmp_path / "c")
        x, y = data.collate(data.__getitems__(range(N)))
        assert x.shape == (N, 1) and y.dtype == dtype
        if name == "label":
            assert data.source.classes == ["maybe", "no", "yes"]
            assert [data.source.classes[i] for i in y.tolist()] == table["label"].to_pylist()
        elif name == "count":
            assert y.tolist() == table["count"].to_pylist()
    alone = feed.table(path, categorical=["kind"], cache=tmp_path / "c")
    assert alone.collate(alone.__getitems__([0, 1]))[0].shape == (2, 1) and alone[0][0].shape == (
        1,
    )


def test_a_test_table_speaks_the_training_tables_language(tmp_path):
    train, test = columns(0), columns(1)
    test = test.set_column(
        test.column_names.index("city"), "city", pa.array(["Paris", "Bern"] * (N // 2))
    )
    first = feed.table(
        write(train, tmp_path / "a.parquet"),
        numeric=NUMERIC,
        categorical=CATEGORICAL,
        target="label",
        cache=tmp_path / "c",
    )
    other = feed.table(write(test, tmp_path / "b.parquet"), like=first, cache=tmp_path / "c")
    (x, codes), y = other.collate(other.__getitems__(range(N)))
    assert codes[:, 0].tolist() == [0, 1] * (N // 2)  # Paris was never seen
    assert [first.source.classes[i] for i in y.tolist()] == test["label"].to_pylist()
    means, prices = oracle(train)[2], test["price"].to_pylist()
    assert {round(x[i, 0].item(), 3) for i in range(N) if prices[i] is None} == {
        round(means["price"], 3)
    }
    with pytest.raises(
        ArgumentError,
        match=r"b\.parquet: the target 'label' is an unknown class \('never'\); the "
        r"first such row of the table is 0",
    ):
        feed.table(
            write(test.set_column(9, "label", pa.array(["never"] * N)), tmp_path / "b.parquet"),
            like=first,
            cache=tmp_path / "c",
        )


def test_several_files_and_any_number_of_workers(tmp_path):
    parts = [columns(seed, n) for seed, n in ((0, 30), (1, 1), (2, 77))]
    for i, part in enumerate(parts):
        write(part, tmp_path / f"part{i}.parquet")
    whole = pa.concat_tables([p.set_column(6, "kind", p["kind"].cast(pa.string())) for p in parts])
    data = feed.table(
        tmp_path / "part*.parquet",
        numeric=["rooms"],
        categorical=["zone"],
        target="count",
        cache=tmp_path / "c",
    )
    order, first = read(data, 0, batch=16)
    assert [int(v) for (x, _), _ in first for v in x[:, 0]] == [
        whole["rooms"].to_pylist()[i] for i in order
    ]
    for workers in (1, 2):
        again, found = read(data, workers, batch=16)
        assert again == order
        for ((x, c), y), ((x0, c0), y0) in zip(found, first, strict=True):
            assert torch.equal(x, x0) and torch.equal(c, c0) and torch.equal(y, y0)
    plain = [y for _, y in DataLoader(data, 16)]
    assert torch.cat(plain).tolist() == whole["count"].to_pylist()
    assert torch.equal(pickle.loads(pickle.dumps(data))[5][0][0], data[5][0][0])  # noqa: S301


def test_a_table_trains(tmp_path, monkeypatch):
    """Through the same door as a script's data."""
    import ronde

    monkeypatch.setenv("RONDE_RUNS", "none")
    monkeypatch.setenv("RONDE_PROGRESS", "quiet")
    n = 256
    x = np.random.default_rng(0).standard_normal(n)
    pa.parquet.write_table(pa.table({"x": x, "y": 3 * x + 1}), tmp_path / "t.parquet")
    data = feed.table(tmp_path / "t.parquet", numeric=["x"], target="y", cache=tmp_path / "c")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Flatten(0))
    run = ronde.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        loss=torch.nn.functional.mse_loss,
        batch_size=32,
    )
    for _ in run.epochs(8):
        for batch in run.batches():
            run.step(batch)
    assert abs(model[0].weight.item() - 3) < 0.05 and abs(model[0].bias.item() - 1) < 0.05


def test_tables_say_what_is_wrong(tmp_path):
    path, cache = write(columns(), tmp_path / "t.parquet"), tmp_path / "c"
    (tmp_path / "bad.parquet").write_bytes(path.read_bytes()[:500])
    (tmp_path / "bad.csv").write_text("a,b\n1,2\nx,3\n")
    (tmp_path / "empty.csv").write_text("a,b\n")
    (tmp_path / "t.xlsx").write_text("no")
    for make, kind, says in (
        (lambda: feed.table(path, cache=cache), ArgumentError, "needs columns"),
        (
            lambda: feed.table(path, numeric=["cost"], cache=cache),
            ArgumentError,
            r"t\.parquet has no column 'cost': choose among price, rooms",
        ),
        (
            lambda: feed.table(path, numeric=["city"], cache=cache),
            ArgumentError,
            "the column 'city' is string, not a number",
        ),
        (
            lambda: feed.table(path, numeric=["rooms"], target="rooms", cache=cache),
            ArgumentError,
            "'rooms' is named twice among",
        ),
        (
            lambda: feed.table(path, numeric=["rooms"], target="price", cache=cache),
            ArgumentError,
            "the target 'price' is missing; the first such row of the table is",
        ),
        (
            lambda: feed.table(path, numeric=["rooms"], missing="zero", cache=cache),
            ArgumentError,
            "expected 'mean', 'nan' or a number",
        ),
        (
            lambda: feed.table(tmp_path / "bad.parquet", numeric=["rooms"], cache=cache),
            SampleError,
            r"bad\.parquet cannot be read",
        ),
        (
            lambda: feed.table(tmp_path / "bad.csv", numeric=["a"], cache=cache),
            SampleError,
            r"bad\.csv cannot be read: .*'x'",
        ),
        (
            lambda: feed.table(tmp_path / "empty.csv", numeric=["a"], cache=cache),
            ArgumentError,
            r"empty\.csv holds no row",
        ),
        (
            lambda: feed.table(tmp_path / "t.xlsx", numeric=["a"], cache=cache),
            ArgumentError,
            "is none of .parquet",
        ),
        (
            lambda: feed.table(path, numeric=["rooms"], like=3, cache=cache),
            ArgumentError,
            r"like= takes a table from feed\.table",
        ),
    ):
        with pytest.raises(kind, match=says):
            make()
    assert not [p for p in cache.iterdir() if p.name.startswith(".")]
