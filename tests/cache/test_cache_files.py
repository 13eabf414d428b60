"""What a cache on disk keeps of a data set holds as long as the files are as they were: compared
with the data set itself.
"""

# ruff: noqa: PTH118, PTH208 - as users write it
from __future__ import annotations

import csv
import functools
import mmap
import os
import shutil
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from ronde.cache import file_dependencies
from ronde.data.sources.map_dataset import dataset
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


def test_a_file_that_is_opened_once_for_all_samples_counts_for_all(tmp_path):
    class Indexed(Rooted):
        index = None

        def __getitem__(self, i):
            if self.index is None:
                with open(os.path.join(self.root, "index.csv"), newline="") as file:
                    self.index = list(csv.reader(file))
            return (*super().__getitem__(i), self.index[i])

    root = made(tmp_path / "data")
    (root / "index.csv").write_text("a\n" * 6)
    assert both(Indexed(str(root)), tmp_path / "cache") == (0, 0)
    assert both(Indexed(str(root)), tmp_path / "cache") == (6, 0)
    os.utime(root, ns=(0, 0))  # the folder itself is as it was
    both(Indexed(str(root)), tmp_path / "cache")
    (root / "index.csv").write_text("bb\n" * 6)
    os.utime(root, ns=(0, 0))
    assert both(Indexed(str(root)), tmp_path / "cache") == (0, 6)


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


def test_a_data_set_as_a_source_and_a_cache_after_a_cache(tmp_path):
    root = made(tmp_path / "data")

    def values():
        kept = Pipeline(dataset(Rooted(str(root)))).cache(
            "read", where=tmp_path / "one", limit="1MiB"
        )
        twice = kept.map(lambda sample: sample[0] * 2, "decode").cache(
            "decode", where=tmp_path / "two", limit="1MiB"
        )
        found = twice.__getitems__(range(6))
        report = twice.source.report()
        twice.source.close()
        kept.source.close()
        assert found == [Rooted(str(root))[i][0] * 2 for i in range(6)]
        return report.hits

    assert values() == 0 and values() == 6
    in_place(root / "images" / "3.bin")
    assert values() == 11
    two = tmp_path / "two"
    shutil.rmtree(two)  # made of what the first cache holds: its files are those of that one
    values()
    renamed(root / "images" / "3.bin")
    assert values() == 5


def test_pictures_by_pillow(tmp_path):
    class Pictures(Rooted):
        def __getitem__(self, i):
            with Image.open(self.path(i)) as image:
                return np.asarray(image.convert("RGB")).tolist()

    (tmp_path / "data" / "images").mkdir(parents=True)
    for i in range(3):
        Image.new("RGB", (2, 2), (i, 0, 0)).save(tmp_path / "data" / "images" / f"{i}.png")
    data = Pictures(str(tmp_path / "data"))
    assert both(data, tmp_path / "cache") == (0, 0)
    Image.new("RGB", (2, 2), (0, 200, 0)).save(tmp_path / "data" / "images" / "1.png")
    assert both(data, tmp_path / "cache") == (2, 1)


def test_more_files_than_can_be_looked_at_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(file_dependencies, "MOST_LISTED", 4)
    root = made(tmp_path / "data")
    with pytest.warns(RuntimeWarning, match="holds more than .* files"):
        both(Foreign(str(root)), tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both(Rooted(str(root)), tmp_path / "other")  # these are known by themselves


def test_only_the_thread_that_makes_a_sample_is_listened_to(tmp_path):
    (tmp_path / "a").write_text("")
    (tmp_path / "b").write_text("")
    with file_dependencies.Noting() as noting:
        other = threading.Thread(target=(tmp_path / "b").read_text)
        other.start()
        other.join()
        (tmp_path / "a").read_text()
        (tmp_path / "c").write_text("")
    (tmp_path / "b").read_text()
    assert noting.files == {str(tmp_path / "a"): [0, (tmp_path / "a").stat().st_mtime_ns]}


def test_data_in_memory_or_beside_a_python_counts_and_what_python_comes_with_does_not():
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file, file_dependencies.Noting() as noting:
        Path(file.name).read_bytes()
        Path(os.__file__).read_text()
        Path("/proc/self/stat").read_text()
    assert list(noting.files) == [file.name]
    assert not any(
        sys.prefix + "/data" == s or (sys.prefix + "/data/x").startswith(s)
        for s in file_dependencies._SYSTEM
    )


def test_a_folder_that_holds_a_link_to_itself_is_listed_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("1")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "back").symlink_to(tmp_path / "held")
    before = file_dependencies.listing([str(tmp_path / "held")])
    assert before == file_dependencies.listing([str(tmp_path / "held")]) and before[1] == ""
    (tmp_path / "real" / "file").write_text("22")
    assert file_dependencies.listing([str(tmp_path / "held")]) != before
