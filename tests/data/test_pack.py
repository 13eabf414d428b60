"""ronde pack: the same bytes whatever happens on the way, and back again what went in."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from processes import child
from ronde import feed
from ronde.cli.app import app
from ronde.data.pack import pack, verify_pack
from ronde.world import ArgumentError, SampleError


def folder(path: Path, count: int = 60, seed: int = 0, largest: int = 9000) -> Path:
    draw = random.Random(seed)
    names = [
        f"{draw.choice(['ant', 'bee', 'cow'])}/{i:03d}{draw.choice(['.jpg', '.JPG', '.tar.gz', '', '.cls', '.b.c.png'])}"
        for i in range(count)
    ]
    # Names that WebDataset's rule would put into one sample, and one that is too long for a plain
    # header.
    for name in [
        *names,
        "ant/same.1.jpg",
        "ant/same.2.jpg",
        "ant/same.jpg",
        "ant/same.png",
        f"bee/{'long' * 50}.jpg",
        "__odd__/ü x.jpg",
    ]:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(draw.randbytes(draw.choice([0, 1, 511, 512, largest])))
    return path


def contents(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


def test_what_went_in_comes_out(tmp_path):
    source = feed.folder(folder(tmp_path / "files"))
    done = pack(tmp_path / "files", tmp_path / "out", shard_bytes=1 << 16)
    packed = feed.tar(tmp_path / "out")
    assert done.samples == len(source) == len(packed)
    assert done.shards >= 2
    assert done.bytes == sum(p.stat().st_size for p in (tmp_path / "out").glob("shard*.tar"))
    ids = random.Random(0).choices(range(len(source)), k=200)
    assert packed.read(ids) == source.read(ids)
    assert packed.classes == source.classes == ["__odd__", "ant", "bee", "cow"]
    assert packed.fingerprint == source.fingerprint
    assert verify_pack(tmp_path / "out").problems == ()
    assert all(packed.label(i) == source.label(i) for i in ids)
    for shard in (tmp_path / "out").glob("*.tar"):
        if shard.stat().st_size > 1 << 16:
            assert (
                json.loads((tmp_path / "out/ronde-pack.json").read_text())["shards"][
                    int(shard.stem[-6:])
                ]["samples"]
                == 1
            )


def test_the_shards_are_webdatasets(tmp_path):
    """By WebDataset's rule, with nothing but tarfile: one sample for each file, its bytes under one
    ending, its class as .cls.
    """
    source = feed.folder(folder(tmp_path / "files"))
    pack(tmp_path / "files", tmp_path / "out", shard_bytes=1 << 17)
    found: list[dict] = []
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        last = None
        with tarfile.open(shard) as held:
            for member in held:
                place, slash, base = member.name.rpartition("/")
                key = place + slash + base.partition(".")[0]
                assert not member.name.startswith("__")
                assert (
                    member.mtime,
                    member.uid,
                    member.mode,
                ) == (0, 0, 0o644)
                if key != last:
                    found.append({})
                    last = key
                found[-1][base.partition(".")[2]] = held.extractfile(member).read()
    for sample, files in zip(source.read(range(len(source))), found, strict=True):
        assert files.pop("cls") == str(sample.label).encode()
        assert list(files.values()) == [sample.data]
    # A plain reader of tars sees the same without the manifest.
    assert len(feed.tar(sorted((tmp_path / "out").glob("*.tar")))) == len(source)


def test_a_killed_pack_leaves_nothing_that_opens(tmp_path):
    files = folder(tmp_path / "files", 700, largest=30_000)
    pack(files, tmp_path / "whole", shard_bytes=1 << 19)
    out, writing = tmp_path / "out", tmp_path / ".out.writing"
    command = [
        sys.executable,
        "-m",
        "ronde",
        "pack",
        "--shard-size",
        "512KiB",
        str(files),
        str(out),
    ]
    for sent, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with child(command, tmp_path) as started:
            limit = time.monotonic() + 60
            while not (writing / "shard-000001.tar").exists() and time.monotonic() < limit:
                time.sleep(0.001)
            started.process.send_signal(sent)
            done = started.done(30)
        assert done.returncode == status
        assert "Traceback" not in done.stderr
        assert not out.exists()
        with pytest.raises(ArgumentError, match=r"is not a pack"):
            verify_pack(out)
        assert writing.exists() == (sent == signal.SIGKILL)
        if sent == signal.SIGINT:
            assert done.stderr.strip() == f"stopped by SIGINT; nothing was packed: {out}"
    assert pack(files, out, shard_bytes=1 << 19).samples == 706
    assert contents(out) == contents(tmp_path / "whole")


def test_a_second_pack_into_the_same_folder_is_refused(tmp_path):
    files = folder(tmp_path / "files", 5)
    refused = []

    def again(done, total):
        with pytest.raises(ArgumentError, match=r"another process is packing into .*out now"):
            pack(files, tmp_path / "out")
        refused.append(done)

    pack(files, tmp_path / "out", progress=again)
    assert refused
    assert pack(files, tmp_path / "out").already
    (files / "ant/new.jpg").write_bytes(b"new")
    with pytest.raises(ArgumentError, match=r"is a pack of other settings \(samples 11\)"):
        pack(files, tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"files is not empty \(__odd__\)"):
        pack(tmp_path / "out", files, labels=None)


def test_damage_is_found_and_named(tmp_path):
    source = feed.folder(folder(tmp_path / "files"))
    pack(source, tmp_path / "out", shard_bytes=1 << 16)
    shard = sorted((tmp_path / "out").glob("*.tar"))[1]
    whole = bytearray(shard.read_bytes())
    i = next(
        i for i in range(len(source)) if source.sizes[i] > 600 and source.read([i])[0].data in whole
    )
    where, name = whole.index(source.read([i])[0].data), source.names[i]
    bent = bytearray(whole)
    bent[where + 100] ^= 1
    shard.write_bytes(bent)
    result = CliRunner().invoke(app, ["pack", "--verify", str(tmp_path / "out")])
    assert result.exit_code == 1 and shard.name in result.output and name in result.output
    shard.write_bytes(whole[:-600])
    assert any("bytes" in p and shard.name in p for p in verify_pack(tmp_path / "out").problems)
    shard.unlink()
    assert verify_pack(tmp_path / "out").problems == (f"{shard.name}: No such file or directory",)
    shard.write_bytes(whole)
    assert verify_pack(tmp_path / "out").problems == ()
    index = tmp_path / "out/ronde-pack.npz"
    raw = index.read_bytes()
    index.write_bytes(raw[:-1] + b"\x01")
    assert any(index.name in p for p in verify_pack(tmp_path / "out").problems)
    with pytest.raises(ArgumentError, match=f"{index.name} cannot be used: it is damaged"):
        feed.tar(tmp_path / "out")
    index.unlink()
    with pytest.raises(ArgumentError, match=f"{index.name} cannot be used: it is missing"):
        feed.tar(tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"Open it with feed.tar"):
        feed.parquet(tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"is not a pack"):
        verify_pack(tmp_path / "files")


def test_the_command(tmp_path):
    folder(tmp_path / "files", 5)
    runner = CliRunner()
    done = runner.invoke(app, ["pack", str(tmp_path / "files"), str(tmp_path / "out")])
    assert done.exit_code == 0
    assert done.output.startswith("packed 11 samples of 4 classes, ")
    assert done.output.count("\n") == 1
    assert runner.invoke(
        app, ["pack", str(tmp_path / "files"), str(tmp_path / "out")]
    ).output.startswith(f"{tmp_path}/out is packed already: 11 samples")
    checked = runner.invoke(app, ["pack", "--verify", str(tmp_path / "out")])
    assert checked.exit_code == 0 and "all as they were packed" in checked.output
    as_json = json.loads(
        runner.invoke(app, ["pack", "--verify", "--json", str(tmp_path / "out")]).output
    )
    assert as_json["ok"] and as_json["samples"] == 11
    for arguments, text in (
        (["x"], "OUT is missing"),
        (["--verify", "x", "y"], "--verify takes one folder"),
        (["--shard-size", "big", "x", "y"], "--shard-size big: expected a size"),
    ):
        found = runner.invoke(app, ["pack", *arguments])
        assert isinstance(found.exception, ArgumentError) and text in str(found.exception)
    shown = runner.invoke(app, ["pack", "--help"]).output
    assert "--verify" in shown and "ronde pack photos/train packed/train" in shown


def test_a_damaged_sample_is_named_when_it_is_read_and_the_others_are_read(tmp_path):
    content = {
        f"{c}/{i}.bin": np.random.default_rng([i, ord(c)]).bytes(400)
        for c in "ab"
        for i in range(5)
    }
    for name, data in content.items():
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(data)
    pack(tmp_path / "files", tmp_path / "out")
    names = sorted(content)
    (shard,) = (tmp_path / "out").glob("*.tar")
    raw = bytearray(shard.read_bytes())
    raw[raw.index(content[names[3]]) + 200] ^= 1
    shard.write_bytes(raw)
    packed = feed.tar(tmp_path / "out")
    others = [i for i in range(10) if i != 3]
    assert [s.data for s in packed.read(others)] == [content[names[i]] for i in others]
    for ids in ([3], [5, 3, 1]):
        with pytest.raises(
            SampleError,
            match=rf"shard-000000\.tar: '{names[3]}' is damaged: .*ronde pack --verify .*out'",
        ):
            packed.read(ids)
