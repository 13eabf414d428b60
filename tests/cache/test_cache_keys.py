"""A cache serves what its source and its steps would make now: not another array's rows, another
version's work, or another sample's bytes.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from cache_worker import Toy, oracle, same
from ronde.data.sources.arrays import arrays
from ronde.data.sources.map_dataset import dataset
from ronde.data.sources.tokens import TokenSource, _File, tokens
from ronde.feed import Pipeline, cached, cached_dataset
from ronde.introspect import fingerprint as describe
from ronde.introspect.fingerprint import CannotDescribe, digest
from ronde.world import ArgumentError


@pytest.fixture(autouse=True)
def nothing_left_in_memory(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="ronde-test-", dir="/dev/shm") as folder:
        monkeypatch.setenv("RONDE_SHM", folder)
        yield
        if list(Path(folder).iterdir()):
            gc.collect()
        assert not list(Path(folder).iterdir())


def all_right(kept) -> bool:
    return all(same(v, oracle(i)) for i, v in enumerate(kept.read(range(len(kept)))))


# -- coming and going ------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_one_cache_that_is_closed_leaves_the_files_of_another_alone(tmp_path, place):
    where = "memory" if place == "memory" else tmp_path / "cache"
    one, two = (cached(Toy(30, "shared"), where=where, limit="4MiB", check=False) for _ in range(2))
    one.read(range(15))
    arena = two._opened()
    assert arena is one._opened()
    one.close()
    strangers = [open(tmp_path / f"stranger{i}", "w+b", buffering=0) for i in range(8)]  # noqa: SIM115
    for stranger in strangers:
        stranger.write(b"precious" * 1000)
    assert all_right(two) and two.report().hits == 15
    assert all((tmp_path / f"stranger{i}").read_bytes() == b"precious" * 1000 for i in range(8))
    two.close()
    for call in (
        lambda: arena.get(3),
        lambda: arena.put([(3, [b"x"], bytes(32))]),
        lambda: arena.count(hits=1),
    ):
        with pytest.raises(OSError, match=r"closed|Bad file"):
            call()
    for stranger in strangers:
        stranger.close()
    assert all_right(one) and all_right(two), "they read on from the source"


def test_the_last_user_of_a_cache_leaves_it_also_where_another_was_only_forgotten():
    one, two = (cached(Toy(5, "forgotten"), limit="1MiB", check=False) for _ in range(2))
    folder = two._folder
    del one
    gc.collect()
    assert folder.is_dir() and all_right(two)
    two.close()
    assert not folder.exists()


def test_room_in_use_is_not_given_out_again_where_the_header_is_older_than_the_entries(tmp_path):
    kept = cached(Toy(40, "power"), where=tmp_path, limit="4MiB", check=False)
    kept.read(range(10))
    index = kept._folder / "cache.idx"
    header = index.read_bytes()[:4096]
    kept.read(range(20))
    kept.close()
    with index.open(
        "r+b"
    ) as file:  # the machine went down: this page had not reached the disk, those after it had
        file.write(header)
        file.seek(4096 + 32 * 39)
        # torn; it must not count as room that is taken up to the end of the world
        file.write(b"\xff" * 32)
    kept = cached(Toy(40, "power"), where=tmp_path, limit="4MiB", check=False)
    assert all_right(kept), "before and after others are written"
    assert all_right(kept)
    report = kept.report()
    assert (report.held, report.corrupt, report.full) == (40, 1, 0)
    kept.close()


def test_a_record_on_disk_is_checked_each_time(tmp_path):
    kept = cached(Toy(10, "rot"), where=tmp_path, limit="1MiB", check=False)
    assert all_right(kept) and all_right(kept)
    data = kept._folder / "cache.bin"
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(8 << 10))
    assert all_right(kept)
    assert kept.report().corrupt >= 1
    kept.close()


def test_no_reserve_is_a_reserve(tmp_path):
    kept = cached(Toy(5, "none"), where=tmp_path, limit="1MiB", reserve=0, check=False)
    assert all_right(kept) and kept._reserve == 0 and kept.report().held == 5
    kept.close()
    for reserve in (-1, "-1", float("nan"), True):
        with pytest.raises(ArgumentError, match="reserve="):
            cached(Toy(5), reserve=reserve)
    with pytest.raises(ArgumentError, match="limit=0"):
        cached(Toy(5), limit=0)


# -- sources whose fingerprints are equal, and whose samples are not -------------------


class Wrapped(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Named(Wrapped):
    """As Wrapped, with its source's fingerprint for its own."""

    @property
    def fingerprint(self):
        return self.rows.fingerprint

    def read(self, ids):
        return [self.rows[i] for i in ids]


def mapped(path, offset):
    return np.memmap(path, np.int64, "r", offset, (2, 4))


def pairs(folder: Path):
    """Two makers of sources that look alike, by name. They are called one after the other, so that
    the second may write anew.
    """
    one, two = np.arange(8).reshape(2, 4), np.arange(8).reshape(2, 4) + 100
    for name, values in (
        ("t1", np.arange(9, dtype=np.uint16)),
        ("t2", np.arange(9, dtype=np.uint16) + 7),
    ):
        (folder / name).mkdir()
        values.tofile(folder / name / "t.bin")
    np.concatenate([one, two]).tofile(folder / "both.raw")

    def save(values, seconds):
        np.save(folder / "x.npy", values)
        np.savez(folder / "x.npz", x=values)
        for name in ("x.npy", "x.npz"):
            os.utime(folder / name, (seconds, seconds))

    def written(values, seconds, name):
        save(values, seconds)
        return arrays(folder / name)

    return {
        "in memory": (lambda: arrays(one), lambda: arrays(two)),
        "by name": (lambda: arrays({"x": one}), lambda: arrays({"x": two})),
        "not contiguous": (lambda: arrays(one.T), lambda: arrays(two.T)),
        "alone or not": (lambda: arrays(one), lambda: arrays([one])),
        "tokens": (
            lambda: tokens(folder / "t1/t.bin", 4, "uint16"),
            lambda: tokens(folder / "t2/t.bin", 4, "uint16"),
        ),
        "npy anew": (lambda: written(one, 1000, "x.npy"), lambda: written(two, 2000, "x.npy")),
        "npz anew": (lambda: written(one, 1000, "x.npz"), lambda: written(two, 2000, "x.npz")),
        "parts of a file": (
            lambda: arrays(mapped(folder / "both.raw", 0)),
            lambda: arrays(mapped(folder / "both.raw", 64)),
        ),
        "data set": (lambda: dataset(Wrapped(arrays(one))), lambda: dataset(Wrapped(arrays(two)))),
        "data set of the same fingerprint": (
            lambda: dataset(Named(arrays(one))),
            lambda: dataset(Named(arrays(two))),
        ),
        "own source": (lambda: Named(arrays(one)), lambda: Named(arrays(two))),
    }


def values_of(samples):
    """As lists, whatever kind of sample: its kind too."""

    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return (
            [plain(v) for v in value]
            if isinstance(value, tuple)
            else torch.as_tensor(value).tolist()
        )

    return [(isinstance(s, tuple), plain(s)) for s in samples]


ALIKE = [
    "in memory",
    "by name",
    "not contiguous",
    "alone or not",
    "tokens",
    "npy anew",
    "npz anew",
    "parts of a file",
    "data set",
]


@pytest.mark.parametrize("case", [*ALIKE, "data set of the same fingerprint", "own source"])
def test_sources_that_look_alike_do_not_share_a_cache(tmp_path, case):
    folders = []
    for make in pairs(tmp_path)[case]:
        source = make()
        kept = cached(source, where=tmp_path / "cache", limit="1MiB")
        ids = range(len(source))
        expected = values_of(source.read(ids))
        assert values_of(kept.read(ids)) == expected and values_of(kept.read(ids)) == expected
        kept.close()
        again = cached(source, where=tmp_path / "cache", limit="1MiB")
        assert again._folder == kept._folder, "the same source finds its own"
        again.close()
        folders.append(kept._folder)
    assert folders[0] != folders[1]


@pytest.mark.parametrize("case", ["in memory", "tokens", "npy anew"])
def test_data_sets_around_sources_that_look_alike_do_not_share_a_cache(tmp_path, case):
    for make in pairs(tmp_path)[case]:
        source = make()
        for wrapped in (Wrapped(source), Pipeline(source)):
            kept = cached_dataset(wrapped, where=tmp_path / "cache", limit="1MiB")
            assert values_of([kept[i] for i in range(len(source))]) == values_of(
                source.read(range(len(source)))
            )
            kept.close()


def test_sources_at_two_addresses_do_not_share_a_cache():
    def remote(bucket):
        return TokenSource(
            [_File(f"https://{bucket}/t.bin", 0, 9, np.dtype("u2"), 18)], 4, 4, None, None
        )

    assert remote("one").fingerprint == remote("two").fingerprint
    assert digest(remote("one")) == digest(remote("one")) != digest(remote("two"))


def test_mapped_arrays_and_what_was_made_of_them_are_told_apart(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(8))
    whole = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert digest(whole) == digest(np.load(tmp_path / "a.npy", mmap_mode="r"))
    assert digest(whole[:4]) != digest(whole[4:])
    changed = whole.copy()
    changed[0] = 5
    assert digest(changed) != digest(whole.copy())


def test_an_array_that_is_too_large_to_be_read_is_refused_not_guessed(tmp_path, monkeypatch):
    monkeypatch.setattr(describe, "_MOST_ARRAY_BYTES", 1000)
    rows = arrays(np.zeros((200, 2)))
    with pytest.raises(ArgumentError, match=r"GiB in memory.*version="):
        cached(rows, where=tmp_path)
    kept = cached(rows, where=tmp_path, version="1")  # whose word it is then
    kept.close()
    one, two = cached(rows, limit="1MiB"), cached(rows, limit="1MiB")  # in memory: each one's own
    assert one._folder != two._folder
    one.close()
    two.close()


def add_one(row):
    return row + 1


def add_two(row):
    return row + 2


def test_steps_before_an_earlier_cache_count(tmp_path):
    def after(step):
        first = (
            Pipeline(arrays(np.arange(4)))
            .map(step, "decode")
            .cache("decode", where=tmp_path, limit="1MiB")
        )
        second = first.map(float, "crop").cache("crop", where=tmp_path, limit="1MiB")
        found = [second[i] for i in range(4)]
        second.source.close()
        first.source.close()
        return found

    assert after(add_one) == [1, 2, 3, 4] and after(add_two) == [2, 3, 4, 5]
    for step, expected in ((add_one, 1), (add_two, 2)):
        kept = cached_dataset(
            Pipeline(arrays(np.arange(4))).map(step), where=tmp_path / "whole", limit="1MiB"
        )
        assert int(kept[0]) == expected
        kept.close()


# -- code that was changed -------------------------------------------------------------


def told(folder: Path, files: dict[str, str]) -> str:
    """The digest of ``step`` in a module of these files, imported from a folder as a process of its
    own would.
    """
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    saved = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        return digest(
            importlib.import_module(
                "mended.steps" if "mended/steps.py" in files else "mended_steps"
            ).step
        )
    finally:
        sys.path[:] = saved
        for name in [n for n in sys.modules if n.startswith("mended")]:
            del sys.modules[name]


def attribute(value: str) -> str:
    return f"""
        import enum, functools
        import numpy as np
        class Mode(enum.Enum):
            A = {value}
        class Inner:
            def __init__(self, n):
                self.n = n
        class Base:
            X = VALUE
            def __call__(self, x):
                return x, self.X
        class T(Base):
            pass
        step = T()
    """


CLASS = {
    "tuple": ("(4, 4)", "(8, 8)"),
    "list": ("[4]", "[8]"),
    "dict": ("{'a': 4}", "{'a': 8}"),
    "array": ("np.full(2, 4)", "np.full(2, 8)"),
    "object": ("Inner(4)", "Inner(8)"),
    "cached property": (
        "functools.cached_property(lambda self: 4)",
        "functools.cached_property(lambda self: 8)",
    ),
    "partial method": ("functools.partialmethod(print, 4)", "functools.partialmethod(print, 8)"),
    "setter": ("property(None, lambda self, x: 4)", "property(None, lambda self, x: 8)"),
}


@pytest.mark.parametrize("kind", CLASS)
def test_another_attribute_of_a_class_is_another_step(tmp_path, kind):
    one, two = (
        {"mended_steps.py": attribute("1").replace("VALUE", value)} for value in CLASS[kind]
    )
    assert told(tmp_path / "1", one) == told(tmp_path / "2", one) != told(tmp_path / "3", two)


HELPER = "SIZE = 4\ndef helper(x):\n    return x + SIZE\n"
USES = {
    "from, in the body": "def step(x):\n    from mended_pkg.sub import helper\n    return "
    "helper(x)\n",
    "dotted, in the body": "def step(x):\n    import mended_pkg.sub\n    return "
    "mended_pkg.sub.helper(x)\n",
    "renamed, in the body": "def step(x):\n    import mended_pkg.sub as m\n    return m.helper(x)\n",
    "module, in the body": "def step(x):\n    from mended_pkg import sub\n    return "
    "sub.helper(x)\n",
    "a constant of it": "import mended_pkg.sub\ndef step(x):\n    return x + mended_pkg.sub.SIZE\n",
    "dotted": "import mended_pkg.sub\ndef step(x):\n    return mended_pkg.sub.helper(x)\n",
    "by another name": "import mended_pkg.sub\ndef step(x):\n    s = mended_pkg.sub\n    return "
    "s.helper(x)\n",
    "used inside": "def make():\n    import mended_pkg.sub as m\n    return lambda x: "
    "m.helper(x)\ndef step(x):\n    return make()(x)\n",
    "held by an object": "import mended_pkg.sub\nclass T:\n    def __init__(self):\n        self.m "
    "= mended_pkg.sub\nstep = T()\n",
}


@pytest.mark.parametrize("init", [True, False], ids=["package", "namespace"])
@pytest.mark.parametrize("use", USES)
def test_another_helper_in_another_module_is_another_step(tmp_path, use, init):
    def files(helper):
        return {
            "mended_steps.py": USES[use],
            "mended_pkg/sub.py": helper,
            **({"mended_pkg/__init__.py": ""} if init else {}),
        }

    one = told(tmp_path / "1", files(HELPER))
    assert (
        one
        == told(tmp_path / "2", files(HELPER))
        != told(tmp_path / "3", files(HELPER.replace("4", "8")))
    )


def test_a_relative_import_and_the_members_of_an_enum_count(tmp_path):
    def files(value):
        return {
            "mended/__init__.py": "",
            "mended/steps.py": "def step(x):\n    from .modes import Mode\n    return x + "
            "Mode.A.value\n",
            "mended/modes.py": f"import enum\nclass Mode(enum.Enum):\n    A = {value}\n    B = 1\n",
        }

    assert (
        told(tmp_path / "1", files(4))
        == told(tmp_path / "2", files(4))
        != told(tmp_path / "3", files(8))
    )


def test_an_import_that_cannot_be_looked_into_is_refused(tmp_path):
    def step(row):
        import no_such_module_anywhere

        return no_such_module_anywhere.helper(row)

    with pytest.raises(CannotDescribe, match="imports no_such_module_anywhere"):
        digest(step)
    pipeline = Pipeline(arrays(np.arange(4))).map(step, "decode")
    with pytest.raises(ArgumentError, match=r"the step 'decode'.*version="):
        pipeline.cache("decode", where=tmp_path, check=False)
    pipeline.cache("decode", where=tmp_path, version="1", check=False).source.close()


LOOKED_UP = {
    "environment": "def step(x):\n    return x * float(os.environ['RONDE_TEST_SCALE'])\n",
    "getenv": "def step(x):\n    return x * float(os.getenv('RONDE_TEST_SCALE', '1'))\n",
    "a name that is a constant": "NAME = 'RONDE_TEST_SCALE'\ndef step(x):\n    return x * "
    "float(os.environ[NAME])\n",
    "globals()": "SCALE = VALUE\ndef step(x):\n    return x * globals()['SCALE']\n",
    "getattr": "import mended_values\ndef step(x):\n    return x * getattr(mended_values, "
    "'SCALE')\n",
    "import_module": "import importlib\ndef step(x):\n    return x * "
    "importlib.import_module('mended_values').SCALE\n",
}


@pytest.mark.parametrize("way", LOOKED_UP)
def test_what_a_step_looks_up_by_a_text_counts(tmp_path, monkeypatch, way):
    def at(folder, value):
        monkeypatch.setenv("RONDE_TEST_SCALE", value)
        text = "import os\n" + LOOKED_UP[way].replace("VALUE", value)
        return told(
            tmp_path / folder, {"mended_steps.py": text, "mended_values.py": f"SCALE = {value}\n"}
        )

    assert at("1", "4") == at("2", "4") != at("3", "8")


@pytest.mark.parametrize("text", ["os.environ[x]", "globals()[x]", "importlib.import_module(x)"])
def test_what_is_looked_up_by_a_text_that_nobody_knows_is_refused(tmp_path, text):
    with pytest.raises(CannotDescribe, match="by a name that does not stand beside it"):
        told(
            tmp_path,
            {"mended_steps.py": f"import importlib, os\ndef step(x):\n    return {text}\n"},
        )


def test_what_an_object_looked_up_when_it_was_made_is_its_state(monkeypatch):
    class Scaled:
        def __init__(self):
            self.rank, self.scale = (
                os.environ["RONDE_TEST_RANK"] and 1,
                os.environ[str(self)] if not self else 2,
            )

        def __call__(self, x):
            return x * self.scale

    monkeypatch.setenv("RONDE_TEST_RANK", "0")
    first = digest(Scaled())
    monkeypatch.setenv("RONDE_TEST_RANK", "1")
    assert digest(Scaled()) == first


def test_the_default_type_of_numbers_counts(tmp_path):
    def step(row):
        return torch.tensor(1 / 3)

    made = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            kept = (
                Pipeline(arrays(np.arange(4)))
                .map(step, "decode")
                .cache("decode", where=tmp_path, limit="1MiB")
            )
            made.append(kept[0].dtype)
            kept.source.close()
        finally:
            torch.set_default_dtype(torch.float32)
    assert made == [torch.float32, torch.float64]


def test_an_object_that_answers_for_every_name_is_described():
    class Store:
        def __getattr__(self, name):
            return {"scale": 2}[name]

    def step(x, store=Store()):
        return x * store.scale

    assert digest(step) == digest(step)


def test_an_open_file_is_refused_and_a_lock_is_not(tmp_path):
    class Held:
        pass

    held = Held()
    held.lock = threading.Lock()
    assert digest(held) == digest(held)
    with (
        open(tmp_path / "text", "w") as held.file,
        pytest.raises(CannotDescribe, match=r"it\.file"),
    ):
        digest(held)


class Ordinary(torch.nn.Module):
    """What is often found in a transform, and says nothing of a state that cannot be told."""

    SIZE = (4, 4)
    Mean = torch.tensor([0.5])
    Output = dict[str, int] | None
    lock = threading.Lock()

    def __init__(self):
        super().__init__()
        self.filter = torch.nn.Conv2d(1, 1, 3, bias=False)
        torch.nn.init.ones_(self.filter.weight)

    @property
    def half(self):
        return np.float32(0.5)

    def forward(self, image):
        import json.decoder
        from concurrent import futures

        from torch.nn import functional

        pixels = torch.from_numpy(np.asarray(image, np.float32))[None, None]
        return (
            functional.interpolate(self.filter(pixels), self.SIZE) * self.half,
            json.decoder,
            futures,
        )


def test_what_uses_installed_packages_stays_describable():
    image = pytest.importorskip("PIL.Image")
    filters = pytest.importorskip("PIL.ImageFilter")

    def step(x):
        import PIL.ImageOps

        return PIL.ImageOps.fit(x.filter(filters.BLUR), (3, 3), image.Resampling.BILINEAR)

    assert digest(Ordinary()) == digest(Ordinary())
    assert digest(step) == digest(step)
    for each in (
        np.add,
        torch.relu,
        torch.nn.functional.interpolate,
        torch.ops,
        filters.GaussianBlur(2),
        list[int],
        int | None,
    ):
        assert digest(each) == digest(each)
