"""ronde pack: the same bytes whatever happens on the way, and back again what went in."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from processes import child, python
from ronde import feed
from ronde.cli.app import app
from ronde.data.pack import pack, verify_pack
from ronde.data.sources.tar import PARTIAL
from ronde.world import ArgumentError, RondeError, SampleError


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
    assert (
        done.samples == len(source) == len(packed)
        and done.shards >= 2
        and done.bytes == sum(p.stat().st_size for p in (tmp_path / "out").glob("shard*.tar"))
    )
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


def test_a_parquet_pack_of_an_earlier_version_is_refused(tmp_path):
    out = tmp_path / "out"
    pack(folder(tmp_path / "files"), out)
    manifest = out / "ronde-pack.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), "kind": "parquet"}))
    again = partial(pack, tmp_path / "files")
    for opens in (verify_pack, feed.parquet, feed.tar, feed.images, again):
        with pytest.raises(ArgumentError, match=r"Parquet pack of an earlier version"):
            opens(out)
    manifest.rename(out / PARTIAL)
    for opens in (verify_pack, feed.parquet, feed.images):
        with pytest.raises(ArgumentError, match=r"unfinished pack"):
            opens(out)


def test_labels_of_every_kind(tmp_path):
    files = folder(tmp_path / "files", 20)
    values = {
        "none": None,
        "float": lambda n: len(n) / 7,
        "mixed": lambda n: len(n) if len(n) % 2 else "odd",
        "big": lambda n: len(n) << 40,
    }
    for name, labels in values.items():
        source = feed.folder(files, labels=labels)
        pack(files, tmp_path / name, labels=labels)
        packed = feed.tar(tmp_path / name)
        assert (
            packed.read(range(len(source))) == source.read(range(len(source)))
            and packed.classes is None
        )
    with pytest.raises(ArgumentError, match=r"must be classes or numbers; found"):
        pack(files, tmp_path / "bad", labels=lambda n: {"a": 1})


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
                assert not member.name.startswith("__") and (
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


def test_the_same_bytes_from_anywhere(tmp_path):
    folder(tmp_path / "a")
    folder(tmp_path / "elsewhere/b")
    for path in (tmp_path / "a").rglob("*"):
        os.utime(path, (1, 1))
    pack(tmp_path / "a", tmp_path / "1", shard_bytes=1 << 17)
    pack(tmp_path / "elsewhere/b", tmp_path / "2", shard_bytes=1 << 17)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def forked(task) -> multiprocessing.Process:
    """A process of its own, without the seconds that importing torch takes."""
    child = multiprocessing.get_context("fork").Process(target=task, daemon=True)
    child.start()
    return child


def test_killed_and_gone_on(tmp_path):
    """SIGKILL in the middle, several times; the same call then ends with the bytes of one that was
    left alone.
    """
    files = folder(tmp_path / "files", 1500, largest=30_000)
    pack(files, tmp_path / "whole", shard_bytes=1 << 19)
    wanted = contents(tmp_path / "whole")
    out = tmp_path / "out"
    kills = 0
    for goal in (0, 1, 4, 9):
        going = forked(lambda: pack(files, out, shard_bytes=1 << 19))
        limit = time.monotonic() + 60
        while (
            going.is_alive()
            and len(list(out.glob("shard-*.tar"))) < goal
            and time.monotonic() < limit
        ):
            time.sleep(0.001)
        going.kill()
        going.join(30)
        kills += going.exitcode == -signal.SIGKILL
        if (out / PARTIAL).exists():
            with pytest.raises(ArgumentError, match=r"unfinished pack"):
                verify_pack(out)
            for opens in (feed.tar, feed.images):
                with pytest.raises(ArgumentError, match=r"unfinished pack"):
                    opens(out)
    assert kills >= 3
    (out / "shard-000099.tar.writing").write_bytes(b"half")
    done = pack(files, out, shard_bytes=1 << 19)
    assert done.resumed > 0 and done.samples == 1506
    assert contents(out) == wanted


@pytest.mark.parametrize("labels", ["folder", "none", len])
def test_a_manifest_that_is_damaged_is_told(tmp_path, labels):
    files, out = folder(tmp_path / "files", 20), tmp_path / "out"
    pack(files, out, labels=labels)
    assert verify_pack(out).problems == ()
    manifest = out / "ronde-pack.json"
    good = manifest.read_bytes()
    values = json.loads(good)
    for key in ("kind", "samples", "classes", "labels", "fingerprint", "shards", "pixels_changed"):
        manifest.write_text(json.dumps({k: v for k, v in values.items() if k != key}))
        for opens in (verify_pack, feed.tar):
            with pytest.raises(ArgumentError, match=rf"ronde-pack\.json is damaged: its {key} is"):
                opens(out)
    for key in ("name", "samples", "bytes", "sha256", "index_sha256"):
        manifest.write_text(
            json.dumps(
                {**values, "shards": [{k: v for k, v in values["shards"][0].items() if k != key}]}
            )
        )
        with pytest.raises(
            ArgumentError, match=rf"ronde-pack\.json is damaged: {key} of shard 0 is missing"
        ):
            verify_pack(out)
    changes = [
        (values["fingerprint"].encode(), b"0123456789abcdef"),
        *([(b'"bee"', b'"bef"')] if labels == "folder" else []),
    ]
    for old, new in changes:
        manifest.write_bytes(good.replace(old, new))
        (problem,) = verify_pack(out).problems
        assert problem.startswith("ronde-pack.json: its fingerprint is")
    done = CliRunner().invoke(app, ["pack", "--verify", str(out)])
    assert done.exit_code == 1 and "fingerprint" in done.output


SHRINKS = """
import sys
from pathlib import Path
from ronde import SampleError, feed

files, out = sys.argv[1:]

def progress(done, total):
    if done == 10:  # further on than what is read ahead
        (Path(files) / "a" / "39.bin").write_bytes(b"less")

try:
    feed.pack(files, out, shard_bytes=1 << 16, progress=progress)
except SampleError as error:
    print(error)
"""


def test_a_file_that_shrinks_meanwhile_is_named_and_nothing_else_is_said(tmp_path):
    for i in range(40):
        path = tmp_path / "files" / "a" / f"{i:02d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(i).randbytes(9000))
    out = tmp_path / "out"
    done = python(["-c", SHRINKS, str(tmp_path / "files"), str(out)], tmp_path)
    assert done.returncode == 0 and "39.bin" in done.stdout and done.stderr == "", done.stderr
    assert not list(out.glob("*.writing"))


def test_ctrl_c_is_clean(tmp_path):
    files = folder(tmp_path / "files", 1500, largest=30_000)
    out = tmp_path / "out"
    with child(
        [sys.executable, "-m", "ronde", "pack", "--shard-size", "512KiB", str(files), str(out)],
        tmp_path,
    ) as started:
        limit = time.monotonic() + 60
        # The first shard counts once it is written down, which is after it has its name.
        while (
            not ((out / PARTIAL).exists() and "shard-000000" in (out / PARTIAL).read_text())
            and time.monotonic() < limit
        ):
            time.sleep(0.001)
        started.process.send_signal(signal.SIGINT)
        done = started.done(30)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert done.stderr.strip().endswith(
        f"stopped by SIGINT; run the same command again to continue: {out}"
    )
    assert (
        not list(out.glob("*.writing"))
        and (out / PARTIAL).exists()
        and not (out / "ronde-pack.json").exists()
    )
    assert pack(files, out, shard_bytes=512 << 10).resumed > 0 and verify_pack(out).problems == ()


def test_ctrl_c_just_after_a_file_was_opened(tmp_path, monkeypatch):
    packing = sys.modules["ronde.data.pack"]  # the function has the module's name
    files = folder(tmp_path / "files", 50)
    opened = packing._DigestedFile.__init__

    def interrupted(self, path):
        opened(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(packing._DigestedFile, "__init__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(files, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.writing"))
    monkeypatch.undo()
    assert pack(files, tmp_path / "out").samples == 50 + 6


def test_two_at_once(tmp_path):
    import fcntl

    files = folder(tmp_path / "files", 5)
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/.ronde-pack.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ArgumentError, match=r"another process is packing into"):
            pack(files, tmp_path / "out")
    pack(files, tmp_path / "out")
    assert not (tmp_path / "out/.ronde-pack.lock").exists()


def test_out_must_be_free(tmp_path):
    files = folder(tmp_path / "files", 5)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=r"other is not empty \(mine.txt\)"):
        pack(files, tmp_path / "other")
    assert (tmp_path / "other/mine.txt").read_text() == "mine" and len(
        list((tmp_path / "other").iterdir())
    ) == 1
    with pytest.raises(ArgumentError, match=r"is a file"):
        pack(files, tmp_path / "other/mine.txt")
    with pytest.raises(ArgumentError, match=r"is inside"):
        pack(files, files / "packed")
    with pytest.raises(ArgumentError, match=r"/proc/packed cannot be made: "):
        pack(files, Path("/proc/packed"))
    pack(files, tmp_path / "out")
    again = pack(files, tmp_path / "out")
    assert again.already and again.samples == 11
    with pytest.raises(ArgumentError, match=r"other settings"):
        pack(files, tmp_path / "out", labels=None)
    (files / "ant/new.jpg").write_bytes(b"new")
    with pytest.raises(
        ArgumentError, match=r"other settings|other files, or the files have changed"
    ):
        pack(files, tmp_path / "out")
    (files / "ant/new.jpg").unlink()
    (tmp_path / "out/shard-000000.tar").write_bytes(b"short")
    with pytest.raises(ArgumentError, match=r"shard-000000.tar is missing or has another size"):
        pack(files, tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"shard-000000.tar has 5 bytes"):
        feed.tar(tmp_path / "out")
    for arguments, text in (
        ({"kind": "zip"}, "pack writes tar shards, not 'zip'"),
        ({"kind": "parquet"}, "not Parquet. To make Parquet files, use pyarrow or datasets"),
        ({"shard_bytes": 5}, "too small"),
    ):
        with pytest.raises(ArgumentError, match=text):
            pack(files, tmp_path / "new", **arguments)
    with pytest.raises(ArgumentError, match=r"does not exist"):
        pack(tmp_path / "nowhere", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    files = folder(tmp_path / "files", 40)
    source = feed.folder(files)
    gone = files / source.names[30]
    data = gone.read_bytes()
    assert source.sizes.sum() > 0
    gone.unlink()
    with pytest.raises(RondeError, match=f"{source.names[30]} cannot be read: No such file"):
        pack(source, tmp_path / "out", shard_bytes=1 << 16)
    assert not (tmp_path / "out/ronde-pack.json").exists() and not list(
        (tmp_path / "out").glob("*.writing")
    )
    gone.write_bytes(data + b"more")
    with pytest.raises(RondeError, match=f"{source.names[30]} changed while it was packed"):
        pack(source, tmp_path / "out", shard_bytes=1 << 16)
    gone.write_bytes(data)
    assert pack(source, tmp_path / "out", shard_bytes=1 << 16).resumed > 0
    assert feed.tar(tmp_path / "out").read(range(46)) == source.read(range(46))
    gone.unlink()
    gone.symlink_to("nothing")
    found = CliRunner().invoke(app, ["pack", str(files), str(tmp_path / "new")])
    assert isinstance(
        found.exception, ArgumentError
    ) and f"{source.names[30]} cannot be opened" in str(found.exception)


def test_no_room_on_the_disk(tmp_path):
    """A limit on the size of files stands in for a full disk: it is the same error of write(), with
    another number.
    """
    files = folder(tmp_path / "files", 200, largest=30_000)
    limit = 300_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            pack(files, tmp_path / "out", shard_bytes=900 << 10)
        except RondeError as error:
            (tmp_path / "said").write_text(str(error))

    limited_one = forked(limited)
    limited_one.join(60)
    said = (tmp_path / "said").read_text()
    assert (
        limited_one.exitcode == 0
        and "shard-000000.tar cannot be written: File too large" in said
        and "bytes are free there" in said
    )
    assert not (tmp_path / "out/ronde-pack.json").exists() and not list(
        (tmp_path / "out").glob("*.writing")
    )
    # with room, the same command ends
    assert pack(files, tmp_path / "out", shard_bytes=900 << 10).samples == 206


def test_a_disk_that_is_too_small_is_seen_beforehand(tmp_path, monkeypatch):
    files = folder(tmp_path / "files", 5)
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(RondeError, match=r"1,000 bytes free, but [\d,]+ remain to be packed"):
        pack(files, tmp_path / "out")


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
    index = tmp_path / "out" / (shard.name + ".ronde-index")
    raw = index.read_bytes()
    index.write_bytes(raw[:-1] + b"\x01")
    assert any(index.name in p for p in verify_pack(tmp_path / "out").problems)
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
    assert (
        done.exit_code == 0
        and done.output.startswith("packed 11 samples of 4 classes, ")
        and done.output.count("\n") == 1
    )
    assert runner.invoke(
        app, ["pack", str(tmp_path / "files"), str(tmp_path / "out")]
    ).output.startswith(f"{tmp_path}/out is packed already: 11 samples")
    checked = runner.invoke(app, ["pack", "--verify", str(tmp_path / "out")])
    assert checked.exit_code == 0 and "all as they were packed" in checked.output
    as_json = json.loads(
        runner.invoke(app, ["pack", "--verify", "--json", str(tmp_path / "out")]).output
    )
    assert as_json["ok"] and as_json["samples"] == 11 and as_json["kind"] == "tar"
    for arguments, text in (
        (["x"], "OUT is missing"),
        (["--verify", "x", "y"], "--verify takes one folder"),
        (["--format", "zip", "x", "y"], "pack writes tar shards, not 'zip'"),
        (
            ["--format", "parquet", "x", "y"],
            "use pyarrow or datasets and read them with feed.parquet",
        ),
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
