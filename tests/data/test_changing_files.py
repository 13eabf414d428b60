"""Files of a source that change, lead elsewhere, or cannot be written."""

from __future__ import annotations

import json
import os
import tarfile
import warnings
from pathlib import Path

import pytest

from ronde import feed
from ronde.data.pack import pack
from ronde.data.sources.tar import PARTIAL
from ronde.world import ArgumentError, RondeError
from sampling import some


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


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


class Stopped(Exception):
    pass


@pytest.mark.parametrize("harm", some(["short", "shard", "index", "no index"], 4))
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


@pytest.mark.parametrize(
    "form", some([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT], 3)
)
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
