"""Fills models without values: lazy parameters, and models built on ``meta``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from ronde.data import Order
from ronde.introspect import detached_copy
from ronde.loader import Feed, TakenOver
from ronde.parallel.meta_init import Init, materialise, weights_in
from ronde.plan import Share
from ronde.run import checks
from ronde.run.losses import LossCall
from ronde.world import ArgumentError, World
from ronde.world.consensus import ask_main

__all__ = ["filler", "shape_lazy"]


def shape_lazy(model: nn.Module, forward: LossCall, taken: TakenOver, lazy: list[str]) -> None:
    """Shape lazy parameters by running one sample, without training."""
    was_training = model.training
    model.eval()
    try:
        feed = Feed(
            detached_copy(taken.dataset),
            Order(taken.order.n, 0, False),
            dataclasses.replace(taken.settings, num_workers=0),
            0,
        )
        share = Share(0, 0, 1, ((0, 1),), 1)
        for _, micros in feed.read(lambda: iter([share])):
            with torch.no_grad():
                forward.arguments(model, feed.finish(share, micros)[0])
    except Exception as error:
        raise ArgumentError(
            f"the lazily initialized parameters {', '.join(map(repr, lazy[:3]))} got no shape: "
            f"running one sample failed ({type(error).__name__}: {error}). Run one batch through "
            "the model before ronde.distribute."
        ) from error
    finally:
        model.train(was_training)
    still = checks.lazy_names(model)
    if still:
        raise ArgumentError(
            f"{', '.join(map(repr, still[:3]))} still has no shape after one sample was "
            "run: it is never used. Remove it."
        )


def filler(
    model: nn.Module, init: Init, seed: int, me: World
) -> Callable[[Callable[[str], bool]], None]:
    """Makes the function that fills a model on meta. Rank 0 verifies weights on disk, once."""

    def verify() -> None:
        if not callable(init) and init != "reset":
            weights_in(init)

    ask_main(me, verify)

    def fill(keep: Callable[[str], bool]) -> None:
        materialise(model, init, seed=seed, device=me.device, keep=keep, verified=True)

    return fill
