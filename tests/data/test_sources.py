"""Sources of samples, against the libraries that wrote the files."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import os
import pickle
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from range_server import serving
from ronde import feed
from ronde.data.sources import tar_index
from ronde.data.sources.base import Sample
from ronde.world import ArgumentError, SampleError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def copied(source):
    """As a loading process gets it."""
    return pickle.loads(pickle.dumps(source))  # noqa: S301


def pictures(count: int = 30, seed: int = 0) -> dict[str, bytes]:
    draw = random.Random(seed)
    return {
        f"{draw.choice(['cat', 'dog', 'eel'])}/{i:03d}.jpg": draw.randbytes(draw.randint(0, 3000))
        for i in range(count)
    }


def same_source(source, expected: list) -> None:
    """Random access gives what reading everything gave, whichever way it is asked."""
    n = len(source)
    assert n == len(expected)
    assert list(source.read(range(n))) == expected
    draw = random.Random(n)
    ids = [draw.randrange(n) for _ in range(2 * n)]  # with repetitions
    assert list(source.read(ids)) == [expected[i] for i in ids]
    assert source[n - 1] == expected[n - 1]
    assert list(source.__getitems__([0, n - 1])) == [
        expected[0],
        expected[n - 1],
    ]
    assert list(source.read([])) == []
    for wrong in (n, -1):
        with pytest.raises(IndexError):
            source.read([0, wrong])
    copy = copied(source)
    assert list(copy.read(ids[:5])) == [expected[i] for i in ids[:5]]
    assert copy.fingerprint == source.fingerprint


# Folders


def test_folder_of_classes(tmp_path):
    files = {
        **pictures(),
        "cat/deep/er.JPG": b"deep",
        "empty/none.txt": b"",
        "dog/.hidden.jpg": b"no",
        ".git/x/y.jpg": b"no",
    }
    write(tmp_path, files)
    source = feed.folder(tmp_path)
    kept = sorted(name for name in files if "/." not in "/" + name)
    classes = sorted({name.split("/")[0] for name in kept})
    assert source.classes == classes == ["cat", "dog", "eel", "empty"]
    same_source(source, [Sample(files[n], classes.index(n.split("/")[0]), n) for n in kept])
    assert source.name(3) == kept[3]
    assert source.label(3) == source[3].label
    assert type(source[3].label) is int
    assert source.sizes.tolist() == [len(files[n]) for n in kept]
    # else "empty" would be a class folder without files
    only = feed.folder(tmp_path, suffixes=[".jpg"], classes=["cat", "dog", "eel"])
    assert list(only.names) == [n for n in kept if n.lower().endswith(".jpg")]
    assert only.classes == ["cat", "dog", "eel"]
    assert list(feed.folder(tmp_path, pattern="cat/*").names) == [
        n for n in kept if n.startswith("cat/")
    ]
    assert [s.label for s in feed.folder(tmp_path, labels="none").read([0, 1])] == [None, None]
    assert list(iter(source)) == source.read(range(len(source)))


def test_folder_labels_of_a_csv_and_of_a_function(tmp_path):
    write(tmp_path / "all", {"a.1.png": b"1", "b.png": b"2", "c.png": b"3", "d.png": b"4"})

    def table(rows: list[list[str]]) -> Path:
        with open(tmp_path / "labels.csv", "w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows(rows)
        return tmp_path / "labels.csv"

    here = tmp_path / "all"
    named = feed.folder(
        here,
        labels=table(
            [["file", "kind"], ["c.png", "sea, deep"], ["a.1", "land"], ["b.png", "land"]]
        ),
    )
    assert named.classes == ["land", "sea, deep"] and named.unlabelled == 1
    assert [(s.name, s.label) for s in named.read(range(3))] == [
        ("a.1.png", 0),
        ("b.png", 0),
        ("c.png", 1),
    ]
    other = feed.folder(
        here,
        labels=table([["age", "id"], ["1.5", "b.png"], ["2", "d.png"]]),
        file_column="id",
        label_column="age",
    )
    assert other.classes is None and [s.label for s in other.read([0, 1])] == [1.5, 2.0]
    whole = feed.folder(here, labels=table([["id", "age"], ["b.png", "7"]]))
    assert whole[0].label == 7 and type(whole[0].label) is int
    assert (
        whole.fingerprint
        != feed.folder(here, labels=table([["id", "age"], ["b.png", "8"]])).fingerprint
    )
    by_function = feed.folder(here, labels=lambda name: ord(name[0]))
    assert [s.label for s in by_function.read([0, 3])] == [97, 100]
    assert feed.folder(
        here, labels=lambda name: (name[0] in "ab" and "early") or "late"
    ).classes == ["early", "late"]
    for rows, text in (
        ([["f", "l"], ["gone.png", "1"]], r"line 2: 'gone.png' is not a file"),
        (
            [["f", "l"], ["b.png", "1"], ["b", "1"]],
            r"line 3: 'b.png' appears a second time",
        ),
        ([["f", "l"], ["b.png"]], r"line 2: 1 columns, expected 2"),
        ([["f", "l"]], r"has 1"),
        (
            [["b.png", "1"], ["c.png", "2"]],
            r"needs a header line: its first line names a file, 'b.png'",
        ),
        ([["f"], ["b.png"]], r"label_column=1: .* has 1 columns"),
    ):
        with pytest.raises(ArgumentError, match=text):
            feed.folder(here, labels=table(rows))
    with pytest.raises(ArgumentError, match=r"is not a column of .*: choose among f, l"):
        feed.folder(here, labels=table([["f", "l"], ["b.png", "1"]]), label_column="kind")
    with pytest.raises(ArgumentError, match=r"no such file"):
        feed.folder(here, labels="nowhere.csv")
    with pytest.raises(ArgumentError, match=r"is in no class folder"):
        feed.folder(here)


def test_folder_errors_name_the_file(tmp_path):
    with pytest.raises(ArgumentError, match=r"does not exist"):
        feed.folder(tmp_path / "nowhere")
    write(tmp_path / "f", {"a/1.jpg": b"1", "a/2.jpg": b"2"})
    with pytest.raises(ArgumentError, match=r"is a file"):
        feed.folder(tmp_path / "f/a/1.jpg")
    with pytest.raises(ArgumentError, match=r"no file ending in .png \(2 others\)"):
        feed.folder(tmp_path / "f", suffixes=["png"])
    (tmp_path / "f/a/3.jpg").symlink_to("gone")
    # leads back to where it is
    (tmp_path / "f/a/up").symlink_to(tmp_path / "f/a", target_is_directory=True)
    source = feed.folder(tmp_path / "f", pattern="a/?.jpg")
    assert list(source.names) == ["a/1.jpg", "a/2.jpg", "a/3.jpg"]
    with pytest.raises(SampleError, match=r"a/3.jpg cannot be read: No such file"):
        source.read([0, 2])
    assert source.read([0])[0].data == b"1"


def test_links_to_folders_above_and_to_themselves(tmp_path):
    here = write(
        tmp_path / "files",
        {"a/1.txt": b"1", "a/deep/3.txt": b"3", "b/2.txt": b"2", "c/4.txt": b"4"},
    )
    (here / "a/up").symlink_to("..")
    (here / "a/deep/a").symlink_to("../../a")
    (here / "b/else").symlink_to("../c")  # leads to no folder above: its files are taken
    source = feed.folder(here)
    assert list(source.names) == ["a/1.txt", "a/deep/3.txt", "b/2.txt", "b/else/4.txt", "c/4.txt"]
    assert [s.label for s in source.read(range(5))] == [0, 0, 1, 1, 2]
    (here / "b/self").symlink_to("self")
    with pytest.raises(ArgumentError, match=r"/files/b/self cannot be listed: Too many levels"):
        feed.folder(here)


# Tars


def tar_of(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as out:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path


def samples_of(paths: list[Path]) -> list[dict]:
    """What WebDataset's rule gives, by tarfile: files that follow each other under one key."""
    found: list[dict] = []
    for path in paths:
        last = None
        with tarfile.open(path) as held:
            for member in held:
                if not member.isfile():
                    continue
                folder, slash, base = member.name.rpartition("/")
                key, _, suffix = base.partition(".")
                key = folder + slash + key
                if key != last:
                    found.append({"__key__": key})
                    last = key
                found[-1][suffix.lower()] = held.extractfile(member).read()
    return found


def web_members(count: int, seed: int, long: bool = False) -> list[tuple[str, bytes]]:
    draw = random.Random(seed)
    found = []
    for i in range(count):
        key = f"train/{'long' * 40 + '/' if long and i % 3 == 0 else ''}{seed}_{i:04d}"
        found.append((f"{key}.jpg", draw.randbytes(draw.choice([0, 1, 511, 512, 513, 5000]))))
        if i % 4:
            found.append((f"{key}.seg.PNG", draw.randbytes(40)))
        found.append((f"{key}.cls", str(draw.randrange(10)).encode()))
    return found


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_tars_of_webdataset(tmp_path, form):
    paths = [
        tar_of(
            tmp_path / f"t-{s:03d}.tar", web_members(20, s, long=form != tarfile.USTAR_FORMAT), form
        )
        for s in range(3)
    ]
    expected = samples_of(paths)
    assert len(expected) == 60
    for given in (tmp_path, str(tmp_path / "*.tar"), str(tmp_path / "t-{000..002}.tar"), paths):
        source = feed.tar(given)
        same_source(source, expected)
    pairs = feed.tar(tmp_path, data=["png", "jpg"], label="cls")
    same_source(pairs, [Sample(e["jpg"], int(e["cls"]), e["__key__"]) for e in expected])
    segments = feed.tar(tmp_path, data="seg.png", label=lambda files: len(files["jpg"]))
    assert segments[1] == Sample(
        expected[1]["seg.png"], len(expected[1]["jpg"]), expected[1]["__key__"]
    )
    with pytest.raises(
        SampleError, match=r"t-000.tar: the sample '.*0000' has no .seg.png; it has .jpg, .cls"
    ):
        segments.read([0])
    assert "t-001.tar" in source.name(25)


def test_tars_labels(tmp_path):
    tar_of(
        tmp_path / "a.tar",
        [("0.txt", b"x"), ("0.json", b'{"age": 3}'), ("0.cls", b"many"), ("1.txt", b"y")],
    )
    assert feed.tar(tmp_path, data="txt", label="json")[0].label == {"age": 3}
    assert feed.tar(tmp_path, data="json", label="txt")[0].label == "x"
    with pytest.raises(SampleError, match=r"sample '0': its label .cls cannot be read: b'many'"):
        feed.tar(tmp_path, data="txt", label="cls").read([0])
    with pytest.raises(SampleError, match=r"sample '1' has no label .cls"):
        feed.tar(tmp_path, data="txt", label="cls").read([1])
    with pytest.raises(ArgumentError, match=r"label= needs data="):
        feed.tar(tmp_path, label="cls")


def test_tars_index_is_kept_checked_and_made_anew(tmp_path, monkeypatch):
    path = tar_of(tmp_path / "a.tar", web_members(10, 0))
    index = tmp_path / "a.tar.ronde-index"
    built: list[str] = []
    build = tar_index.build_index
    monkeypatch.setattr(
        tar_index, "build_index", lambda store, at: built.append(at) or build(store, at)
    )
    expected = samples_of([path])
    assert list(feed.tar(path).read(range(10))) == expected and index.exists() and len(built) == 1
    raw = index.read_bytes()
    assert list(feed.tar(path).read(range(10))) == expected and len(built) == 1
    for wrong in (
        raw[:-30],
        b"",
        raw[: len(raw) // 2] + b"\xff" + raw[len(raw) // 2 + 1 :],
        b"PK\x03\x04 nonsense",
    ):
        index.write_bytes(wrong)
        assert list(feed.tar(path).read(range(10))) == expected
        assert index.read_bytes() == raw
    count = len(built)
    assert count == 5
    # Another tar of the same length under the same name: its time tells.
    swapped = [(name, data[::-1]) for name, data in web_members(10, 0)]
    tar_of(path, swapped)
    os.utime(path, ns=(1, 1))
    assert list(feed.tar(path).read(range(10))) == samples_of([path]) and len(built) == count + 1
    tar_of(path, web_members(40, 0))
    assert len(feed.tar(path)) == 40
    assert not list(tmp_path.glob("*.writing"))


def test_truncated_and_damaged_tars_are_named(tmp_path):
    whole = tar_of(tmp_path / "whole.tar", web_members(6, 1, long=True)).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512
    draw = random.Random(0)
    places = {*range(512, end, 512), *(draw.randrange(1, end) for _ in range(40))}
    for place in sorted(places):
        path = tmp_path / f"cut-{place}.tar"
        path.write_bytes(whole[:place])
        with pytest.raises(ArgumentError, match=rf"cut-{place}.tar (is truncated|is not a tar)"):
            feed.tar(path)
        path.unlink()
    with tarfile.open(tmp_path / "whole.tar") as held:
        first = held.getmembers()[5].offset
    (tmp_path / "a.txt").write_bytes(b"1")
    with tarfile.open(tmp_path / "link.tar", "w") as out:
        out.add(tmp_path / "a.txt", "a.txt")
        member = tarfile.TarInfo("b.txt")
        member.type, member.linkname = tarfile.SYMTYPE, "a.txt"
        out.addfile(member)
    for name, raw, says in (
        ("bent", whole[:first] + b"\x07" + whole[first + 1 :], f"is damaged at byte {first:,}"),
        ("two", whole + whole, "has data after its end"),
        ("z", gzip.compress(whole), "is compressed"),
        ("bz", bz2.compress(b"small"), "is compressed"),
        ("xz", lzma.compress(b"small"), "is compressed"),
        ("no", b"no tar" * 200, "is not a tar"),
        ("link", None, "'b.txt' is a link, .*--dereference --hard-dereference"),
        ("gone", None, "cannot be opened: No such file"),
    ):
        if raw is not None:
            (tmp_path / f"{name}.tar").write_bytes(raw)
        with pytest.raises(ArgumentError, match=rf"{name}\.tar:? {says}"):
            feed.tar(tmp_path / f"{name}.tar")
    with pytest.raises(ArgumentError, match=r"nothing matches"):
        feed.tar(str(tmp_path / "*.tgz"))
    with pytest.raises(ArgumentError, match=r"'a' has two files .txt"):
        feed.tar(tar_of(tmp_path / "twice.tar", [("a.txt", b"1"), ("a.txt", b"2")]))
    with pytest.raises(ArgumentError, match=r"no samples in"):
        feed.tar(tar_of(tmp_path / "none.tar", []))
    # Truncated after it was opened.
    source = feed.tar(tmp_path / "whole.tar")
    (tmp_path / "whole.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SampleError, match=r"whole.tar changed: it has"):
        source.read([5])


# Processes, threads, descriptors


class Hashes(Dataset):
    def __init__(self, source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, ids):
        return [(s.name, len(s.data), sum(s.data)) for s in self.source.read(ids)]


def listed(batch):
    return batch


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loading_processes_open_their_own_files(tmp_path, method):
    paths = [tar_of(tmp_path / f"{s}.tar", web_members(15, s)) for s in range(2)]
    source = feed.tar(paths, data="jpg", label="cls")
    source.read(range(30))  # open here before the others begin
    expected = [(e["__key__"], len(e["jpg"]), sum(e["jpg"])) for e in samples_of(paths)]
    loader = DataLoader(
        Hashes(source),
        4,
        num_workers=2 if method == "fork" else 1,
        multiprocessing_context=method,
        collate_fn=listed,
    )
    assert [one for batch in loader for one in batch] == expected
    assert source.read([29])[0].name == expected[29][0]


def test_tars_stay_open_up_to_a_limit_and_a_replaced_one_is_opened_anew(tmp_path):
    for i in range(300):
        tar_of(tmp_path / f"{i:03}.tar", [("a.bin", bytes([i % 256]) * 600)])
    source = feed.tar(tmp_path)
    before = len([*Path("/proc/self/fd").iterdir()])
    with ThreadPoolExecutor(8) as pool:
        for i, found in enumerate(pool.map(lambda i: source.read([i % 300]), range(900))):
            assert found[0]["bin"] == bytes([i % 300 % 256]) * 600
    assert len([*Path("/proc/self/fd").iterdir()]) - before <= 128
    tar_of(tmp_path / "new", [("a.bin", b"n" * 600)]).rename(tmp_path / "299.tar")
    assert feed.tar(tmp_path / "299.tar")[0]["bin"] == b"n" * 600


# Parquet


def tables(
    tmp_path: Path, rows: int = 500, files: int = 3, group: int = 40
) -> tuple[list[Path], pa.Table]:
    draw = np.random.default_rng(0)
    whole = pa.table(
        {
            "x": draw.normal(size=rows),
            "k": pa.array(
                [None if i % 17 == 0 and i > rows // 2 else int(i) for i in range(rows)], pa.int32()
            ),
            "flag": pa.array((draw.random(rows) < 0.5).tolist()),
            "text": [f"row {i}" if i % 5 else None for i in range(rows)],
            "raw": [bytes([i % 256]) * (i % 7) for i in range(rows)],
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array(draw.normal(size=rows * 3).astype(np.float32)), 3
            ),
            "kind": pa.array([f"k{i % 4}" for i in range(rows)]).dictionary_encode(),
        }
    )
    paths = []
    edges = [rows * i // files for i in range(files + 1)]
    for f in range(files):
        paths.append(tmp_path / f"part-{f}.parquet")
        pq.write_table(
            whole.slice(edges[f], edges[f + 1] - edges[f]), paths[-1], row_group_size=group
        )
    return paths, whole


@pytest.mark.parametrize("cache_bytes", [0, 6000, 1 << 20])
def test_parquet_against_arrow(tmp_path, cache_bytes):
    _, whole = tables(tmp_path)
    source = feed.parquet(tmp_path, cache_bytes=cache_bytes)
    assert len(source) == 500 and source.groups == 15 and source.columns == whole.column_names
    assert (source.blocks is None) == (cache_bytes == 1 << 20)
    assert source.blocks is None or sum(source.blocks) == 500
    draw = random.Random(0)
    for size in (1, 64, 700):
        ids = [draw.randrange(500) for _ in range(size)]
        expected = whole.take(pa.array(ids)).to_pydict()
        found = source.take(ids)
        assert found["x"].tolist() == expected["x"] and found["flag"].tolist() == expected["flag"]
        assert found["text"] == expected["text"]
        assert found["raw"] == expected["raw"]
        assert found["kind"] == expected["kind"]
        assert found["vector"].shape == (size, 3) and found["vector"].tolist() == expected["vector"]
        # there are nulls in one of the files: floating-point in every batch
        assert found["k"].dtype == np.float64
        assert [None if np.isnan(v) else int(v) for v in found["k"]] == expected["k"]
    row = source[7]
    assert row["text"] == "row 7" and row["k"] == 7 and list(row) == whole.column_names
    assert copied(source)[7]["raw"] == row["raw"]


@pytest.mark.parametrize("kind", ["file", "stream", "compressed"])
def test_arrow_files_are_read_as_parquet_files_are(tmp_path, kind):
    _, whole = tables(tmp_path)
    options = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "compressed" else None)
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    viewed = whole.set_column(
        whole.column_names.index("text"), "text", whole["text"].cast(pa.string_view())
    )
    for name, part in (("a", viewed.slice(0, 200)), ("b", viewed.slice(200))):
        with make(str(tmp_path / f"{name}.arrow"), part.schema, options=options) as out:
            out.write_table(part, max_chunksize=64)
    arrow = feed.parquet([tmp_path / "a.arrow", tmp_path / "b.arrow"])
    same = feed.parquet([tmp_path / f"part-{i}.parquet" for i in range(3)])
    assert len(arrow) == 500 and arrow.columns == same.columns
    ids = random.Random(0).choices(range(500), k=90)
    found, expected = arrow.take(ids), same.take(ids)
    for name in arrow.columns:
        assert np.array_equal(found[name], expected[name], equal_nan=name == "k"), name
    assert copied(arrow)[7]["text"] == "row 7"
    (tmp_path / "a.arrow").write_bytes(b"no arrow" * 9)
    with pytest.raises(ArgumentError, match=r"a\.arrow cannot be read as Arrow"):
        feed.parquet(tmp_path / "a.arrow")


def test_parquet_is_collated_by_columns(tmp_path):
    paths, whole = tables(tmp_path)
    source = feed.parquet(paths, columns=["x", "flag", "text", "vector"])
    for workers in (0, 2):
        batches = list(DataLoader(source, 64, num_workers=workers))
        assert torch.cat([b["x"] for b in batches]).tolist() == whole["x"].to_pylist()
        assert torch.cat([b["vector"] for b in batches]).shape == (500, 3)
        assert batches[0]["flag"].dtype == torch.bool
        assert [t for b in batches for t in b["text"]] == whole["text"].to_pylist()
    # Rows that were touched one by one are collated alike.
    rows = [source[i] for i in range(4)]
    assert torch.equal(torch.utils.data.default_collate(rows)["vector"], batches[0]["vector"][:4])


def test_parquet_errors(tmp_path):
    paths, _ = tables(tmp_path)
    with pytest.raises(ArgumentError, match=r"no column 'y': choose among x, k"):
        feed.parquet(paths, columns=["y"])
    with pytest.raises(ArgumentError, match=r"label= and name= go with data="):
        feed.parquet(paths, label="k")
    pq.write_table(pa.table({"x": ["text"]}), tmp_path / "part-9.parquet")
    with pytest.raises(
        ArgumentError, match=r"'x' is double in .*part-0.parquet and string in .*part-9.parquet"
    ):
        feed.parquet(str(tmp_path / "*.parquet"), columns=["x"])
    dotted = pa.table({"a": [1, 2], "a.b": [None, 2]})
    pq.write_table(dotted, tmp_path / "dotted.parquet")
    found = feed.parquet(tmp_path / "dotted.parquet").take([0, 1])
    assert found["a"].dtype == np.int64 and found["a.b"].dtype == np.float64
    raw = paths[0].read_bytes()
    (tmp_path / "cut.parquet").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ArgumentError, match=r"cut.parquet cannot be read as Parquet"):
        feed.parquet(tmp_path / "cut.parquet")
    source = feed.parquet(paths[0])
    paths[0].write_bytes(b"\0" * len(raw))
    with pytest.raises(SampleError, match=r"part-0.parquet, row group 0, cannot be read"):
        source.read([0])
    paths[0].write_bytes(raw + raw)
    with pytest.raises(SampleError, match=r"part-0.parquet changed: it has"):
        source.read([0])
    paths[0].unlink()  # max_skipped counts samples of a file that has gone
    with pytest.raises(SampleError, match=r"part-0.parquet, row group 0, cannot be read"):
        source.read([0])
    unlabelled = pa.table({"raw": [b"a"], "kind": pa.array([None], pa.string())})
    pq.write_table(unlabelled, tmp_path / "unlabelled.parquet")
    given = {"data": "raw", "label": "kind", "classes": ["cat", "dog"]}
    assert feed.parquet(tmp_path / "unlabelled.parquet", **given).classes == ["cat", "dog"]
    twice = pa.table([pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])], names=["x", "x", "y"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ArgumentError, match=r"twice.parquet has 2 columns named 'x'. Rename them"):
        feed.parquet(tmp_path / "twice.parquet")
    assert feed.parquet(tmp_path / "twice.parquet", columns=["y"]).take([1])["y"].tolist() == [6]
    views = pa.table({"n": pa.array([["a"]], pa.list_(pa.string_view())), "y": [7]})
    with pa.ipc.new_file(str(tmp_path / "views.arrow"), views.schema) as out:
        out.write_table(views)
    with pytest.raises(ArgumentError, match=r"views.arrow: the column 'n' is list<.*nested views"):
        feed.parquet(tmp_path / "views.arrow")
    assert feed.parquet(tmp_path / "views.arrow", columns=["y"])[0] == {"y": 7}
    samples = feed.parquet(paths[1:], data="raw", label="flag", name="text")
    assert samples[1] == Sample(bytes([167]) * (167 % 7), samples[1].label, "row 167")
    assert type(samples[1].label) is bool


# Tokens and arrays


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "<i8", ">u2"])
def test_tokens_are_windows_shifted_by_one(tmp_path, dtype):
    values = np.random.default_rng(0).integers(0, 200, 1003)
    values.astype(dtype).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", values[::-1].astype(np.dtype(dtype).newbyteorder("=")))
    for length, stride in ((10, None), (10, 3), (7, 20), (1002, None)):
        step = stride or length
        starts = [s for s in range(0, 1003, step) if s + length + 1 <= 1003]
        source = feed.tokens(tmp_path / "a.bin", length, dtype, stride=stride)
        assert len(source) == len(starts)
        batch = source.read([0, len(starts) - 1, 0])
        inputs, targets = torch.utils.data.default_collate(batch)
        assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == (3, length)
        for row, s in zip(range(3), (starts[0], starts[-1], starts[0]), strict=True):
            assert inputs[row].tolist() == values[s : s + length].tolist()
            assert targets[row].tolist() == values[s + 1 : s + length + 1].tolist()
            assert batch[row][0].tolist() == inputs[row].tolist()
    files = feed.tokens([tmp_path / "b.npy", tmp_path / "b.npy"], 10)
    assert len(files) == 200 and files.total == 2006
    assert files.take([150])[0].tolist() == values[::-1][500:511].tolist()
    assert len(pickle.dumps(files)) < 4000  # the numbers stay in the file
    got = list(DataLoader(files, 50, num_workers=2 if dtype == "uint16" else 0))
    assert torch.equal(torch.cat([b[0] for b in got])[150], files[150][0])


def test_tokens_errors(tmp_path):
    np.zeros(11, np.uint8).tofile(tmp_path / "a.bin")
    for arguments, text in (
        ({"length": 10}, "give its type, such as dtype"),
        ({"length": 10, "dtype": "uint16"}, "11 bytes, which is not a whole number of uint16"),
        ({"length": 11, "dtype": "uint8"}, r"11 tokens in .*a.bin are fewer than length \+ 1 = 12"),
        ({"length": 0, "dtype": "uint8"}, "length=0"),
        ({"length": 2, "dtype": "uint8", "stride": 0}, "stride=0"),
        ({"length": 2, "dtype": "float32"}, "not a whole number|integers"),
    ):
        with pytest.raises(ArgumentError, match=text):
            feed.tokens(tmp_path / "a.bin", **arguments)
    source = feed.tokens(tmp_path / "a.bin", 5, "uint8")
    with open(tmp_path / "a.bin", "ab") as file:
        file.write(b"1")
    with pytest.raises(SampleError, match=r"a.bin changed after it was opened"):
        source.read([0])


def test_arrays_errors(tmp_path):
    np.save(tmp_path / "long.npy", np.zeros(5))
    np.save(tmp_path / "short.npy", np.zeros(4))
    np.save(tmp_path / "objects.npy", np.asarray([{}, []], dtype=object), allow_pickle=True)
    np.save(tmp_path / "turned.npy", np.asfortranarray(np.zeros((3, 4))))
    np.save(tmp_path / "one.npy", np.float64(1))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "long.npy").read_bytes()[:-1])
    (tmp_path / "text.npy").write_text("text")
    for given, text in (
        (
            {"a": tmp_path / "long.npy", "b": tmp_path / "short.npy"},
            "different lengths: long.npy: 5, short.npy: 4",
        ),
        (tmp_path / "objects.npy", "Python objects"),
        (tmp_path / "turned.npy", "Fortran order"),
        (tmp_path / "one.npy", "a single number"),
        (tmp_path / "cut.npy", "cut.npy is truncated"),
        (tmp_path / "text.npy", "cannot be read as npy"),
        (tmp_path / "gone.npy", "gone.npy cannot be opened"),
        (tmp_path / "x.npz", "x.npz is no .npy file. Save each array of an .npz with numpy.save"),
        ({}, "no array was given"),
    ):
        with pytest.raises(ArgumentError, match=text):
            feed.arrays(given)


class Squares(Dataset):
    classes = ("even", "odd")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i):
        return i * i


class Many(Squares):
    def __getitems__(self, ids):
        return [("many", i * i) for i in ids]


def test_any_map_style_data_set():
    same_source(feed.dataset(Squares()), [i * i for i in range(10)])
    same_source(feed.dataset(Many()), [("many", i * i) for i in range(10)])
    assert feed.dataset(Squares()).classes == ("even", "odd")
    assert feed.dataset(Squares()).fingerprint != feed.dataset(Many()).fingerprint
    tokens = feed.arrays(np.arange(4))
    assert feed.dataset(tokens).fingerprint == tokens.fingerprint
    with pytest.raises(ArgumentError, match=r"map-style"):
        feed.dataset(type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(())})())


# Remote


def everything(folder: Path) -> None:
    write(folder / "files", pictures(12))
    for s in range(3):
        tar_of(folder / f"tars/{s}.tar", web_members(10, s))
    tables(
        write(folder / "tables", {}) if (folder / "tables").mkdir(parents=True) is None else folder
    )
    np.arange(5000, dtype=np.uint16).tofile(folder / "text.bin")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(40, 3)))
    feed.pack(folder / "files", folder / "packed", shard_bytes=1 << 16)


def check_remote(base: str, folder: Path) -> None:
    """Every source gives there what it gives here."""
    draw = random.Random(0)

    def compare(there, here) -> None:
        ids = [draw.randrange(len(here)) for _ in range(25)]
        assert len(there) == len(here)
        got, expected = (torch.utils.data.default_collate(s.read(ids)) for s in (there, here))
        if isinstance(got, list) and not torch.is_tensor(got[0]):
            assert got == expected
        elif isinstance(got, dict):
            assert all(
                np.array_equal(
                    got[k],
                    expected[k],
                    equal_nan=torch.is_tensor(got[k]) and got[k].is_floating_point(),
                )
                for k in expected
            )
        else:
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    with ThreadPoolExecutor(4) as pool:
        there, here = feed.tar(f"{base}/packed"), feed.tar(folder / "packed")
        ids = [draw.randrange(len(here)) for _ in range(15)]
        expected = feed.folder(folder / "files").read(ids)
        assert here.read(ids) == expected
        for samples in pool.map(lambda _: there.read(ids), range(4)):
            assert samples == expected
        assert there.classes == here.classes and there.fingerprint == here.fingerprint
    expected = samples_of([folder / f"tars/{s}.tar" for s in range(3)])
    same_source(feed.tar(f"{base}/tars/{{0..2}}.tar"), expected)
    compare(
        feed.parquet([f"{base}/tables/part-{i}.parquet" for i in range(3)]),
        feed.parquet(folder / "tables"),
    )
    compare(
        feed.tokens(f"{base}/text.bin", 10, "uint16"),
        feed.tokens(folder / "text.bin", 10, "uint16"),
    )
    compare(feed.arrays({"x": f"{base}/x.npy"}), feed.arrays({"x": folder / "x.npy"}))


def test_memory_file_system(tmp_path):
    everything(tmp_path / "here")
    fs = fsspec.filesystem("memory")
    fs.put(str(tmp_path / "here"), "/remote", recursive=True)
    try:
        check_remote("memory://remote", tmp_path / "here")
        files = feed.folder("memory://remote/files")
        assert files.read(range(12)) == feed.folder(tmp_path / "here/files").read(range(12))
        assert files.fingerprint == feed.folder(tmp_path / "here/files").fingerprint
        assert len(feed.tar("memory://remote/tars/*.tar")) == 30
        with pytest.raises(ArgumentError, match=r"gone.tar cannot be opened"):
            feed.tar("memory://remote/gone.tar")
        with pytest.raises(ArgumentError, match=r"nothing matches"):
            feed.tar("memory://remote/none/*.tar")
        fs.rm("/remote/files/" + files.names[3])
        with pytest.raises(SampleError, match=f"{files.names[3]} cannot be read: no such file"):
            files.read([2, 3])
    finally:
        fs.rm("/remote", recursive=True)


def test_web_server(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before another try
    everything(tmp_path)
    with serving(tmp_path) as server:
        check_remote(server.url, tmp_path)
        source = feed.tar(f"{server.url}/tars/0.tar", data="jpg", label="cls")
        expected = samples_of([tmp_path / "tars/0.tar"])
        with pytest.raises(ArgumentError, match=r"gone.tar cannot be opened"):
            feed.tar(f"{server.url}/gone.tar")
        # Requests that fail are made again; those that go on failing are an error that names the
        # file.
        server.fail = 1
        assert source.read([3])[0].data == expected[3]["jpg"]
        table = feed.parquet(f"{server.url}/tables/part-0.parquet")
        server.fail = 1
        assert table.take([3])["x"] == feed.parquet(tmp_path / "tables").take([3])["x"]
        server.fail = 1000
        with pytest.raises(
            SampleError, match=r"part-1.parquet cannot be read: ClientResponse.*503"
        ):
            feed.parquet(f"{server.url}/tables/part-1.parquet")
        with pytest.raises(SampleError, match=r"0.tar cannot be read: ClientResponseError: 503"):
            source.read([3])
        server.fail = 0
        server.ranges = False
        with pytest.raises(SampleError, match=r"does not support range requests"):
            source.read([3])
