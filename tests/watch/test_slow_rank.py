"""A rank that is slow in every step, from how long each has waited."""

from __future__ import annotations

import pytest

from ronde.watch.hang_judge import RankView
from ronde.watch.slow_rank import SlowRanks


def looks(waits, steps=20, seconds=10.0, size=None, **values):
    """Verdicts of looks ``seconds`` apart, in which every rank took ``steps`` and waited so long in
    each.
    """
    slow = SlowRanks(size or len(waits), 10.0)
    told = []
    for n in range(5):
        views = [
            RankView(r, steps=n * steps, step=n * steps, waited_seconds=n * steps * w, **values)
            for r, w in enumerate(waits)
        ]
        told.append(slow.look(n * seconds, views))
    return [(each.rank, each.sentence) for each in told if each is not None]


def test_the_one_that_waits_least_is_who_the_others_wait_for():
    (told,) = looks([0.30, 0.05, 0.29], host="b", reasons=("it is swapping: 900 pages/s",))
    assert told == (
        1,
        "Rank 1 on b is slow: ranks 0, 2 wait for it 245 ms of each step of 500 ms, up to step 40; "
        "it is swapping: 900 pages/s.",
    )
    ((rank, sentence),) = looks([1.0, 3.5], steps=11, seconds=50.0)
    assert rank == 0 and "rank 1 waits for it 2.5 s of each step of 4.55 s" in sentence


@pytest.mark.parametrize(
    "case",
    [
        {"waits": [0.30, 0.29, 0.31]},  # a slow network: all wait
        {"waits": [0.30, 0.25, 0.29]},  # too little
        {"waits": [0.30, 0.05], "steps": 4},  # too few steps
        {"waits": [0.30, 0.05], "size": 3},  # one of another host is not known yet
        {"waits": [0.30, 0.05], "cuda": True},  # its clock runs ahead of its device
        {"waits": [0.30, -1.0]},  # a plan that does not know
    ],
)
def test_nobody_is_named_where_nothing_is_known(case):
    assert looks(**case) == []


def test_it_must_be_slow_twice_in_a_row():
    slow, waited, told = SlowRanks(2, 10.0), [0.0, 0.0], []
    for n in range(8):
        views = [RankView(r, steps=20 * n, waited_seconds=w) for r, w in enumerate(waited)]
        told.append(slow.look(10.0 * n, views))
        waited[n % 2] += 6.0  # another one each time
    assert not any(told)
