"""Who loads, and what is never changed by it: the order, the bits, the training's own randomness.
Bad samples, dead processes, settings.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
import weakref

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import ronde
from feeding import feed_of, read, take, with_executor
from processes import child, python, ronde_run
from ronde import ArgumentError, CheckpointError, FeedError, SampleError
from ronde.adapt import requested_settings
from ronde.feed import (
    FeedSettings,
    Order,
    Pipeline,
    apply_settings,
    key_of,
    read_settings,
    rng,
    rngs,
)
from ronde.loader.choose_executor import choose_executor
from ronde.loader.thread_workers import Threads
from ronde.plan import shares
from ronde.world import RondeError
from sampling import some

EXECUTORS = ("none", "threads", "processes")


def loading() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ronde-")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    limit = time.monotonic() + 60
    while loading() and time.monotonic() < limit:
        gc.collect()
        time.sleep(0.01)
    assert not loading()


@pytest.fixture
def nothing_kept(monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    monkeypatch.setenv("RONDE_DEVICE", "cpu")


# -- threads ---------------------------------------------------------------------------


def test_threads_hand_out_in_order_bounded_and_stay_for_the_next_epoch():
    threads = Threads(3, 4)
    asked, handed = 0, 0
    draw = random.Random(1)

    def jobs():
        nonlocal asked
        for job in range(25):
            asked += 1
            assert asked - handed <= 4, "further ahead than is allowed"
            yield job

    def slow(job):
        # those behind it wait
        time.sleep(0.02 if job % 7 == 3 else draw.random() * 0.002)
        return job

    names = None
    for _ in range(2):
        asked = handed = 0
        for expected, job in enumerate(threads.run(jobs(), slow)):
            handed += 1
            assert job == expected
        assert handed == 25
        now = {t.ident for t in threading.enumerate() if t.name.startswith("ronde-load")}
        assert len(now) == 3 and names in (None, now)
        names = now
    threads.stop()
    assert not loading()


@pytest.mark.parametrize("how", ["break", "error", "collected"])
def test_threads_end_with_the_loop(how):
    threads = Threads(2, 4)

    def work(job):
        if how == "error" and job == 5:
            raise KeyError("bad")
        return job

    def go():
        done = []
        for job in threads.run(iter(range(50)), work):
            done.append(job)
            if how == "break" and job == 5:
                break
        return done

    if how == "break":
        assert go() == list(range(6))
    elif how == "collected":
        go()
        assert loading()
        del threads
        return  # the fixture sees that they are gone
    else:
        with pytest.raises(KeyError, match="bad"):
            go()
    assert not loading()
    assert list(threads.run(iter(range(3)), work)) == [0, 1, 2]  # they start again
    threads.stop()


class Reports(Dataset):
    """Who reads, and with how many compute threads."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.tensor(
            [i, torch.get_num_threads(), threading.current_thread() is threading.main_thread()]
        )


def test_an_error_is_told_though_another_thread_hangs(monkeypatch):
    monkeypatch.setattr("ronde.loader.thread_workers.PATIENCE_SECONDS", 0.1)
    hangs = threading.Event()

    def work(i):
        if i == 1:
            hangs.wait()
        raise OSError("the storage is gone")

    with pytest.raises(OSError, match="the storage is gone"):
        list(Threads(2, 4).run(iter(range(4)), work))
    assert not hangs.is_set()
    hangs.set()


@pytest.mark.parametrize("threads", [None, 2])
def test_compute_threads_of_loading_threads_are_limited_and_no_others(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rows = torch.cat(
            read(with_executor(take(Reports(), shuffle=False), "threads", threads=threads))
        ).tolist()
        assert torch.get_num_threads() == 3
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)
    assert [row[0] for row in rows] == list(range(40))
    assert {tuple(row[1:]) for row in rows} == {(threads or 1, 0)}


# -- the same order and the same bits --------------------------------------------------


def by_hand(seed: int, epoch: int, key: int, purpose: int = 1) -> np.random.Generator:
    """What a sample's generator must be: Philox under a key of (seed, purpose, epoch, sample)."""
    return np.random.Generator(np.random.Philox(key=key_of(seed, purpose, epoch, key)))


class Rows:
    """A source. ``bad`` maps an id to what is wrong with it."""

    def __init__(self, n=50, bad=None, named=True, fingerprint="rows"):
        self.n, self.bad, self.named, self.fingerprint = n, bad or {}, named, fingerprint

    def __len__(self):
        return self.n

    def name(self, i):
        return f"row-{i}.bin" if self.named else None

    def read(self, ids):
        for i in ids:
            if self.bad.get(i) == "read":
                raise SampleError(f"row-{i}.bin is truncated")
        return [np.full(3 if self.bad.get(i) == "shape" else 2, float(i)) for i in ids]


class Plain(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return np.array([float(i), rng().random(), rng().random()])


class Many(Plain):
    """Makes all samples in one call, and asks for random numbers there."""

    def __getitems__(self, ids):
        return [self[i] for i in ids]


def draw_two(row):
    return np.array([row[0], rng().random(), 0.0])


def draw_more(row):
    return row + np.array([0.0, 0.0, rng().random()])


class ForAll(Plain):
    """Makes all samples in one call, each with its own generator."""

    def __getitems__(self, ids):
        return [
            np.array([float(i), r.random(), r.random()])
            for i, r in zip(ids, rngs(len(ids)), strict=True)
        ]


DATA = {
    "data set": Plain(),
    "__getitems__": Many(),
    "two steps": Pipeline(Rows()).map(draw_two).map(draw_more),
    "rngs": ForAll(),
}


@pytest.mark.parametrize("kind", DATA)
def test_order_and_augmentation_are_the_same_for_any_executor_and_number_of_workers(kind):
    for executor, size in itertools.product(EXECUTORS, (1, 2)):
        if executor == "processes" and size == 2 and kind != "two steps":
            continue
        taken = with_executor(take(DATA[kind], seed=3), executor)
        before = state()
        rows = torch.cat(read(taken, size, batch=7, epochs=(0, 1), seed=3)).tolist()
        assert state() == before, executor
        expected = [(e, i) for e in (0, 1) for i in Order(50, 3).ids(e, 0, 50).tolist()]
        assert [row[0] for row in rows] == [i for _, i in expected], (executor, size)
        for row, (epoch, i) in zip(rows, expected, strict=True):
            drawn = by_hand(3, epoch, i)
            assert row[1:] == [drawn.random(), drawn.random()], (executor, size, epoch, i)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_sampler_draws_a_sample_several_times_each_time_with_another_augmentation(executor):
    data = Plain()
    taken = with_executor(
        take(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 50, 60)), seed=3),
        executor,
    )
    rows = torch.cat(read(taken, 2, batch=7, seed=3)).tolist()
    assert len(rows) == 60 > len({row[0] for row in rows})
    assert [row[1] for row in rows] == [by_hand(3, 0, position).random() for position in range(60)]


def test_rows_of_tensors_and_streams_under_threads():
    data = TensorDataset(torch.arange(50), torch.randn(50, 3))
    expected = read(take(data))
    for a, b in zip(read(with_executor(take(data), "threads")), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    class Stream(IterableDataset):
        def __len__(self):
            return 17

        def __iter__(self):
            return iter(range(17))

    assert torch.cat(read(with_executor(take(Stream()), "threads"))).tolist() == list(range(17))


# -- the generators that all share -----------------------------------------------------


class Global(Dataset):
    """Draws from the global generators, from sample ``start`` on."""

    def __init__(self, start=0, n=300):
        self.start, self.n = start, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        drawn = (
            [float(torch.rand((), dtype=torch.float64)), random.random(), float(np.random.rand())]
            if i >= self.start
            else [0.0] * 3
        )
        return torch.tensor([float(i), *drawn], dtype=torch.float64)


def state():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_what_draws_from_global_generators_is_not_read_by_threads():
    expected = read(with_executor(take(Global(n=60)), "none"))
    before, told = state(), []
    taken = with_executor(take(Global(n=60)), "threads")
    feed = feed_of(taken, say=lambda text, warning: told.append((text, warning)))
    found = [b for _, bs in feed.read(lambda: shares(0, 0, 60, 6, 0, 1)) for b in bs]
    feed.close()
    assert feed.executor == "none"
    assert len(told) == 1
    assert "global generator" in told[0][0]
    assert told[0][1]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert state() == before


# -- auto ------------------------------------------------------------------------------


class Works(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, i):
        return torch.tensor(i)


class Records(Dataset):
    """Numbers in a file, read by seeking: right only for who has the file for himself."""

    def __init__(self, path, lazily):
        self.path, self.file = path, None if lazily else path.open("rb", buffering=0)

    def __len__(self):
        return 200

    def __getitem__(self, i):
        if self.file is None:
            self.file = self.path.open("rb", buffering=0)
        self.file.seek(8 * i)
        time.sleep(3e-4)
        return torch.tensor(int.from_bytes(self.file.read(8), "little"))


@pytest.mark.parametrize("lazily", [False, True])
def test_auto_never_shares_an_open_file(tmp_path, lazily):
    path = tmp_path / "records"
    path.write_bytes(b"".join(i.to_bytes(8, "little") for i in range(200)))
    taken = with_executor(take(Records(path, lazily)), "auto")
    feed = feed_of(taken)
    found = torch.cat([b for _, bs in feed.read(lambda: shares(0, 0, 200, 8, 0, 1)) for b in bs])
    feed.close()
    assert found.tolist() == Order(200, 0).ids(0, 0, 200).tolist()
    assert feed.executor == ("processes" if lazily else "none")


def test_auto_follows_from_what_the_data_set_is(tmp_path):
    images, rows = write_images(tmp_path), ronde.feed.arrays({"x": np.arange(9)})
    packed = ronde.feed.pack(tmp_path, tmp_path.with_name("packed"), labels="none").path
    shard = f"{packed}/shard-000000.tar"
    plain = torch.utils.data.default_collate
    for data, collate, workers, expected in (
        (images, images.collate, 2, "threads"),
        (images.cache("decode", limit="1MiB"), images.collate, 2, "threads"),
        (images.map(brighten), images.collate, 2, "processes"),
        (images, draw_two, 2, "processes"),
        (
            ronde.feed.images(tmp_path, augment=[brighten], labels="none"),
            images.collate,
            2,
            "processes",
        ),
        (ronde.feed.tar(packed), plain, 2, "threads"),
        (ronde.feed.tar(shard, data="jpg", label=draw_two), plain, 2, "processes"),
        (images, images.collate, 0, "none"),
        (rows, plain, 2, "none"),
        (Pipeline(rows).map(draw_two), plain, 2, "processes"),
        (Pipeline(ronde.feed.dataset(Plain())), plain, 2, "processes"),
        (Plain(), plain, 2, "processes"),
    ):
        assert choose_executor(data, collate, workers)[0] == expected, data


# -- bad samples -----------------------------------------------------------------------


def decode(row):
    if row[0] == 11:
        raise OSError("cannot identify image file")
    return torch.from_numpy(row)


def brighten(row):
    return row + rng().random()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({7: "read"}, r"^sample 7: row-7\.bin is truncated$"),
        ({}, r"^sample 11( \(row-11\.bin\))?, stage decode: OSError: cannot identify image file$"),
        (
            {9: "shape"},
            r"^sample 9 \(row-9\.bin\), stage collate: it is \[3\] float64, where the "
            r"others are \[2\] float64",
        ),
    ],
)
def test_a_bad_sample_is_an_error_that_names_it(executor, bad, where):
    pipeline = (
        Pipeline(Rows(40, bad)).map(decode if not bad else torch.from_numpy, "decode").map(brighten)
    )
    with pytest.raises(SampleError, match=where) as error:
        read(with_executor(take(pipeline), executor))
    shown = "".join(traceback.format_exception(error.value))
    assert bad or ("in decode" in shown and "test_executors.py" in shown), shown


BAD = {7: "read", 23: "shape", 31: "read"}


def stand_in(seed: int, epoch: int, i: int, n: int, bad) -> tuple[int, float]:
    """By hand: which sample stands in, and its first random number."""
    for attempt in range(16):
        other = key_of(seed, 6, epoch, i, attempt) % n
        if other not in bad:
            return other, np.random.Generator(
                np.random.Philox(key=key_of(seed, 1, epoch, i, attempt + 1))
            ).random()
    raise AssertionError


def test_skipped_samples_have_the_same_stand_ins_everywhere():
    pipeline = Pipeline(Rows(40, BAD)).map(decode, "decode").map(brighten).skip_bad(0.2)
    bad = {*BAD, 11}
    for executor, size in itertools.product(EXECUTORS, (1, 3)):
        if executor == "processes" and size == 3:
            continue
        taken = with_executor(take(pipeline, seed=2), executor)
        rows = torch.cat(read(taken, size, batch=8, epochs=(0, 1), seed=2)).tolist()
        expected = []
        for epoch in (0, 1):
            for i in Order(40, 2).ids(epoch, 0, 40).tolist():
                of, noise = (
                    stand_in(2, epoch, i, 40, bad)
                    if i in bad
                    else (i, by_hand(2, epoch, i).random())
                )
                expected.append([of + noise] * 2)
        assert rows == expected, (executor, size)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_evaluation_leaves_bad_samples_out(executor):
    pipeline = Pipeline(Rows(40, {**BAD, 8: "read", 9: "read"})).map(torch.from_numpy).skip_bad(0.5)
    taken = with_executor(take(pipeline, evaluate=True), executor)
    found, missing = [], []
    feed = feed_of(taken, evaluate=True)
    for share, batches in feed.read(lambda: shares(0, 0, 40, 4, 0, 2, 2)):
        for batch, (low, high), left in zip(batches, share.micro, feed.left_out, strict=True):
            missing.append(left)
            found += batch[: high - low - left, 0].tolist()
            # all are bad: something of that shape, which counts for nothing
            assert len(batch) == max(1, high - low - left)
    feed.close()
    mine = [p for start in range(0, 40, 4) for p in (start, start + 1)]
    assert found == [float(i) for i in mine if i not in {*BAD, 8, 9}]
    assert sum(missing) == 2
    assert max(missing) == 2


# -- loading processes that die --------------------------------------------------------


class Kills(Works):
    def __init__(self, at, number):
        self.at, self.number = at, number

    def __getitem__(self, i):
        if i == self.at:
            if self.number is KeyboardInterrupt:
                raise KeyboardInterrupt
            os._exit(self.number[0]) if isinstance(self.number, tuple) else os.kill(
                os.getpid(), self.number
            )
        return super().__getitem__(i)


@pytest.mark.parametrize(
    ("number", "said"),
    some(
        [
            (signal.SIGKILL, r"was killed by signal 9 \(SIGKILL\): .*when memory ran out"),
            (signal.SIGBUS, r"was killed by signal 7 \(SIGBUS\): .*shared memory .*/dev/shm"),
            ((3,), "ended with exit status 3: .*executor: none"),
            ((0,), "ended with exit status 0: .*executor: none"),
            (KeyboardInterrupt, "ended with exit status 0: .*executor: none"),
        ],
        5,
    ),
)
def test_a_loading_process_that_dies_is_named(number, said):
    with pytest.raises(
        FeedError, match=rf"loading process 1 of 2 \(pid \d+\) of training rank 0 {said}"
    ):
        read(with_executor(take(Kills(7, number), shuffle=False), "processes"))


class Local(Works):
    def __getitem__(self, i):
        if i == 7:

            class Odd(self.number):
                def __init__(self, *given):
                    super().__init__(given[0])

            raise Odd("bad thing", 2)
        return super().__getitem__(i)


@pytest.mark.parametrize("base", some([Exception, RondeError], 2))
def test_an_error_that_cannot_be_pickled_comes_out_of_a_loading_process(base):
    data = Local()
    data.number = base
    with pytest.raises(RuntimeError) as error:
        read(with_executor(take(data, shuffle=False), "processes"))
    assert re.search(
        r"RuntimeError: test_executors\.Local\.__getitem__\.<locals>\.Odd: bad "
        r"thing\nwhile sample 7 of the data",
        str(error.value),
    )
    shown = "".join(traceback.format_exception(error.value))
    assert "in __getitem__" in shown and 'raise Odd("bad thing", 2)' in shown


# -- the next epoch --------------------------------------------------------------------


class Changing(Dataset):
    """Made at a strength that the script may change."""

    strength = 1.0

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.tensor([i * self.strength, float(os.getpid())], dtype=torch.float64)


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_what_the_script_changes_between_epochs_is_what_the_next_one_is_read_with(executor):
    """As a curriculum does: loading processes start again for every epoch, as torch's do."""
    data = Changing()
    taken = with_executor(take(data), executor)
    feed = feed_of(taken)
    processes = set()
    for epoch in range(3):
        data.strength = 10.0 + epoch
        batches = feed.read(lambda epoch=epoch: shares(epoch, 0, 40, 4, 0, 1))
        rows = torch.cat([batch for _, (batch,) in batches])
        assert rows[:, 0].tolist() == [i * data.strength for i in Order(40, 0).ids(epoch, 0, 40)]
        processes |= set(rows[:, 1].tolist())
    feed.close()
    assert len(processes) == (6 if executor == "processes" else 1)


def write_images(folder):
    for i in range(40):
        Image.new("RGB", (9, 9), (i, i, i)).save(folder / f"{i:02}.png")
    return ronde.feed.images(folder, size=8, labels="none", normalize=None)


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_a_training_that_is_left_between_two_epochs_ends_at_once(tmp_path, executor):
    lines = SCRIPT.replace("loss=", f"feed={{'executor': {executor!r}, 'workers': 2}}, loss=")
    # Whoever keeps the epochs may go on.
    left = "epochs = run.epochs(9)\nfor epoch in epochs:\n    for batch in run.batches():\n"
    left += "        run.step(batch)\n    if epoch == 1: break\n"
    (tmp_path / "train.py").write_text(lines.replace("run.fit(2)\n", left))
    done = python(["train.py"], tmp_path, 60, {"RONDE_RUNS": "none"})
    assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_what_loads_ends_with_the_loop_and_is_kept_from_epoch_to_epoch(nothing_kept, executor):
    def loaders():
        if executor == "threads":
            return [t.ident for t in threading.enumerate() if t.name.startswith("ronde-load")]
        return [p.pid for p in psutil.Process().children() if p.pid not in before]

    before = {p.pid for p in psutil.Process().children()}
    gone = []
    for _ in range(2):
        data, other = (TensorDataset(torch.zeros(20, 2, dtype=torch.float64)) for _ in range(2))
        gone += [weakref.ref(data), weakref.ref(other)]
        model, optimizer = linear()
        run = ronde.distribute(
            model,
            optimizer,
            data,
            loss=loss_of,
            forward=lambda m, b: (m(b[0]),),
            batch_size=4,
            feed={"executor": executor, "workers": 2},
        )
        seen = []
        for epoch in run.epochs(3):
            for batch in run.batches():
                run.step(batch)
                seen.append(set(loaders()))
            run.evaluate(other)
            if epoch == 1:
                break
        # one that has nothing left to read may have ended before a step
        first, second = set().union(*seen[:5]), set().union(*seen[5:])
        assert first and second
        # threads stay, and processes start for each epoch: the data is the script's
        assert bool(first & second) == (executor == "threads")
        assert not loaders() and not loading()
        run.port.group.members[0].finish("completed")
        del run, data, other, model, optimizer
        batch = None
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


class Ends(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 12

    def __getitem__(self, i):
        if i == 6:
            raise self.kind("no width")
        return torch.tensor(i)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (ZeroDivisionError, ZeroDivisionError, "no width"),
        (StopIteration, RuntimeError, "raised StopIteration"),
    ],
)
def test_an_error_of_a_plain_data_set_keeps_its_type_and_says_of_which_sample(
    executor, raised, kind, says
):
    with pytest.raises(kind, match=says) as caught:
        read(with_executor(take(Ends(raised), shuffle=False), executor))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert text.rstrip().endswith(f"{says}\nwhile sample 6 of the data set was read"), text
    shown = "".join(traceback.format_exception(caught.value))
    assert "in __getitem__" in shown and "test_executors.py" in shown, shown


# -- settings --------------------------------------------------------------------------


def test_settings_change_how_samples_are_read_and_nothing_else(tmp_path):
    taken = take(
        DataLoader(Plain(), batch_size=8, num_workers=3, prefetch_factor=4, pin_memory=False),
        seed=1,
    )

    def applied(**settings):
        return apply_settings(taken, FeedSettings(**settings), local_size=1)

    for settings in (
        applied(),
        applied(executor="threads"),
        applied(workers=1),
        applied(prefetch=5, threads=2, pin_memory=True),
    ):
        assert settings.order == taken.order
        assert settings.dataset is taken.dataset
        assert settings.batch_size == 8
    assert applied().settings.chosen == "processes" and applied().settings.num_workers == 3
    assert applied(executor="threads").settings.num_workers == 3
    assert applied(executor="none").settings.num_workers == 0
    assert applied(workers=0).settings.chosen == "none"
    assert applied(prefetch=5).settings.options.get("prefetch_factor") is None
    assert applied(prefetch=5).settings.prefetch == 5
    assert applied(pin_memory=True).settings.options["pin_memory"] is True
    bare = apply_settings(take(Plain()), FeedSettings(executor="threads"), local_size=10_000)
    assert bare.settings.num_workers == 1  # cores shared out among the workers of a node
    file = tmp_path / "x.feed.yaml"
    FeedSettings(executor="threads", workers=2).save(file)
    assert (
        read_settings(file)
        == read_settings(str(file))
        == read_settings({"executor": "threads", "workers": 2})
    )
    for wrong in (
        5,
        {"worker": 2},
        {"workers": -1},
        {"executor": "fibers"},
        tmp_path / "none.yaml",
    ):
        with pytest.raises(ArgumentError, match=r"feed|setting"):
            read_settings(wrong)


SCRIPT = """
import os, sys, threading, torch, ronde
from ronde.feed import rng

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.tensor([float(i), rng().random()]), torch.tensor([float(i)])

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-4), Data(), loss=torch.nn.functional.mse_loss, batch_size=8)
run.fit(2)
print("rank", run.rank, run.port.group.members[0].feed.executor, run.port.group.members[0].feed.settings.num_workers, model.weight.tolist(), flush=True)
"""


def said(output: str, rank: int) -> tuple[str, str]:
    line = next(x for x in output.splitlines() if x.startswith(f"rank {rank} "))
    _, _, executor, workers, weights = line.split(" ", 4)
    return f"{executor} {workers}", weights


def numbers(text: str) -> list[float]:
    return [float(x) for x in text.strip().strip("[]").split(",")]


def test_ronde_run_reads_the_settings_beside_the_script_and_says_so(tmp_path, nothing_kept, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train.feed.yaml").write_text("executor: threads\nworkers: 2\n")
    (tmp_path / "other.yaml").write_text("executor: processes\nworkers: 1\n")
    exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
    here = said(capsys.readouterr().out, 0)
    assert here[0] == "none 0"
    for workers, options, expected in (
        ("2", (), "train.feed.yaml (executor threads, workers 2)"),
        ("1", ("--feed", "other.yaml"), "other.yaml (executor processes, workers 1)"),
    ):
        done = ronde_run(
            ["run", "--workers", workers, "--runs", "none", *options, "train.py"], tmp_path, 150
        )
        assert done.returncode == 0, done.stderr
        assert [x for x in done.stdout.splitlines() if x.startswith("feed: ")] == [
            f"feed: {expected}"
        ]
        executor, weights = said(done.stdout, 0)
        assert executor == ("threads 2" if workers == "2" else "processes 1")
        # the same training, but for the order of float32 sums
        assert numbers(weights) == pytest.approx(numbers(here[1]), rel=1e-5)


def test_only_ronde_run_reads_the_file_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.feed.yaml").write_text("workers: 2\nprefetch: 3\n")
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert requested_settings(None) == FeedSettings()
    assert requested_settings({"workers": 1}) == FeedSettings(workers=1)
    monkeypatch.setenv("RONDE_FEED", str(tmp_path / "train.feed.yaml"))
    assert requested_settings({"workers": 1, "threads": 4}) == FeedSettings(
        workers=2, prefetch=3, threads=4
    )
    monkeypatch.setenv("RONDE_FEED", "none")
    assert requested_settings({"workers": 1}) == FeedSettings(workers=1)


def test_ctrl_c_ends_a_training_whose_threads_are_reading(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace(
            "return torch.tensor([float(i)",
            "__import__('time').sleep(0.05); return torch.tensor([float(i)",
        ).replace("run.fit(2)", "print('ready', flush=True); run.fit(1000)")
    )
    file = tmp_path / "slow.yaml"
    file.write_text("executor: threads\nworkers: 3\n")
    with child(
        [sys.executable, "train.py"],
        tmp_path,
        {"RONDE_RUNS": "none", "RONDE_FEED": str(file)},
        fork=True,
    ) as started:
        started.wait_for("ready", 60)
        time.sleep(0.5)
        started.process.send_signal(signal.SIGINT)
        done = started.done(20)
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr


# -- in a run --------------------------------------------------------------------------


def plus_noise(batch):
    """On the device: two numbers of each sample's own."""
    return batch + torch.tensor([[r.random(), 0.0] for r in rngs(len(batch))], dtype=batch.dtype)


def linear():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def forward(model, batch):
    return (model(batch),)


def loss_of(out):
    return (out**2).mean()


@pytest.mark.parametrize(
    "feed", [None, {"executor": "threads", "workers": 2}, FeedSettings(executor="none")]
)
def test_what_is_done_on_the_device_is_done_in_training_and_evaluation(nothing_kept, feed):
    pipeline = (
        Pipeline(Rows(20))
        .map(torch.from_numpy)
        .on_device(plus_noise)
        .on_device(torch.Tensor.double)
    )
    model, optimizer = linear()
    run = ronde.distribute(
        model, optimizer, pipeline, loss=loss_of, forward=forward, batch_size=8, seed=4, feed=feed
    )
    seen = []
    for epoch in run.epochs(2):
        for batch in run.batches():
            seen.append((epoch, batch.tolist()))
            run.step(batch)
    rows = [(epoch, row) for epoch, batch in seen for row in batch]
    expected = [(e, i) for e in (0, 1) for i in Order(20, 4).ids(e, 0, 20).tolist()]
    for (epoch, row), (e, i) in zip(rows, expected, strict=True):
        assert epoch == e and row == [i + by_hand(4, e, i, purpose=7).random(), float(i)]
    means = run.evaluate(pipeline, metrics={"first": lambda out: out[:, 0]})
    with torch.no_grad():
        batch = torch.tensor(
            [[i + by_hand(4, 0, i, purpose=7).random(), float(i)] for i in range(20)],
            dtype=torch.float64,
        )
        assert means["loss"] == pytest.approx(float(loss_of(model(batch))), rel=1e-12)


SKIPPING = """
import numpy as np, torch, ronde
from ronde import FeedError, SampleError
from ronde.feed import Pipeline

class Rows:
    fingerprint = "x"
    def __len__(self):
        return 40
    def read(self, ids):
        if any(i % 10 == 3 for i in ids):
            raise SampleError(f"file-{[i for i in ids if i % 10 == 3][0]} is truncated")
        return [np.full(2, float(i)) for i in ids]

def train(most):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).double()
    pipeline = Pipeline(Rows()).map(torch.from_numpy).skip_bad(most)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = ronde.distribute(model, optimizer, pipeline, loss=lambda out: (out ** 2).mean(), forward=lambda m, b: (m(b),), batch_size=8)
    run.fit(1, validate=pipeline)
    return run, model

run, model = train(0.1)
print("rank", run.rank, "weights", model.weight.tolist(), flush=True)
try:
    train(0.099)
except FeedError as error:
    print("refused", error, flush=True)
"""


def test_skipped_samples_are_counted_over_all_workers(tmp_path, nothing_kept, capsys):
    exec(compile(SKIPPING, "train.py", "exec"), {"__name__": "__main__"})
    here = capsys.readouterr().out
    (tmp_path / "train.py").write_text(SKIPPING)
    done = ronde_run(["run", "--workers", "2", "--runs", "none", "train.py"], tmp_path, 150)
    assert done.returncode == 0, done.stderr
    weights = []
    for told in (here, done.stdout):
        assert "epoch 1: 4 samples of 40 (10.00%)" in told and "evaluation: 4 samples of 40" in told
        assert "refused 4 of 40 samples were skipped" in told
        weights.append(numbers(told.split("weights ")[1].splitlines()[0]))
    assert weights[0] == pytest.approx(weights[1], rel=1e-12)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Begin or resume a run of a name, make some steps, and save it."""
    monkeypatch.setenv("RONDE_DEVICE", "cpu")
    monkeypatch.setenv("RONDE_RUNS", str(tmp_path))

    def begin(name, data, steps=1, resume=True, first=lambda batch: batch):
        monkeypatch.setenv("RONDE_RESUME", "1" if resume else "0")
        model, optimizer = linear()
        run = ronde.distribute(
            model,
            optimizer,
            data,
            loss=loss_of,
            forward=lambda m, b: (m(first(b)),),
            batch_size=8,
            seed=4,
            name=name,
        )
        for batch in itertools.islice(run.batches(), steps):
            run.step(batch)
        run.save()
        run.port.group.members[0].finish("completed")
        return run.state.step

    return begin


def test_a_checkpoint_of_other_data_is_refused_and_one_without_a_fingerprint_is_not(start):
    def rows(fingerprint):
        return Pipeline(Rows(40, fingerprint=fingerprint)).map(torch.from_numpy)

    class Same(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return torch.full((2,), float(i), dtype=torch.float64)

    start("x", Same(), resume=False)  # as one written before fingerprints were known
    assert start("x", rows("one")) == 2
    with pytest.raises(
        CheckpointError,
        match=r"its fingerprint was one then and is two now.*Restore the data set, or start a "
        r"new run",
    ):
        start("x", rows("two"))
    assert start("x", rows("one")) == 3


class Backwards(Sampler):
    def __len__(self):
        return 42

    def __iter__(self):
        return iter(range(41, -1, -1))


def test_a_resume_under_another_sampler_or_another_end_of_the_epoch_is_refused(start):
    data = TensorDataset(torch.zeros(42, 2, dtype=torch.float64))

    def begin(name, resume=True, **options):
        loader = DataLoader(data, batch_size=8, **options)
        return start(name, loader, 2, resume, first=lambda batch: batch[0])

    begin("shuffled", False, shuffle=True)
    begin("own", False, sampler=Backwards())
    weighted = WeightedRandomSampler([1.0] * 42, 42)
    for name, options, text in (
        ("shuffled", {"sampler": Backwards()}, "sampler's class was none then and is Backwards"),
        ("own", {"sampler": weighted}, "was Backwards then and is WeightedRandomSampler now"),
        ("own", {"shuffle": True}, "the sampler's class was Backwards then and is none now"),
        ("shuffled", {"shuffle": False}, "shuffle was True then and is False now"),
        ("shuffled", {"shuffle": True, "drop_last": True}, "drop_last was False then and is True"),
    ):
        with pytest.raises(CheckpointError, match=text):
            begin(name, **options)
    assert begin("own", sampler=Backwards()) == 4
