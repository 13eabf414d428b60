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
from ronde.feed import cached
from ronde.introspect.fingerprint import CannotDescribe, digest


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

    def save(values, seconds):
        np.save(folder / "x.npy", values)
        os.utime(folder / "x.npy", (seconds, seconds))

    def written(values, seconds, name):
        save(values, seconds)
        return arrays(folder / name)

    return {
        "in memory": (lambda: arrays(one), lambda: arrays(two)),
        "by name": (lambda: arrays({"x": one}), lambda: arrays({"x": two})),
        "tokens": (
            lambda: tokens(folder / "t1/t.bin", 4, "uint16"),
            lambda: tokens(folder / "t2/t.bin", 4, "uint16"),
        ),
        "npy anew": (lambda: written(one, 1000, "x.npy"), lambda: written(two, 2000, "x.npy")),
        "data set": (lambda: dataset(Wrapped(arrays(one))), lambda: dataset(Wrapped(arrays(two)))),
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


ALIKE = ["in memory", "by name", "tokens", "npy anew", "data set", "own source"]


@pytest.mark.parametrize("case", ALIKE)
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


def test_sources_at_two_addresses_do_not_share_a_cache():
    def remote(bucket):
        return TokenSource(
            [_File(f"https://{bucket}/t.bin", 0, 9, np.dtype("u2"), 18)], 4, 4, None, None
        )

    assert remote("one").fingerprint == remote("two").fingerprint
    assert digest(remote("one")) == digest(remote("one")) != digest(remote("two"))


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
