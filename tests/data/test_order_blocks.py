"""The order by blocks and windows, against brute force."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from feeding import take
from ronde import feed
from ronde.feed import Order, Pipeline
from ronde.world import ArgumentError


def uneven(blocks: int, largest: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randint(1, largest) for _ in range(blocks))


CASES = [
    ((1,), 1),
    ((5,), 64),
    ((3, 4), 1),
    ((1,) * 40, 7),
    ((10,) * 12, 4),
    (uneven(23, 9, 0), 5),
    (uneven(100, 30, 1), 64),
    (uneven(100, 30, 2), 33),
    ((70_000, 3, 4_000, 1, 9), 2),  # windows above and below 65,536, which are permuted in two ways
    (uneven(3000, 60, 3), 500),
]


@pytest.mark.parametrize(("blocks", "window"), CASES)
def test_every_epoch_is_a_permutation_window_by_window(blocks, window):
    n = sum(blocks)
    owner = np.repeat(np.arange(len(blocks)), blocks)
    order = Order(n, seed=5, blocks=blocks, window=window)
    seen = []
    for epoch in (0, 1, 7):
        ids = order.ids(epoch, 0, n)
        assert np.array_equal(np.sort(ids), np.arange(n))
        # Brute force: cut the epoch where the blocks that were begun are all complete; no piece may
        # hold more than a window's blocks.
        left = dict(enumerate(blocks))
        opened: set[int] = set()
        for b in owner[ids].tolist():
            opened.add(b)
            left[b] -= 1
            assert len(opened) <= window
            if all(left[o] == 0 for o in opened):
                opened.clear()
        assert not opened
        seen.append(ids.tobytes())
    if n > 20:
        assert len(set(seen)) == 3
        assert Order(n, seed=6, blocks=blocks, window=window).ids(0, 0, n).tobytes() != seen[0]


@pytest.mark.parametrize(("blocks", "window"), CASES)
def test_any_part_of_it_by_itself(blocks, window):
    n = sum(blocks)
    whole = Order(n, seed=5, blocks=blocks, window=window).ids(3, 0, n)
    draw = random.Random(n)
    cuts = sorted({0, n, *(draw.randrange(n + 1) for _ in range(40))})
    order = Order(n, seed=5, blocks=blocks, window=window)
    for low, high in [*itertools.pairwise(cuts), *((draw.randrange(n), n + 5) for _ in range(3))]:
        order.ids(draw.randrange(9), 0, 1)  # another epoch in between changes nothing
        assert np.array_equal(order.ids(3, low, high), whole[low:high])
        assert np.array_equal(
            Order(n, seed=5, blocks=blocks, window=window).ids(3, low, high), whole[low:high]
        )
    assert order.ids(3, n, n).size == 0


def test_fixed_for_ever():
    order = Order(20, seed=3, blocks=(4, 1, 6, 2, 7), window=2)
    whole = [12, 11, 3, 2, 1, 0, 4, 15, 9, 14, 10, 8, 13, 6, 19, 16, 18, 5, 17, 7]
    assert order.ids(2, 0, 20).tolist() == whole
    large = Order(100_000, seed=3, blocks=(40_000, 60_000), window=2)
    assert large.ids(2, 50_000, 50_006).tolist() == [39754, 7625, 25763, 33245, 79840, 7879]
    assert (
        order.kind
        == Order(20, seed=9, blocks=(4, 1, 6, 2, 7), window=2).kind
        != Order(20, blocks=(4, 1, 6, 2, 7), window=3).kind
    )


def test_blocks_and_places_are_drawn_evenly():
    first = np.zeros(8)
    inside = np.zeros(40)
    for seed in range(2000):
        i = int(Order(40, seed, blocks=(5,) * 8, window=2).ids(0, 0, 1)[0])
        first[i // 5] += 1
        inside[i] += 1
    # Chi-square with 7 and 39 degrees of freedom: above 35 and 90 once in 100,000.
    assert ((first - 250) ** 2 / 250).sum() < 35
    assert ((inside - 50) ** 2 / 50).sum() < 90


def test_without_shuffling_blocks_do_not_count():
    order = Order(10, shuffle=False, blocks=(5, 5), window=1)
    assert order.ids(4, 2, 9).tolist() == list(range(2, 9)) and order.kind == "samples"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"blocks": (3, 4)}, "add up to 7 samples, not to n=10"),
        ({"blocks": (10, 0)}, "block 1 has 0 samples"),
        ({"blocks": (10,), "window": 0}, "window=0"),
        ({"blocks": (10,), "window": True}, "window=True"),
    ],
)
def test_what_cannot_be(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        Order(10, **arguments)


def order_of(data):
    return take(data, seed=3).order


def test_large_tables_go_by_blocks_small_ones_do_not(tmp_path):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": np.arange(500)}), file, row_group_size=40)
    small, large = feed.parquet(file), feed.parquet(file, cache_bytes=1000)
    n = len(small)
    assert order_of(small) == Order(n, 3) and small.blocks is None
    assert large.blocks == (*[40] * 12, 20) and feed.parquet(file, blocks=True).blocks is not None
    wanted = Order(n, 3, blocks=large.blocks, window=large.window)
    assert order_of(large) == wanted
    assert order_of(Pipeline(large)) == wanted and order_of(Pipeline(small)) == Order(n, 3)
    assert order_of(DataLoader(large, 8, shuffle=True)) == wanted
    assert order_of(DataLoader(large, 8)) == Order(n, 3, False)
    assert feed.parquet(file, cache_bytes=1000, blocks=False).blocks is None
