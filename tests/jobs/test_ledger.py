"""The ledger: one commit a task, whoever is killed or stopped in between."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from ronde.jobs import ledger as ledger_module
from ronde.jobs.ledger import JobLedger, Lease, LeaseLost

WORKER = """
import os, random, sys, time
from pathlib import Path
from ronde.jobs.ledger import JobLedger, LeaseLost
root = Path(sys.argv[1])
ledger = JobLedger(root, patience=0.5)
while True:
    lease = ledger.claim()
    if lease is None:
        if not ledger.left:
            break
        time.sleep(0.02)
        continue
    try:
        with open(lease.folder / "out", "w") as out:
            for part in range(4):
                print(lease.key, part, file=out, flush=True)
                time.sleep(random.random() * 0.02)
                ledger.beat(lease)
        if lease.key == "divide":
            ledger.divide(lease, ["left", "right"])
        elif lease.key == "fails" and not lease.failed:
            ledger.fail(lease)
        elif ledger.commit(lease):
            told = os.open(root / "commits", os.O_APPEND | os.O_CREAT | os.O_WRONLY)
            os.write(told, f"{lease.key}\\n".encode())
    except LeaseLost:
        pass
"""


@pytest.mark.timeout(100)
def test_one_commit_a_task_while_owners_are_killed_or_stopped(tmp_path: Path) -> None:
    rng = random.Random(0)
    keys = [f"{i:03d}" for i in range(120)] + ["divide", "fails"]
    JobLedger(tmp_path).add(keys)
    start = lambda: subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)])  # noqa: E731
    owners = [start() for _ in range(3)]
    faults = 0
    try:
        while any(owner.poll() is None for owner in owners):
            time.sleep(rng.random() * 0.3)
            place = rng.randrange(3)
            if faults >= 12 or owners[place].poll() is not None:
                continue
            faults += 1
            if rng.random() < 0.3:  # beyond its patience, then it goes on
                os.kill(owners[place].pid, signal.SIGSTOP)
                time.sleep(0.8)
                os.kill(owners[place].pid, signal.SIGCONT)
            else:
                owners[place].kill()
                owners[place].wait()
                owners[place] = start()
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
    expected = {*keys, "left", "right"}
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == expected
    for key in expected - {"divide"}:
        assert (out / key / "out").read_text() == "".join(f"{key} {i}\n" for i in range(4))
    believed = Counter((tmp_path / "commits").read_text().split())
    assert max(believed.values()) == 1  # a killed one may not have told
    assert not JobLedger(tmp_path).left


def test_what_an_owner_does_after_it_was_taken_for_lost_is_void(tmp_path: Path) -> None:
    slow, other = JobLedger(tmp_path, patience=0.2), JobLedger(tmp_path, patience=0.2)
    slow.add(["a"])
    lease = slow.claim()
    assert lease is not None
    assert other.claim() is None
    time.sleep(0.4)
    taken = other.claim()
    assert taken is not None
    assert (taken.key, taken.failed, taken.lost) == ("a", 0, 1)
    with pytest.raises(LeaseLost):
        slow.beat(lease)
    slow.fail(lease)  # its script failed, because its folder was gone
    slow.give_back(lease)
    assert not slow.commit(lease)
    assert other.left == 1
    other.beat(taken)
    assert other.commit(taken, {"host": "b"})
    assert other.info("a") == {"owner": taken.path.name, "host": "b"}
    assert other.left == 0


def test_the_largest_first_and_what_is_given_back_again(tmp_path: Path) -> None:
    ledger = JobLedger(tmp_path)
    ledger.add(["small", "large"])
    size = {"small": 1.0, "large": 2.0}.__getitem__
    lease = ledger.claim(size)
    assert lease is not None
    assert lease.key == "large"
    ledger.give_back(lease)
    again = ledger.claim(size)
    assert again is not None
    assert (again.key, again.failed) == ("large", 0)
    ledger.fail(again)
    last = ledger.claim(size)
    assert last is not None
    assert (last.key, last.failed) == ("large", 1)


def test_a_task_is_never_lost_between_two_owners(tmp_path: Path) -> None:
    """One takes a failed task while the other still tells that it failed, and both give one back
    at the same time.
    """

    class Late(JobLedger):
        def _put_back(self, lease: Lease, failed: int) -> bool:
            put = super()._put_back(lease, failed)
            again.append(other.claim())
            return put

        def drop(self, lease: Lease) -> None:
            other.give_back(again[0])
            super().drop(lease)

    again: list = []
    first, other = Late(tmp_path), JobLedger(tmp_path)
    first.add(["a"])
    first.fail(first.claim())
    assert first.left == 1
    other.beat(again[0])
    mine = Lease("a", 1, 0, tmp_path / "lease" / "a.1.0.me", tmp_path / "work" / "a.1.0.me")
    mine.path.touch()  # races it
    first.give_back(mine)
    assert [path.name for path in (tmp_path / "todo").iterdir()] == ["a.1.0"] and first.left == 1


def test_a_straggler_is_raced_and_one_of_both_commits(tmp_path: Path) -> None:
    first, second = JobLedger(tmp_path), JobLedger(tmp_path)
    first.add(["done", "slow"])
    lease = first.claim()
    assert lease is not None
    first.commit(lease, {"seconds": 0.01})
    slow = first.claim()
    assert slow is not None
    assert second.claim() is None  # not late yet
    time.sleep(1.2)
    race = second.claim()
    assert race is not None
    assert race.key == slow.key
    assert second.commit(race)
    assert not first.commit(slow)
    assert second.left == first.left == 0


def test_a_commit_that_takes_long_is_no_lost_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = JobLedger(tmp_path, 1.5), JobLedger(tmp_path, 1.5)
    first.add(["a"])
    lease = first.claim()
    assert lease is not None
    (lease.folder / "out").write_text("much")
    (lease.folder / "link").symlink_to("nowhere")
    taken: list[Lease | None] = []

    def slow(path: Path) -> None:  # a disk that needs longer than the patience
        time.sleep(2.0)
        taken.append(second.claim())

    monkeypatch.setattr(ledger_module, "sync", slow)
    assert first.commit(lease) and len(taken) >= 2 and not any(taken)
    assert (second.output("a") / "link").is_symlink()
