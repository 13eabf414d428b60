"""Sources of samples, against the libraries that wrote the files."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ronde
from range_server import serving
from ronde import feed
from ronde.data.sources import byte_ranges, tar_index
from ronde.data.sources.base import Batch, Names, Sample
from ronde.data.sources.byte_ranges import ByteRange, Store
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
    assert source[n - 1] == expected[n - 1] and list(source.__getitems__([0, n - 1])) == [
        expected[0],
        expected[n - 1],
    ]
    assert list(source.read([])) == []
    for wrong in (n, -1):
        with pytest.raises(IndexError):
            source.read([0, wrong])
    copy = copied(source)
    assert (
        list(copy.read(ids[:5])) == [expected[i] for i in ids[:5]]
        and copy.fingerprint == source.fingerprint
    )


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
    assert (
        source.name(3) == kept[3]
        and source.label(3) == source[3].label
        and type(source[3].label) is int
    )
    assert source.sizes.tolist() == [len(files[n]) for n in kept]
    # else "empty" would be a class folder without files
    only = feed.folder(tmp_path, suffixes=[".jpg"], classes=["cat", "dog", "eel"])
    assert list(only.names) == [n for n in kept if n.lower().endswith(".jpg")] and only.classes == [
        "cat",
        "dog",
        "eel",
    ]
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


def test_fingerprints_follow_names_sizes_and_labels(tmp_path):
    write(tmp_path / "a", {"x/1": b"12", "y/2": b"3"})
    mark = feed.folder(tmp_path / "a").fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert feed.folder(tmp_path / "b").fingerprint == mark  # elsewhere, the same
    write(tmp_path / "b", {"x/1": b"123"})
    bigger = feed.folder(tmp_path / "b").fingerprint
    (tmp_path / "b/x/1").rename(tmp_path / "b/x/3")
    renamed = feed.folder(tmp_path / "b").fingerprint
    without = feed.folder(tmp_path / "b", labels=None).fingerprint
    assert len({mark, bigger, renamed, without}) == 4 and all(len(m) == 16 for m in (mark, bigger))


def test_names_are_any_bytes():
    names = ["", "a", "é/\udcff.jpg", "b" * 300]
    held = Names.of(names)
    assert (
        list(held) == names == [held[i] for i in range(4)]
        and held[-1] == names[3]
        and held[1:3] == names[1:3]
    )
    assert list(Names.joined([held, Names.of([]), held])) == names * 2
    with pytest.raises(IndexError):
        held[4]


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
    with pytest.raises(SampleError, match=r"label .cls of sample '0' cannot be read: b'many'"):
        feed.tar(tmp_path, data="txt", label="cls").read([0])
    with pytest.raises(SampleError, match=r"sample '1' has no label .cls"):
        feed.tar(tmp_path, data="txt", label="cls").read([1])
    with pytest.raises(ArgumentError, match=r"label= needs data="):
        feed.tar(tmp_path, label="cls")


def test_files_without_an_ending_are_no_samples(tmp_path):
    tar_of(
        tmp_path / "a.tar",
        [
            ("README", b"r"),
            ("d.1/LICENSE", b"l"),
            ("d.1/0.jpg", b"x"),
            ("d.1/0.cls", b"1"),
            ("d.1/sums", b"s"),
        ],
    )
    source = feed.tar(tmp_path / "a.tar", data="jpg", label="cls")
    assert [(s.data, s.label, s.name) for s in source.read(range(len(source)))] == [
        (b"x", 1, "d.1/0")
    ]


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


def test_tars_index_elsewhere_where_it_cannot_lie_beside(tmp_path):
    path = tar_of(tmp_path / "t/a.tar", web_members(5, 0))
    (tmp_path / "t/a.tar.ronde-index").mkdir()  # cannot be written to, even by root
    assert len(feed.tar(path)) == 5
    kept = list((tmp_path / "cache").rglob("*.ronde-index"))
    assert len(kept) == 1 and list(feed.tar(path).read([3])) == samples_of([path])[3:4]


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
    first = len(whole) // 2
    with tarfile.open(tmp_path / "whole.tar") as held:
        first = held.getmembers()[5].offset
    (tmp_path / "bent.tar").write_bytes(whole[:first] + b"\x07" + whole[first + 1 :])
    with pytest.raises(ArgumentError, match=rf"bent.tar is damaged at byte {first:,}"):
        feed.tar(tmp_path / "bent.tar")
    (tmp_path / "z.tar").write_bytes(gzip.compress(whole))
    with pytest.raises(ArgumentError, match=r"z.tar is compressed"):
        feed.tar(tmp_path / "z.tar")
    for name, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        small = compress(tar_of(tmp_path / "small.tar", [("a.txt", b"1")]).read_bytes())
        assert len(small) < 512
        (tmp_path / f"small.tar.{name}").write_bytes(small)
        with pytest.raises(ArgumentError, match=rf"small.tar.{name} is compressed"):
            feed.tar(tmp_path / f"small.tar.{name}")
    (tmp_path / "n.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(ArgumentError, match=r"n.tar is not a tar"):
        feed.tar(tmp_path / "n.tar")
    with pytest.raises(ArgumentError, match=r"nothing matches"):
        feed.tar(str(tmp_path / "*.tgz"))
    with pytest.raises(ArgumentError, match=r"gone.tar cannot be opened: No such file"):
        feed.tar(tmp_path / "gone.tar")
    with pytest.raises(ArgumentError, match=r"'a' has two files .txt"):
        feed.tar(tar_of(tmp_path / "twice.tar", [("a.txt", b"1"), ("a.txt", b"2")]))
    with pytest.raises(ArgumentError, match=r"no samples in"):
        feed.tar(tar_of(tmp_path / "none.tar", []))
    # Truncated after it was opened.
    source = feed.tar(tmp_path / "whole.tar")
    (tmp_path / "whole.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SampleError, match=r"whole.tar (has changed|ends at byte [\d,]+;)"):
        source.read([5])


def test_tars_put_together_and_large_numbers(tmp_path):
    one, two = web_members(4, 0), web_members(4, 1)
    raw = (
        tar_of(tmp_path / "1.tar", one).read_bytes() + tar_of(tmp_path / "2.tar", two).read_bytes()
    )
    (tmp_path / "both.tar").write_bytes(raw)
    expected = samples_of([tmp_path / "1.tar", tmp_path / "2.tar"])
    assert list(feed.tar(tmp_path / "both.tar").read(range(8))) == expected
    # Folders, links out of the tar and what macOS leaves behind are no samples; sizes may be
    # written in base 256.
    with tarfile.open(tmp_path / "odd.tar", "w") as out:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/link.jpg", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "../elsewhere.jpg"
            out.addfile(member)
        for name in ("d/._0.jpg", "__meta__/1.jpg", "d/0.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 3
            out.addfile(member, io.BytesIO(b"abc"))
    raw = bytearray((tmp_path / "odd.tar").read_bytes())
    at = raw.index(b"d/0.jpg\0" + b"\0" * 92 + b"0000644")
    raw[at + 124 : at + 136] = b"\x80" + (3).to_bytes(11, "big")
    raw[at + 148 : at + 156] = b" " * 8
    raw[at + 148 : at + 156] = b"%06o\0 " % sum(raw[at : at + 512])
    (tmp_path / "odd.tar").write_bytes(raw)
    with pytest.warns(RuntimeWarning, match=r"links without a target in the tar are skipped \(1\)"):
        odd = feed.tar(tmp_path / "odd.tar")
    assert list(odd.read([0])) == [{"__key__": "d/0", "jpg": b"abc"}] and len(odd) == 1


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


def test_threads_share_few_descriptors(tmp_path, monkeypatch):
    paths = [tar_of(tmp_path / f"{s:02d}.tar", web_members(8, s)) for s in range(24)]
    monkeypatch.setattr(byte_ranges, "open_files", byte_ranges._OpenFiles(5))
    source = feed.tar(paths)
    expected = samples_of(paths)
    draw = random.Random(1)
    batches = [[draw.randrange(len(expected)) for _ in range(20)] for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        for ids, found in zip(batches, pool.map(source.read, batches), strict=True):
            assert list(found) == [expected[i] for i in ids]
    source.read([0])
    assert 0 < byte_ranges.open_files.count() <= 5 + 8
    source.read(range(0, len(expected), 8))
    assert byte_ranges.open_files.count() <= 5


def fork_and_read(source, expected) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(0 if list(source.read([3])) == expected else 1)
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_a_fork_while_threads_read(tmp_path):
    path = tar_of(tmp_path / "a.tar", web_members(20, 0))
    source, expected = feed.tar(path, read="blocks"), samples_of([path])[3:4]
    source._cache.most_bytes = 0  # so that threads are always making something
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            source.read(range(20))

    threads = [threading.Thread(target=hammer) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            fork_and_read(source, expected)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_the_cache_makes_once_what_many_want():
    cache: byte_ranges.BytesCache[int, bytes] = byte_ranges.BytesCache(1000, len)
    made: list[int] = []
    gate = threading.Barrier(4)

    def make(keys: list[int]) -> list[bytes]:
        made.extend(keys)
        time.sleep(0.05)
        return [bytes([k]) * 100 for k in keys]

    def ask(low: int) -> dict[int, bytes]:
        gate.wait()
        return cache.get([low, low + 1, 5, 6], make)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert all(
        got[k] == bytes([k]) * 100 for low, got in enumerate(found) for k in (low, low + 1, 5, 6)
    )
    assert sorted(made) == sorted(set(made)) and cache.bytes <= 1000
    for k in range(20, 60):
        cache.get([k], make)
    assert cache.bytes <= 1000 and cache.get([59], lambda keys: []) == {59: bytes([59]) * 100}
    assert (
        cache.get([200, 200], lambda keys: [b"x" * 5000 for _ in keys])[200] == b"x" * 5000
        and cache.bytes <= 1000
    )

    def fails(keys: list[int]) -> list[bytes]:
        raise OSError("disk")

    with pytest.raises(OSError, match=r"disk"):
        cache.get([99], fails)
    assert cache.get([99], make)[99] == bytes([99]) * 100


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
    assert (source.blocks is None) == (cache_bytes == 1 << 20) and (
        source.blocks is None or sum(source.blocks) == 500
    )
    draw = random.Random(0)
    for size in (1, 64, 700):
        ids = [draw.randrange(500) for _ in range(size)]
        expected = whole.take(pa.array(ids)).to_pydict()
        found = source.take(ids)
        assert found["x"].tolist() == expected["x"] and found["flag"].tolist() == expected["flag"]
        assert (
            found["text"] == expected["text"]
            and found["raw"] == expected["raw"]
            and found["kind"] == expected["kind"]
        )
        assert found["vector"].shape == (size, 3) and found["vector"].tolist() == expected["vector"]
        # there are nulls in one of the files: floating-point in every batch
        assert found["k"].dtype == np.float64
        assert [None if np.isnan(v) else int(v) for v in found["k"]] == expected["k"]
    assert source._cache.bytes <= cache_bytes
    row = source[7]
    assert row["text"] == "row 7" and row["k"] == 7 and list(row) == whole.column_names
    assert copied(source)[7]["raw"] == row["raw"]


@pytest.mark.parametrize(
    "rows",
    [[[1, 2, 3], [4, 5, 6], None, [7, 8, 9]], [[1, 2, 3], [4, 5, 6], [0, None, 0], [7, 8, 9]]],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_lists_of_constant_length_with_nulls_are_lists_whatever_is_read_together(
    tmp_path, kind, rows
):
    table = pa.table(
        {
            "e": pa.array(rows, pa.list_(pa.int32(), 3)),
            "f": pa.array([[1, 2]] * 4, pa.list_(pa.int32(), 2)),
        }
    )
    if kind == "parquet":
        pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    else:
        with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as out:
            out.write_table(table, max_chunksize=2)
    source = (
        feed.parquet(tmp_path / "x.parquet")
        if kind == "parquet"
        else feed.arrays(tmp_path / "x.arrow")
    )
    for ids in ([0], [0, 1], [2, 3], [3], [0, 2], [3, 2, 1, 0]):
        found = source.take(ids)
        assert found["e"] == [rows[i] for i in ids] and found["f"].shape == (len(ids), 2)
        assert [row["e"] for row in source.read(ids)] == found["e"]
    if kind == "parquet":
        pq.write_table(table, tmp_path / "bare.parquet", row_group_size=2, write_statistics=False)
        with pytest.raises(
            SampleError,
            match=r"bare.parquet, row group 1: the column 'e' holds nulls that the file does not declare",
        ):
            feed.parquet(tmp_path / "bare.parquet").read([0, 2])


def test_parquet_is_collated_by_columns(tmp_path):
    paths, whole = tables(tmp_path)
    source = feed.parquet(paths, columns=["x", "flag", "text", "vector"])
    for workers in (0, 2):
        batches = list(DataLoader(source, 64, num_workers=workers))
        assert torch.cat([b["x"] for b in batches]).tolist() == whole["x"].to_pylist()
        assert (
            torch.cat([b["vector"] for b in batches]).shape == (500, 3)
            and batches[0]["flag"].dtype == torch.bool
        )
        assert [t for b in batches for t in b["text"]] == whole["text"].to_pylist()
    # Rows that were touched one by one are collated alike.
    rows = [source[i] for i in range(4)]
    assert torch.equal(torch.utils.data.default_collate(rows)["vector"], batches[0]["vector"][:4])


def test_parquet_decodes_each_row_group_once_for_all_threads(tmp_path):
    paths, whole = tables(tmp_path)
    source = feed.parquet(paths)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda k: source.take(range(k, 500, 6))["x"].tolist(), range(6)))
    assert [v for column in zip(*(f[:83] for f in found), strict=True) for v in column] == whole[
        "x"
    ].to_pylist()[:498]
    assert source._cache.made == source.groups


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
    raw = paths[0].read_bytes()
    (tmp_path / "cut.parquet").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ArgumentError, match=r"cut.parquet cannot be read as Parquet"):
        feed.parquet(tmp_path / "cut.parquet")
    source = feed.parquet(paths[0])
    paths[0].write_bytes(b"\0" * len(raw))
    with pytest.raises(SampleError, match=r"part-0.parquet, row group 0, cannot be read"):
        source.read([0])
    samples = feed.parquet(paths[1:], data="raw", label="flag", name="text")
    assert (
        samples[1] == Sample(bytes([167]) * (167 % 7), samples[1].label, "row 167")
        and type(samples[1].label) is bool
    )


def test_rows_without_data_or_label_are_named(tmp_path):
    pq.write_table(
        pa.table({"data": [b"a", None, b"c", b"d"], "label": [1, 2, None, 4]}),
        tmp_path / "t.parquet",
    )
    samples = feed.parquet(tmp_path / "t.parquet", data="data", label="label")
    assert [s.data for s in samples.read([0, 3])] == [b"a", b"d"]
    for row, what in ((1, "data"), (2, "label")):
        with pytest.raises(SampleError, match=f"t.parquet: row {row} of the table has no '{what}'"):
            samples[row]


def photos(count):
    rng = np.random.default_rng(0)
    found = {}
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (9 + i, 12, 3), dtype=np.uint8)).save(
            file := io.BytesIO(), "png"
        )
        found[f"{i}.png"] = file.getvalue()
    return found


def files_table(labels, names=("cat", "dog"), extra=None):
    """As Hugging Face's data sets write images: a struct of bytes and path, and the features beside
    the schema.
    """
    image = [{"bytes": value, "path": name} for name, value in photos(len(labels)).items()]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(image, type=kind), "label": labels, **(extra or {})})
    feature = (
        {"_type": "ClassLabel", "names": list(names)}
        if names
        else {"_type": "Value", "dtype": "int64"}
    )
    told = {"info": {"features": {"image": {"_type": "Image"}, "label": feature}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(told)})


def test_a_struct_of_bytes_and_path_is_a_file(tmp_path):
    table = files_table([0, 1, 1, 0, 1, 0])
    for i in range(2):
        pq.write_table(table.slice(3 * i, 3), tmp_path / f"train-{i}.parquet", row_group_size=2)
    want = list(photos(6).items())
    samples = feed.parquet(tmp_path / "train-*.parquet", data="image", label="label")
    assert [(s.name, s.data) for s in samples.read(range(6))] == want and samples.classes == [
        "cat",
        "dog",
    ]
    data = feed.images(tmp_path / "train-*.parquet", size=8, augment=False)
    assert data.source.classes == ["cat", "dog"]
    images, labels = next(
        iter(DataLoader(data, batch_size=6, collate_fn=data.collate, num_workers=1))
    )
    assert labels.tolist() == [0, 1, 1, 0, 1, 0] and images.shape == (6, 3, 8, 8)
    for (name, value), image in zip(want, images, strict=True):
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one" / f"{name.replace('/', '_')}").write_bytes(value)
        alone = feed.images(tmp_path / "one", size=8, augment=False, labels="none")
        assert torch.equal(
            next(iter(DataLoader(alone, batch_size=1, collate_fn=alone.collate))), image[None]
        )
        shutil.rmtree(tmp_path / "one")


def test_images_of_parquet_files_by_their_columns(tmp_path):
    file = tmp_path / "t.parquet"
    pq.write_table(
        files_table(
            ["dog", "cat", "dog", "ant"],
            names=None,
            extra={"other": [b"a"] * 4, "id": [7, 8, 9, 10]},
        ),
        file,
    )
    with pytest.raises(
        ArgumentError,
        match=r"t.parquet: its columns 'image', 'other' all hold bytes: choose one with data='…'",
    ):
        feed.images(file, size=8)
    data = feed.images(file, size=8, data="image")  # with the column label
    assert data.source.classes == ["ant", "cat", "dog"] and [
        s.label for s in data.source.read([0, 1, 3])
    ] == [2, 1, 0]
    assert [
        s.label for s in feed.images(file, size=8, data="image", labels="id").source.read([0, 3])
    ] == [7, 10]
    pq.write_table(pq.read_table(file).drop_columns(["other", "label"]), file)
    with pytest.raises(
        ArgumentError,
        match=r"t.parquet has no column 'label': choose among id with labels='…', or labels='none'",
    ):
        feed.images(file, size=8)
    assert feed.images(file, size=8, labels="none").source[2].label is None
    with pytest.raises(ArgumentError, match=r"t.parquet: none of its columns id holds bytes"):
        pq.write_table(pq.read_table(file).drop_columns(["image"]), file)
        feed.images(file, size=8)
    with pytest.raises(
        ArgumentError,
        match=r"data='id': the column is int64 in .*t.parquet: expected bytes, or a struct",
    ):
        feed.parquet(file, data="id")


def test_a_label_that_is_missing_does_not_make_numbers_of_classes(tmp_path):
    big = 2**60 + 1  # no floating-point number
    for kind, labels in ((pa.int64(), [3, None, 4, big]), (pa.bool_(), [True, None, False, True])):
        table = pa.table({"image": [b"a", b"b", b"c", b"d"], "label": pa.array(labels, kind)})
        pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
        data = feed.parquet(tmp_path / "t.parquet", data="image", label="label")
        found = [s.label for s in data.read([3, 0, 2])]
        assert found == [labels[3], labels[0], labels[2]] and {type(v) for v in found} == {
            type(labels[0])
        }
        with pytest.raises(SampleError, match=r"row 1 of the table has no 'label'"):
            data.read([0, 1])


def test_labels_of_images_are_found_beside_what_is_not_read(tmp_path):
    table = files_table(["dog", "cat", "dog", "ant"], names=None)
    coded = table.set_column(1, "label", table.column("label").dictionary_encode())
    # a column that the files do not agree on
    for i, extra in enumerate((pa.array([1, 2]), pa.array(["x", "y"]))):
        part = coded.slice(2 * i, 2)
        pq.write_table(part.append_column("note", extra), tmp_path / f"{i}.parquet")
    data = feed.images(tmp_path / "*.parquet", size=8)
    assert data.source.classes == ["ant", "cat", "dog"] and [
        s.label for s in data.source.read(range(4))
    ] == [2, 1, 2, 0]
    with pytest.raises(ArgumentError, match="is the name of a column"):
        feed.images(tmp_path / "*.parquet", size=8, labels=["label"])


def test_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(
        pa.Table.from_arrays(
            [pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])], names=["a", "a", "b"]
        ),
        tmp_path / "t.parquet",
    )
    with pytest.raises(ArgumentError, match=r"t.parquet has 2 columns named 'a'. Leave it out"):
        feed.parquet(tmp_path / "t.parquet")
    assert feed.parquet(tmp_path / "t.parquet", columns=["b"])[1]["b"] == 6
    with pytest.raises(ArgumentError, match=r"t.parquet has 2 columns named 'a'"):
        feed.table(tmp_path / "t.parquet", numeric=["a"], cache=tmp_path / "cache")
    (tmp_path / "t.csv").write_text("a;b\n1;2\n")
    with pytest.raises(
        ArgumentError,
        match=r"has no column 'a': choose among a;b. Its columns seem to be separated by ';', not "
        r"commas",
    ):
        feed.table(tmp_path / "t.csv", numeric=["a"], cache=tmp_path / "cache")


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


def test_arrays_of_many_kinds(tmp_path):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(50, 3, 2)).astype(np.float32), draw.integers(0, 5, 50)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    np.savez(tmp_path / "plain.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "packed.npz", x=x, y=y)
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 6),
            "y": y,
            "name": [f"n{i}" for i in range(50)],
        }
    )
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as out:
        for batch in table.to_batches(max_chunksize=13):
            out.write_batch(batch)
    ids = [49, 0, 0, 13, 12]
    given = {"x": tmp_path / "x.npy", "y": tmp_path / "y.npy"}
    fingerprints = set()
    for source in (
        feed.arrays(given),
        feed.arrays(tmp_path),
        feed.arrays(tmp_path / "plain.npz"),
        feed.arrays(tmp_path / "packed.npz", columns=["y", "x"]),
        feed.arrays({"x": x, "y": np.load(tmp_path / "y.npy", mmap_mode="r")}),
    ):
        batch = torch.utils.data.default_collate(source.read(ids))
        assert (
            np.array_equal(batch["x"], x[ids])
            and np.array_equal(batch["y"], y[ids])
            and set(batch) == {"x", "y"}
        )
        assert torch.equal(source[3]["x"], torch.from_numpy(x[3])) and len(source) == 50
        again = copied(source)
        assert np.array_equal(torch.utils.data.default_collate(again.read(ids))["x"], x[ids])
        fingerprints.add(source.fingerprint)
    assert len(fingerprints) >= 3
    assert len(pickle.dumps(feed.arrays(tmp_path / "plain.npz"))) < 3000
    pair = feed.arrays((tmp_path / "x.npy", tmp_path / "y.npy"))
    inputs, targets = torch.utils.data.default_collate(pair.read(ids))
    assert np.array_equal(inputs, x[ids]) and np.array_equal(targets, y[ids])
    alone = feed.arrays(tmp_path / "x.npy")
    assert np.array_equal(torch.utils.data.default_collate(alone.read(ids)), x[ids])
    arrow = feed.arrays(tmp_path / "a.arrow")
    batch = torch.utils.data.default_collate(arrow.read(ids))
    assert np.array_equal(batch["x"], x.reshape(50, 6)[ids]) and batch["name"] == [
        f"n{i}" for i in ids
    ]
    assert np.array_equal(copied(arrow).take(ids)["y"], y[ids])
    assert isinstance(pair.read(ids), Batch) and len(pair.read(ids)[1:3]) == 2


def _stream(path, table, most=7):
    with pa.ipc.new_stream(path, table.schema) as out:
        for batch in table.to_batches(max_chunksize=most):
            out.write_batch(batch)


def test_arrow_streams_and_folders_of_them_as_data_sets_are_saved_to_disk(tmp_path):
    """Hugging Face's ``save_to_disk`` writes streams, one after the other as its ``state.json``
    says.
    """
    table = pa.table(
        {
            "id": list(range(50)),
            "text": [f"t{i}" for i in range(50)],
            "gap": [None if i == 40 else i for i in range(50)],
        }
    )
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    _stream(tmp_path / names[0], table.slice(0, 20))
    _stream(tmp_path / names[1], table.slice(20))
    ids = [49, 0, 20, 19, 40, 0]
    alone = feed.arrays(tmp_path / names[0], columns=["id", "text"])
    assert (
        len(alone) == 20
        and alone.take([13, 2])["id"].tolist() == [13, 2]
        and alone.take([13])["text"] == ["t13"]
    )
    by_name = feed.arrays(tmp_path)
    (tmp_path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    source = feed.arrays(tmp_path)
    for one in (source, copied(source)):
        found = one.take(ids)
        assert (
            len(one) == 50
            and found["id"].tolist() == ids
            and found["text"] == [f"t{i}" for i in ids]
        )
        assert (
            np.isnan(found["gap"][4]) and found["gap"].dtype == np.float64 and found["gap"][0] == 49
        )
    assert by_name.take([0])["id"].tolist() == [20] and by_name.fingerprint != source.fingerprint
    assert len(pickle.dumps(source)) < 3000 and "and 1 more" in repr(source)
    assert {Path(p).name for p in source.origins()[1:]} == set(names)
    for split in ("train", "test"):
        (tmp_path / "splits" / split).mkdir(parents=True)
        _stream(tmp_path / "splits" / split / "data-00000-of-00001.arrow", table)
    with pytest.raises(
        ArgumentError, match=r"no \.arrow file\. Pass one of its folders: test, train\."
    ):
        feed.arrays(tmp_path / "splits")
    _stream(tmp_path / names[1], table.select(["id"]))
    with pytest.raises(
        ArgumentError,
        match=r"data-00000-of-00002\.arrow has different columns, or types, than .*data-00001",
    ):
        feed.arrays(tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ArgumentError, match=r"data-00000-of-00002\.arrow"):
        feed.arrays(tmp_path)
    whole = (tmp_path / names[0]).read_bytes()
    for wrong in (b"", b"text", whole[:300], whole[: len(whole) // 2]):
        (tmp_path / "cut.arrow").write_bytes(wrong)
        with pytest.raises(
            ArgumentError, match=r"cut\.arrow cannot be read as an Arrow IPC file or stream"
        ):
            feed.arrays(tmp_path / "cut.arrow")


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
        (tmp_path / "gone.csv", "gone.csv cannot be opened"),
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
        ids = [draw.randrange(len(here)) for _ in range(40)]
        for found in pool.map(lambda _: there.read(ids), range(8)):
            assert (
                found == here.read(ids) == [feed.folder(folder / "files").read([i])[0] for i in ids]
            )
        assert there.classes == here.classes and there.fingerprint == here.fingerprint
    for read in ("auto", "samples", "blocks"):
        tars = feed.tar(f"{base}/tars/{{0..2}}.tar", read=read)
        same_source(tars, samples_of([folder / f"tars/{s}.tar" for s in range(3)]))
        assert sum(tars.blocks) == 30
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


def test_web_server(tmp_path):
    everything(tmp_path)
    with serving(tmp_path) as server:
        check_remote(server.url, tmp_path)
        source = feed.tar(f"{server.url}/tars/0.tar", read="samples", data="jpg", label="cls")
        expected = samples_of([tmp_path / "tars/0.tar"])
        with pytest.raises(ArgumentError, match=r"gone.tar cannot be opened"):
            feed.tar(f"{server.url}/gone.tar")
        # Requests that fail are made again; those that go on failing are an error that names the
        # file.
        server.fail = 1
        assert source.read([3])[0].data == expected[3]["jpg"]
        server.fail = 1000
        with pytest.raises(SampleError, match=r"0.tar cannot be read: ClientResponseError: 503"):
            source.read([3])
        server.fail = 0
        server.ranges = False
        with pytest.raises(SampleError, match=r"does not support range requests"):
            source.read([3])


def test_reads_of_a_batch_are_in_flight_together(tmp_path):
    write(tmp_path, {f"{i}.bin": bytes([i]) * 100 for i in range(16)})
    with serving(tmp_path) as server:
        store = Store()
        server.gather = 8  # none is answered before eight have come
        places = [ByteRange(f"{server.url}/{i}.bin", 10, 50) for i in range(16)]
        assert store.read(places) == [bytes([i]) * 50 for i in range(16)]
        assert server.most >= 8
        # Neighbours are asked for together, and each gets its own part.
        server.gather, server.asked[:] = 0, []
        near = [ByteRange(f"{server.url}/3.bin", at, 5) for at in (40, 0, 20, 0)]
        assert store.read(near) == [bytes([3]) * 5] * 4
        assert server.asked == [("3.bin", 0, 44)]


def test_blocks_of_remote_tars_are_fetched_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["ronde.data.sources.tar"], "_BLOCK_BYTES", 8000)
    monkeypatch.setattr(byte_ranges, "_GAP", 1024)  # less than such a small block
    paths = [tar_of(tmp_path / f"{s}.tar", web_members(40, s)) for s in range(3)]
    expected = samples_of(paths)
    with serving(tmp_path) as server:
        source = feed.tar([f"{server.url}/{s}.tar" for s in range(3)])
        assert len(source.blocks) > 20
        server.asked.clear()
        order = feed.Order(len(source), seed=1, blocks=source.blocks, window=source.window)
        for start in range(0, 120, 16):
            ids = order.ids(0, start, min(start + 16, 120)).tolist()
            assert list(source.read(ids)) == [expected[i] for i in ids]
        spans = sorted(server.asked)
        for (name, _, last), (other, first, _) in itertools.pairwise(spans):
            assert name != other or first > last  # no byte twice
        # Where several processes share the work, each fetches only what it needs.
        for name, value in (
            ("WORLD_SIZE", "2"),
            ("RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1"),
        ):
            monkeypatch.setenv(name, value)
        shared = feed.tar([f"{server.url}/{s}.tar" for s in range(3)], data="cls")
        server.asked.clear()
        shared.read([5, 90])
        assert [last - first + 1 for _, first, last in server.asked] == [1, 1]
        assert shared.blocks == source.blocks


def test_a_whole_training_on_a_source(tmp_path, monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    monkeypatch.setenv("RONDE_DEVICE", "cpu")
    np.random.default_rng(0).integers(0, 30, 400).astype(np.uint16).tofile(tmp_path / "text.bin")
    source = feed.tokens(tmp_path / "text.bin", 8, "uint16")
    model = torch.nn.Sequential(torch.nn.Embedding(30, 4), torch.nn.Linear(4, 30))
    run = ronde.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        source,
        loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        batch_size=7,
    )
    seen = []
    for _ in run.epochs(1):
        for inputs, targets in run.batches():
            seen += inputs.tolist()
            run.step((inputs, targets))
    assert sorted(seen) == sorted(source.read(range(49))[i][0].tolist() for i in range(49))


def test_importing_feed_is_light():
    import subprocess

    heavy = "pyarrow", "PIL", "fsspec", "simplejpeg", "aiohttp"
    code = f"import sys, ronde.feed; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == "[]", found.stderr


def test_loading_processes_make_their_own_connections(tmp_path):
    paths = [tar_of(tmp_path / f"{s}.tar", web_members(15, s)) for s in range(2)]
    expected = [(e["__key__"], len(e["jpg"]), sum(e["jpg"])) for e in samples_of(paths)]
    with serving(tmp_path) as server:
        source = feed.tar(f"{server.url}/{{0..1}}.tar", data="jpg", label="cls")
        source.read(range(30))  # connections and a thread that the children cannot use
        loader = DataLoader(
            Hashes(source),
            4,
            num_workers=2,
            multiprocessing_context="fork",
            collate_fn=listed,
            timeout=60,
        )
        assert [one for batch in loader for one in batch] == expected
