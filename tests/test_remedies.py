"""Remedies that change nothing in the script: what comes out is compared with and without each, in this process, threads and processes."""

from __future__ import annotations

import builtins
import functools
import gc
import io
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from ronde.feed import Feed, FeedSettings, LoaderSettings, Order, lazy
from ronde.feed.cache import cached_dataset, clear_cache
from ronde.feed.decode import DECODERS, Decoder
from ronde.feed.pack import pack
from ronde.feed.probe import Probe
from ronde.feed.remedies import DatasetFacts, apply, batched_access, facts, judge
from ronde.plan.batch import Share
from ronde.world import ArgumentError

N = 24


def _image(numbers, width, height):
    return Image.fromarray(numbers.integers(0, 255, (5, 7, 3), dtype=np.uint8)).resize((width, height))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """JPEGs in two folders; some grey, one in four colours, one cut short, one that is a PNG by another name."""
    where = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(1)
    for i in range(N):
        folder = where / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        image, path = _image(numbers, 60 + i % 3, 48), folder / f"{i}.jpg"
        exif = image.getexif()
        exif[0x010E] = f"picture {i}"
        if i == 5:
            image.convert("L").save(path, "JPEG")
        elif i == 6:
            image.convert("CMYK").save(path, "JPEG")
        elif i == 7:
            image.save(path, "PNG")
        elif i == 8:
            image.save(path, "JPEG", progressive=True, quality=60, exif=exif)
        else:
            image.save(path, "JPEG", quality=90, exif=exif)
    return where


@pytest.fixture
def copy(pictures, tmp_path) -> Path:
    """The same pictures, to be changed."""
    return Path(shutil.copytree(pictures, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def no_layers_left():
    before = {**places()}
    yield
    if places() != before:
        gc.collect()
    assert {k for k, v in places().items() if before[k] is not v} == set()


def places():
    return {
        "open": builtins.open,
        "io": io.open,
        "image": PIL.Image.open,
        "load": vars(ImageFile.ImageFile)["load"],
        "resize": vars(PIL.Image.Image)["resize"],
    }


class Pictures(Dataset):
    def __init__(self, where, way="path", transform=None):
        self.paths = sorted(where.glob("*/*.jpg"), key=lambda p: int(p.stem))
        self.way = way
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        path, way = self.paths[i], self.way
        if way == "path":
            image = Image.open(path)
        elif way == "str":
            image = Image.open(str(path))
        elif way == "file":
            with open(path, "rb") as file, Image.open(file) as image:
                image = image.convert("RGB")
        elif way == "bytes":
            image = Image.open(io.BytesIO(path.read_bytes()))
        elif way == "draft":
            image = Image.open(path)
            image.draft("L", (20, 20))
        else:
            with Image.open(path) as image:
                assert image.size[1] == 48
                about = (image.getexif().get(0x010E, ""), image.format, image.mode, Path(image.filename).name, "progressive" in image.info)
                image = image.convert("RGB")
                assert image.getpixel((0, 0)) is not None
            return torch.from_numpy(np.array(image.resize((16, 16)))), str(about)
        image = image.convert("RGB")
        if self.transform is not None:
            return self.transform(image), i
        return torch.from_numpy(np.array(image.resize((16, 16)))), i


def flip(image):
    """Draws random numbers."""
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image.resize((16, 16), box=(0, 0, *torch.randint(20, 40, (2,)).tolist()))))


def batches(dataset, loader=None, executor="none", workers=0, epochs=1, probe=None):
    """As ronde.distribute reads it."""
    settings = LoaderSettings((loader or LoaderSettings()).collate, workers, executor=executor, probe=probe)
    feed = Feed(dataset, Order(len(dataset), 0), settings, 0)
    try:
        shares = [Share(e, k, k + 6, ((k, k + 6),), 6) for e in range(epochs) for k in range(0, len(dataset), 6)]
        return [b for e in range(epochs) for _, micros in feed.read(lambda e=e: (s for s in shares if s.epoch == e)) for b in micros]
    finally:
        feed.close()


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


class Counted:
    """A decoder that counts what it is asked for, and is otherwise a real one."""

    def __init__(self, name="simplejpeg"):
        self.inner = DECODERS[name]
        self.calls, self.shrinks = 0, []

    def __call__(self, data, shrink):
        self.calls += 1
        self.shrinks.append(shrink)
        return self.inner.call(data, shrink)


@pytest.fixture
def counted(monkeypatch):
    made = Counted()
    monkeypatch.setitem(DECODERS, "counted", Decoder(made, "simplejpeg"))
    return made


# -- another decoder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["path", "str", "file", "bytes", "with", "draft"])
def test_another_decoder_gives_the_same_bits_and_leaves_odd_files_to_pillow(pictures, counted, way):
    dataset = Pictures(pictures, way)
    plain = batches(dataset)
    swapped, loader = apply(dataset, LoaderSettings(), FeedSettings(decoder="counted"))
    counted.calls = 0
    assert same(plain, batches(swapped, loader))
    # Of the four odd ones it is asked for none that Pillow does not hold for a colour JPEG; after draft() for none at all.
    assert counted.calls == (0 if way == "draft" else N - 3)


@pytest.mark.parametrize(("executor", "workers"), [("none", 0), ("threads", 2), ("processes", 2)])
def test_the_same_bits_wherever_samples_are_read(pictures, executor, workers):
    for transform in (flip, None):
        if transform is flip and executor == "threads":
            continue  # global generators are not read in threads
        dataset = Pictures(pictures, transform=transform)
        plain = batches(dataset, epochs=2)
        for settings in (
            FeedSettings(decoder="simplejpeg"),
            FeedSettings(cache="read"),
            FeedSettings(cache="decode", decoder="simplejpeg"),
        ):
            swapped, loader = apply(dataset, LoaderSettings(), settings)
            assert same(plain, batches(swapped, loader, executor, workers, 2)), settings
            del swapped
    assert clear_cache() == 0  # nothing is left in memory


def test_errors_of_broken_files_are_pillows_own(copy):
    dataset = Pictures(copy)
    given = (FeedSettings(decoder="simplejpeg"), FeedSettings(cache="read"), FeedSettings(cache="decode", decoder="simplejpeg"))
    swapped = [apply(dataset, LoaderSettings(), settings)[0] for settings in given]
    data = dataset.paths[3].read_bytes()
    dataset.paths[3].write_bytes(data[: len(data) // 2])
    dataset.paths[4].write_bytes(b"\xff\xd8\xff nothing")
    dataset.paths[9].unlink()

    def errors(of):
        found = []
        for i in (3, 4, 9):
            with pytest.raises(Exception) as caught:
                of[i]
            found.append((type(caught.value), str(caught.value)))
        return found

    plain = errors(dataset)
    for one in swapped * 2:
        assert errors(one) == plain


def test_a_picture_handed_out_undecoded_is_still_a_picture(pictures):
    class Lazy(Pictures):
        def __getitem__(self, i):
            return Image.open(self.paths[i])

    dataset = Lazy(pictures)
    for settings in (FeedSettings(decoder="simplejpeg"), FeedSettings(cache="decode"), FeedSettings(cache="read")):
        swapped, _ = apply(dataset, LoaderSettings(), settings)
        for _ in range(2):
            for i in (0, 5, 6, 7, 8):
                assert swapped[i].tobytes() == dataset[i].tobytes()
                small, other = swapped[i], dataset[i]
                small.draft("RGB", (20, 20))
                other.draft("RGB", (20, 20))
                assert small.size == other.size
                assert small.tobytes() == other.tobytes()
        kept = swapped[0]
        del swapped, small
        gc.collect()
        assert kept.tobytes() == dataset[0].tobytes()


def test_a_picture_that_is_not_pillows_yet_behaves_as_one(large):
    """Every operation on it gives what it gives on Pillow's own, in whatever order."""

    def ways(image):
        yield "array", np.array(image)
        yield "bytes", image.tobytes()
        seen = np.asarray(image.crop((0, 0, 30, 30)))  # the picture is gone, the array is not
        cut = image.crop((3, 3, 30, 30))
        yield "arrays of its own", (seen, seen.flags.writeable, *[np.asarray(cut) for _ in range(5)])
        yield "crop", np.asarray(image.crop((10, 20, 110.4, 95)))
        yield "crop beyond", np.asarray(image.crop((-5, 0, 10, 10)))
        yield "crop twice", np.asarray(image.crop((50, 50, 350, 250)).crop((1, 2, 30, 40)))
        yield "flip", np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).transpose(Image.Transpose.FLIP_TOP_BOTTOM))
        yield "turn", np.asarray(image.transpose(Image.Transpose.ROTATE_90))
        yield "flip and resize", np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((30, 20)))
        yield "resize in a box", np.asarray(image.resize((30, 20), Image.Resampling.BILINEAR, (10, 10, 210, 110)))
        yield "rotate", np.asarray(image.rotate(30))
        yield "grey", np.asarray(image.convert("L"))
        yield "same", np.asarray(image.convert("RGB").convert("RGB"))
        yield "pixel", image.getpixel((3, 4))
        yield "bands", [b.tobytes() for b in image.split()]
        yield "sizes", (image.size, image.width, image.height, image.mode, image.getbands(), image.getbbox(), image.getextrema())
        yield (
            "copy",
            (image.copy().tobytes(), image.copy() == image, image == Image.fromarray(np.array(image)), image == image.crop((0, 0, 5, 5))),
        )
        yield "pickled", pickle.loads(pickle.dumps(image)).tobytes()  # noqa: S301
        yield "info", sorted(map(str, image.info))
        painted = image.copy()
        painted.paste((9, 9, 9), (0, 0, 50, 50))
        yield "painted", (painted.tobytes(), image.tobytes())
        other = image.crop((0, 0, 20, 20))
        other.putpixel((0, 0), (1, 2, 3))
        other.load()[1, 1] = (4, 5, 6)
        yield "written", (other.tobytes(), np.asarray(other), np.asarray(image.crop((0, 0, 20, 20))))
        small = image.copy()
        small.thumbnail((50, 50))
        yield "thumbnail", (small.size, small.tobytes())
        saved = io.BytesIO()
        image.save(saved, "PNG")
        yield "saved", saved.getvalue()

    class All(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            first = dict(ways(Image.open(large / f"{i}.jpg").convert("RGB")))
            again = {}
            for name in first:  # each on a picture that nothing was done to before
                for found, value in ways(Image.open(large / f"{i}.jpg").convert("RGB")):
                    if found == name:
                        again[name] = value
                        break
            return first, again

    dataset = All()
    swapped, _ = apply(Large(large, to_tensor), LoaderSettings(), FeedSettings(decoder="simplejpeg"))
    swapped.dataset = dataset
    for i in (0,):
        for mine, theirs in zip(swapped[i], dataset[i], strict=True):
            for name in theirs:
                np.testing.assert_equal(mine[name], theirs[name], err_msg=name)


def test_a_decoder_is_judged_on_the_data_sets_own_images(pictures, monkeypatch):
    images = [p.read_bytes() for p in Pictures(pictures).paths]
    found = judge("simplejpeg", images)
    assert found.same_bits
    assert (found.difference, found.label) == (0.0, "same bits")
    assert (found.images, found.refused) == (N - 2, 2)  # four colours, and the PNG

    def brighter(data, shrink):
        return np.clip(DECODERS["pillow"].call(data, shrink).astype(int) + 2, 0, 255).astype(np.uint8)

    monkeypatch.setitem(DECODERS, "brighter", Decoder(brighter, "PIL.Image"))
    other = judge("brighter", images)
    assert not other.same_bits
    assert other.label == "same distribution"
    assert 1.5 < other.difference <= 2.0


# -- caches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["read", "decode"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_what_is_cached_is_not_read_again(copy, tmp_path, kind, where):
    dataset = Pictures(copy)
    odd = dataset.paths[6:8] if kind == "decode" else []  # of these, Pillow is the only decoder
    plain = batches(dataset, epochs=2)
    settings = FeedSettings(cache=kind, cache_in=None if where == "memory" else str(tmp_path / "cache"))
    cached, loader = apply(dataset, LoaderSettings(), settings)
    first = batches(cached, loader)
    for path in dataset.paths:
        if path not in odd:
            path.unlink()
    with pytest.raises(FileNotFoundError):
        dataset[0]
    assert same(plain, first + batches(cached, loader, epochs=2)[4:])
    report = (cached.plan.reads or cached.plan.pixels).report()
    assert report.held == (N if kind == "read" else N - len(odd))
    if where == "disk":  # a later run finds it, loading processes too
        again = pickle.loads(pickle.dumps(cached))  # noqa: S301
        (cached.plan.reads or cached.plan.pixels).close()
        shutil.copytree(copy, tmp_path / "nothing")
        with pytest.raises(FileNotFoundError):
            again[0]  # it asks once whether the file is what it was
    else:
        (cached.plan.reads or cached.plan.pixels).close()


def test_a_file_that_changed_is_read_anew(copy, tmp_path):
    dataset = Pictures(copy)
    for kind in ("read", "decode"):
        settings = FeedSettings(cache=kind, cache_in=str(tmp_path / kind))
        cached, _ = apply(dataset, LoaderSettings(), settings)
        old = [cached[i] for i in range(3)]
        (cached.plan.reads or cached.plan.pixels).close()
        Image.new("RGB", (60, 48), (250, 0, 0)).save(dataset.paths[1])
        again, _ = apply(dataset, LoaderSettings(), settings)
        assert same(again[0], old[0])
        assert not same(again[1], old[1])
        assert same(again[1], dataset[1])
        assert same(again[1], dataset[1])
        assert (again.plan.reads or again.plan.pixels).report().hits >= 2
        (again.plan.reads or again.plan.pixels).close()
        dataset.paths[1].write_bytes(dataset.paths[0].read_bytes())


def test_other_files_come_out_of_the_cache_as_they_are(tmp_path):
    for i in range(N):
        np.save(tmp_path / f"{i}.npy", np.full((3, 4), i))
        (tmp_path / f"{i}.txt").write_text(f"zeile ä {i}\nzweite", encoding="utf-8")
        torch.save(torch.full((2,), i), tmp_path / f"{i}.pt")
        np.full(3, i, dtype=np.int32).tofile(tmp_path / f"{i}.raw")

    class Mixed(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            with (tmp_path / f"{i}.txt").open(encoding="utf-8") as file:
                text = file.readlines()
            return (
                np.load(tmp_path / f"{i}.npy"),
                text,
                torch.load(tmp_path / f"{i}.pt"),
                np.fromfile(tmp_path / f"{i}.raw", dtype=np.int32),
            )

    dataset = Mixed()
    cached, _ = apply(dataset, LoaderSettings(), FeedSettings(cache="read"))
    for _ in range(2):
        for i in range(N):
            a, b = dataset[i], cached[i]
            assert np.array_equal(a[0], b[0])
            assert a[1] == b[1]
            assert torch.equal(a[2], b[2])
            assert np.array_equal(a[3], b[3])
    with open(tmp_path / "written", "w") as file:  # outside of a sample, and inside of one for writing, all is as ever
        file.write("x")
    assert cached.plan.reads.report().hits >= 3 * N
    cached.plan.reads.close()


def test_a_bounded_cache_keeps_what_came_first(pictures):
    dataset = Pictures(pictures)
    cached, loader = apply(dataset, LoaderSettings(), FeedSettings(cache="decode", cache_bytes=60_000))
    assert same(batches(dataset, epochs=2), batches(cached, loader, epochs=2))
    report = cached.plan.pixels.report()
    assert 0 < report.held < N - 3
    assert report.bytes <= 60_000
    cached.plan.pixels.close()


def test_finished_samples_are_kept_where_there_are_no_images():
    class Slow(Dataset):
        made = 0

        def __len__(self):
            return N

        def __getitem__(self, i):
            self.made += 1
            return torch.full((3,), i)

    dataset = Slow()
    cached, loader = apply(dataset, LoaderSettings(), FeedSettings(cache="decode"))
    first = batches(cached, loader)
    made = dataset.made
    assert same(first, batches(cached, loader))
    assert dataset.made == made
    cached.close()

    class Random(Slow):
        def __getitem__(self, i):
            return torch.rand(3)

    with pytest.raises(ArgumentError, match="draws random numbers"):
        apply(Random(), LoaderSettings(), FeedSettings(cache="decode"))
    with pytest.raises(ArgumentError, match="no file is opened"):
        apply(Slow(), LoaderSettings(), FeedSettings(cache="read"))


# -- a pack ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("executor", "workers"), [("none", 0), ("processes", 2)])
def test_files_come_out_of_a_pack(copy, tmp_path, executor, workers):
    dataset = Pictures(copy)
    plain = batches(dataset)
    pack(copy, tmp_path / "packed")
    packed, loader = apply(dataset, LoaderSettings(), FeedSettings(pack=str(tmp_path / "packed"), decoder="simplejpeg"))
    shutil.rmtree(copy)
    assert same(plain, batches(packed, loader, executor, workers))


def test_a_pack_of_something_else_is_refused(copy, tmp_path):
    pack(copy, tmp_path / "packed")
    other = tmp_path / "other"
    (other / "c").mkdir(parents=True)
    shutil.copy(copy / "a" / "0.jpg", other / "c" / "77.jpg")
    with pytest.raises(ArgumentError, match="a pack of another folder"):
        apply(Pictures(other), LoaderSettings(), FeedSettings(pack=str(tmp_path / "packed")))
    with pytest.raises(ArgumentError, match="not what ronde pack wrote"):
        apply(Pictures(copy), LoaderSettings(), FeedSettings(pack=str(copy)))
    shutil.copy(copy / "a" / "2.jpg", copy / "a" / "0.jpg")
    with pytest.raises(ArgumentError, match=r"0\.jpg has changed since"):
        apply(Pictures(copy), LoaderSettings(), FeedSettings(pack=str(tmp_path / "packed")))


# -- decoding to size -------------------------------------------------------------------------------------------------------


class Large(Dataset):
    def __init__(self, where, how):
        self.where, self.how = where, how

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return self.how(Image.open(self.where / f"{i}.jpg").convert("RGB")), i


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    where = tmp_path_factory.mktemp("large")
    numbers = np.random.default_rng(2)
    for i in range(6):
        _image(numbers, 400, 300).save(where / f"{i}.jpg", quality=92)
    return where


def to_tensor(image):
    return torch.from_numpy(np.array(image))


def test_large_images_are_decoded_at_a_fraction_of_their_size(large, counted):
    sizes = []

    def shrink(image):
        sizes.append(image.size)
        return to_tensor(image.resize((60, 60)))

    dataset = Large(large, shrink)
    for settings in (FeedSettings(decode_to_size=True), FeedSettings(decode_to_size=True, decoder="counted")):
        found, _ = apply(dataset, LoaderSettings(), settings)
        sizes.clear()
        counted.shrinks.clear()
        for i in range(6):
            whole, small = dataset[i][0].float(), found[i][0].float()
            assert sizes[-2:] == [(400, 300), (100, 75)]  # a quarter still has the 60 pixels that are asked for
            assert small.shape == whole.shape
            assert (whole - small).abs().mean() < 3
        assert counted.shrinks == ([4] * 6 if settings.decoder else [])


def test_decoding_to_size_is_refused_where_it_would_show_something_else(large, monkeypatch):
    def crop(image):
        return to_tensor(image.crop((100, 50, 300, 200)).resize((20, 20)))

    with pytest.raises(ArgumentError, match="counts in pixels"):
        apply(Large(large, crop), LoaderSettings(), FeedSettings(decode_to_size=True))
    with pytest.raises(ArgumentError, match="nothing to gain"):
        apply(Large(large, to_tensor), LoaderSettings(), FeedSettings(decode_to_size=True))

    # One that is hardly made smaller is decoded whole, and made smaller by torch.
    dataset = Large(large, lambda image: to_tensor(image.crop((100, 50, 380, 290)).resize((250, 200), Image.Resampling.BILINEAR)))
    found, _ = apply(dataset, LoaderSettings(), FeedSettings(decode_to_size=True))
    assert found.plan.fit is None
    by_torch = []
    monkeypatch.setattr(lazy, "smaller", lambda *args, done=lazy.smaller: by_torch.append(args[1]) or done(*args))
    for i in range(6):
        apart = (found[i][0].float() - dataset[i][0].float()).abs()
        assert apart.max() <= 2
        assert apart.mean() < 0.1
    assert by_torch == [(250, 200)] * 6

    def share(image):  # a crop in shares of the image is fine
        w, h = image.size
        return to_tensor(image.crop((w // 4, 0, w * 3 // 4, h)).resize((40, 60)))

    found, _ = apply(Large(large, share), LoaderSettings(), FeedSettings(decode_to_size=True))
    assert found.plan.fit == (40, 60, pytest.approx(0.5))
    assert same(found[0][0].shape, Large(large, share)[0][0].shape)


# -- rows by the batch --------------------------------------------------------------------------------------------------------


class Rows(Dataset):
    def __init__(self, form):
        self.x, self.y, self.form, self.asked = torch.randn(N, 3), np.arange(N), form, 0

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.asked += 1
        return {
            "pair": lambda: (self.x[i], self.y[i]),
            "dict": lambda: {"x": self.x[i], "y": self.y[i] * 2},
            "alone": lambda: self.x[i],
            "nested": lambda: ([self.x[i]], (self.y[i],)),
            "random": lambda: self.x[i] + torch.rand(3),
            "first": lambda: (self.x[i], self.x[0]),
            "text": lambda: (self.x[i], str(i)),
            "reshaped": lambda: self.x[i].reshape(3),
        }[self.form]()


@pytest.mark.parametrize(
    ("form", "executor", "workers"),
    [*((form, "none", 0) for form in ("pair", "dict", "alone", "nested")), ("pair", "threads", 2), ("pair", "processes", 2)],
)
def test_rows_are_had_by_the_batch(form, executor, workers):
    dataset = Rows(form)
    plain = batches(dataset, epochs=6)
    found, loader = apply(dataset, LoaderSettings(), FeedSettings(batched=True))
    dataset.asked = 0
    assert same(plain, batches(found, loader, executor, workers, 6))
    if executor == "none":
        assert dataset.asked < 4 * N  # one by one only until it is known that nothing is drawn


@pytest.mark.parametrize("form", ["random", "first", "text", "reshaped"])
def test_rows_that_would_come_out_otherwise_are_refused(form):
    with pytest.raises(ArgumentError, match="does not give the batch"):
        apply(Rows(form), LoaderSettings(), FeedSettings(batched=True))


class KeptRows:
    def __init__(self, x):
        self.x = x

    def __getitem__(self, i):
        return _without_nan(self.x[i])


class Decides(Dataset):
    """One row of 200 is not like the others, and is treated otherwise in one of many ways."""

    def __init__(self, way, n=200):
        self.x, self.way, self.transform, self.seen = torch.randn(n, 3), getattr(self, f"_{way}"), None, None
        self.x[77] = torch.nan
        self.inner = functools.partial(_without_nan)
        if way == "kept":
            self.rows = KeptRows(self.x)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.transform is not None:  # the same for every sample
            return self.transform(self.x[i])
        return self.way(i)

    def _method(self, i):
        x = self.x[i]
        return torch.zeros_like(x) if torch.isnan(x).any() else x

    def _function(self, i):
        return _without_nan(self.x[i])

    def _partial(self, i):
        return self.inner(self.x[i])

    def _nested(self, i):
        return [part(self.x[i]) for part in (_without_nan,)]

    def _lambda(self, i):
        return (lambda: self._method(i))()

    def _kept(self, i):
        return self.rows[i]

    def _arithmetic(self, i):
        x = self.x[i].nan_to_num(1e9)
        return x * (x.max() < 1e8)

    def _attribute(self, i):
        self.seen = bool(torch.isnan(self.x[i]).any())
        if self.seen:
            return torch.zeros_like(self.x[i])
        return self.x[i]


def _without_nan(x):
    while torch.isnan(x).any():
        x = torch.zeros_like(x)
    return x


@pytest.mark.parametrize("way", ["method", "function", "partial", "nested", "lambda", "kept", "attribute"])
def test_rows_that_are_treated_by_what_they_hold_are_refused(way):
    with pytest.raises(ArgumentError, match="decides something for each sample"):
        batched_access(Decides(way, 3000), LoaderSettings())
    assert not facts(Decides(way, 3000)).batched


def test_rows_that_mix_without_a_decision_are_found_by_trying_many():
    with pytest.raises(ArgumentError, match="does not give the batch"):
        batched_access(Decides("arithmetic"), LoaderSettings())


def test_what_a_data_set_decides_for_all_samples_alike_does_not_count():
    class Alike(Rows):
        def __init__(self, split, double):
            super().__init__("pair")
            self.split, self.double = split, double

        def __getitem__(self, i):
            x = self.x[i]
            if self.split == "train" and self.double:
                x = x * 2
            return x, self.y[i]

    dataset = Alike("train", True)
    found, loader = batched_access(dataset, LoaderSettings())
    assert same(batches(dataset), batches(found, loader))


def test_rows_with_a_collate_function_of_their_own_are_refused_and_tensor_datasets_left_alone():
    with pytest.raises(ArgumentError, match="collate function of its own"):
        apply(Rows("pair"), LoaderSettings(collate=list), FeedSettings(batched=True))
    rows = TensorDataset(torch.arange(5))
    assert apply(rows, LoaderSettings(), FeedSettings(batched=True))[0] is rows


# -- facts, pipelines, and what cannot be ---------------------------------------------------------------------------------------


def test_facts_say_which_remedies_are_possible(pictures, large):
    state = torch.get_rng_state(), random.getstate()
    found = facts(Pictures(pictures, transform=flip), samples=N)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert found.jpeg
    assert found.draws
    assert not found.batched
    assert found.files == 1.0
    assert found.folder == str(pictures)
    assert found.file_bytes == pytest.approx(sum(p.stat().st_size for p in pictures.glob("*/*.jpg")) / N)
    assert found.decoders["simplejpeg"].same_bits
    assert found.shrink == 1
    assert 60 * 48 * 3 <= found.decoded_bytes <= 62 * 48 * 3
    assert facts(Large(large, lambda image: to_tensor(image.resize((60, 60))))).shrink == 4
    rows = facts(Rows("pair"))
    assert (rows.batched, rows.jpeg, rows.files, rows.draws) == (True, False, 0.0, False)

    class Broken(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            raise OSError("no disk")

    assert facts(Broken()).error == "OSError: no disk"
    assert facts([]) == DatasetFacts(error="it can only be iterated, or is empty")


def test_pipelines_of_images_have_the_same_remedies(pictures, tmp_path):
    from ronde.feed import images

    clean = tmp_path / "clean"
    for folder in ("a", "b"):
        (clean / folder).mkdir(parents=True)
    for i in range(10, N):
        shutil.copy(pictures / "ab"[i % 2] / f"{i}.jpg", clean / "ab"[i % 2])
    pipeline = images(clean, size=16, decoder="pillow")
    plain = batches(pipeline, LoaderSettings(pipeline.collate))
    pack(clean, tmp_path / "packed")
    for settings in (FeedSettings(decoder="simplejpeg"), FeedSettings(cache="read"), FeedSettings(pack=str(tmp_path / "packed"))):
        found, _ = apply(pipeline, LoaderSettings(), settings)
        assert found.source.fingerprint == pipeline.source.fingerprint
        assert same(plain, batches(found, LoaderSettings(found.collate))), settings
    with pytest.raises(ArgumentError, match="reads by the batch in any case"):
        apply(pipeline, LoaderSettings(), FeedSettings(batched=True))
    pack(pictures, tmp_path / "another")
    with pytest.raises(ArgumentError, match="is not a pack of"):
        apply(pipeline, LoaderSettings(), FeedSettings(pack=str(tmp_path / "another")))


def test_what_does_not_fit_is_refused_in_words(pictures):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    for dataset, settings, text in (
        (Stream(), FeedSettings(decoder="simplejpeg"), "only be iterated"),
        (Rows("pair"), FeedSettings(decoder="simplejpeg"), "no JPEG image is decoded"),
        (Rows("pair"), FeedSettings(device_augment=True), "for a ronde.feed pipeline"),
        (Rows("pair"), FeedSettings(cache_in="memory"), "go with cache"),
        (Rows("pair"), FeedSettings(pack="/none"), "not what ronde pack wrote"),
        (Pictures(pictures), FeedSettings(decoder="nonesuch"), "is not known"),
    ):
        with pytest.raises(ArgumentError, match=text):
            apply(dataset, LoaderSettings(), settings)


def test_a_probe_sees_through_a_remedy_and_they_are_taken_away_in_any_order(pictures, tmp_path):
    dataset = Pictures(pictures)
    before = places()
    plain = batches(dataset)
    swapped, loader = apply(dataset, LoaderSettings(), FeedSettings(decoder="simplejpeg"))
    with_remedy = places()
    probe = Probe(tmp_path / "board")
    probe.install()
    again, _ = apply(dataset, LoaderSettings(), FeedSettings(cache="decode"))  # and one that comes while the probe is there
    assert same(plain, batches(swapped, loader, probe=probe))
    assert same(plain, batches(again, loader))
    found = probe.times()
    assert found["python"].samples == found["decode"].samples == found["read"].samples
    assert found["read"].bytes >= sum(p.stat().st_size for p in pictures.glob("*/*.jpg"))
    again.plan.pixels.close()
    del again
    gc.collect()
    probe.uninstall()
    assert places().keys() == with_remedy.keys()
    assert same(plain, batches(swapped, loader))
    for name in ("read", "decode"):
        removed = Probe(tmp_path / name, {name})
        assert len(batches(swapped, loader, probe=removed, epochs=2)) == 8
        assert removed.notes() == []
        assert removed.times()[name].calls < 4 * N
    del swapped
    gc.collect()
    assert places() == before


def test_a_remedied_data_set_is_the_data_set_for_everyone_else(pictures):
    dataset = Pictures(pictures)
    swapped, _ = apply(dataset, LoaderSettings(), FeedSettings(decoder="simplejpeg"))
    assert swapped.paths is dataset.paths
    assert len(swapped) == N
    assert same(swapped[-1], dataset[-1])
    with pytest.raises(AttributeError):
        swapped.nothing
    assert not hasattr(swapped, "__getitems__")
    loader = DataLoader(swapped, batch_size=6, num_workers=1, collate_fn=default_collate)
    assert same(list(loader), list(DataLoader(dataset, batch_size=6)))
    assert os.path.exists(dataset.paths[0])  # noqa: PTH110
    del loader
    kept = cached_dataset(swapped, limit="1MiB")
    assert same(kept[3], dataset[3])
    kept.close()
