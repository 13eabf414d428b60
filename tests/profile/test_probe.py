"""The probe: it finds the stages of data sets that were not written for it, times them, and leaves
no trace.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import random
import tarfile
import time
import types
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import simplejpeg
import torch
from PIL import Image, ImageEnhance, ImageFile
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
from ronde.feed import Feed, LoaderSettings, Order, stage
from ronde.plan.batch import Share
from ronde.profile import monkeypatch as layers
from ronde.profile.probe import Probe
from ronde.profile.shared_counters import read_board
from ronde.world import RondeError

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


@pytest.fixture
def board(tmp_path) -> Path:
    return tmp_path / "board"


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


def looked_at(dataset, board, epochs=1, collate=default_collate, **options):
    """Batches of a data set under a probe."""
    probe = Probe(board, **options)
    try:
        return batches(*probe.attach(dataset, collate), epochs=epochs)
    finally:
        probe.uninstall()


def size_of(folder, kind="jpg") -> int:
    return sum(p.stat().st_size for p in folder.glob(f"*.{kind}"))


# -- what it finds ---------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "spawn")])
def test_the_stages_of_a_plain_data_set_are_found_wherever_it_is_read(
    folder, board, workers, context
):
    dataset = Pictures(folder)
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


@pytest.mark.parametrize(("executor", "workers"), [("none", 0), ("threads", 2), ("processes", 2)])
def test_it_goes_into_each_of_rondes_executors(folder, board, tmp_path, executor, workers):
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
    assert same(plain, read(Probe(board)))
    found = read_board(board)
    for name in ("python", "read", "decode", "augment", "collate"):
        assert found[name].samples >= N, name  # and what was read to see what the samples are like
    assert found["read"].samples == found["decode"].samples == found["python"].samples
    # and samples can be replayed there
    read(Probe(other := tmp_path / "other", replay=True))
    assert read_board(other)["decode"].samples < read_board(other)["python"].samples


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


def _lines(folder, i):
    with open(folder / f"{i}.json", encoding="utf-8") as file:
        return [*file]


WAYS = {
    "read_bytes": (lambda f, i: (f / f"{i}.npy").read_bytes(), {"read"}),
    "lines": (_lines, {"read"}),
    "np.load": (lambda f, i: np.load(f / f"{i}.npy"), {"read"}),
    "torch.load": (lambda f, i: torch.load(f / f"{i}.pt"), {"read"}),
    "tar": (lambda f, i: _tar(f).extractfile(f"{i}.jpg").read(), {"read"}),
    "json": (lambda f, i: json.loads((f / f"{i}.json").read_bytes()), {"read", "decode"}),
    "simplejpeg by name": (
        lambda f, i: decode_jpeg((f / f"{i}.jpg").read_bytes()),
        {"read", "decode"},
    ),
    "enhanced": (
        lambda f, i: np.asarray(ImageEnhance.Color(Image.open(f / f"{i}.jpg")).enhance(2)),
        {"read", "decode", "augment"},
    ),
}


def _plain(value):
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes())
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_read_and_decode_are_found_and_timed(folder, way, board):
    how, stages_of_it = WAYS[way]
    dataset = _Things(folder, how)
    plain = [_plain(dataset[i]) for i in range(N)]
    watched = looked_at(dataset, board, collate=list)
    assert [_plain(s) for b in watched for s in b] == plain
    found = {name: t for name, t in read_board(board).items() if t.calls}
    assert set(found) == stages_of_it | {"python", "collate"}
    if "read" in found:
        assert found["read"].samples == N
        assert found["read"].bytes > 0


# -- whose time it is ------------------------------------------------------------------


def test_time_belongs_to_the_innermost_stage_and_all_of_it_to_some(board):
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

    probe = Probe(board)
    watched, _ = probe.attach(Nested(), list)
    begin = time.perf_counter()
    assert [watched[i] for i in range(4)] == [0, 1, 2, 3]
    took = time.perf_counter() - begin
    probe.uninstall()
    found = read_board(board)
    assert found["parse"].wall_seconds >= 4 * 0.02
    assert found["augment"].wall_seconds >= 4 * 0.002
    assert found["python"].wall_seconds >= 4 * 0.005
    assert sum(t.wall_seconds for t in found.values()) <= took
    # it slept
    assert sum(t.cpu_seconds for t in found.values()) < sum(t.wall_seconds for t in found.values())


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


class _Tokens(_Keeps):
    def __getitem__(self, i):
        return self.tokenizer.encode(str(i))[0]


class _Tokenizer:
    def encode(self, text):
        return [int(text) + 1]

    def __call__(self, text):
        raise AssertionError


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
def test_transforms_are_found_and_put_back(dataset, board):
    before = {**vars(dataset)}, global_transform
    plain = [dataset[i] for i in range(N)]
    watched = looked_at(dataset, board, collate=list)
    assert [s for b in watched for s in b] == plain
    # it is gone through, not called
    if not isinstance(getattr(dataset, "transforms", None), torch.nn.Sequential):
        assert read_board(board)["augment"].calls == N
    assert vars(dataset) == before[0]
    assert all(vars(dataset)[k] is v for k, v in before[0].items())
    assert global_transform is before[1]
    assert [dataset[i] for i in range(N)] == plain


# -- no trace --------------------------------------------------------------------------


def test_it_leaves_no_trace(folder, board):
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
        }

    dataset = Pictures(folder)
    dataset[0]  # Pillow imports its formats
    transform, before = dataset.transform, places()
    probe = Probe(board)
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
    seen = read_board(board)
    watched[1]
    assert read_board(board) == seen
    probe.install()
    watched[1]
    assert read_board(board)["python"].samples == seen["python"].samples + 1
    probe.uninstall()
    assert {k for k in before if places()[k] is not before[k]} == set()


def _quarter(image):
    return image.resize((16, 12))


def _half(image):
    return image.resize((32, 24))


def test_what_the_user_sets_while_it_looks_stays(folder, board):
    dataset = Pictures(folder, _quarter)
    dataset.augmentations = steps = [_quarter]
    probe = Probe(board)
    watched, _ = probe.attach(dataset, list)
    assert watched[0][0].size == (16, 12)
    dataset.transform = _half
    dataset.augmentations.append(_half)
    assert watched[0][0].size == (32, 24)
    probe.uninstall()
    assert dataset.transform is _half
    assert dataset.augmentations is steps
    assert steps == [_quarter, _half]
    assert [type(s) for s in steps] == [types.FunctionType] * 2


def test_everything_is_put_back_whatever_has_become_of_some_of_it(folder, board):
    class Stubborn(Pictures):
        def __getattr__(self, name):
            raise RuntimeError(name)

    before = builtins.open, io.open, PIL.Image.open, PIL.Image.Image.convert
    dataset = Stubborn(folder, _quarter)
    probe = Probe(board)
    watched, _ = probe.attach(dataset, list)
    watched[0]
    assert builtins.open is not before[0]
    del dataset.transform
    probe.uninstall()
    assert (builtins.open, io.open, PIL.Image.open, PIL.Image.Image.convert) == before
    assert "transform" not in vars(dataset)


def test_what_somebody_else_replaced_meanwhile_is_left_to_them():
    module = types.ModuleType("module")
    module.f = original = lambda: "original"
    undo = layers.put(module, "f", lambda f: lambda: f() + " ours")
    ours = module.f
    module.f = theirs = lambda: ours() + " theirs"  # a mock, say, that wraps what it found
    later = layers.put(module, "f", lambda f: lambda: f() + " later")
    assert module.f() == "original ours theirs later"
    undo()
    assert module.f() == "original ours theirs later"
    later()
    assert module.f is theirs
    module.f = original
    again = layers.put(module, "f", lambda f: lambda: f() + " again")
    assert module.f() == "original again"
    again()
    assert module.f is original


# -- replaying samples -----------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True])
def test_after_its_first_samples_each_process_gives_these_out_again(folder, board, many):
    dataset = Pictures(folder, quiet)
    if many:
        dataset.__class__ = PicturesAtOnce
    plain = batches(dataset, epochs=2)
    again = looked_at(dataset, board, collate=taking_apart, epochs=2, replay=True)
    assert same(plain[:2], again[:2])  # two batches of eight to learn from
    assert [len(b[0]) for b in again] == [8] * 10
    first = {tuple(image.flatten().tolist()) for b in plain[:2] for image in b[0]}
    assert all(tuple(image.flatten().tolist()) in first for b in again[2:] for image in b[0])
    found = read_board(board)
    assert found["decode"].samples == 16
    assert found["python"].samples == 2 * N
    assert found["collate"].calls == 10


class PicturesAtOnce(Pictures):
    def __getitems__(self, ids):
        return [list(self[i]) for i in ids]


def taking_apart(samples):
    found = default_collate([tuple(sample) for sample in samples])
    for sample in samples:
        if isinstance(sample, list):
            sample.clear()
    return found


# -- the board -------------------------------------------------------------------------


def test_what_cannot_be_asked_for(board):
    first, second = Probe(board), Probe(board)
    first.install()
    try:
        with pytest.raises(RondeError, match="another probe is active"):
            second.install()
    finally:
        first.uninstall()
    second.install()
    second.uninstall()
    copy = pickle.loads(pickle.dumps(Probe(Path("x"), True)))  # noqa: S301
    assert (copy.board, copy.replay) == (Path("x"), True)
