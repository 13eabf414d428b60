"""What a cache on disk keeps of a data set holds as long as the files are as they were: compared
with the data set itself.
"""

# ruff: noqa: PTH118, PTH208 - as users write it
from __future__ import annotations

import functools
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, Subset

from ronde.feed import Pipeline, arrays, cached_dataset

HERE = ""


class Rooted(Dataset):
    """The usual shape: a folder, and names apart."""

    def __init__(self, root: str) -> None:
        self.root, self.names = root, sorted(os.listdir(os.path.join(root, "images")))

    def __len__(self):
        return len(self.names)

    def path(self, i):
        return os.path.join(self.root, "images", self.names[i])

    def __getitem__(self, i):
        with open(self.path(i), "rb") as file:
            return file.read(), i


class ByPath(Rooted):
    def __getitem__(self, i):
        return Path(self.path(i)).read_bytes(), i


class ByNumber(Rooted):
    def __getitem__(self, i):
        descriptor = os.open(self.path(i), os.O_RDONLY)
        try:
            return os.read(descriptor, 1 << 20), i
        finally:
            os.close(descriptor)


class ByMap(Rooted):
    def __getitem__(self, i):
        with (
            open(self.path(i), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return bytes(data), i


class ByNumPy(Rooted):
    def __getitem__(self, i):
        return np.memmap(self.path(i), np.uint8, "r").tobytes(), i


class Formatted(Rooted):
    def __getitem__(self, i):
        with open(f"{self.root}/images/{i}.bin", "rb") as file:
            return file.read(), i


class Global(Rooted):
    def __init__(self) -> None:
        pass

    def __len__(self):
        return 6

    def __getitem__(self, i):
        with open(f"{HERE}/images/{i}.bin", "rb") as file:
            return file.read(), i


class Many(Rooted):
    def __getitems__(self, ids):
        return [self[i] for i in ids]


class Foreign(Rooted):
    """Read by a library that opens files by itself."""

    def __getitem__(self, i):
        from pyarrow import OSFile

        with OSFile(self.path(i)) as file:
            return file.read(), i


KINDS = {
    kind.__name__: kind
    for kind in (Rooted, ByPath, ByNumber, ByMap, ByNumPy, Formatted, Many, Foreign)
}


def made(root: Path) -> Path:
    (root / "images").mkdir(parents=True)
    for i in range(6):
        (root / "images" / f"{i}.bin").write_bytes(b"%05d" % i)
    return root


def in_place(file: Path) -> None:
    file.write_bytes(b"AAAAA")


def renamed(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(b"another size")
    other.replace(file)


def both(data, where):
    """Out of a cache and as the data set itself gives it; hits, and what was made anew."""
    kept = cached_dataset(data, where=where, limit="1MiB")
    before = kept.report()
    found = kept.__getitems__(list(range(len(data))))
    after = kept.report()
    kept.close()
    assert found == [data[i] for i in range(len(data))]
    return after.hits - before.hits, after.changed - before.changed


@pytest.mark.parametrize("change", [in_place, renamed])
@pytest.mark.parametrize("kind", [*KINDS, "Global", "Subset"])
def test_a_file_that_changed_is_read_anew(tmp_path, monkeypatch, kind, change):
    root = made(tmp_path / "data")
    monkeypatch.setattr(sys.modules[__name__], "HERE", str(root))
    make = Global if kind == "Global" else functools.partial(KINDS.get(kind, Rooted), str(root))
    wrap = (lambda data: Subset(data, range(6))) if kind == "Subset" else (lambda data: data)
    assert both(wrap(make()), tmp_path / "cache") == (0, 0)
    assert both(wrap(make()), tmp_path / "cache") == (6, 0)
    change(root / "images" / "3.bin")
    # The others still hold, but where nobody knows which file was read.
    assert both(wrap(make()), tmp_path / "cache") == ((0, 6) if kind == "Foreign" else (5, 1))
    assert both(wrap(make()), tmp_path / "cache") == (6, 0)


def test_it_is_noticed_in_loading_processes_and_by_a_cache_that_is_open(tmp_path):
    root = made(tmp_path / "data")
    data = Rooted(str(root))
    kept = cached_dataset(data, where=tmp_path / "cache", limit="1MiB")
    loader = DataLoader(kept, batch_size=None, num_workers=2)
    for _ in range(2):
        assert [tuple(x) for x in loader] == [data[i] for i in range(6)]
        renamed(root / "images" / "4.bin")
    assert [tuple(x) for x in loader] == [data[i] for i in range(6)]
    assert kept.report().changed == 2 and kept.report().held == 6
    kept.close()


def test_a_file_that_went_is_the_data_sets_own_error_and_one_that_came_counts(tmp_path):
    class Masked(Rooted):
        def __getitem__(self, i):
            try:
                mask = open(f"{self.root}/masks/{i}", "rb").read()  # noqa: SIM115
            except FileNotFoundError:
                mask = b""
            return super().__getitem__(i) + (mask,)

    root = made(tmp_path / "data")
    (root / "masks").mkdir()
    (root / "masks" / "0").write_bytes(b"mask")
    data = Masked(str(root))
    assert both(data, tmp_path / "cache") == (0, 0)
    (root / "masks" / "2").write_bytes(b"new mask")
    assert both(data, tmp_path / "cache") == (5, 1)
    (root / "images" / "5.bin").unlink()
    kept = cached_dataset(data, where=tmp_path / "cache", limit="1MiB")
    assert kept[4] == data[4]
    with pytest.raises(FileNotFoundError):
        kept[5]
    kept.close()


def test_files_that_a_step_reads_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mean.txt").write_text("1.0")
    Path("frames").mkdir()
    Path("frames/1").write_text("")

    def scaled(row):
        return float(row["x"]) - float(Path("mean.txt").read_text()), len(os.listdir("frames"))

    def values():
        made_of = (
            Pipeline(arrays({"x": np.arange(4.0)}))
            .map(scaled, "decode")
            .cache("decode", where=tmp_path / "cache", limit="1MiB")
        )
        found = made_of.__getitems__(range(4))
        hits = made_of.source.report().hits
        made_of.source.close()
        assert found == [scaled({"x": i}) for i in range(4)]
        return hits

    assert values() == 0 and values() == 4
    Path("mean.txt").write_text("2.50")
    assert values() == 4 and values() == 8
    Path("frames/2").write_text("")
    assert values() == 8 and values() == 12
