"""Remedies that change nothing in the script: what comes out is compared with and without each, in
this process, threads and processes.
"""

from __future__ import annotations

import builtins
import gc
import io
import random
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import Dataset, IterableDataset

from ronde.adapt.remedies import DatasetFacts, apply_remedies, dataset_facts
from ronde.feed import FeedSettings
from ronde.world import ArgumentError

N = 24


def _image(numbers, width, height):
    return Image.fromarray(numbers.integers(0, 255, (5, 7, 3), dtype=np.uint8)).resize(
        (width, height)
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """JPEGs in two folders; one gray, one in four colors, one that is a PNG by another name."""
    where = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(1)
    for i in range(N):
        folder = where / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        image = _image(numbers, 60 + i % 3, 48).convert({5: "L", 6: "CMYK"}.get(i, "RGB"))
        image.save(folder / f"{i}.jpg", "PNG" if i == 7 else "JPEG", quality=90)
    return where


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
    }


class Pictures(Dataset):
    def __init__(self, where, transform=None):
        self.paths = sorted(where.glob("*/*.jpg"), key=lambda p: int(p.stem))
        self.transform = transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        image = Image.open(self.paths[i])
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


# -- caches ----------------------------------------------------------------------------


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
    first = [cached[i].tolist() for i in range(N)]
    made = dataset.made
    assert [cached[i].tolist() for i in range(N)] == first == [[i] * 3 for i in range(N)]
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


class Rows(Dataset):
    def __init__(self):
        self.x, self.y = torch.randn(N, 3), np.arange(N)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], self.y[i]


# -- facts, pipelines, and what cannot be ----------------------------------------------


def test_facts_say_which_remedies_are_possible(pictures):
    state = torch.get_rng_state(), random.getstate()
    found = dataset_facts(Pictures(pictures, transform=flip), samples=N)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert found.jpeg
    assert found.draws
    assert found.file_bytes == pytest.approx(
        sum(p.stat().st_size for p in pictures.glob("*/*.jpg")) / N
    )
    assert found.same_pixels == ("pillow", "simplejpeg")
    assert found.decoders.keys() == set(found.same_pixels) and min(found.decoders.values()) > 0
    assert 60 * 48 * 3 <= found.decoded_bytes <= 62 * 48 * 3
    rows = dataset_facts(Rows())
    assert (rows.jpeg, rows.file_bytes, rows.draws) == (False, 0.0, False)

    class Broken(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            raise OSError("no disk")

    assert dataset_facts(Broken()).error == "OSError: no disk"
    assert dataset_facts([]) == DatasetFacts(error="it can only be iterated, or is empty")


def test_what_does_not_fit_is_refused_in_words(pictures):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    for dataset, settings, text in (
        (Stream(), FeedSettings(decoder="simplejpeg"), "only be iterated"),
        (
            Rows(),
            FeedSettings(decoder="simplejpeg"),
            r"feed\.images\(FOLDER, decoder=NAME\) instead",
        ),
        (
            Pictures(pictures),
            FeedSettings(cache="read"),
            r"cache: read is for .*feed\.images\(FOLDER\)\.cache\(\"read\"\) instead",
        ),
        (Rows(), FeedSettings(cache_bytes=9), "goes with cache"),
    ):
        with pytest.raises(ArgumentError, match=text):
            apply_remedies(dataset, settings)
