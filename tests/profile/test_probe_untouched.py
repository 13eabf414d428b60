"""What measuring and remedies must not break in other people's code: each of these once did."""

from __future__ import annotations

import builtins
import gc
import io
import pickle
import random
import sys
import types
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, default_collate

from ronde.adapt.remedies import apply_remedies, dataset_facts
from ronde.feed import FeedSettings, synthetic
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


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- torchvision's v2 transforms -------------------------------------------------------

# PyPI's torchvision does not load with this torch. This has the structure of torchvision 0.29's v2:
# each functional looks its kernel up in a registry by what its own name leads to, and transforms
# are modules that call functionals through their module.
_FUNCTIONAL = """
_KERNEL_REGISTRY = {}

def _get_kernel(functional, kind):
    registry = _KERNEL_REGISTRY.get(functional)
    if not registry:
        raise ValueError(f"No kernel registered for functional {functional.__name__}.")
    return registry[kind]

def horizontal_flip(inpt):
    return _get_kernel(horizontal_flip, type(inpt))(inpt)

def resize(inpt, size):
    return _get_kernel(resize, type(inpt))(inpt, size)

from PIL import Image
_KERNEL_REGISTRY[horizontal_flip] = {Image.Image: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)}
_KERNEL_REGISTRY[resize] = {Image.Image: lambda image, size: image.resize((size, size))}
"""
_TRANSFORMS = """
import torch
from torchvision.transforms.v2 import functional as F

class Transform(torch.nn.Module):
    def forward(self, *inputs):
        return self.transform(*inputs)

class RandomHorizontalFlip(Transform):
    def transform(self, inpt):
        return F.horizontal_flip(inpt) if torch.rand(1) < 0.5 else inpt

class Resize(Transform):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def transform(self, inpt):
        return F.resize(inpt, self.size)

class Compose(Transform):
    def __init__(self, transforms):
        super().__init__()
        self.transforms = transforms

    def forward(self, *inputs):
        for transform in self.transforms:
            inputs = (transform(*inputs),)
        return inputs[0]
"""


@pytest.fixture
def v2(monkeypatch):
    if "torchvision" in sys.modules:
        pytest.skip("the real one is there")
    made = {}
    for name in (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2.functional",
        "torchvision.transforms.v2",
    ):
        made[name] = types.ModuleType(name)
        made[name].__path__ = []
        made[name].__file__ = torch.__file__  # it is an installed library
        monkeypatch.setitem(sys.modules, name, made[name])
        if name == "torchvision.transforms.v2.functional":
            exec(_FUNCTIONAL, vars(made[name]))
    made["torchvision.transforms.v2"].functional = made["torchvision.transforms.v2.functional"]
    exec(_TRANSFORMS, vars(made["torchvision.transforms.v2"]))
    return made["torchvision.transforms.v2"]


class Own(Pictures):
    """Its transform is found by no name of the data set's."""

    def __getitem__(self, i):
        return torch.from_numpy(np.array(self.steps(Image.open(self.paths[i]).convert("RGB"))))


@pytest.mark.parametrize("kind", [Pictures, Own])
def test_transforms_that_find_kernels_by_what_functions_are_can_be_measured(folder, v2, kind):
    steps = v2.Compose([v2.RandomHorizontalFlip(), v2.Resize(8)])
    dataset = kind(folder, transform=steps)
    dataset.steps = steps
    torch.manual_seed(0)
    plain = [dataset[i] for i in range(N)]
    probe = Probe(None)
    watched, _ = probe.attach(dataset, default_collate)
    torch.manual_seed(0)
    assert same(plain, [watched[i] for i in range(N)])
    found = probe.times()["augment"]
    probe.uninstall()
    assert (found.samples, found.calls) == (N, N)  # what is inside belongs to it
    assert "__call__" not in vars(v2.Transform)


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
        self.x = torch.arange(40.0)
        self.numpy, self.old, self.python = (
            np.random.default_rng(0),
            np.random.RandomState(0),
            random.Random(0),
        )
        self.torch = torch.Generator().manual_seed(0)
        self.more = {"list": [np.random.Generator(np.random.MT19937(0))]}
        self.step = types.SimpleNamespace(rng=random.Random(1))

    def __len__(self):
        return 40

    def __getitem__(self, i):
        noise = (
            self.numpy.random()
            + self.old.normal()
            + self.python.gauss(0, 1)
            + self.more["list"][0].normal()
            + self.step.rng.random()
        )
        return self.x[i] + noise + torch.rand(1, generator=self.torch)[0] + _of_the_module.random()


class NoisyPictures(Pictures):
    def __init__(self, folder):
        super().__init__(folder)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        return super().__getitem__(i).float() + self.rng.random()


class NoisyStream(IterableDataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(torch.from_numpy(self.rng.random((40, 2))))


def test_what_a_data_set_draws_while_it_is_tried_is_not_missing_in_the_training(folder):
    global _of_the_module
    _of_the_module = np.random.default_rng(5)
    plain = [Noisy()[i] for i in [0]] + [Noisy()[0]]
    _of_the_module = np.random.default_rng(5)
    dataset = Noisy()
    found = dataset_facts(dataset)
    assert found.draws  # and what it draws is still seen
    synthetic(dataset, batches=1)
    with pytest.raises(
        ArgumentError, match="feed setting cache: decode keeps the finished samples"
    ):
        apply_remedies(dataset, FeedSettings(cache="decode"))
    assert torch.equal(dataset[0], plain[0])
    pictures, first = NoisyPictures(folder), NoisyPictures(folder)[0]
    dataset_facts(pictures)
    assert torch.equal(pictures[0], first)
    stream = NoisyStream()
    synthetic(stream, batches=1)
    assert same(stream, NoisyStream())


# -- files that are not files ----------------------------------------------------------


class Stream:
    """Bytes that can be read once."""

    def __init__(self, path, seekable=None):
        self._file = path.open("rb")
        if seekable is not None:
            self.seek = self._refuse

    def _refuse(self, at, whence=0):
        raise io.UnsupportedOperation("seek")

    def read(self, size=-1):
        return self._file.read(size)


class Streams(Pictures):
    def __getitem__(self, i):
        return torch.from_numpy(
            np.array(Image.open(Stream(self.paths[i], None if i % 2 else False)).convert("RGB"))
        )


def test_a_stream_that_cannot_be_rewound_is_an_image_as_well(folder):
    dataset = Streams(folder)
    assert dataset_facts(dataset).jpeg
    cached = apply_remedies(dataset, FeedSettings(cache="decode"))
    for _ in range(2):
        assert same([dataset[i] for i in range(N)], [cached[i] for i in range(N)])
    cached.close()


def test_files_that_are_replayed_can_be_peeked_into(folder):
    class Peeking(Pictures):
        def __getitem__(self, i):
            with open(self.paths[i], "rb") as file:
                return file.peek(2)[:2] + file.read()[-2:]

    probe = Probe(None, {"read"})
    watched, _ = probe.attach(Peeking(folder), list)
    assert {watched[i % N] for i in range(3 * N)} == {b"\xff\xd8\xff\xd9"}
    probe.uninstall()
    assert probe.notes() == []
    assert probe.times()["read"].samples < N  # the others were replayed


# -- functions that data sets hold -----------------------------------------------------


class Holder:
    """Something of the user's between the data set and the function."""

    def __init__(self, opener):
        self.opener = opener

    def __call__(self, path):
        return self.opener(path)


@pytest.mark.parametrize("make", [lambda: Image.open, lambda: Holder(Image.open)])
def test_a_data_set_that_holds_the_function_itself_is_observed(folder, make):
    dataset = Pictures(folder, make())
    found = dataset_facts(dataset)
    assert found.jpeg and found.images and found.files == 1.0
    holder = dataset.loader
    assert (holder if isinstance(holder, types.FunctionType) else holder.opener) is Image.open
    pickle.dumps(dataset)


def test_a_probe_sees_it_and_lets_it_be_sent(folder):
    dataset = Pictures(folder, Image.open)
    plain = [dataset[i] for i in range(N)]
    probe = Probe(None)
    watched, _ = probe.attach(dataset, default_collate)
    assert same(plain, [watched[i] for i in range(N)])
    back = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert same(plain[:2], [back[i] for i in range(2)])
    assert probe.times()["read"].samples == N
    probe.uninstall()
    assert dataset.loader is Image.open
    pickle.dumps(back)


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


def test_a_layer_over_what_another_took_away():
    class Owner:
        def f(self):
            return 1

    class Heir(Owner):
        pass

    undo = layers.put(Heir, "f", lambda f: lambda self: f(self) + 1)
    assert Heir().f() == 2
    del Heir.f  # somebody's cleaning up
    undo()
    assert Heir().f() == 1 and "f" not in vars(Heir)
