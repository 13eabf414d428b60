"""Reads the plans to prove."""

from __future__ import annotations

from collections.abc import Sequence

from ronde.plan import Plan
from ronde.world import ArgumentError

__all__ = ["ALL_PLANS", "chosen_plans"]

ALL_PLANS = (
    "replicate",
    "shard=optimizer",
    "shard=gradients",
    "shard=parameters",
    "pipeline=2",
    "tensor=2",
)
_HYBRIDS = (
    "pipeline=2,shard=optimizer",
    "pipeline=2,shard=parameters",
    "tensor=2,shard=parameters",
    "pipeline=2,tensor=2",
)
# settings belong to the plan before them
_SETTINGS = (
    "schedule",
    "virtual",
    "micro_batch",
    "split_at",
    "optimize",
    "shard_within",
    "reducer",
)


def chosen_plans(plans: str | Sequence[str], workers: int) -> list[str]:
    """The plans to prove; ``"all"`` are those that ``workers`` can run.

    Example:
        >>> chosen_plans("all", 2)[-1]
        'tensor=2'
        >>> chosen_plans(["zero3"], 2)
        ['shard=parameters']
        >>> chosen_plans("replicate,shard=optimizer,shard=parameters,pipeline=2", 2)
        ['replicate', 'shard=optimizer', 'pipeline=2,shard=parameters']
        >>> chosen_plans("replicate,pipeline=2,schedule=gpipe,shard=parameters", 2)
        ['replicate', 'pipeline=2,schedule=gpipe,shard=parameters']
        >>> chosen_plans("replicate,reducer=bf16,shard=optimizer", 2)
        ['replicate,reducer=bf16', 'shard=optimizer']
    """
    if plans == "all":
        return [*ALL_PLANS, *(_HYBRIDS if workers >= 4 else ())]
    texts = [plans] if isinstance(plans, str) else list(plans)
    if not texts:
        raise ArgumentError("no plan was given: --plans all, or --plans shard=parameters, say.")
    return list(dict.fromkeys(Plan.parse(one).spec for text in texts for one in _split(text)))


def _kind(word: str) -> str:
    key = word.partition("=")[0].strip().replace("-", "_")
    return key if key in _SETTINGS else Plan.parse(word).spec.partition("=")[0]


def _split(text: str) -> list[str]:
    """Several plans in one text: a new one starts at ``replicate``, after it, and at a word that
    the plan has already.
    """
    plans: list[list[str]] = [[]]
    for word in map(str.strip, text.split(",")):
        kind, kinds = _kind(word), [_kind(w) for w in plans[-1]]
        ends = kind not in _SETTINGS and (kind in kinds or "replicate" in kinds)
        if kinds and (kind == "replicate" or ends):
            plans.append([])
        plans[-1].append(word)
    return [",".join(words) for words in plans]
