"""Sources and packs under odd circumstances: each of these once gave wrong samples, or none."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import sys
import tarfile
import warnings
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ronde import feed
from ronde.data.pack import pack, verify_pack
from ronde.data.sources import byte_ranges, tar_index
from ronde.data.sources.base import Sample
from ronde.data.sources.tar import PARTIAL
from ronde.world import ArgumentError, RondeError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_one_ending_may_be_given_as_text(tmp_path):
    write(tmp_path, {"a/1.jpg": b"1", "a/2.g": b"2"})
    assert [s.name for s in feed.folder(tmp_path, suffixes="jpg").read([0])] == ["a/1.jpg"] and len(
        feed.folder(tmp_path, suffixes=".JPG")
    ) == 1


def test_a_sample_has_a_whole_number():
    rows = feed.arrays({"x": np.arange(4)})
    assert [int(rows[i]["x"]) for i in (1, np.int32(2), np.uint64(3), torch.tensor(1))] == [
        1,
        2,
        3,
        1,
    ] and len(rows.read([])) == 0
    for wrong in (1.5, np.float32(1)):
        with pytest.raises(TypeError, match=r"must be an integer, not 1"):
            rows[wrong]


def test_text_and_tables_say_that_they_read_no_urls(tmp_path):
    (tmp_path / "t.txt").write_text("hello world")
    assert len(feed.text(f"file://{tmp_path}/t.txt", length=5)) == 2
    for read in (partial(feed.text, length=5), partial(feed.table, numeric=["x"], target="y")):
        with pytest.raises(
            ArgumentError,
            match=r"reads local files, not URLs: copy memory://x/t.txt here first",
        ):
            read("memory://x/t.txt")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError("4096 requested and 0 written")],
)
def test_a_full_disk_is_named(tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(sys.modules["ronde.data.text"], "_tokenize", full)
    (tmp_path / "t.txt").write_text("hello world")
    with pytest.raises(
        ArgumentError,
        match=rf"{tmp_path}/kept: the disk is full \(.*give a folder on another disk with cache=",
    ):
        feed.text(tmp_path / "t.txt", length=5, cache=tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_null_dates_are_the_smallest_number_as_the_docs_say(tmp_path):
    days, times = pa.array([0, None, 3], pa.date32()), pa.array([1000, None, 5], pa.timestamp("ms"))
    pq.write_table(pa.table({"d": days, "t": times}), tmp_path / "t.parquet")
    found = torch.utils.data.default_collate(feed.parquet(tmp_path / "t.parquet").read([0, 1, 2]))
    least = -9223372036854775808
    assert found["d"].tolist() == [0, least, 3] and found["t"].tolist() == [1000, least, 5]


def tar_bytes(files: dict[str, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=form) as out:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return held.getvalue()


def keys_and_data(source) -> list[tuple[str, bytes]]:
    return [(sample.name, sample.data) for sample in source.read(range(len(source)))]


OLD = {f"old{i}.bin": b"old" for i in range(4)}
NEW = {f"new{i}.bin": b"new" for i in range(4)}


# An index belongs to the tar as it is now


class Untagged(MemoryFileSystem):
    """A server that says of a file only how long it is."""

    protocol = "untagged"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("untagged://", "memory://"))

    def info(self, path, **kwargs):
        return {
            name: value for name, value in super().info(path, **kwargs).items() if name != "created"
        }


@pytest.fixture
def memory():
    fsspec.register_implementation("untagged", Untagged, clobber=True)
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/mends", recursive=True)


@pytest.mark.parametrize("protocol", ["memory", "untagged"])
def test_a_replaced_remote_tar_of_the_same_size(memory, protocol, monkeypatch):
    built: list[str] = []
    build = tar_index.build_index
    monkeypatch.setattr(
        tar_index, "build_index", lambda store, at: built.append(at) or build(store, at)
    )
    old, new = tar_bytes(OLD), tar_bytes(NEW)
    assert len(old) == len(new)
    memory.pipe("/mends/a.tar", old)
    for _ in range(2):
        assert keys_and_data(feed.tar(f"{protocol}://mends/a.tar", data="bin")) == [
            (f"old{i}", b"old") for i in range(4)
        ]
    assert len(built) == 1
    memory.pipe("/mends/a.tar", new)
    for _ in range(2):
        assert keys_and_data(feed.tar(f"{protocol}://mends/a.tar", data="bin")) == [
            (f"new{i}", b"new") for i in range(4)
        ]
    assert len(built) == 2


@pytest.mark.parametrize("place", ["memory", "here"])
def test_the_index_of_a_pack_whose_shard_was_replaced(tmp_path, memory, place, monkeypatch):
    """A pack's index knows neither time nor tag, for a pack may be copied; opened as plain tars, it
    must still be of these tars.
    """
    built: list[str] = []
    build = tar_index.build_index
    monkeypatch.setattr(
        tar_index, "build_index", lambda store, at: built.append(at) or build(store, at)
    )
    pack(
        write(tmp_path / "files", {**OLD, f"{'ü' * 100}.bin": b"long"}),
        tmp_path / "out",
        labels=None,
    )
    base = str(tmp_path / "out") if place == "here" else "memory://mends"
    if place == "memory":
        memory.put(str(tmp_path / "out"), "/mends", recursive=True)
    names = [f"old{i}" for i in range(4)]
    assert [key for key, _ in keys_and_data(feed.tar(f"{base}/*.tar", data="bin"))] == [
        *names,
        "ü" * 100,
    ] and not built
    size = (tmp_path / "out/shard-000000.tar").stat().st_size
    raw = tar_bytes(NEW)[: 1024 * len(NEW)]
    raw += b"\0" * (size - len(raw))
    memory.pipe("/mends/shard-000000.tar", raw)
    (tmp_path / "out/shard-000000.tar").write_bytes(raw)
    assert (
        keys_and_data(feed.tar(f"{base}/*.tar", data="bin"))
        == [(f"new{i}", b"new") for i in range(4)]
        and len(built) == 1
    )


def test_a_tar_that_was_replaced_while_it_was_open(tmp_path):
    """What this process still holds open is the file that was there before: neither its headers nor
    its bytes are the new one's.
    """
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(OLD))
    before = feed.tar(path, data="bin")
    assert keys_and_data(before)[0] == ("old0", b"old")
    with byte_ranges.open_files.open(str(path), path.stat().st_size) as reading:
        (tmp_path / "new").write_bytes(tar_bytes(NEW))
        os.utime(tmp_path / "new", ns=(1, 1))
        (tmp_path / "new").replace(path)
        for _ in range(2):
            assert keys_and_data(feed.tar(path, data="bin")) == [
                (f"new{i}", b"new") for i in range(4)
            ]
        assert os.pread(reading, 3, 512) == b"old"  # whoever reads meanwhile reads on
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


# Labels of a pack


def test_labels_that_are_missing_in_some_shards(tmp_path):
    files = write(
        tmp_path / "files",
        {f"{kind}{i}.bin": os.urandom(40_000) for kind in "abc" for i in range(3)},
    )

    def labels(name: str) -> int | None:
        return 1 if name[0] in "ac" else None

    source = feed.folder(files, labels=labels)
    assert pack(files, tmp_path / "out", labels=labels, shard_bytes=1 << 16).shards == 9
    assert verify_pack(tmp_path / "out").problems == ()
    packed = feed.tar(tmp_path / "out")
    assert packed.read(range(9)) == source.read(range(9)) and packed.labels == [
        1,
        1,
        1,
        None,
        None,
        None,
        1,
        1,
        1,
    ]
    # Packs were written in which every shard chose for itself.
    for shard in sorted((tmp_path / "out").glob("*.ronde-index")):
        index = tar_index.TarIndex.from_bytes(shard.read_bytes())
        found = json.loads(index.more["label_json"].tobytes())
        if None not in found:
            del index.more["label_json"]
            index.more["label"] = pa.array(found).to_numpy()
            shard.write_bytes(index.to_bytes())
    assert feed.tar(tmp_path / "out").labels == packed.labels


# Labels of a CSV file


def test_only_plain_numbers_of_a_csv_are_numbers(tmp_path):
    here = write(tmp_path / "files", {f"{i}.bin": b"" for i in range(4)})

    def labelled(*texts: str):
        with open(tmp_path / "labels.csv", "w", newline="") as file:
            csv.writer(file).writerows(
                [["file", "label"], *([f"{i}.bin", text] for i, text in enumerate(texts))]
            )
        source = feed.folder(here, labels=tmp_path / "labels.csv")
        return [sample.label for sample in source.read(range(4))], source.classes

    assert labelled("5", "10", "-3", "0") == ([5, 10, -3, 0], None)
    assert labelled("5", "1.5", "-.5", "2e-3") == ([5.0, 1.5, -0.5, 0.002], None)
    # Names that int or float would take for the same number, or for one at all.
    assert labelled("007", "7", "1_0", "nan") == ([0, 2, 1, 3], ["007", "1_0", "7", "nan"])
    assert labelled("00", "01", "10", "11") == ([0, 1, 2, 3], ["00", "01", "10", "11"])
    large = [str(10**20 + i) for i in range(4)]
    assert labelled(*large) == ([0, 1, 2, 3], large)
    with pytest.raises(ArgumentError, match=r"labels.csv, line 4: '2.bin' has no label"):
        labelled("5", "10", "", "7")
    with pytest.raises(
        ArgumentError, match=r"labels.csv: 1 of 4 labels are not numbers, such as 'NaN'"
    ):
        labelled("0.5", "NaN", "2", "7")


# Links in a folder


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
    with pytest.raises(
        ArgumentError, match=r"the link .*/files/b/self cannot be followed: Too many levels"
    ):
        feed.folder(here)


# Folders whose names look like patterns


@pytest.mark.parametrize(
    "name", ["out[v1]", "out{v1}", "out{0..2}", "out*", "what?", "plain.tar", "plain.parquet"]
)
def test_folders_whose_names_look_like_patterns(tmp_path, name):
    files = write(tmp_path / "files", {"cat/1.jpg": b"one", "dog/2.jpg": b"two"})
    expected = [Sample(b"one", 0, "cat/1.jpg"), Sample(b"two", 1, "dog/2.jpg")]
    pack(files, tmp_path / "tar" / name)
    (tmp_path / "parquet" / name).mkdir(parents=True)
    rows = [sample._asdict() for sample in expected]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet" / name / "shard-000000.parquet")
    columns = {"data": "data", "label": "label", "name": "name"}
    assert feed.tar(tmp_path / "tar" / name).read([0, 1]) == expected
    assert feed.parquet(tmp_path / "parquet" / name, **columns).read([0, 1]) == expected
    (tmp_path / "tar" / name / "ronde-pack.json").unlink()
    assert len(feed.tar(tmp_path / "tar" / name)) == 2
    assert len(feed.tar(tmp_path / "tar" / name / "shard-000000.tar")) == 2
    assert len(feed.parquet(tmp_path / "parquet" / name)) == 2
    assert len(feed.parquet([tmp_path / "parquet" / name / "shard-000000.parquet"])) == 2
    (tmp_path / "empty" / name).mkdir(parents=True)
    with pytest.raises(ArgumentError, match=r"nothing matches .*/\*.tar"):
        feed.tar(tmp_path / "empty" / name)


# A pack that goes on


class Stopped(Exception):
    pass


@pytest.mark.parametrize("harm", ["shard", "short", "index", "no index"])
def test_a_finished_shard_that_is_gone_is_written_again(tmp_path, harm):
    files = write(tmp_path / "files", {f"{i}.bin": bytes([i]) * 40_000 for i in range(8)})
    pack(files, tmp_path / "whole", labels=None, shard_bytes=1 << 16)
    wanted = {p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()}

    def stop(done: int, total: int) -> None:
        if done == 6:
            raise Stopped

    out = tmp_path / "out"
    with pytest.raises(Stopped):
        pack(files, out, labels=None, shard_bytes=1 << 16, progress=stop)
    assert len(json.loads((out / PARTIAL).read_bytes())["shards"]) == 5
    shard = out / "shard-000002.tar"
    index = out / f"{shard.name}.ronde-index"
    if harm == "shard":
        shard.unlink()
    elif harm == "short":
        shard.write_bytes(shard.read_bytes()[:-5])
    elif harm == "index":
        index.write_bytes(index.read_bytes()[::-1])
    else:
        index.unlink()
    assert pack(files, out, labels=None, shard_bytes=1 << 16).resumed == 2
    assert {p.name: p.read_bytes() for p in out.iterdir()} == wanted
    (out / "shard-000001.tar.ronde-index").unlink()
    with pytest.raises(RondeError, match=r"shard-000001.tar.ronde-index is missing or damaged"):
        pack(files, out, labels=None, shard_bytes=1 << 16)


# Links in a tar


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_links_in_a_tar_are_the_files_they_lead_to(tmp_path, form):
    # longer than a header's field
    deep = "deep/" * 5 if form == tarfile.USTAR_FORMAT else "deep/" * 30
    files = write(tmp_path / "files", {f"{deep}1.jpg": b"one", "z/9.jpg": b"nine"})
    os.link(files / deep / "1.jpg", files / deep / "2.jpg")
    (files / deep / "3.jpg").symlink_to("2.jpg")
    (files / "a.jpg").symlink_to("z/9.jpg")  # comes before what it leads to
    (files / "a.txt").write_bytes(b"a")
    (files / "z/folder").symlink_to("../deep")
    (files / "z/gone.jpg").symlink_to("/nowhere/gone.jpg")
    (files / "z/loop.jpg").symlink_to("loop.jpg")
    (files / "z/.hidden.jpg").symlink_to("/nowhere")
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as out:
        for name in (
            "a.jpg",
            "a.txt",
            f"{deep}1.jpg",
            f"{deep}2.jpg",
            f"{deep}3.jpg",
            *(f"z/{path.name}" for path in sorted((files / "z").iterdir())),
        ):
            out.add(files / name, name)
        assert {m.type for m in out.getmembers()} == {
            tarfile.REGTYPE,
            tarfile.LNKTYPE,
            tarfile.SYMTYPE,
        }
    with pytest.warns(
        RuntimeWarning,
        match=r"links without a target in the tar are skipped \(3\), such as 'z/folder' to "
        r"'../deep'",
    ):
        source = feed.tar(tmp_path / "a.tar")
    expected = [
        {"__key__": "a", "jpg": b"nine", "txt": b"a"},
        *({"__key__": f"{deep}{i}", "jpg": b"one"} for i in (1, 2, 3)),
        {"__key__": "z/9", "jpg": b"nine"},
    ]
    assert source.read(range(5)) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # from the index that was kept
        assert feed.tar(tmp_path / "a.tar").read(range(5)) == expected


def test_a_hard_link_to_nothing_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        member = tarfile.TarInfo("1.jpg")
        member.type, member.linkname = tarfile.LNKTYPE, "0.jpg"
        out.addfile(member)
    with pytest.raises(
        ArgumentError, match=r"'1.jpg' is a hard link to '0.jpg', which does not come before it"
    ):
        feed.tar(tmp_path / "a.tar")


def test_links_in_a_remote_tar_read_by_blocks(tmp_path, memory):
    """Their bytes lie in other blocks than their neighbours'."""
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        for i in range(6):
            member = tarfile.TarInfo(f"{i}.bin")
            member.size = 3 << 20
            out.addfile(member, io.BytesIO(bytes([i]) * member.size))
            link = tarfile.TarInfo(f"{i}-link.bin")
            link.type, link.linkname = tarfile.LNKTYPE, f"{i // 2}.bin"
            out.addfile(link)
    memory.pipe("/mends/a.tar", (tmp_path / "a.tar").read_bytes())
    source = feed.tar("memory://mends/a.tar", read="blocks", data="bin")
    assert sum(source.blocks) == 12 and len(source.blocks) < 7
    assert [s.data[:1] + s.data[-1:] for s in source.read(range(12))] == [
        bytes([n, n]) for i in range(6) for n in (i, i // 2)
    ]


def test_an_index_that_lacks_links_is_made_anew(tmp_path):
    """Indices of the first version left links out."""
    (tmp_path / "a.tar").write_bytes(tar_bytes(OLD))
    assert len(feed.tar(tmp_path / "a.tar")) == 4
    kept = tmp_path / "a.tar.ronde-index"
    raw = kept.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_index, "_VERSION", 1)
        kept.write_bytes(
            tar_index.build_index(byte_ranges.Store(), str(tmp_path / "a.tar")).to_bytes()
        )
    assert kept.read_bytes() != raw
    feed.tar(tmp_path / "a.tar")
    assert kept.read_bytes() == raw


# Parquet


def test_columns_whose_names_hold_dots(tmp_path, memory):
    table = pa.table(
        {
            "a.b": pa.array([1, None, 3], pa.int64()),
            "a": pa.array([{"b": 1, "c": [1]}, {"b": 2, "c": []}, {"b": 3, "c": [2, 3]}]),
            "m": pa.array([[("k", [1])], [], []], pa.map_(pa.string(), pa.list_(pa.int32()))),
            "z.": pa.array([None, True, False]),
            "whole": pa.array([7, 8, 9]),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    memory.put(str(tmp_path / "t.parquet"), "/mends/t.parquet")
    for path in (tmp_path / "t.parquet", "memory://mends/t.parquet"):
        source = feed.parquet(path)
        columns = source.take([2, 0, 1])
        assert (
            columns["a.b"].dtype.kind == "f"
            and columns["a.b"][:2].tolist() == [3.0, 1.0]
            and columns["a.b"][2] != columns["a.b"][2]
        )
        assert columns["z."][0] == 0.0 and columns["z."][1] != columns["z."][1]
        assert (
            columns["whole"].dtype.kind == "i"
            and columns["a"] == table["a"].take([2, 0, 1]).to_pylist()
        )
        assert columns["m"] == table["m"].take([2, 0, 1]).to_pylist()
        for name in table.column_names:  # Arrow would add "a.b" to "a", and a part of "a" to "a.b"
            assert list(feed.parquet(path, columns=[name]).take([0, 2])) == [name]


def test_a_table_asks_for_room_before_it_is_written_through_a_map(tmp_path, monkeypatch):
    """Without room the system ends the process."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    (tmp_path / "t.csv").write_text("x,y\n1.5,0\n2.5,1\n")
    with pytest.raises(ArgumentError, match=rf"{tmp_path}/kept: the disk is full"):
        feed.table(tmp_path / "t.csv", numeric=["x"], target="y", cache=tmp_path / "kept")


VIEWS = {
    "text": (pa.string_view(), ["a", None, "a text of more than twelve letters"]),
    "bytes": (pa.binary_view(), [b"a", None, b"more than twelve bytes of it"]),
    "texts": (pa.list_(pa.string_view()), [["a", "b"], None, []]),
    "list": (pa.list_view(pa.int64()), [[1, 2], None, []]),
    "list of texts": (pa.list_view(pa.string_view()), [["x", "y"], None, []]),
    "large list": (pa.large_list_view(pa.string_view()), [["x"], None, []]),
    "struct": (
        pa.struct([("bytes", pa.binary_view()), ("path", pa.string_view())]),
        [{"bytes": b"1", "path": "p"}, None, {"bytes": b"3", "path": "q"}],
    ),
    "map": (pa.map_(pa.string_view(), pa.int64()), [[("k", 1)], None, []]),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_columns_of_views_are_read_as_others(tmp_path, kind):
    column, values = VIEWS[kind]
    table = pa.table({"v": pa.array(values, column), "n": [0, 1, 2]})
    # Arrow cannot cut structs of views
    pq.write_table(table, tmp_path / "v.parquet", row_group_size=3 if kind == "struct" else 2)
    with (
        pa.OSFile(str(tmp_path / "v.arrow"), "wb") as out,
        pa.ipc.new_file(out, table.schema) as writer,
    ):
        writer.write_table(table)
    for source in (feed.parquet(tmp_path / "v.parquet"), feed.arrays(tmp_path / "v.arrow")):
        assert [row["v"] for row in source.read([2, 0, 1])] == [
            table.column("v").to_pylist()[i] for i in (2, 0, 1)
        ]


def test_labels_and_files_in_views(tmp_path):
    files = pa.array(
        [{"bytes": b"1", "path": "p"}, {"bytes": b"2", "path": "q"}], VIEWS["struct"][0]
    )
    for image in (files, pa.array([b"1", b"2"], pa.binary_view())):
        pq.write_table(
            pa.table({"image": image, "label": pa.array(["dog", "cat"], pa.string_view())}),
            tmp_path / "v.parquet",
        )
        source = feed.images(tmp_path / "v.parquet").source
        assert source.classes == ["cat", "dog"] and [
            (s.data, s.label) for s in source.read([0, 1])
        ] == [(b"1", 1), (b"2", 0)]


def test_arrays_that_say_more_than_numpys(tmp_path):
    masked = np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0])
    with pytest.raises(ArgumentError, match="a is a masked array with 1 masked value"):
        feed.arrays({"a": masked})
    rows = feed.arrays({"a": masked.filled(np.nan), "b": np.ma.masked_array([1, 2, 3])})
    assert [row["b"].item() for row in rows.read([0, 1, 2])] == [1, 2, 3] and rows[1]["a"].isnan()
    of_pairs = np.ma.masked_array(
        [(1, 2.0)], mask=[(False, True)], dtype=[("i", "i4"), ("f", "f4")]
    )
    with pytest.raises(ArgumentError, match="a is a masked array with 1 masked value"):
        feed.arrays({"a": of_pairs})
    with pytest.raises(ArgumentError, match=r"^feed\.arrays: a is torch\.bfloat16"):
        feed.arrays({"a": torch.ones(3, dtype=torch.bfloat16)})
    for odd in (
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        [[1], [2, 3]],
        torch.ones(2).to(torch.float8_e5m2),
    ):
        with pytest.raises(ArgumentError, match=r"feed\.arrays: a is not an array"):
            feed.arrays({"a": odd})
    learned = torch.arange(6.0).reshape(3, 2).requires_grad_()
    read = feed.arrays({"a": learned, "c": torch.tensor([1j, 2j, 3j]).conj()})
    assert (
        torch.equal(read[2]["a"], learned[2].detach())
        and not read[2]["a"].requires_grad
        and read[1]["c"].item() == -2j
    )
    alone = feed.arrays(learned)  # its rows, as those of an array
    assert len(alone) == 3 and torch.equal(
        torch.stack(alone.read([2, 0])), learned[[2, 0]].detach()
    )
