"""The probe: it finds the stages of data sets that were not written for it, times and removes them,
and leaves no trace.
"""

from __future__ import annotations

import base64
import builtins
import functools
import io
import json
import os
import pickle
import random
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import simplejpeg
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFile
from simplejpeg import decode_jpeg
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from ronde.data import named_stages
from ronde.feed import Feed, LoaderSettings, Order, Pipeline, stage
from ronde.plan.batch import Share
from ronde.profile import known_functions as found
from ronde.profile.page_cache import cached_share, evict, storage_sweep
from ronde.profile.probe import Probe, read_files
from ronde.profile.replay import KEPT
from ronde.profile.shared_counters import STAGES, Slot, StageTimes, read_board, read_notes
from ronde.world import ArgumentError, RondeError

N = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """JPEGs of different sizes, a mask and a few other files for each."""
    where = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for i in range(N):
        small = Image.fromarray(numbers.integers(0, 255, (6, 8, 3), dtype=np.uint8))
        size = (64 + 2 * (i % 5), 48)
        small.resize(size).save(where / f"{i}.jpg", quality=90)
        small.convert("L").resize(size).save(where / f"{i}.png")
        np.save(where / f"{i}.npy", numbers.normal(size=(4, 5)))
        np.savez_compressed(where / f"{i}.npz", x=numbers.normal(size=(4, 5)))
        (where / f"{i}.json").write_text(json.dumps({"label": i, "name": "ä"}), encoding="utf-8")
        torch.save(torch.full((3,), i), where / f"{i}.pt")
    return where


class Augment:
    """Draws random numbers, as augmentations do."""

    def __call__(self, image):
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image.resize((32, 32)))).permute(2, 0, 1)


class Pictures(Dataset):
    def __init__(self, folder, transform=None):
        self.folder = folder
        self.transform = transform or Augment()

    def __len__(self):
        return N

    def __getitem__(self, i):
        image = Image.open(self.folder / f"{i}.jpg").convert("RGB")
        return self.transform(image), i


def same(a, b) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def batches(dataset, collate=default_collate, workers=0, context=None, epochs=1):
    out = []
    for epoch in range(epochs):
        random.seed(epoch)
        torch.manual_seed(epoch)
        out += list(
            DataLoader(
                dataset,
                batch_size=8,
                collate_fn=collate,
                num_workers=workers,
                multiprocessing_context=context,
            )
        )
    return out


def looked_at(dataset, board=None, epochs=1, collate=default_collate, **options):
    """Batches of a data set under a probe, and the probe."""
    probe = Probe(board, **options)
    try:
        return batches(*probe.attach(dataset, collate), epochs=epochs), probe
    finally:
        probe.uninstall()


def size_of(folder, kind="jpg") -> int:
    return sum(p.stat().st_size for p in folder.glob(f"*.{kind}"))


# -- what it finds ---------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])
def test_the_stages_of_a_plain_data_set_are_found_wherever_it_is_read(
    folder, tmp_path, workers, context
):
    dataset, board = Pictures(folder), tmp_path / "board"
    plain = batches(dataset, workers=workers, context=context) if context != "spawn" else None
    probe = Probe(board)
    watched = batches(*probe.attach(dataset, default_collate), workers=workers, context=context)
    probe.uninstall()
    if plain is not None:
        assert same(plain, watched)
    found = read_board(board)
    assert {name: times.samples for name, times in found.items()} == {
        "python": N,
        "read": N,
        "decode": N,
        "augment": N,
        "collate": N,
    }
    assert found["augment"].calls == N  # the calls inside it are part of it
    assert found["collate"].calls == N / 8
    assert found["read"].bytes == size_of(folder)
    assert "read" in found["decode"].contains
    assert probe.removable() == {"read", "decode", "augment", "collate", "sample"}
    assert {f.path for f in read_files(board)} == {str(p) for p in folder.glob("*.jpg")}
    assert sum(f.size for f in read_files(board)) == size_of(folder)
    assert read_notes(board) == []


@pytest.mark.parametrize(("executor", "workers"), [("none", 0), ("threads", 2), ("processes", 2)])
def test_it_goes_into_each_of_rondes_executors(folder, tmp_path, executor, workers):
    def read(probe):
        settings = LoaderSettings(num_workers=workers, executor=executor, probe=probe)
        feed = Feed(Pictures(folder, quiet), Order(N, 0), settings, 0)
        try:
            return [
                b
                for _, micros in feed.read(
                    lambda: (Share(0, k, k + 8, ((k, k + 8),), 8) for k in range(0, N, 8))
                )
                for b in micros
            ]
        finally:
            feed.close()

    plain = read(None)
    board = tmp_path / "board"
    assert same(plain, read(Probe(board)))
    found = read_board(board)
    for name in ("python", "read", "decode", "augment", "collate"):
        assert found[name].samples >= N, name  # and what was read to see what the samples are like
    assert found["read"].samples == found["decode"].samples == found["python"].samples
    # and a stage can be taken out there
    read(Probe(other := tmp_path / "other", {"decode"}))
    assert read_board(other)["decode"].samples < read_board(other)["python"].samples
    assert read_notes(other) == []


def quiet(image):
    return torch.from_numpy(np.array(image.resize((32, 32))))


class _Things(Dataset):
    """One of many ways to get at a sample."""

    def __init__(self, folder, how):
        self.folder, self.how = folder, how

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.how(self.folder, i)


def _tar(folder):
    path = folder / "all.tar"
    if not path.exists():
        with tarfile.open(path, "w") as tar:
            for i in range(N):
                tar.add(folder / f"{i}.jpg", f"{i}.jpg")
    return tarfile.open(path)


def _zip(folder):
    path = folder / "all.zip"
    if not path.exists():
        with zipfile.ZipFile(path, "w") as out:
            for i in range(N):
                out.write(folder / f"{i}.jpg", f"{i}.jpg")
    return zipfile.ZipFile(path)


def _pread(folder, i):
    file = os.open(folder / f"{i}.npy", os.O_RDONLY)
    try:
        return os.pread(file, 100, 0)
    finally:
        os.close(file)


def _lines(folder, i):
    with open(folder / f"{i}.json", encoding="utf-8") as file:
        return [*file]


def _unbuffered(folder, i):
    with open(folder / f"{i}.npy", "rb", buffering=0) as file:
        return file.read(10) + file.read()


WAYS = {
    "read_bytes": (lambda f, i: (f / f"{i}.npy").read_bytes(), {"read"}),
    "read_text": (lambda f, i: (f / f"{i}.json").read_text(encoding="utf-8"), {"read"}),
    "lines": (_lines, {"read"}),
    "unbuffered": (_unbuffered, {"read"}),
    "np.load": (lambda f, i: np.load(f / f"{i}.npy"), {"read"}),
    "np.load of a file": (lambda f, i: np.load((f / f"{i}.npy").open("rb")), {"read"}),
    "np.fromfile": (lambda f, i: np.fromfile(f / f"{i}.npy", dtype=np.uint8), {"read"}),
    "torch.load": (lambda f, i: torch.load(f / f"{i}.pt"), {"read"}),
    "os.pread": (_pread, {"read"}),
    "tar": (lambda f, i: _tar(f).extractfile(f"{i}.jpg").read(), {"read"}),
    "zip": (lambda f, i: _zip(f).read(f"{i}.jpg"), {"read"}),
    "json": (lambda f, i: json.loads((f / f"{i}.json").read_bytes()), {"read", "decode"}),
    "simplejpeg": (
        lambda f, i: simplejpeg.decode_jpeg((f / f"{i}.jpg").read_bytes()),
        {"read", "decode"},
    ),
    "simplejpeg by name": (
        lambda f, i: decode_jpeg((f / f"{i}.jpg").read_bytes()),
        {"read", "decode"},
    ),
    "pickle": (lambda f, i: pickle.loads(pickle.dumps({"i": [i]})), {"decode"}),  # noqa: S301
    "picture of bytes": (
        lambda f, i: np.asarray(Image.open(io.BytesIO((f / f"{i}.png").read_bytes()))),
        {"read", "decode"},
    ),
    "npz": (lambda f, i: _archive(f, i)["x"], {"read", "decode"}),
    "base64": (
        lambda f, i: np.frombuffer(
            base64.b64decode(base64.b64encode(bytes([i % 256]) * 8)), np.uint8
        ),
        {"decode"},
    ),
    "with": (lambda f, i: _with(f / f"{i}.jpg"), {"read", "decode"}),
    "resized outside of a transform": (
        lambda f, i: np.asarray(Image.open(f / f"{i}.jpg").resize((9, 9))),
        {"read", "decode", "augment"},
    ),
    "enhanced": (
        lambda f, i: np.asarray(ImageEnhance.Color(Image.open(f / f"{i}.jpg")).enhance(2)),
        {"read", "decode", "augment"},
    ),
}


def _archive(folder, i):
    return np.load(folder / f"{i}.npz")


def _with(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _plain(value):
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes())
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_read_and_decode_are_found_timed_and_taken_out(folder, way):
    how, stages_of_it = WAYS[way]
    dataset = _Things(folder, how)
    plain = [_plain(dataset[i]) for i in range(N)]
    watched, probe = looked_at(dataset, collate=list, epochs=1)
    assert [_plain(s) for b in watched for s in b] == plain
    found = {name: t for name, t in probe.times().items() if t.calls}
    assert set(found) == stages_of_it | {"python", "collate"}
    if "read" in found:
        assert found["read"].samples == N
        assert found["read"].bytes > 0

    for name in sorted(stages_of_it):
        again, probe = looked_at(dataset, collate=list, epochs=2, remove={name})
        assert probe.notes() == []
        given = [_plain(s) for b in again for s in b]
        assert given[:KEPT] == plain[:KEPT]  # what there was to learn from
        learnt = probe.times()
        # going through the headers changes the open archive, and stays
        if way == "tar" and name == "read":
            assert learnt[name].calls < 2 * found[name].calls
        else:
            assert learnt[name].samples < 2 * N  # later it was not done
        if stages_of_it == {name} or name == "decode":
            # and an earlier result stands there
            assert all(one in plain[:KEPT] for one in given[KEPT:])
        for other in stages_of_it - {name}:
            assert learnt[other].samples >= 2 * N - KEPT, (name, other)  # the others were


class _Slowly:
    """A file object of another's making."""

    def __init__(self, file):
        self.file = file

    def read(self, *size):
        time.sleep(0.002)
        return self.file.read(*size)

    def readline(self):
        time.sleep(0.002)
        return self.file.readline()

    def __iter__(self):
        while line := self.readline():
            yield line

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self.file.close()


@pytest.mark.parametrize("strange", [False, True], ids=["file", "object"])
def test_anothers_open_is_reading_too(folder, monkeypatch, strange):
    """A store that is played by replacing ``open``: what it does is done, counts as reading, and is
    not done where reading is taken out.
    """
    opened = []

    def far(file, *args, **kwargs):
        found = real(file, *args, **kwargs)
        if not str(file).endswith((".json", ".npy")):
            return found
        opened.append(file)
        if strange:
            return _Slowly(found)
        time.sleep(0.002)
        return found

    real = builtins.open
    monkeypatch.setattr(builtins, "open", far)
    monkeypatch.setattr(io, "open", far)

    class Things(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            with open(folder / f"{i}.npy", "rb") as file:
                raw = file.read()
            with open(folder / f"{i}.json", encoding="utf-8") as file:
                return raw, list(file)

    dataset = Things()
    plain = [dataset[i] for i in range(N)]
    opened.clear()
    watched, probe = looked_at(dataset, collate=list, epochs=1)
    assert [s for b in watched for s in b] == plain and len(opened) == 2 * N
    times = probe.times()
    assert times["read"].samples == N and times["read"].wall_seconds >= 2 * N * 0.002
    assert times["read"].bytes >= sum(len(raw) for raw, _ in plain)
    opened.clear()
    again, probe = looked_at(dataset, collate=list, epochs=2, remove={"read"})
    given = [s for b in again for s in b]
    assert (
        given[:KEPT] == plain[:KEPT]
        and all(one in plain[:KEPT] for one in given[KEPT:])
        and not probe.notes()
    )
    assert len(opened) < 2 * N  # of 4 N


# -- whose time it is ------------------------------------------------------------------


def test_time_belongs_to_the_innermost_stage_and_all_of_it_to_some():
    class Nested:
        def __len__(self):
            return 4

        @stage("augment")
        def outer(self, i):
            time.sleep(0.002)
            with stage("parse"):
                time.sleep(0.02)
            return i

        def __getitem__(self, i):
            time.sleep(0.005)
            return self.outer(i)

    probe = Probe(None)
    watched, _ = probe.attach(Nested(), list)
    begin = time.perf_counter()
    assert [watched[i] for i in range(4)] == [0, 1, 2, 3]
    took = time.perf_counter() - begin
    probe.uninstall()
    found = probe.times()
    assert found["parse"].wall_seconds >= 4 * 0.02
    assert found["augment"].wall_seconds >= 4 * 0.002
    assert found["python"].wall_seconds >= 4 * 0.005
    assert sum(t.wall_seconds for t in found.values()) <= took
    # it slept
    assert sum(t.cpu_seconds for t in found.values()) < sum(t.wall_seconds for t in found.values())
    assert found["augment"].contains == {"parse"}
    assert "parse" not in probe.removable()  # a block of lines
    assert "augment" in probe.removable()


def test_an_error_in_a_sample_leaves_the_stages_in_order(folder):
    class Fails(Pictures):
        def __getitem__(self, i):
            if i == 3:
                with stage("inner"):
                    Image.open(self.folder / "none.jpg")
            return super().__getitem__(i)

    probe = Probe(None)
    watched, _ = probe.attach(Fails(folder), list)
    for i in range(6):
        if i == 3:
            with pytest.raises(FileNotFoundError, match=r"none\.jpg"):
                watched[i]
        else:
            watched[i]
    found = probe.times()
    probe.uninstall()
    assert (found["python"].samples, found["augment"].samples, found["inner"].samples) == (6, 5, 1)


def test_what_is_read_outside_of_samples_is_not_counted(folder):
    probe = Probe(None)
    watched, _ = probe.attach(Pictures(folder), list)
    watched[0]
    before = probe.times()
    (folder / "1.npy").read_bytes()
    Image.open(folder / "1.jpg").convert("L").resize((3, 3))
    threading.Thread(target=np.load, args=(folder / "1.npy",)).start()
    assert probe.times() == before
    probe.uninstall()


def test_batches_made_of_rows_and_streams_are_counted(tmp_path):
    rows = TensorDataset(torch.arange(N), torch.ones(N))
    probe = Probe(tmp_path / "rows")
    feed = Feed(rows, Order(N, 0), LoaderSettings(probe=probe), 0)
    shares = [Share(0, k, k + 8, ((k, k + 8),), 8) for k in range(0, N, 8)]
    assert sum(len(b[0]) for _, micros in feed.read(lambda: iter(shares)) for b in micros) == N
    found = read_board(tmp_path / "rows")
    assert (found["python"].samples, found["collate"].samples, found["collate"].calls) == (N, N, 5)

    class Stream(IterableDataset):
        def __len__(self):
            return N

        def __iter__(self):
            for i in range(N):
                yield self.step(i)

        @stage("parse")
        def step(self, i):
            return i

    probe = Probe(tmp_path / "stream")
    feed = Feed(Stream(), Order(N, 0, shuffle=False), LoaderSettings(probe=probe), 0)
    assert torch.cat(
        [b for _, micros in feed.read(lambda: iter(shares)) for b in micros]
    ).tolist() == list(range(N))
    probe.uninstall()
    assert read_board(tmp_path / "stream")["parse"].samples == N


# -- transforms, wherever they are kept ------------------------------------------------


def global_transform(x):
    return x + 1


class _Keeps:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return N


class _Attribute(_Keeps):
    def __getitem__(self, i):
        return self.my_transforms(i)


class _List(_Keeps):
    def __getitem__(self, i):
        for t in self.transforms:
            i = t(i)
        return i


class _Method(_Keeps):
    def _augment(self, x):
        return x + 1

    def __getitem__(self, i):
        return self._augment(i)


class _Static(_Keeps):
    @staticmethod
    def preprocess(x):
        return x + 1

    def __getitem__(self, i):
        return self.preprocess(i)


class _Global(_Keeps):
    def __getitem__(self, i):
        return global_transform(i)


def read_thing(i):
    return i


def decode_thing(i):
    return global_tfm(i)


def global_tfm(i):
    return i + 1


class _Reached(_Keeps):
    """Functions that functions of the user's call, and methods of an object that it holds."""

    class _Store:
        def fetch(self, i):
            return i

    def __init__(self):
        self.store = self._Store()

    def _sample(self, i):
        return decode_thing(read_thing(self.store.fetch(i)))

    def ready(self, i):
        return i

    def __getitem__(self, i):
        return self.ready(self._sample(i))


def test_functions_are_found_by_name_wherever_making_a_sample_comes_by():
    dataset = _Reached()
    watched, probe = looked_at(dataset, collate=list)
    functions = read_thing, decode_thing, global_tfm
    assert [s for b in watched for s in b] == [dataset[i] for i in range(N)]
    times = probe.times()
    assert (
        times["read"].calls == 2 * N and times["decode"].calls == N and times["augment"].calls == N
    )
    assert times["decode"].contains == {"augment"}
    assert (read_thing, decode_thing, global_tfm) == functions and not vars(dataset.store)


def test_names_of_stages_are_words():
    named = {
        name: found._stage_named(name)
        for name in (
            "aug",
            "train_augs",
            "strong_augment",
            "gauge",
            "august",
            "ready",
            "read_row",
            "_fetch",
        )
    }
    assert named == {
        **dict.fromkeys(("aug", "train_augs", "strong_augment"), "augment"),
        **dict.fromkeys(("gauge", "august", "ready"), None),
        **dict.fromkeys(("read_row", "_fetch"), "read"),
    }


class _Tokens(_Keeps):
    def __getitem__(self, i):
        return self.tokenizer.encode(str(i))[0]


class _Tokenizer:
    def encode(self, text):
        return [int(text) + 1]

    def __call__(self, text):
        raise AssertionError


class _Slots(Dataset):
    __slots__ = ()
    transform = functools.partial(global_transform)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.transform(i)


@pytest.mark.parametrize(
    "dataset",
    [
        _Attribute(my_transforms=global_transform),
        _List(transforms=[global_transform]),
        _List(transforms=(global_transform,)),
        _List(transforms=torch.nn.Sequential(torch.nn.Identity())),
        _Method(),
        _Static(),
        _Global(),
        _Tokens(tokenizer=_Tokenizer()),
        Subset(ConcatDataset([_Method()]), range(N)),
    ],
    ids=lambda d: type(d).__name__,
)
def test_transforms_are_found_and_put_back(dataset):
    before = {**vars(dataset)}, global_transform
    plain = [dataset[i] for i in range(N)]
    watched, probe = looked_at(dataset, collate=list)
    assert [s for b in watched for s in b] == plain
    # it is gone through, not called
    if not isinstance(getattr(dataset, "transforms", None), torch.nn.Sequential):
        assert probe.times()["augment"].calls == N
    assert vars(dataset) == before[0]
    assert all(vars(dataset)[k] is v for k, v in before[0].items())
    assert global_transform is before[1]
    assert [dataset[i] for i in range(N)] == plain


def test_what_stands_for_a_transform_passes_for_it(folder):
    dataset = Pictures(folder, torch.nn.Sequential(torch.nn.Identity()))
    probe = Probe(None)
    watched, _ = probe.attach(dataset, list)
    watched[0]
    stands = dataset.transform
    assert stands is not dataset.transform._ronde_value
    assert isinstance(stands, torch.nn.Sequential)
    assert len(stands) == 1
    assert stands[0] is next(iter(stands))
    assert isinstance(watched, Pictures)
    assert type(pickle.loads(pickle.dumps(dataset)).transform) is torch.nn.Sequential  # noqa: S301
    assert repr(stands).startswith("Sequential")
    stands.mark = 3
    probe.uninstall()
    assert dataset.transform.mark == 3


# -- no trace --------------------------------------------------------------------------


def test_it_leaves_no_trace(folder):
    def places():
        owners = (
            PIL.Image,
            PIL.Image.Image,
            ImageFile.ImageFile,
            *ImageFile.ImageFile.__subclasses__(),
            np,
            torch,
            os,
            json,
            pickle,
            simplejpeg,
        )
        found = {
            (o, k): v
            for o in (*owners, builtins, io, zipfile.ZipFile, tarfile)
            for k, v in vars(o).items()
            if callable(v)
        }
        return {
            **found,
            "here": globals()["decode_jpeg"],
            "listener": named_stages.listener,
            "threads": torch.get_num_threads(),
        }

    dataset = Pictures(folder)
    dataset[0]  # Pillow imports its formats
    transform, before = dataset.transform, places()
    probe = Probe(None, threads=1)
    watched, _ = probe.attach(dataset, list)
    watched[0]
    during = places()
    changed = {k for k in before if during[k] is not before[k]}
    assert {
        (builtins, "open"),
        (io, "open"),
        (PIL.Image, "open"),
        (PIL.Image.Image, "resize"),
        (np, "load"),
        "here",
        "listener",
    } <= changed
    assert dataset.transform is not transform
    probe.uninstall()
    after = places()
    assert {k for k in before if after[k] is not before[k]} == set()
    assert set(after) == set(before)
    assert dataset.transform is transform
    # what is read now is not looked at, and it can be put in place again
    seen = probe.times()
    watched[1]
    assert probe.times() == seen
    probe.install()
    watched[1]
    assert probe.times()["python"].samples == seen["python"].samples + 1
    probe.uninstall()
    assert {k for k in before if places()[k] is not before[k]} == set()


def test_files_opened_while_it_looked_can_be_read_afterwards(folder):
    class Holds(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            self.file = open(folder / "0.npy", "rb")  # noqa: SIM115
            assert isinstance(self.file, io.BufferedReader)
            return self.file.read(3)

    probe = Probe(None)
    dataset = Holds()
    watched, _ = probe.attach(dataset, list)
    assert watched[0] == (folder / "0.npy").read_bytes()[:3]
    probe.uninstall()
    assert dataset.file.read() == (folder / "0.npy").read_bytes()[3:]
    dataset.file.close()


# -- taking stages out -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["read", "decode", "augment", "collate", "sample"])
def test_each_stage_of_a_plain_data_set_can_be_taken_out(folder, name):
    dataset = Pictures(folder, quiet)
    plain = batches(dataset, epochs=3)
    again, probe = looked_at(dataset, epochs=3, remove={name})
    found = probe.times()
    assert probe.notes() == []
    assert same(plain[:2], again[:2])  # two batches of eight to learn from
    assert [len(b[0]) for b in again] == [len(b[0]) for b in plain]
    first = {
        tuple(image.flatten().tolist())
        for b in plain[: 4 if name == "collate" else 2]
        for image in b[0]
    }
    assert all(tuple(image.flatten().tolist()) in first for b in again[4:] for image in b[0])
    if name in ("read", "decode", "augment"):  # labels are still each sample's own
        assert [b[1].tolist() for b in again] == [b[1].tolist() for b in plain]
        done = {k: t.samples for k, t in found.items()}
        assert done == {
            k: KEPT if k == name else 3 * N
            for k in ("python", "read", "decode", "augment", "collate")
        }
    if name == "decode":
        # taking out the decoding leaves the reading
        assert found["read"].bytes == 3 * size_of(folder)
    if name == "sample":
        assert found["decode"].samples == KEPT
        assert found["python"].samples == 3 * N
    if name == "collate":
        assert found["collate"].calls == 4
        assert found["augment"].samples == 3 * N


def test_an_augmentation_that_decodes_is_taken_out_without_the_decoding(folder):
    class Lazy(Pictures):
        def __getitem__(self, i):
            return self.transform(Image.open(self.folder / f"{i}.jpg"))

    _, probe = looked_at(Lazy(folder, quiet), epochs=2, remove={"augment"})
    assert probe.times()["decode"].samples == 2 * N
    assert probe.times()["augment"].samples == KEPT


def test_whole_batches_are_replayed_in_loading_processes(folder, tmp_path):
    probe = Probe(tmp_path / "board", {"sample", "collate"})
    watched = batches(*probe.attach(Pictures(folder), default_collate), workers=1, epochs=1)
    assert [len(b[1]) for b in watched] == [8] * 5
    assert watched[4][1].tolist() == watched[0][1].tolist()
    assert read_board(tmp_path / "board")["collate"].calls == 4


def test_parts_of_one_sample_stay_together(folder):
    """Image and mask of the same picture, and the size that was asked for before decoding."""

    def pair(where, i):
        image, mask = Image.open(where / f"{i}.jpg"), Image.open(where / f"{i}.png")
        size = image.size
        pixels = np.asarray(image.convert("L"), dtype=np.int64)
        other = np.asarray(mask, dtype=np.int64)
        assert pixels.shape == other.shape == size[::-1]
        assert np.abs(pixels - other).mean() < 12  # they show the same, one of them compressed
        return np.concatenate([pixels.ravel(), other.ravel()])

    for kind in (_Things, lambda f, h: Subset(_Things(f, h), range(N))):
        _, probe = looked_at(kind(folder, pair), collate=len, epochs=3, remove={"decode"})
        assert probe.notes() == []
        assert probe.times()["decode"].samples == KEPT


@pytest.mark.parametrize("kind", ["array", "tensor", "image", "dict"])
def test_results_that_the_data_set_changes_are_given_unchanged(folder, kind):
    values = {
        "array": lambda i: np.full(5, i),
        "tensor": lambda i: torch.full((5,), i),
        "image": lambda i: Image.new("L", (3, 3), i),
        "dict": lambda i: {"x": [i]},
    }

    class Changes:
        def __len__(self):
            return N

        @stage("decode")
        def make(self, i):
            return values[kind](i)

        def __getitem__(self, i):
            value = self.make(i)
            if kind == "image":
                seen = value.getpixel((0, 0))
                ImageDraw.Draw(value).rectangle((0, 0, 2, 2), fill=99)
            elif kind == "dict":
                seen = value["x"][0]
                value["x"].append(99)
                assert len(value["x"]) == 2
            else:
                seen = int(value[0])
                value += 99
            return seen

    again, probe = looked_at(Changes(), collate=list, epochs=2, remove={"decode"})
    given = [s for b in again for s in b]
    assert given[KEPT:] == [i % KEPT for i in range(KEPT, 2 * N)]
    assert probe.notes() == []


def test_a_picture_that_is_painted_on_is_not_passed_on_painted(folder):
    def paint(where, i):
        image = Image.open(where / f"{i}.png")
        image.load()
        seen = image.tobytes()
        ImageDraw.Draw(image).rectangle((0, 0, 60, 60), fill=255)
        assert image.tobytes() != seen
        image.close()
        return seen

    plain = [paint(folder, i) for i in range(N)]
    again, probe = looked_at(_Things(folder, paint), collate=list, epochs=2, remove={"decode"})
    given = [s for b in again for s in b]
    assert given[KEPT:] == [plain[i % KEPT] for i in range(KEPT, 2 * N)]
    assert probe.times()["decode"].samples == KEPT


def test_where_replaying_breaks_the_data_set_the_stage_stays_in(folder, tmp_path):
    def strict(where, i):
        found = json.loads((where / f"{i}.json").read_text(encoding="utf-8"))
        if found["label"] != i:
            raise ValueError(f"expected {i}")
        return i

    for name in ("read", "decode"):
        board = tmp_path / name
        again, _ = looked_at(_Things(folder, strict), board, collate=list, epochs=2, remove={name})
        assert [s for b in again for s in b] == [*range(N)] * 2  # every sample is right
        (note,) = read_notes(board)
        assert note.startswith(f"{name}: not taken out")
        assert f"expected {KEPT}" in note

    def broken(where, i):
        if i == 20:
            raise KeyError("of its own")
        return (
            strict(where, i)
            if i < KEPT
            else json.loads((where / f"{i}.json").read_text(encoding="utf-8"))["label"]
        )

    probe = Probe(tmp_path / "own", {"decode"})
    watched, _ = probe.attach(_Things(folder, broken), list)
    for i in range(N):
        if i == 20:
            with pytest.raises(KeyError, match="of its own"):
                watched[i]
        else:
            assert watched[i] == i % KEPT
    probe.uninstall()
    assert probe.notes() == []  # that error has nothing to do with what is taken out


def test_a_block_of_lines_is_said_not_to_be_removable(tmp_path):
    class Blocks:
        def __len__(self):
            return N

        def __getitem__(self, i):
            with stage("parse"):
                return i

    again, probe = looked_at(Blocks(), tmp_path / "board", collate=list, remove={"parse"})
    assert [s for b in again for s in b] == [*range(N)]
    assert probe.notes() == [
        "parse: a block of lines (with stage(...)) cannot be taken out; make it a function."
    ]
    assert "parse" not in probe.removable()


def test_stages_of_a_pipeline_are_taken_out_one_by_one_and_in_batches():
    class Source:
        fingerprint = "numbers"
        read_ids = 0

        def __len__(self):
            return N

        def read(self, ids):
            self.read_ids += len(ids)
            return [int(i) for i in ids]

    done = {"decode": 0, "augment": 0}

    def decode(one):
        done["decode"] += 1
        return {"x": one}

    def augment(many):
        done["augment"] += len(many)
        return [one["x"] * 10 for one in many]

    def fresh():
        return Pipeline(Source()).map(decode, "decode").map(augment, "augment", batched=True)

    shares = [Share(e, k, k + 8, ((k, k + 8),), 8) for e in range(2) for k in range(0, N, 8)]
    for name in ("read", "decode", "augment"):
        done.update(decode=0, augment=0)
        pipeline, probe = fresh(), Probe(None, {name})
        feed = Feed(pipeline, Order(N, 0, shuffle=False), LoaderSettings(probe=probe), 0)
        given = torch.cat(
            [b for _, micros in feed.read(lambda: iter(shares)) for b in micros]
        ).tolist()
        counts = {"read": pipeline.source.read_ids, **done}
        assert {k: v for k, v in counts.items() if k != name} == {
            k: 2 * N for k in counts if k != name
        }
        # one by one at first, then eight at once: learnt twice
        assert KEPT <= counts[name] <= KEPT + 8
        assert len(set(given)) == counts[name]
        assert given[:KEPT] == [10 * i for i in range(KEPT)]


def test_large_files_are_taken_out_read_by_read(tmp_path, monkeypatch):
    from ronde.profile import function_hooks

    monkeypatch.setattr(function_hooks, "_WHOLE", 1000)
    path = tmp_path / "tokens.bin"
    np.arange(5000, dtype=np.int64).tofile(path)

    class Window:
        def __len__(self):
            return N

        def __getitem__(self, i):
            with path.open("rb", buffering=0) as file:
                file.seek(800 * i)
                return int(np.frombuffer(file.read(800), dtype=np.int64)[0])

    again, probe = looked_at(Window(), collate=list, epochs=2, remove={"read"})
    assert [s for b in again for s in b][KEPT:] == [100 * (i % KEPT) for i in range(KEPT, 2 * N)]
    assert probe.times()["read"].bytes == 800 * KEPT


# -- the board -------------------------------------------------------------------------


def test_threads_and_processes_add_up_on_one_board(tmp_path):
    board = tmp_path / "board"

    class Counts:
        def __len__(self):
            return 1000

        @stage("work")
        def work(self, i):
            return i

        def __getitem__(self, i):
            return self.work(i)

    probe = Probe(board)
    watched, _ = probe.attach(Counts(), list)
    threads = [threading.Thread(target=lambda: [watched[i] for i in range(1000)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    size = board.stat().st_size
    found = read_board(board)
    assert (found["work"].calls, found["work"].samples, found["python"].samples) == (
        4000,
        4000,
        4000,
    )
    # takes over the place of one that has ended
    again = threading.Thread(target=lambda: watched[0])
    again.start()
    again.join()
    probe.uninstall()
    assert board.stat().st_size == size
    assert read_board(board)["work"].calls == 4001


def test_a_board_holds_many_names_and_tells_differences(tmp_path):
    slot = Slot(tmp_path / "board")
    numbers = [slot.stage(f"stage {i}") for i in range(STAGES + 5)]
    assert len(set(numbers)) == STAGES
    assert numbers[-1] == numbers[-2] == slot.stage("others")
    assert slot.stage("stage 3") == 3
    slot.note("first\nline")
    slot.note("first\nline")
    for i in range(100):
        slot.note(f"{i} " + "x" * 200)
    assert read_notes(tmp_path / "board")[0] == "first line"
    assert len(read_board(tmp_path / "board")) == STAGES
    assert read_board(tmp_path / "none") == {}
    assert read_notes(tmp_path / "none") == []
    assert read_files(tmp_path / "none") == []
    a, b = StageTimes(3, 2, 1.0, 2.0, 7), StageTimes(1, 1, 0.5, 1.5, 2)
    assert (a + b) - a == b


def test_what_cannot_be_asked_for():
    with pytest.raises(ArgumentError, match="Use 'sample' to remove all of it"):
        Probe(None, {"python"})
    for threads in (0, True, 1.5):
        with pytest.raises(ArgumentError, match="whole number"):
            Probe(None, threads=threads)
    first, second = Probe(None), Probe(None)
    first.install()
    try:
        with pytest.raises(RondeError, match="another probe is active"):
            second.install()
    finally:
        first.uninstall()
    second.install()
    second.uninstall()
    copy = pickle.loads(pickle.dumps(Probe(Path("x"), {"read"}, 2)))  # noqa: S301
    assert (copy.board, copy.remove, copy.threads) == (Path("x"), {"read"}, 2)


# -- threads and storage ---------------------------------------------------------------


def test_compute_threads_are_limited_while_samples_are_made_and_put_back():
    seen = []

    class Looks:
        def __len__(self):
            return N

        def __getitem__(self, i):
            torch.set_num_threads(3)  # the arm's limit holds
            seen.append(torch.get_num_threads())
            return i

    before, setter = torch.get_num_threads(), torch.set_num_threads
    setter(2)
    try:
        probe = Probe(None, threads=1)
        feed = Feed(Looks(), Order(N, 0), LoaderSettings(probe=probe), 0)
        between = [
            torch.get_num_threads() for _ in feed.read(lambda: iter([Share(0, 0, 4, ((0, 4),), 4)]))
        ]
        probe.uninstall()
        assert set(seen) == {1}
        assert between == [2]  # the model's own step keeps its threads
        assert torch.set_num_threads is setter
        assert torch.get_num_threads() == 2
    finally:
        setter(before)


def test_storage_is_looked_at(tmp_path):
    files = []
    for i in range(4):
        files.append(tmp_path / f"{i}.bin")
        files[-1].write_bytes(os.urandom(100_000))
    assert cached_share(files[0]) in (1.0, None)
    assert cached_share(tmp_path / "none") is None
    (tmp_path / "empty").touch()
    assert cached_share(tmp_path / "empty") == 1.0
    assert evict([*files, tmp_path / "none"]) == 4
    assert all(f.read_bytes() for f in files)
    found = storage_sweep(files, in_flight=(1, 3), seconds=0.05)
    assert sorted(found) == [1, 3]
    for count, read in found.values():
        assert count > 0
        assert read == pytest.approx(count * 100_000)
    with pytest.raises(ArgumentError, match="no files"):
        storage_sweep([])
    with pytest.raises(ArgumentError, match="numbers of readers"):
        storage_sweep(files, in_flight=(0,))
