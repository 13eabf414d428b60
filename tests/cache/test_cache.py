"""A cache gives what the source would have given, whoever fills it, whoever is killed, and whatever
happens to its files.
"""

from __future__ import annotations

import collections
import gc
import itertools
import json
import os
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ronde
from cache_worker import Toy, cached, oracle, same
from processes import TESTS, python
from ronde.data.named_stages import sample_key
from ronde.data.serialize import CannotEncode, decode_sample, encode_sample
from ronde.data.sources.arrays import arrays
from ronde.data.sources.base import Row, Sample
from ronde.data.sources.folder import folder
from ronde.feed import Pipeline, cached_dataset, clear_cache, rng
from ronde.world import ArgumentError, SampleError

WORKER = TESTS / "cache_worker.py"
Point = collections.namedtuple("Point", "x y")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the commands of cache_worker.py told, each run in a process of its own."""
    disk = tmp_path_factory.mktemp("disk")
    commands = {
        "hammer disk": ["hammer", str(disk / "h"), "3MiB"],
        "hammer memory": ["hammer", "memory", "20MiB"],
        "leave_behind": ["leave_behind", "memory"],
        "first run": ["epochs", str(disk / "e")],
        "second run": ["epochs", str(disk / "e")],
        "full_disk": ["full_disk", str(disk / "f")],
    }
    with tempfile.TemporaryDirectory(prefix="ronde-test-", dir="/dev/shm") as memory:
        done = python(
            [str(WORKER), json.dumps(list(commands.values()))],
            disk,
            timeout=150,
            env={"RONDE_SHM": memory},
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        found |= zip(commands, found.pop("told"), strict=True)
        return found | {"left": [p.name for p in Path(memory).iterdir()], "stderr": done.stderr}


def back(value):
    return decode_sample(bytearray(b"".join(encode_sample(value))))


def alike(a, b) -> bool:
    """Equal in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.contiguous().flatten().view(torch.uint8).tolist()
            == b.flatten().view(torch.uint8).tolist()
        )
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or (a != a and b != b)


# -- values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"jpeg",
        "naïve \ud800",
        3,
        -(10**30),
        True,
        None,
        2.5,
        float("nan"),
        float("-inf"),
        -0.0,
        (1, (b"x", [])),
        {"a": 1, 2: {"b": None}, None: (), 1.5: 0},
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.zeros((0, 3), np.float32),
        np.array(7, np.int8),
        np.array(["ab", ""]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.arange(4, dtype=">u2"),
        np.float32(1.1),
        np.bool_(True),
        np.array([1 + 2j]),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.ones(1, 2, 3).expand(3, 2, 3),
        np.broadcast_to(np.arange(3.0), (2, 3)),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(3, dtype=torch.float8_e5m2),
        Sample(b"data", 3, "cat/1.jpg"),
        Row(age=3, name="x"),
        Point(1, np.ones(2)),
        [np.ones(3, np.uint8), torch.ones(1)],
    ],
    ids=lambda v: f"{type(v).__name__}-{str(v)[:20]!r}",
)
def test_values_come_back_bit_for_bit(value):
    found = back(value)
    assert alike(value if not isinstance(value, torch.Tensor) else value.resolve_conj(), found)


class Odd(dict):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        np.array([None]),
        np.zeros(2, dtype=[("a", "i4")]),
        torch.ones(2, requires_grad=True),
        torch.ones(2).to_sparse(),
        Odd(a=1),
        torch.empty(2, device="meta"),
        {(1, 2): 3},
        torch.nn.Parameter(torch.ones(2)),
        bytearray(b"x"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_would_not_come_back_is_refused(value):
    with pytest.raises(CannotEncode):
        encode_sample((1, value))
    selfish: list = []
    selfish.append(selfish)
    with pytest.raises(CannotEncode, match="contains itself"):
        encode_sample(selfish)


def test_damaged_bytes_are_an_error_and_nothing_else():
    good = b"".join(encode_sample({"x": np.arange(50), "y": (Point(1, 2), "text", torch.ones(3))}))
    draw = random.Random(0)
    errors = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            bad[draw.randrange(draw.choice([len(bad), 120]))] = draw.randrange(256)
        del bad[draw.choice([len(bad), len(bad), draw.randrange(len(bad))]) :]
        try:
            decode_sample(bad)
        except ValueError:
            errors += 1
    assert errors > 500


# -- reading through it ----------------------------------------------------------------


@pytest.fixture(params=["memory", "folder"])
def where(request, tmp_path):
    return "memory" if request.param == "memory" else str(tmp_path / "cache")


@pytest.fixture(autouse=True)
def nothing_left_in_memory(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="ronde-test-", dir="/dev/shm") as folder:
        monkeypatch.setenv("RONDE_SHM", folder)
        yield
        if list(Path(folder).iterdir()):
            gc.collect()  # a test that let go of its cache without closing it
        assert not list(Path(folder).iterdir())


def place_of(kept) -> Path:
    return Path(kept.report().place)


class Counted(Toy):
    def __init__(self, *args):
        super().__init__(*args)
        self.asked = collections.Counter()

    def read(self, ids):
        self.asked.update(ids)
        return super().read(ids)


def test_each_sample_is_read_once_and_is_the_callers_own(where):
    source = Counted(50, "once")
    kept = cached(source, where=where, limit="10MiB")
    source.asked.clear()  # one sample, to see that nothing draws
    ids = [*range(49, -1, -1), 3, 3]
    for _ in range(3):
        for i, value in zip(ids, kept.read(ids), strict=True):
            assert same(value, oracle(i))
            value["data"][:] = 0  # an augmentation that works in place
    # The first round asks for sample 3 three times at once.
    assert set(source.asked.values()) <= {1, 3} and len(source.asked) == 50
    report = kept.report()
    assert (report.held, report.hits, report.misses, report.full) == (50, 104, 52, 0)
    assert kept.fingerprint == "once" and len(kept) == 50
    assert "50 of 50 samples" in str(report)
    with pytest.raises(IndexError):
        kept.read([50])
    kept.close()
    assert all(same(v, oracle(i)) for i, v in enumerate(kept.read(range(50)))), (
        "a closed cache reads on from the source"
    )


def test_what_came_first_stays_and_the_bound_holds(where):
    source = Counted(200, "first")
    kept = cached(source, where=where, limit="1MB")
    order = random.Random(2).sample(range(200), 200)
    first = set(order[:20])
    kept.read(order)
    files = sum(p.stat().st_blocks * 512 for p in place_of(kept).glob("cache.*"))
    assert files <= 1_000_000 and kept.report().bytes <= 1_000_000
    missed = []
    for _ in range(2):
        source.asked.clear()
        random.Random(3).shuffle(order)
        kept.read(order)
        missed.append(set(source.asked))
    held = set(range(200)) - missed[0]
    assert missed[0] == missed[1] and held >= first and 20 < len(held) < 100
    # In each of the three rounds what is not held was counted.
    assert kept.report().full == 3 * (200 - len(held)) and kept.report().held == len(held)
    kept.close()


def test_a_cache_on_disk_is_used_again_and_only_by_the_same(tmp_path):
    where = str(tmp_path / "cache")
    path = tmp_path / "data"
    for name in ("a/1.npy", "a/2.npy", "b/3.npy"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(name.encode() * 10)

    def reads(size, version):
        made = Pipeline(folder(path)).map(lambda sample: sample.data[:size], "decode")
        made = made.cache("decode", where, "1MiB", version=version)
        values = [made[i] for i in range(3)]
        hits = made.source.report().hits
        made.source.close()
        return values, hits

    first = [b"a/", b"a/", b"b/"]
    assert reads(2, "1") == (first, 0)
    assert reads(2, "1") == (first, 3)  # hits are counted over both
    assert reads(3, "2") == ([b"a/1", b"a/2", b"b/3"], 0)
    assert reads(2, "1") == (first, 6)
    # Written anew with another content of the same size: its fingerprint, names and sizes, is the
    # same.
    before = folder(path).fingerprint
    (path / "a/1.npy").write_bytes(b"Z" * len(b"a/1.npy" * 10))
    assert folder(path).fingerprint == before
    assert reads(2, "1") == ([b"ZZ", *first[1:]], 0)
    assert clear_cache(where) > 0
    assert not list(Path(where).iterdir())


def test_a_cache_on_disk_without_files_or_of_steps_needs_a_version(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"{i}")
    files, where = folder(tmp_path, labels="none"), tmp_path / "cache"
    cached(files, where=where, version="").close()
    own = Plain()
    own.path = str(tmp_path / "0.txt")
    for call, reason in (
        (lambda: cached(Toy(3), where=where, version=""), "Toy is not made of files alone"),
        (lambda: cached_dataset(own, where=where), "Plain is not made of files alone"),
        (
            lambda: cached(arrays(np.ones(3)), where=where, version=""),
            "ArraySource is not made of files alone",
        ),
        (
            lambda: Pipeline(files).map(len, "decode").cache("decode", where),
            "the code of the step 'decode' may change",
        ),
    ):
        with pytest.raises(ArgumentError, match=rf"{reason}\. Pass version='…', and change it"):
            call()


def test_caches_in_memory_of_one_launch_are_shared_by_its_workers_alone(monkeypatch, tmp_path):
    """Two datasets that look alike have a cache each; a second worker finds both."""

    def two():
        monkeypatch.setattr(ronde.cache.cached, "made_in_memory", itertools.count())
        return [cached_dataset([i, i + 1], limit="1MiB") for i in (5, 7)]

    alone = [place_of(each) for _ in range(2) for each in two()]
    assert len(set(alone)) == 4
    gc.collect()
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "h"), ("MASTER_PORT", 29)):
        monkeypatch.setenv(name, str(value))
    one, other = two(), two()
    assert [each[0] for each in one] == [5, 7]
    assert [each[0] for each in other] == [5, 7]
    assert [each.report().hits for each in other] == [1, 1]
    monkeypatch.setattr(ronde.cache.cached, "made_in_memory", itertools.count())
    extra = cached_dataset((8, 9), limit="1MiB")  # of a worker that makes another one first
    assert extra[0] == 8
    monkeypatch.setattr(ronde.cache.cached, "made_in_memory", itertools.count())
    part = cached_dataset([6, 9], limit="1MiB")  # of a worker that has other samples
    assert part[0] == 6
    on_disk = [
        cached_dataset(samples, tmp_path, "1MiB", version="1") for samples in ([5, 6], [6, 9])
    ]
    assert [each[0] for each in on_disk] == [5, 6]
    monkeypatch.setenv("MASTER_PORT", "30")
    assert not {place_of(each) for each in two()} & {place_of(each) for each in one}
    for each in (*one, *other, extra, part, *on_disk):
        each.close()
    gc.collect()


# -- randomness ------------------------------------------------------------------------


def plus_global(sample):
    return sample["label"] + np.random.randint(1 << 30)


def plus_torch(sample):
    return sample["label"] + int(torch.randint(1 << 30, ()))


def plus_python(sample):
    return sample["label"] + random.randrange(1 << 30)


def plus_rng(sample):
    return sample["label"] + int(rng().integers(1 << 30))


own = np.random.default_rng()


def plus_own(sample):
    return sample["label"] + int(own.integers(1 << 30))


def test_a_generator_of_its_own_is_refused_too():
    pipeline = Pipeline(Toy(9)).map(dict, "decode").map(plus_own, "flip")
    with pytest.raises(ArgumentError, match="a generator of its own draws random numbers"):
        cached(pipeline, "flip")


@pytest.mark.parametrize(
    "step", [plus_rng, plus_global, plus_torch, plus_python], ids=lambda f: f.__name__
)
def test_a_step_that_draws_is_refused_by_name(step):
    pipeline = Pipeline(Toy(9, "draws")).map(dict, "decode").map(step, "flip")
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), random.getstate()
    with pytest.raises(ArgumentError, match="the step 'flip' draws random numbers"):
        cached(pipeline, "flip")
    assert (
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        random.getstate(),
    ) == before
    kept = cached(pipeline, "decode")
    assert [s.name for s in kept.steps] == ["flip"]
    kept.source.close()

    class Rows(Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, i):
            return step({"label": i})

    with pytest.raises(ArgumentError, match="the data set draws random numbers"):
        cached_dataset(Rows())


def test_a_sample_that_draws_later_is_not_kept_and_is_reported_once():
    kept = cached_dataset([0] * 9, limit="1MiB")
    kept.dataset = Lately()
    with pytest.warns(RuntimeWarning, match="the data set draws random numbers") as warned:
        first, again = ([kept[i] for i in range(9)] for _ in range(2))
    assert len(warned) == 1 and first[:5] == again[:5] == [0.0] * 5
    assert (kept.report().held, kept.report().random) == (5, 8)
    kept.close()


class Lately:
    def __getitem__(self, i):
        return random.random() if i >= 5 else 0.0


def test_augmentation_after_it_has_the_same_bits_cold_and_warm():
    pipeline = (
        Pipeline(Toy(20, "after"))
        .map(lambda s: s["data"][:50], "decode")
        .map(lambda a: a ^ rng().integers(256, dtype=np.uint8))
    )
    kept = pipeline.cache("decode", limit="1MiB")
    for epoch in (0, 1, 0):
        for i in range(20):
            with sample_key(1000 * epoch + i):
                expected = pipeline[i]
            with sample_key(1000 * epoch + i):
                assert np.array_equal(kept[i], expected)
    assert kept.source.report().hits == 40
    kept.source.close()


def test_a_closed_cache_leaves_the_files_of_others_alone(tmp_path):
    kept = cached(Toy(30), where=str(tmp_path / "cache"), limit="4MiB")
    kept.read(range(15))
    arena = kept._opened()
    kept.close()
    others = [(tmp_path / f"{i}").open("w+b", buffering=0) for i in range(8)]  # get its numbers
    with pytest.raises(OSError):
        arena.put([(3, [b"x"])])
    assert not any(os.fstat(file.fileno()).st_size for file in others)
    for file in others:
        file.close()


def test_a_record_on_disk_is_checked_each_time(tmp_path):
    kept = reopened(tmp_path)
    assert all_right(kept) and all_right(kept)
    data = place_of(kept) / "cache.bin"
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        file.write(bytes(8 << 10))
    assert all_right(kept)
    assert kept.report().corrupt >= 1
    kept.close()


def test_a_bad_sample_is_named_and_the_others_are_kept():
    def picky(sample):
        if sample["label"] == 3:
            raise ValueError("truncated")
        return sample["label"]

    kept = Pipeline(Toy(6, "bad")).map(picky, "decode").cache("decode")
    with pytest.raises(SampleError, match=r"sample 3.*stage decode: ValueError: truncated"):
        kept.__getitems__(range(6))
    assert kept.__getitems__([0, 1, 2, 4, 5]) == [0, 1, 2, 4, 5]
    assert kept.source.report().held == 5
    kept.source.close()


# -- several threads and processes -----------------------------------------------------


class Plain(Dataset):
    classes = ("a", "b")

    def __init__(self, n: int = 64) -> None:
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        value = oracle(i)
        return torch.from_numpy(np.resize(value["data"], 100)) if len(
            value["data"]
        ) else torch.zeros(100, dtype=torch.uint8), i


@pytest.mark.parametrize(
    ("place", "start"), [("memory", "fork"), ("folder", "fork"), ("memory", "spawn")]
)
def test_loading_processes_share_it(tmp_path, place, start):
    kept = cached_dataset(Plain(), where="memory" if place == "memory" else tmp_path, version="1")
    assert kept.classes == ("a", "b") and len(kept) == 64
    loader = DataLoader(
        kept,
        8,
        shuffle=True,
        num_workers=1 if start == "spawn" else 2,
        multiprocessing_context=start,
    )
    for _ in range(1 if start == "spawn" else 2):
        seen = []
        for x, i in loader:
            assert all(torch.equal(row, Plain()[int(k)][0]) for row, k in zip(x, i, strict=True))
            seen += i.tolist()
        assert sorted(seen) == list(range(64))
    report = kept.report()
    assert report.held == 64 and report.misses == 64
    assert report.hits == (0 if start == "spawn" else 64)
    assert torch.equal(kept[-1][0], Plain()[63][0])
    with pytest.raises(IndexError):
        kept[64]
    kept.close()


def test_many_threads_read_and_fill_it():
    kept = cached(Toy(100, "threads"), limit="1500kB")

    def go(seed: int) -> bool:
        draw = random.Random(seed)
        wanted = [[draw.randrange(100) for _ in range(5)] for _ in range(60)]
        return all(
            same(v, oracle(i)) for ids in wanted for i, v in zip(ids, kept.read(ids), strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(go, range(8)))
    report = kept.report()
    assert report.hits + report.misses == 8 * 60 * 5
    assert report.corrupt == 0 and report.bytes <= 1_500_000
    kept.close()


@pytest.mark.parametrize(("place", "limit"), [("disk", 3 << 20), ("memory", 20 << 20)])
def test_processes_that_are_killed_leave_a_cache_that_is_right(told, place, limit):
    found = told[f"hammer {place}"]
    assert found["killed"] >= 6 and set(found["codes"]) <= {0, -9} and 0 in found["codes"]
    assert found["wrong"] == 0 and found["intact"] and found["corrupt"] == 0
    assert found["held"] == found["told"] and found["hits"] > 0
    assert found["held"] == 300 if place == "memory" else found["full"] > 0
    assert found["most"] <= limit and found["bytes"] <= limit
    assert Path(found["folder"]).exists() == (place == "disk")


# -- files that are damaged, full or not ours ------------------------------------------


def reopened(tmp_path, n=40):
    return cached(Toy(n, "damage"), where=tmp_path / "c", limit="4MiB")


def all_right(kept) -> bool:
    return all(same(v, oracle(i)) for i, v in enumerate(kept.read(range(len(kept)))))


def test_damaged_records_are_found_read_anew_and_replaced(tmp_path):
    kept = reopened(tmp_path)
    assert all_right(kept)
    arena = place_of(kept) / "cache.bin"
    kept.close()
    data = bytearray(arena.read_bytes())
    for place in range(1000, len(data), len(data) // 5):
        data[place] ^= 16
    arena.write_bytes(data)
    kept = reopened(tmp_path)
    assert all_right(kept)
    damaged = kept.report().corrupt
    assert 1 <= damaged <= 6
    assert all_right(kept)
    assert kept.report().corrupt == damaged, "they were replaced"
    kept.close()
    with arena.open("r+b") as file:  # cut short
        file.truncate(200_000)
    kept = reopened(tmp_path)
    assert all_right(kept) and kept.report().corrupt > damaged + 5
    kept.close()


def test_a_damaged_index_is_a_miss(tmp_path):
    kept = reopened(tmp_path)
    assert all_right(kept)
    index = place_of(kept) / "cache.idx"
    kept.close()
    data = bytearray(index.read_bytes())
    good = bytes(data)
    draw = random.Random(4)
    for i in range(0, 40, 2):
        data[4096 + 32 * i + draw.randrange(24)] ^= 1 << draw.randrange(8)
    index.write_bytes(data)
    kept = reopened(tmp_path)
    assert all_right(kept)
    assert kept.report().corrupt == 20 and kept.report().held == 40
    kept.close()
    index.write_bytes(b"\1" * 30 + good[30:])  # its first page: nothing in it can be believed
    kept = reopened(tmp_path)
    assert all_right(kept) and kept.report().hits == 0
    assert all_right(kept) and kept.report().hits == 40
    kept.close()
    index.write_bytes(good[:500])
    kept = reopened(tmp_path)
    assert all_right(kept) and all_right(kept)
    kept.close()


def test_a_disk_that_is_full_costs_the_cache_and_not_the_run(told):
    found = told["full_disk"]
    assert found["wrong"] == 0 and found["full"] > 20 and 5 < found["held"] < 40
    assert found["hits"] == found["held"]


def test_a_disk_that_breaks_ends_the_cache_and_not_the_run(tmp_path):
    kept = reopened(tmp_path)
    assert all_right(kept)
    (records,) = (
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if link.resolve() == (place_of(kept) / "cache.bin").resolve()
    )
    broken = os.open(tmp_path / "unreadable", os.O_WRONLY | os.O_CREAT)
    os.dup2(broken, records)  # from here on reading is an error of the system
    os.close(broken)
    with pytest.warns(RuntimeWarning, match="nothing more is cached") as said:
        assert all_right(kept) and all_right(kept)
    assert len(said) == 1 and "Bad file descriptor" in kept.report().off


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_folder_of_somebody_else_is_not_used(tmp_path):
    kept = reopened(tmp_path)
    place = place_of(kept)
    kept.close()
    place.chmod(0o755)
    with pytest.warns(RuntimeWarning, match="nothing more is cached.*0700"):
        kept = reopened(tmp_path)
        assert all_right(kept)
    assert "0700" in kept.report().off and "no cache" in str(kept.report())
    (tmp_path / "elsewhere").mkdir()
    place.chmod(0o700)
    clear_cache(tmp_path / "c")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="nothing more is cached"):
        assert all_right(reopened(tmp_path))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_arguments():
    pipeline = Pipeline(Toy(3)).map(dict, "decode")
    for call, text in (
        (lambda: cached(pipeline, "crop"), "the steps of this pipeline are read, decode"),
        (lambda: cached(Toy(3), "decode"), "is for a pipeline"),
        (lambda: cached([1, 2]), "expected a source"),
        (lambda: cached(Toy(3), limit="2 parsecs"), r"limit='2 parsecs': expected"),
        (lambda: cached(Toy(3), limit=0), "limit=0"),
        (lambda: cached(Toy(3), limit=True), "limit=True"),
        (lambda: cached(Toy(3), where=""), "where=''"),
        (lambda: cached(Toy(3), where="s3://bucket/x"), "a folder on a local disk"),
        (lambda: cached(Toy(3), where=__file__), "is a file"),
        (lambda: cached(Toy(3), version=3), "version=3"),
        (lambda: cached_dataset(iter([1])), "map-style Dataset"),
        (lambda: cached_dataset([]), "is empty"),
    ):
        with pytest.raises(ArgumentError, match=text):
            call()
