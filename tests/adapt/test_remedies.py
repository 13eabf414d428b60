"""Remedies that change nothing in the script: what comes out is compared with and without each, in
this process, threads and processes.
"""

from __future__ import annotations

import builtins
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
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ronde.adapt.remedies import DatasetFacts, apply_remedies, dataset_facts, judge_decoder
from ronde.cache.cached import cached_dataset, clear_cache
from ronde.data.image_decoders import DECODERS, Decoder
from ronde.data.pack import pack
from ronde.feed import Feed, FeedSettings, LoaderSettings, Order
from ronde.plan.batch import Share
from ronde.profile.probe import Probe
from ronde.world import ArgumentError

N = 24


def _image(numbers, width, height):
    return Image.fromarray(numbers.integers(0, 255, (5, 7, 3), dtype=np.uint8)).resize(
        (width, height)
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """JPEGs in two folders; some grey, one in four colours, one cut short, one that is a PNG by
    another name.
    """
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
                about = (
                    image.getexif().get(0x010E, ""),
                    image.format,
                    image.mode,
                    Path(image.filename).name,
                    "progressive" in image.info,
                )
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
    return torch.from_numpy(
        np.array(image.resize((16, 16), box=(0, 0, *torch.randint(20, 40, (2,)).tolist())))
    )


def batches(dataset, loader=None, executor="none", workers=0, epochs=1, probe=None):
    """As ronde.distribute reads it."""
    settings = LoaderSettings(
        (loader or LoaderSettings()).collate, workers, executor=executor, probe=probe
    )
    feed = Feed(dataset, Order(len(dataset), 0), settings, 0)
    try:
        shares = [
            Share(e, k, k + 6, ((k, k + 6),), 6)
            for e in range(epochs)
            for k in range(0, len(dataset), 6)
        ]
        return [
            b
            for e in range(epochs)
            for _, micros in feed.read(lambda e=e: (s for s in shares if s.epoch == e))
            for b in micros
        ]
    finally:
        feed.close()


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
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


# -- another decoder -------------------------------------------------------------------


@pytest.mark.parametrize("way", ["path", "str", "file", "bytes", "with", "draft"])
def test_another_decoder_gives_the_same_bits_and_leaves_odd_files_to_pillow(pictures, counted, way):
    dataset = Pictures(pictures, way)
    plain = batches(dataset)
    swapped = apply_remedies(dataset, FeedSettings(decoder="counted"))
    counted.calls = 0
    assert same(plain, batches(swapped))
    # Of the four odd ones it is asked for none that Pillow does not hold for a colour JPEG; after
    # draft() for none at all.
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
            FeedSettings(cache="read", decoder="simplejpeg"),
        ):
            swapped = apply_remedies(dataset, settings)
            assert same(plain, batches(swapped, None, executor, workers, 2)), settings
            del swapped
    assert clear_cache() == 0  # nothing is left in memory


def test_errors_of_broken_files_are_pillows_own(copy):
    dataset = Pictures(copy)
    given = (
        FeedSettings(decoder="simplejpeg"),
        FeedSettings(cache="read"),
        FeedSettings(cache="read", decoder="simplejpeg"),
    )
    swapped = [apply_remedies(dataset, settings) for settings in given]
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
    for settings in (FeedSettings(decoder="simplejpeg"), FeedSettings(cache="read")):
        swapped = apply_remedies(dataset, settings)
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


def test_a_decoder_is_judged_on_the_data_sets_own_images(pictures, monkeypatch):
    images = [p.read_bytes() for p in Pictures(pictures).paths]
    found = judge_decoder("simplejpeg", images)
    assert found.same_bits
    assert (found.difference, found.label) == (0.0, "same bits")
    assert (found.images, found.refused) == (N - 2, 2)  # four colours, and the PNG

    def brighter(data, shrink):
        return np.clip(DECODERS["pillow"].call(data, shrink).astype(int) + 2, 0, 255).astype(
            np.uint8
        )

    monkeypatch.setitem(DECODERS, "brighter", Decoder(brighter, "PIL.Image"))
    other = judge_decoder("brighter", images)
    assert not other.same_bits
    assert other.label == "same distribution"
    assert 1.5 < other.difference <= 2.0


# -- caches ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_what_is_cached_is_not_read_again(copy, tmp_path, where):
    dataset = Pictures(copy)
    plain = batches(dataset, epochs=2)
    cached = apply_remedies(
        dataset,
        FeedSettings(
            cache="read",
            decoder="simplejpeg",
            cache_in=None if where == "memory" else str(tmp_path / "cache"),
        ),
    )
    first = batches(cached)
    for path in dataset.paths:
        path.unlink()
    with pytest.raises(FileNotFoundError):
        dataset[0]
    assert same(plain, first + batches(cached, epochs=2)[4:])
    assert cached.plan.reads.report().held == N
    if where == "disk":  # a later run finds it, loading processes too
        again = pickle.loads(pickle.dumps(cached))  # noqa: S301
        cached.plan.reads.close()
        with pytest.raises(FileNotFoundError):
            again[0]  # it asks once whether the file is what it was
    else:
        cached.plan.reads.close()


def test_a_file_that_changed_is_read_anew(copy, tmp_path):
    dataset = Pictures(copy)
    settings = FeedSettings(cache="read", cache_in=str(tmp_path / "kept"))
    cached = apply_remedies(dataset, settings)
    old = [cached[i] for i in range(3)]
    cached.plan.reads.close()
    Image.new("RGB", (60, 48), (250, 0, 0)).save(dataset.paths[1])
    again = apply_remedies(dataset, settings)
    assert same(again[0], old[0])
    assert not same(again[1], old[1])
    assert same(again[1], dataset[1])
    assert same(again[1], dataset[1])
    assert again.plan.reads.report().hits >= 2
    again.plan.reads.close()


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
    cached = apply_remedies(dataset, FeedSettings(cache="read"))
    for _ in range(2):
        for i in range(N):
            a, b = dataset[i], cached[i]
            assert np.array_equal(a[0], b[0])
            assert a[1] == b[1]
            assert torch.equal(a[2], b[2])
            assert np.array_equal(a[3], b[3])
    with open(
        tmp_path / "written", "w"
    ) as file:  # outside of a sample, and inside of one for writing, all is as ever
        file.write("x")
    assert cached.plan.reads.report().hits >= 3 * N
    cached.plan.reads.close()


def test_a_bounded_cache_keeps_what_came_first(pictures):
    dataset = Pictures(pictures)
    cached = apply_remedies(dataset, FeedSettings(cache="read", cache_bytes=12_000))
    assert same(batches(dataset, epochs=2), batches(cached, epochs=2))
    report = cached.plan.reads.report()
    assert 0 < report.held < N
    assert report.bytes <= 12_000
    cached.plan.reads.close()


def test_finished_samples_are_kept():
    class Slow(Dataset):
        made = 0

        def __len__(self):
            return N

        def __getitem__(self, i):
            self.made += 1
            return torch.full((3,), i)

    dataset = Slow()
    cached = apply_remedies(dataset, FeedSettings(cache="decode"))
    first = batches(cached)
    made = dataset.made
    assert same(first, batches(cached))
    assert dataset.made == made
    cached.close()

    class Random(Slow):
        def __getitem__(self, i):
            return torch.rand(3)

    with pytest.raises(
        ArgumentError,
        match=r"feed\.images\(FOLDER\)\.cache\(\"decode\"\) instead: .*draws random numbers",
    ):
        apply_remedies(Random(), FeedSettings(cache="decode"))
    with pytest.raises(ArgumentError, match="no file is opened"):
        apply_remedies(Slow(), FeedSettings(cache="read"))


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


class Rows(Dataset):
    def __init__(self):
        self.x, self.y = torch.randn(N, 3), np.arange(N)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], self.y[i]


# -- facts, pipelines, and what cannot be ----------------------------------------------


def test_facts_say_which_remedies_are_possible(pictures, large):
    state = torch.get_rng_state(), random.getstate()
    found = dataset_facts(Pictures(pictures, transform=flip), samples=N)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert found.jpeg
    assert found.draws
    assert found.files == 1.0
    assert found.folder == str(pictures)
    assert found.file_bytes == pytest.approx(
        sum(p.stat().st_size for p in pictures.glob("*/*.jpg")) / N
    )
    assert found.decoders["simplejpeg"].same_bits
    assert found.images and not found.imread
    assert found.shrink == 1
    assert 60 * 48 * 3 <= found.decoded_bytes <= 62 * 48 * 3
    assert dataset_facts(Large(large, lambda image: to_tensor(image.resize((60, 60))))).shrink == 4
    rows = dataset_facts(Rows())
    assert (rows.jpeg, rows.images, rows.files, rows.draws) == (False, False, 0.0, False)

    class Broken(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            raise OSError("no disk")

    assert dataset_facts(Broken()).error == "OSError: no disk"
    assert dataset_facts([]) == DatasetFacts(error="it can only be iterated, or is empty")


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
    for settings in (
        FeedSettings(decoder="simplejpeg"),
        FeedSettings(cache="read"),
        FeedSettings(pack=str(tmp_path / "packed")),
    ):
        found = apply_remedies(pipeline, settings)
        assert found.source.fingerprint == pipeline.source.fingerprint
        assert same(plain, batches(found, LoaderSettings(found.collate))), settings
    pack(pictures, tmp_path / "another")
    with pytest.raises(ArgumentError, match="is not a pack of"):
        apply_remedies(pipeline, FeedSettings(pack=str(tmp_path / "another")))


def test_what_does_not_fit_is_refused_in_words(pictures):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    for dataset, settings, text in (
        (Stream(), FeedSettings(decoder="simplejpeg"), "only be iterated"),
        (Rows(), FeedSettings(decoder="simplejpeg"), "no JPEG image is decoded"),
        (
            Rows(),
            FeedSettings(device_augment=True),
            r"is for ronde\.feed pipelines.*feed\.images\(FOLDER, on_device=True\) instead",
        ),
        (Rows(), FeedSettings(cache_in="memory"), "go with cache"),
        (Rows(), FeedSettings(pack="/none"), r"is for ronde\.feed pipelines.*feed\.images\(PACK\)"),
        (
            Pictures(pictures),
            FeedSettings(decode_to_size=True),
            r"is for ronde\.feed pipelines.*decode_to_size=True\) instead",
        ),
        (Pictures(pictures), FeedSettings(decoder="nonesuch"), "is not known"),
    ):
        with pytest.raises(ArgumentError, match=text):
            apply_remedies(dataset, settings)


def test_a_settings_file_that_asks_for_a_removed_setting_says_what_to_use(tmp_path):
    file = tmp_path / "train.feed.yaml"
    file.write_text("executor: threads\nbatched: true\n")
    with pytest.raises(
        ArgumentError,
        match=r"train\.feed\.yaml: feed setting 'batched' was removed\. .* use feed\.table",
    ):
        FeedSettings.load(file)


def test_files_that_opencv_reads_are_seen_and_not_cached(pictures, monkeypatch):
    import sys
    import types

    class ByOpenCV(Pictures):
        def __getitem__(self, i):
            return torch.from_numpy(sys.modules["cv2"].imread(str(self.paths[i])).copy())

    # Reads as OpenCV does: without Python's open.
    library = types.ModuleType("cv2")
    library.imread = lambda path: np.full((48, 60, 3), os.stat(path).st_size % 256, np.uint8)  # noqa: PTH116
    monkeypatch.setitem(sys.modules, "cv2", library)
    imread, dataset = library.imread, ByOpenCV(pictures)
    found = dataset_facts(dataset, N)
    assert (found.imread, found.images, found.jpeg, found.files, found.folder) == (
        True,
        True,
        False,
        1.0,
        str(pictures),
    )
    assert library.imread is imread
    with pytest.raises(
        ArgumentError,
        match=r"OpenCV reads the files by itself.*feed\.images\(FOLDER\)\.cache\(\"read\"\) "
        r"instead",
    ):
        apply_remedies(dataset, FeedSettings(cache="read"))


def test_a_probe_sees_through_a_remedy_and_they_are_taken_away_in_any_order(pictures, tmp_path):
    dataset = Pictures(pictures)
    before = places()
    plain = batches(dataset)
    swapped = apply_remedies(dataset, FeedSettings(decoder="simplejpeg"))
    with_remedy = places()
    probe = Probe(tmp_path / "board")
    probe.install()
    # and one that comes while the probe is there
    again = apply_remedies(dataset, FeedSettings(cache="read"))
    assert same(plain, batches(swapped, probe=probe))
    assert same(plain, batches(again))
    found = probe.times()
    assert found["python"].samples == found["decode"].samples == found["read"].samples
    assert found["read"].bytes >= sum(p.stat().st_size for p in pictures.glob("*/*.jpg"))
    again.plan.reads.close()
    del again
    gc.collect()
    probe.uninstall()
    assert places().keys() == with_remedy.keys()
    assert same(plain, batches(swapped))
    for name in ("read", "decode"):
        removed = Probe(tmp_path / name, {name})
        assert len(batches(swapped, probe=removed, epochs=2)) == 8
        assert removed.notes() == []
        assert removed.times()[name].calls < 4 * N
    del swapped
    gc.collect()
    assert places() == before


def test_a_remedied_data_set_is_the_data_set_for_everyone_else(pictures):
    dataset = Pictures(pictures)
    swapped = apply_remedies(dataset, FeedSettings(decoder="simplejpeg"))
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
