"""Remedies that change nothing in the script: what a data set does, and what it takes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from ronde import feed
from ronde.adapt.remedies import DatasetFacts, apply_remedies, dataset_facts
from ronde.feed import FeedSettings
from ronde.world import ArgumentError

N = 24


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """JPEGs in two folders; one gray, one in four colors, one that is a PNG by another name."""
    where = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(1)
    for i in range(N):
        folder = where / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        image = Image.fromarray(numbers.integers(0, 255, (5, 7, 3), dtype=np.uint8))
        image = image.resize((60 + i % 3, 48)).convert({5: "L", 6: "CMYK"}.get(i, "RGB"))
        image.save(folder / f"{i}.jpg", "PNG" if i == 7 else "JPEG", quality=90)
    return where


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
    data = Rows()
    state = torch.get_rng_state(), random.getstate()
    rows = dataset_facts(data)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    assert (rows.decoder, rows.draws) == ("", False)
    assert 20 < rows.kept_bytes < 1000  # three numbers and a fourth, and how they are written
    images = dataset_facts(feed.images(pictures, 16, decoder="pillow"), samples=N)
    assert images.decoder == "pillow" and images.same_pixels == ("pillow", "simplejpeg")
    assert images.decoders.keys() == set(images.same_pixels) and min(images.decoders.values()) > 0
    assert not images.draws  # what is drawn after decoding is not kept
    assert 60 * 48 * 3 <= images.kept_bytes <= 62 * 48 * 3 + 1000

    class Drawing(Rows):
        def __init__(self):
            more = random.Random(0), np.random.RandomState(0), torch.Generator().manual_seed(0)
            self.generators = {"own": [np.random.default_rng(0)], "more": more}

        def __getitem__(self, i):
            python, old, own = self.generators["more"]
            drawn = self.generators["own"][0].random() + python.random() + old.rand()
            return torch.full((2,), i + drawn) + torch.rand(1, generator=own)

    class Pictures(Rows):
        def __getitem__(self, i):
            return Image.new("RGB", (4, 4))

    class Broken(Rows):
        def __getitem__(self, i):
            raise OSError("no disk")

    own = Drawing()
    drawing, unkept = dataset_facts(own), dataset_facts(Pictures())
    assert drawing.draws and drawing.kept_bytes == 0
    assert torch.equal(own[0], Drawing()[0])  # what was drawn is not missing in the training
    assert not unkept.error and unkept.kept_bytes == 0
    assert dataset_facts(Broken()).error == "OSError: no disk"
    assert dataset_facts([]) == DatasetFacts(error="it can only be iterated, or is empty")


def test_what_does_not_fit_is_refused_in_words():
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
            Rows(),
            FeedSettings(cache="read"),
            r"cache: read is for .*feed\.images\(FOLDER\)\.cache\(\"read\"\) instead",
        ),
        (Rows(), FeedSettings(cache_bytes=9), "goes with cache"),
    ):
        with pytest.raises(ArgumentError, match=text):
            apply_remedies(dataset, settings)
