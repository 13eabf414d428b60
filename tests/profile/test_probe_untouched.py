"""What measuring and remedies must not break in other people's code: each of these once did."""

from __future__ import annotations

import builtins
import gc
import io
import random
import types
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from ronde.adapt.remedies import apply_remedies, dataset_facts
from ronde.feed import FeedSettings
from ronde.profile import monkeypatch as layers
from ronde.profile.probe import Probe
from ronde.world import ArgumentError

N = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for i in range(N):
        Image.fromarray(numbers.integers(0, 255, (6, 8, 3), dtype=np.uint8)).resize((64, 48)).save(
            where / f"{i}.jpg", quality=90
        )
    return where


class Pictures(Dataset):
    def __init__(self, folder, loader=None, transform=None):
        self.paths = [folder / f"{i}.jpg" for i in range(N)]
        self.loader = loader
        self.transform = transform

    def __len__(self):
        return N

    def __getitem__(self, i):
        image = (self.loader or Image.open)(self.paths[i]).convert("RGB")
        image = self.transform(image) if self.transform is not None else image
        return torch.from_numpy(np.array(image))


@pytest.fixture(autouse=True)
def as_it_was():
    """Every test leaves the process as it found it."""
    before = builtins.open, io.open, PIL.Image.open
    yield
    gc.collect()
    assert (builtins.open, io.open, PIL.Image.open) == before


# -- putting back ----------------------------------------------------------------------


def _quarter(image):
    return image.resize((16, 12))


def _half(image):
    return image.resize((32, 24))


def test_what_the_user_sets_while_it_looks_stays(folder):
    dataset = Pictures(folder, transform=_quarter)
    dataset.augmentations = steps = [_quarter]
    probe = Probe(None)
    watched, _ = probe.attach(dataset, default_collate)
    assert watched[0].shape == (12, 16, 3)
    dataset.transform = _half
    dataset.augmentations.append(_half)
    assert watched[0].shape == (24, 32, 3)
    probe.uninstall()
    assert dataset.transform is _half
    assert dataset.augmentations is steps
    assert steps == [_quarter, _half]
    assert [type(s) for s in steps] == [types.FunctionType] * 2


def test_everything_is_put_back_whatever_has_become_of_some_of_it(folder, monkeypatch):
    class Stubborn(Pictures):
        def __getattr__(self, name):
            raise RuntimeError(name)

    before = builtins.open, io.open, PIL.Image.open, PIL.Image.Image.convert
    dataset = Stubborn(folder, transform=_quarter)
    probe = Probe(None)
    watched, _ = probe.attach(dataset, default_collate)
    watched[0]
    assert builtins.open is not before[0]
    del dataset.transform
    probe.uninstall()
    assert (builtins.open, io.open, PIL.Image.open, PIL.Image.Image.convert) == before
    assert "transform" not in vars(dataset)


# -- generators of a data set's own ----------------------------------------------------

_of_the_module = np.random.default_rng(5)


class Noisy(Dataset):
    """Rows with noise from generators that it keeps, in many places."""

    def __init__(self):
        self.old = np.random.RandomState(0)
        self.torch = torch.Generator().manual_seed(0)
        self.more = {"list": [np.random.Generator(np.random.MT19937(0))]}
        self.step = types.SimpleNamespace(rng=random.Random(1))

    def __len__(self):
        return 40

    def __getitem__(self, i):
        noise = self.old.normal() + self.more["list"][0].normal() + self.step.rng.random()
        return i + noise + torch.rand(1, generator=self.torch)[0] + _of_the_module.random()


def test_what_a_data_set_draws_while_it_is_tried_is_not_missing_in_the_training():
    global _of_the_module
    _of_the_module = np.random.default_rng(5)
    plain = [Noisy()[i] for i in [0]] + [Noisy()[0]]
    _of_the_module = np.random.default_rng(5)
    dataset = Noisy()
    found = dataset_facts(dataset)
    assert found.draws  # and what it draws is still seen
    with pytest.raises(
        ArgumentError, match="feed setting cache: decode keeps the finished samples"
    ):
        apply_remedies(dataset, FeedSettings(cache="decode"))
    assert torch.equal(dataset[0], plain[0])


# -- replacements of others ----------------------------------------------------------


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
