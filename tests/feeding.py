"""Read data as a run does: the shares of each rank, with any number of loaders."""

from __future__ import annotations

import itertools
from collections import defaultdict

from ronde.feed import Feed, FeedSettings, apply_settings, take_over
from ronde.plan import shares


def take(data, *, evaluate=False, **given):
    """What a run takes over: a bare data set is shuffled, unless it is evaluated on."""
    given = {"seed": 0, "batch_size": None, "shuffle": None, "drop_last": False, **given}
    return take_over(data, shuffle_dataset=not evaluate, evaluate=evaluate, **given)


def with_executor(taken, executor, workers=2, **more):
    workers = 0 if executor == "none" else workers
    return apply_settings(taken, FeedSettings(executor=executor, workers=workers, **more))


def feed_of(taken, seed=0, **more):
    return Feed(taken.dataset, taken.order, taken.settings, seed, **more)


def read(
    taken, size=1, batch=6, micro=None, epochs=(0,), offset=0, seed=0, drop_last=False, **more
):
    """Micro-batches of every rank, in the order of the global batches, those of empty shares left
    out.
    """
    steps = defaultdict(list)
    for rank in range(size):
        feed, step = feed_of(taken, seed, **more), itertools.count()
        for epoch in epochs:
            start = offset if epoch == epochs[0] else 0
            n = taken.order.epoch_samples
            asked = epoch, start, n, batch, rank, size, micro, drop_last
            for share, batches in feed.read(lambda asked=asked: shares(*asked)):
                made = zip(feed.finish(share, batches), share.micro, strict=True)
                steps[next(step)] += [b for b, (low, high) in made if high > low]
        feed.close()
    return [b for step in steps.values() for b in step]
