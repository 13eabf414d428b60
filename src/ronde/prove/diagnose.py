"""Rules that name why two runs differ, from their traces and, where those are ambiguous, from short
runs with one thing changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ronde.prove.catalogue import Cause, cause
from ronde.prove.compare import BATCH, EPOCHS, Difference, RunTrace, compare

__all__ = ["GONE", "SEEDED", "Case", "diagnose", "disagreement"]


@dataclass
class Case:
    """What a diagnosis has at hand.

    Attributes:
        again: ``again("split")`` runs one process over micro-batches like the workers' shares;
            ``"twice"`` one process with each forward pass computed twice; ``"parts"`` one process
            that computes a part of each batch by itself as well; ``"blind"`` the workers, of which
            each is told that it is rank 0 of 1 where the script asks; ``"whole"`` the workers
            without the script's micro-batches; ``"sync_batchnorm"`` with it on. None where that run
            failed.
        replicated: whether the plan only splits the data.
        replicate_equal: whether plain replicate was found equal.
    """

    one: RunTrace
    many: RunTrace
    difference: Difference
    again: Callable[[str], RunTrace | None]
    replicated: bool = True
    replicate_equal: bool = False


def _reads(case: Case, *phases: str) -> str | None:
    """Where the user's code asked for its rank or the number of workers."""
    told = _noted(case, "rank", *phases)
    return f"the script reads {', '.join(told[:3])}" if told else None


def _noted(case: Case, what: str, *phases: str) -> list[str]:
    """Where something was noted in these phases, or in any."""
    found = [n.split("|", 1) for n in case.many.notes().get(what, [])]
    return list(
        dict.fromkeys(
            place.replace("@", " at ") for phase, place in found if phase in phases or not phases
        )
    )


_BY_RANK = {
    "initial weights": "init-depends-on-workers",
    "initial buffers": "init-depends-on-workers",
    "order": "sampler-depends-on-workers",
    "data": "data-depends-on-rank",
    "weights between steps": "weights-changed-by-script",
    "dropout": "rank-dependent-forward",
    "outputs": "rank-dependent-forward",
    "loss": "rank-dependent-forward",
    "gradients": "rank-dependent-gradients",
    "clipped gradients": "rank-dependent-gradients",
    "learning rate": "learning-rate-depends-on-workers",
    "scheduler": "learning-rate-depends-on-workers",
    "weights": "optimizer-depends-on-workers",
    "buffers": "buffers",
    "evaluation": "evaluation-depends-on-workers",
    "steps": "rank-dependent-loop",
}


def _by_rank(case: Case) -> bool | None:
    """Is the difference gone if each worker is told that it is alone, wherever the script asks?
    None: it asks nowhere, or cannot be told.
    """
    if not _noted(case, "rank"):
        return None
    blind = case.again("blind")
    if blind is None or not blind.steps():
        return None
    left = compare(case.one, blind).difference
    return left is None or left.place > case.difference.place


def _asks(case: Case, *phases: str) -> str | None:
    """Where the script asks for its rank, unless that was seen to make no difference: many ask only
    to print.
    """
    return None if _by_rank(case) is False else _reads(case, *phases)


GONE = "told that it is rank 0 of 1 wherever it asks, every worker trains like one process"
"""What was seen where the script's asking for its rank is the cause."""


SEEDED = "where all workers begin with the same seed, it is equal"
"""What was seen where nothing seeds the script."""
_SEEDS = (
    "initial buffers",
    "order",
    "data",
    "weights between steps",
    "dropout",
    "outputs",
    "loss",
    "gradients",
    "learning rate",
    "evaluation",
    "steps",
)


def _of_seeds(case: Case) -> Cause | None:
    """The difference disappears where all workers start with the same seed."""
    d = case.difference
    if d.phase not in _SEEDS:
        return None
    alike = case.again("alike")
    if alike is None or not alike.steps():
        return None
    left = compare(case.one, alike).difference
    if left is not None and left.place <= d.place:
        return None
    told = (
        "where all workers begin with the same seed, the next difference is: "
        f"{left.phase}, step {left.step}, {left.name}"
        if left
        else SEEDED
    )
    drawn = _draws(case) if d.phase in ("outputs", "loss", "gradients") else None
    if drawn:  # in every step: that is more than what is made once
        return cause("randomness", drawn, told)
    return cause(
        "unseeded-data" if d.phase == "data" or d.name.startswith("sample ") else "unseeded-script",
        told,
    )


def _of_rank(case: Case) -> Cause | None:
    """The script asks for its rank or the number of workers, and that makes the difference."""
    d = case.difference
    if d.phase not in _BY_RANK or not _by_rank(case):
        return None
    id = _BY_RANK[d.phase]
    if d.phase in ("initial weights", "initial buffers") and isinstance(d.one, list | str):
        id = "model-depends-on-workers"
    if d.phase in ("learning rate", "scheduler"):
        id = _of_rate(case).id
    if d.phase == "evaluation" and d.name == "number of evaluations":
        id = "rank-dependent-loop"
    if d.phase == "gradients" and _noted(case, "exchange", "step"):
        return cause(
            "exchange-by-script",
            f"the script calls {', '.join(_noted(case, 'exchange', 'step')[:3])}",
        )
    before = ("setup", "between") if d.phase != "order" else ("setup",)
    if d.phase == "order" and not _reads(case, *before):
        id = "rank-dependent-loop"  # the loop's body went on without training
    return cause(id, _reads(case), GONE)


def _draws(case: Case, key: str = "drawn") -> str | None:
    """Whether the step drew random numbers, and where."""
    drawn = {g for t in (case.one, case.many) for s in t.steps() for g in s.get(key, [])}
    phase = "step" if key == "drawn" else "update"
    if not drawn:
        own = _noted(case, "own generator", phase)
        return f"drawn from a generator of the script's own: {', '.join(own[:3])}" if own else None
    places = [
        n.split("|", 1)[1].replace("@", " at ")
        for n in case.one.notes().get("random", [])
        if n.startswith(phase + "|")
    ]
    return f"drawn from {', '.join(sorted(drawn))}" + (
        f": {', '.join(places[:3])}" if places else ""
    )


def _module_of(name: str) -> str:
    return re.sub(r"( \(call \d+\)|\[.*)$", "", name)


def diagnose(case: Case) -> Cause:
    """Name the cause of a difference: the first rule of :data:`RULES` that applies."""
    diagnosis = next((c for c in (rule(case) for rule in RULES) if c), None) or _unknown(case)
    drift = _drift(case)
    if drift is None:
        return diagnosis
    if diagnosis.id == "randomness":  # harmless only while all workers have the same weights
        return cause("replicas-drift", *diagnosis.evidence, drift)
    return replace(diagnosis, evidence=(*diagnosis.evidence, drift))


def _drift(case: Case) -> str | None:
    """Whether workers that each hold the whole model have other weights than each other after the
    step that differs.
    """
    d = case.difference
    if not case.replicated or not 0 < d.step <= min(
        len(case.many.steps(r)) for r in range(case.many.size)
    ):
        return None
    first = case.many.of(0, d.step - 1, "weight")
    for rank in range(1, case.many.size):
        for name, theirs in case.many.of(rank, d.step - 1, "weight").items():
            mine = first.get(name, theirs)
            if mine.shape == theirs.shape and not np.allclose(
                mine,
                theirs,
                rtol=0.0,
                atol=1e-9 * float(np.abs(mine).max(initial=0.0)),
                equal_nan=True,
            ):
                return (
                    f"after step {d.step} the workers' own weights differ: {name!r} of rank "
                    f"{rank} is not that of rank 0"
                )
    return None


_BEGINS = ("contract", "initial weights", "initial buffers", "data", "order")


def _of_files(case: Case) -> Cause | None:
    """It differs from the start, and the script reads a file that another run wrote."""
    read = _noted(case, "reread")
    return (
        cause("reads-another-run", f"it reads {', '.join(read[:3])}")
        if read and case.difference.phase in _BEGINS
        else None
    )


def _of_uneven_shares(case: Case) -> Cause | None:
    """The script exchanges tensors, and all is equal until workers have unequal sample counts."""
    if not case.replicated or case.difference.phase in ("order", "data", "evaluation"):
        return None
    exchanges = _noted(case, "exchange", "step", "between", "update")
    uneven = next((k for k, sizes in enumerate(_shares(case)) if len(set(sizes)) > 1), None)
    if not exchanges or not uneven or case.difference.step not in (uneven + 1, uneven + 2):
        return None
    told = (
        f"until step {uneven} all workers have equally many samples, and it is equal; in step "
        f"{uneven + 1} they have {_shares(case)[uneven]}"
    )
    return cause("mean-of-means", told, f"the script calls {', '.join(exchanges[:3])}")


_AFTER_FORWARD = ("outputs", "loss", "gradients", "buffers")


def _of_spectral_norm(case: Case) -> Cause | None:
    """A spectral norm iterates in every forward pass, and a step has several."""
    iterating = case.one.first("opening").get("iterating", [])
    if not iterating or not _several_passes(case) or case.difference.phase not in _AFTER_FORWARD:
        return None
    return cause("state-of-each-pass", f"{iterating[0]!r} is normalized by its spectrum")


def _of_plan(case: Case) -> Cause | None:
    """The plan splits the model, and replicate is equal."""
    if case.replicated or not case.replicate_equal:
        return None
    tied = _tied(case)
    if tied is not None:
        return tied
    moved = _moves(case) if case.difference.phase in _AFTER_FORWARD else None
    return cause("state-of-each-pass", moved) if moved else cause("plan")


def _tied(case: Case) -> Cause | None:
    """Parameters that differ share memory without being one parameter."""
    d = case.difference
    for names in case.one.first("opening").get("shared", []):
        if {d.name, *d.others} & set(names):
            return cause("tied-weights", f"{' and '.join(names)} share their memory")
    return None


def _of_phase(case: Case) -> Cause:
    """The rule for the phase of the step in which the difference shows first."""
    return _BY_PHASE.get(case.difference.phase, _unknown)(case)


def _shares(case: Case) -> list[list[int]]:
    """How many samples each worker has, step by step."""
    said = [case.many.steps(r) for r in range(case.many.size)]
    return [
        [sum(high - low for low, high in step["micro"]) for step in steps]
        for steps in zip(*said, strict=False)
    ]


def _several_passes(case: Case) -> bool:
    return not case.replicated or case.many.first("opening").get("micro_batch") is not None


def _unknown(case: Case) -> Cause:
    return cause("unknown", _reads(case, "setup", "step", "between", "update", "evaluate"))


def _of_contract(case: Case) -> Cause:
    return cause(_contract_id(case.difference.name), _reads(case, "setup"))


def _contract_id(name: str) -> str:
    if name == EPOCHS:
        return "rank-dependent-loop"
    if name in ("the length of the data set", "the samples of an epoch"):
        return "data-depends-on-workers"
    if "'s lr " in name:
        return "learning-rate-depends-on-workers"
    if name == "batch_size":
        return "batch-size-depends-on-workers"
    return (
        "model-depends-on-workers"
        if name.startswith(("parameter", "buffer", "the dropout"))
        else "arguments-depend-on-workers"
    )


def disagreement(text: str) -> tuple[Difference, str] | None:
    """What ronde.distribute said that ranks disagree on, and the cause's name."""
    found = re.search(
        r"The ranks disagree on (.+?) in ronde\.distribute: (.*?)\. Every worker", text, re.S
    )
    if not found:
        return None
    name, said = found[1], found[2]
    id = _contract_id(name)
    if id == "data-depends-on-workers":
        id = "data-depends-on-rank"
    if name == "the order that the sampler draws":
        id = "sampler-depends-on-workers"
    return Difference("distribute", 0, name, None, None, said), id


def _of_init(case: Case) -> Cause:
    if isinstance(case.difference.one, list | str):
        return cause("model-depends-on-workers", _reads(case, "setup"))
    reads = _asks(case, "setup")
    told = "one process begins alike every time, and the script was not seen to ask for its rank"
    return cause("init-depends-on-workers", reads) if reads else cause("unknown", told)


def _of_order(case: Case) -> Cause:
    return cause("sampler-depends-on-workers", _reads(case, "setup", "between"))


def _of_batch(case: Case) -> Cause:
    """The data set gives the same samples; what is made of them differs."""
    drawn = [n.split("|", 1)[1] for n in case.many.notes().get("collate", [])]
    if drawn:
        return cause("randomness", f"drawn from {drawn[0]} in the collate function")
    return cause("batch-dependent-collate", "the samples are the same, the batch is not")


def _of_data(case: Case) -> Cause:
    if case.difference.name.startswith(BATCH) and not _loads_elsewhere(case):
        return _of_batch(case)
    reads = _asks(case, "setup", "between", "step")
    # one process twice has read the same
    return cause("data-depends-on-rank" if reads else "data-not-by-index", reads)


def _loads_elsewhere(case: Case) -> bool:
    """Whether samples were read where they could not be noted: in loading processes of the script's
    own.
    """
    return not any(s["digests"] for s in case.one.steps())


def _of_dropout(case: Case) -> Cause:
    drawn, reads = _draws(case), _asks(case)
    if drawn:
        return cause("randomness", drawn)
    return cause("rank-dependent-forward", reads) if reads else _of_state(case) or cause("unknown")


def _of_between(case: Case) -> Cause:
    return cause("weights-changed-by-script", _reads(case, "between"))


def _splitting(case: Case) -> Difference | bool | None:
    """Does one process that splits the batch as the workers do differ too? None: it cannot tell."""
    split = case.again("split")
    if split is None or not split.steps():
        return None
    found = compare(case.one, split).difference
    return (
        found
        if found is not None and found.phase != "steps" and found.step <= case.difference.step
        else False
    )


def _given(case: Case, name: str) -> bool:
    """Whether a module was given something else already."""
    k = case.difference.step - 1
    one, many = case.one.outputs(k, "in"), case.many.outputs(k, "in")
    for key, (value, shape) in one.items():
        if _module_of(key) == name and key in many and many[key][1] == shape:
            scale = float(np.nanmax(np.abs(value), initial=0.0)) or 1.0
            if float(np.nanmax(np.abs(value - many[key][0]), initial=0.0)) > 1e-9 * scale:
                return True
    return False


def _of_state(case: Case) -> Cause | None:
    """The cause, if it is what each worker carries from batch to batch: equal at first, with as
    many samples as where it differs.

    A layer that mixes samples differs as soon as they are dealt out.
    """
    k, shares = case.difference.step - 1, _shares(case)
    if not 0 < k < len(shares) or shares[k] not in shares[:k] or _asks(case, "step", "between"):
        return None
    if case.difference.phase == "outputs" and _mixes(case, "step", k):
        return None
    return cause(
        "state-outside-the-model",
        f"{_count(k)} {'is' if k == 1 else 'are'} equal, with as many samples on each worker",
    )


def _mixes(case: Case, during: str, step: int) -> bool | None:
    """Whether what is computed of a sample depends on the other samples, with the same weights and
    state. None: that cannot be asked.
    """
    parts = case.again("parts")
    found = (
        [
            e["mixes"]
            for e in parts.events[0]
            if e["kind"] == "mixes" and (e["during"], e["step"]) == (during, step)
        ]
        if parts
        else []
    )
    return any(found) if found else None


def _not_of_splitting(case: Case, by_rank: str) -> Cause:
    """One process that splits the batch as the workers do does not differ: the rank's doing if the
    script asks for it.
    """
    reads = _asks(case, "step", "between") or _asks(case)
    told = "one process that splits the batch alike does not differ"
    if reads:
        return cause(by_rank, reads, told)
    return _of_state(case) or cause(
        "unknown", f"{told}, and the script was not seen to ask for its rank"
    )


def _of_outputs(case: Case) -> Cause:
    drawn = _draws(case)
    if drawn:
        return cause("randomness", drawn)
    if _given(case, "(model)"):
        return cause(
            "batch-changed-by-script", "the batch is the same, what the model is called with is not"
        )
    opening = case.one.first("opening")
    splitting = _splitting(case)
    d = case.difference
    name = _module_of(
        splitting.name
        if isinstance(splitting, Difference) and splitting.phase == "outputs"
        else d.name
    )
    kind = opening.get("modules", {}).get(name)
    what = f"{name!r} is a {kind}" if kind else None
    functional = [
        n.split("|", 1)[1] for n in case.one.notes().get("batch_norm", []) if n.startswith("step|")
    ]
    if kind and name not in opening.get("batchnorms", []) and _given(case, name):
        parent = name.rpartition(".")[0]
        holder = (
            f"{parent!r} ({opening['modules'].get(parent)})"
            if parent
            else f"the model ({opening['modules'].get('')})"
        )
        what = (
            f"what {name!r} is given differs already: it is computed in the forward pass of "
            f"{holder}"
        )
        if functional:
            return cause("batchnorm", what, f"torch.nn.functional.batch_norm at {functional[0]}")
    k = d.step - 1
    if "(call " in d.name and any(
        t.steps(r)[k].get("rewritten") for t in (case.one, case.many) for r in range(t.size)
    ):
        return cause(
            "weights-changed-by-script",
            "weights are written to within the step, between two forward passes",
        )
    if splitting is False and name not in opening.get("batchnorms", []):
        return _not_of_splitting(case, "rank-dependent-forward")
    if name in opening.get("batchnorms", []) and opening.get("contract", {}).get("sync_batchnorm"):
        text = (
            "sync_batchnorm=True is on: what it normalises over is not the global batch, but a "
            "micro-batch or a piece of it"
        )
        return cause("batchnorm", what, text)
    if name in opening.get("batchnorms", []):
        cured = case.again("sync_batchnorm")
        left = compare(case.one, cured).difference if cured is not None else None
        told = None
        if cured is not None and cured.steps():
            told = (
                "with sync_batchnorm=True it is equal"
                if left is None
                else f"with sync_batchnorm=True the next difference is: {left.phase}, step "
                f"{left.step}, {left.name}"
            )
        return cause("batchnorm", what, told)
    related = _related(case)
    if related:
        return cause("loss-over-the-batch", related)
    padded = _padded(case)
    if padded:
        return cause("padding", padded)
    moved = _moves(case)
    if moved:
        return cause("state-of-each-pass", moved)
    kept = _of_state(case)
    if kept is not None:
        return kept
    if splitting is None:
        reads = _reads(case, "step")
        return (
            cause("rank-dependent-forward", reads)
            if reads
            else cause("batch-dependent-layer", what)
        )
    if kind is None or name.startswith("("):
        reads = _reads(case, "step")
        if reads:
            return cause("rank-dependent-forward", reads)
    return cause(
        "batch-dependent-layer", what, "one process that splits the batch alike differs too"
    )


def _moves(case: Case) -> str | None:
    """A layer whose output is another one when it is called for the second time with the same."""
    if not _several_passes(case):
        return None
    twice = case.again("twice")
    found = compare(case.one, twice).difference if twice is not None and twice.steps() else None
    if found is None or found.phase != "outputs" or found.step > case.difference.step:
        return None
    return (
        f"computed twice from the same samples, the output of {_module_of(found.name)!r} is "
        "another one"
    )


def _padded(case: Case) -> str | None:
    """An output whose samples have another shape with one process than with a worker's share."""
    return next((told for told, over_batch in _reshaped(case) if not over_batch), None)


def _related(case: Case) -> str | None:
    """An output that has, for each sample, as many numbers as there are samples beside it."""
    return next((told for told, over_batch in _reshaped(case) if over_batch), None)


def _reshaped(case: Case) -> Iterator[tuple[str, bool]]:
    """Outputs whose samples have another shape than with one process, and whether it is the number
    of samples that shows in it.
    """
    k = case.difference.step - 1
    step = case.one.steps()[k]
    one, whole = step["shapes"], {size for *_, size in step["local"]}
    for rank in range(case.many.size):
        theirs = case.many.steps(rank)[k]
        part = {size for *_, size in theirs["local"]}
        for key, shape in theirs["shapes"].items():
            if key not in one or one[key] == shape:
                continue
            theirs_is = "one or another" if isinstance(shape, str) else str(shape)
            told = (
                f"a sample of {key.removeprefix('out|')!r} has shape {one[key]} with one "
                f"process, {theirs_is} on rank {rank}"
            )
            if isinstance(shape, str) or isinstance(one[key], str):
                yield told, "samples" in (shape, one[key])
                continue
            differing = [(a, b) for a, b in zip(one[key], shape, strict=False) if a != b]
            yield (
                told,
                len(shape) == len(one[key]) and all(a in whole and b in part for a, b in differing),
            )


_LOSSES = {
    "sum": "loss-is-a-sum",
    "weighted": "loss-is-a-weighted-mean",
    "over-batch": "loss-over-the-batch",
    "state": "state-outside-the-model",
    "pair-mean": "loss-pair",
    "pair-weight": "loss-pair",
    "pair-other": "loss-pair",
}
_LOSS_ANSWERS = {
    "sum": "asked about parts of a batch, the loss answers like a sum",
    "weighted": "asked about parts of a batch, the loss answers like a mean with weights",
    "over-batch": "asked about parts of a batch, the loss or its gradient answers like neither a "
    "mean nor a sum",
    "pair-mean": "asked about parts of a batch, the first of the pair answers like a mean, not a "
    "sum",
    "pair-weight": "asked about parts of a batch, the weights of the parts do not add up to that "
    "of all",
    "pair-other": "asked about parts of a batch, the first of the pair answers like neither a sum "
    "nor a mean",
    "state": "asked about the same samples again, the loss answers otherwise: it keeps a state, "
    "computed from what it was given before",
}


def _of_loss(case: Case) -> Cause:
    drawn = _draws(case)
    if drawn:
        return cause("randomness", drawn)
    kind = case.one.loss_kind()
    if kind in _LOSSES:
        return cause(_LOSSES[kind], _LOSS_ANSWERS[kind])
    if _without_micro(case) and _proportional(case):
        return cause("accumulation", "without micro-batches it is equal", _proportional(case))
    splitting = _splitting(case)
    if splitting is False:
        return _not_of_splitting(case, "rank-dependent-forward")
    related = _related(case)
    if related:
        return cause("loss-over-the-batch", related)
    padded = _padded(case)
    if padded:
        return cause("padding", padded)
    if kind in ("mean", "pair") and splitting is None and _asks(case, "step"):
        return cause("rank-dependent-forward", _reads(case, "step"))
    if isinstance(splitting, Difference) and splitting.phase == "outputs":
        return _of_outputs(case)  # of a pipeline's stages no outputs are noted
    kept = _of_state(case) if kind == "mean" else None
    if kept is not None:
        return kept
    by_gradients = _loss_by_gradients(case)
    if by_gradients is not None:
        return by_gradients
    # A script that owns its loop: its loss is known by its values only.
    d = case.difference
    local = [
        part
        for r in range(case.many.size)
        for part in case.many.steps(r)[d.step - 1]["local"]
        if part[2]
    ]
    values = [v for v, w, _ in local if w is None]
    reads = _reads(case, "step")
    if values and len(values) == len(local) and isinstance(d.one, float):
        if abs(sum(values) - d.one) <= 1e-9 * abs(d.one):
            return cause("loss-is-a-sum", f"the workers' losses add up to {d.one:.6g}")
        if reads:
            return cause("rank-dependent-forward", reads)
    elif reads:
        return cause("rank-dependent-forward", reads)
    return cause("loss-over-the-batch")


_MEAN = "the loss's gradient at the model's output is that of a mean: something else is added to it"


def _loss_by_gradients(case: Case) -> Cause | None:
    """What the loss's gradient at the model's output says, see :func:`_asked_of_gradients`."""
    found = _asked_of_gradients(case, case.difference.step - 1)
    if found is None:
        return None
    # it was a mean over samples before
    if case.difference.step > 1 and found[0] == "loss-over-the-batch":
        return cause(
            "state-outside-the-model",
            f"the loss of {_count(case.difference.step - 1)} is equal, with the same weights",
        )
    return cause(*found)


def _count(steps: int) -> str:
    return "the first step" if steps == 1 else f"the first {steps} steps"


def _asked_of_gradients(case: Case, k: int) -> tuple[str, str] | None:
    """What the loss's gradient at the model's output says, in one process with the whole batch and
    with parts of it; the cause and why.

    A part's gradient is, among all, ``r`` times what it is alone: 1 for a sum, its part of the
    samples for a mean, its part of the weights for a weighted mean, where all parts are 1 and add
    the parts' losses up to the whole; otherwise the loss relates samples to each other.
    """
    split = case.again("split")
    if split is None or k >= len(split.steps()):
        return None
    said = split.steps()[k]
    if any(weight is not None for _, weight, _ in said["local"]):
        return None
    whole, parts = case.one.outputs(k, "back"), split.outputs(k, "back")
    name = next((n for n in whole if n in parts), None)
    if name is None:
        return None
    a, b = whole[name][0], parts[name][0]
    n, start = len(a), said["start"]
    ratios, shares = [], []
    for low, high in said["micro"]:
        x, y = a[low - start : high - start], b[low - start : high - start] * (n / (high - low))
        kept = np.abs(y) > 1e-9 * (np.abs(y).max(initial=0.0) or 1.0)
        if not kept.any():
            return None
        ratio = x[kept] / y[kept]
        if np.ptp(ratio) > 1e-6 * np.abs(ratio).max():
            return (
                "loss-over-the-batch",
                "the loss's gradient at a sample's output depends on which samples are with it",
            )
        ratios.append(float(ratio[0]))
        shares.append((high - low) / n)
    if np.allclose(ratios, 1.0, rtol=1e-6):
        return (
            "loss-is-a-sum",
            "the loss's gradient at a sample's output is the same, however many samples "
            "are with it",
        )
    if np.allclose(ratios, shares, rtol=1e-6):
        return "loss-over-the-batch", _MEAN
    values = [value for value, _, _ in said["local"]]
    loss = case.one.steps()[k]["loss"]
    weighted = abs(sum(ratios) - 1.0) < 1e-6 and min(ratios) > 1e-9 and len(values) == len(ratios)
    if weighted and abs(
        sum(r * v for r, v in zip(ratios, values, strict=True)) - loss
    ) <= 1e-6 * abs(loss):
        weights = ", ".join(f"{r:.3f}" for r in ratios)
        return (
            "loss-is-a-weighted-mean",
            f"by its gradient at the model's output, the workers' parts weigh {weights}",
        )
    return (
        "loss-over-the-batch",
        "its gradient at the model's output is neither that of a sum nor of a mean, "
        "weighted or not",
    )


def _without_micro(case: Case) -> bool:
    """Whether the difference goes away without the script's micro-batches."""
    if case.many.first("opening").get("micro_batch") is None:
        return False
    whole = case.again("whole")
    if whole is None or not whole.steps():
        return False
    left = compare(case.one, whole).difference
    return left is None or (
        (left.phase, left.step) > (case.difference.phase, case.difference.step)
        and left.step > case.difference.step
    )


def _proportional(case: Case) -> str | None:
    """Whether all gradients differ by one and the same factor."""
    k = case.difference.step - 1
    one, many = case.one.merged(k, "gradient"), case.many.merged(k, "gradient")
    names = [n for n in one if n in many and one[n].shape == many[n].shape]
    if not names:
        return None
    a, b = (np.concatenate([of[n].reshape(-1) for n in names]) for of in (one, many))
    factor = float(a @ b) / (float(a @ a) or 1.0)
    if not factor or not np.allclose(
        b, factor * a, rtol=0.0, atol=1e-6 * float(np.abs(b).max(initial=0.0))
    ):
        return None
    return f"all gradients are {factor:.4g} times those of one process"


def _of_gradients(case: Case) -> Cause:
    drawn = _draws(case)
    if drawn:
        return cause("randomness", drawn)
    opening = case.many.first("opening")
    d = case.difference
    reads = _reads(case, "step")
    if any(case.many.first("notes", r).get("clips_itself") for r in range(case.many.size)):
        return cause(
            "clipping", "the script calls torch.nn.utils.clip_grad_norm_ or clip_grad_value_"
        )
    clamps = _noted(case, "clamps", "step")
    if clamps:
        return cause("clipping", f"the script clips gradients itself: {clamps[0]}")
    cleared = _noted(case, "cleared", "step")
    if cleared:
        return cause("gradients-cleared", f"zero_grad() at {cleared[0]}")
    regraded = sorted(
        {
            n
            for r in range(case.many.size)
            for n in case.many.steps(r)[d.step - 1].get("regraded", [])
        }
    )
    if regraded:
        return cause(
            "gradients-changed",
            f"that of {regraded[0]!r}",
            *(f"by {place}" for place in _noted(case, "regraded", "step")[:2]),
        )
    if _without_micro(case) and _proportional(case):
        return cause("accumulation", "without micro-batches it is equal", _proportional(case))
    exchanges = _noted(case, "exchange", "step")
    if exchanges:
        return cause("exchange-by-script", f"the script calls {', '.join(exchanges[:3])}")
    splitting = _splitting(case)
    hooked = [
        n
        for n in opening.get("hooked", [])
        if n in (d.name, *d.others) or any(x.startswith(f"{n}.") for x in (d.name, *d.others))
    ]
    names = set(opening.get("names", []))
    # a module's changes what is below it too
    hooked += [n for n in opening.get("hooked", []) if n not in names and n not in hooked]
    if splitting is False and not hooked:
        return _not_of_splitting(case, "rank-dependent-gradients")
    if reads and splitting is not False:
        return cause("rank-dependent-gradients", reads)
    if not hooked and case.one.loss_kind() in ("state", "over-batch"):
        kind = case.one.loss_kind()
        return cause(_LOSSES[kind], _LOSS_ANSWERS[kind])
    if hooked:
        if reads:
            return cause("rank-dependent-gradients", reads, f"{hooked[0]!r} has a hook")
        return cause("gradient-hook", f"{hooked[0]!r} has a hook")
    if splitting is None:
        return cause("unknown", reads)
    return cause("batch-dependent-gradients", "one process that splits the batch alike differs too")


def _of_rate(case: Case) -> Cause:
    scheduled = case.one.first("opening").get("contract", {}).get("the scheduler") != "NoneType"
    stepped = case.many.notes().get("scheduler", []) + case.one.notes().get("scheduler", [])
    where = f"the script steps a scheduler at {stepped[0].split('|', 1)[1]}" if stepped else None
    reads = _asks(case, "between", "setup")
    k = case.difference.step - 1
    alike = {
        t.steps(r)[k].get("scheduled")
        for t in (case.one, case.many)
        for r in range(t.size)
        if k < len(t.steps(r))
    }
    # it is stepped as it should be, and gives what the workers' number says
    if (scheduled or stepped) and len(alike) == 1 and reads:
        first = {tuple(t.steps(r)[0]["lr"]) for t in (case.one, case.many) for r in range(t.size)}
        return cause(
            "scheduler-depends-on-workers"
            if len(first) == 1
            else "learning-rate-depends-on-workers",
            reads,
        )
    return cause("scheduler" if scheduled or stepped else "learning-rate", where, reads)


def _of_weights(case: Case) -> Cause:
    drawn = _draws(case, "drawn_by_optimizer")
    if drawn:
        return cause("optimizer-randomness", drawn)
    d = case.difference
    tied = None if case.replicated else _tied(case)
    if tied is not None:
        return tied
    k = d.step - 1
    rewritten = {
        n
        for t in (case.one, case.many)
        for r in range(t.size)
        for n in t.steps(r)[k].get("rewritten", [])
    }
    if rewritten & {d.name, *d.others}:
        return cause(
            "weights-changed-in-forward", f"{d.name!r} is written to before the optimizer's step"
        )
    return cause("optimizer-depends-on-workers", _reads(case, "update"))


def _of_buffers(case: Case) -> Cause:
    module = case.difference.name.rpartition(".")[0]
    if module in case.one.first("opening").get("batchnorms", []) and case.one.first("opening").get(
        "contract", {}
    ).get("sync_batchnorm"):
        return cause(
            "batchnorm",
            f"{module!r} is a batch normalisation, and sync_batchnorm=True is on: it is "
            "called with less than the batch",
        )
    if module in case.one.first("opening").get("batchnorms", []):
        return cause("batchnorm", f"{module!r} is a batch normalisation")
    return cause("buffers", _reads(case, "step"))


def _of_evaluation(case: Case) -> Cause:
    d = case.difference
    if d.name == "number of evaluations":
        return cause("rank-dependent-loop", _reads(case, "between"))
    if d.name == "samples":
        return cause("evaluation-depends-on-workers", _reads(case, "between", "setup", "evaluate"))
    if d.name.startswith("sample "):
        return cause(
            "unseeded-data", "the evaluation's data set gives other values under the same index"
        )
    if any(e.get("drawn") for t in (case.one, case.many) for e in t.evaluations()):
        return cause("randomness", "drawn during evaluation")
    reads = _reads(case, "evaluate")
    if reads:
        return cause("evaluation-depends-on-workers", reads)
    shape = next((e["metrics"].get(d.name) for e in case.one.evaluations()), None)
    if shape is not None and not _mixes(case, "evaluate", d.step):
        return cause(
            "state-outside-the-model",
            f"the metric {d.name!r} returns {shape}: these values depend on what a worker has kept",
        )
    if d.name != "loss" and shape is None:
        return cause("metric-not-a-mean")
    kind = case.one.loss_kind()
    if kind in _LOSSES and shape is None:
        return cause(_LOSSES[kind])
    if _mixes(case, "evaluate", d.step) is False:
        return cause(
            "state-outside-the-model",
            "a sample's output in evaluation does not depend on the others: on what a "
            "worker has kept of its own",
        )
    return cause("evaluation-depends-on-batch")


def _of_steps(case: Case) -> Cause:
    return cause("rank-dependent-loop", _reads(case, "between", "setup"))


_BY_PHASE: dict[str, Callable[[Case], Cause]] = {
    "contract": _of_contract,
    "initial weights": _of_init,
    "initial buffers": _of_init,
    "order": _of_order,
    "data": _of_data,
    "weights between steps": _of_between,
    "dropout": _of_dropout,
    "outputs": _of_outputs,
    "loss": _of_loss,
    "gradients": _of_gradients,
    "clipped gradients": _of_gradients,
    "learning rate": _of_rate,
    "scheduler": _of_rate,
    "weights": _of_weights,
    "buffers": _of_buffers,
    "evaluation": _of_evaluation,
    "steps": _of_steps,
}

# In this order: the first rules rest on an experiment that removes the difference, which is proof;
# the last one, by phase, always answers.
RULES: list[Callable[[Case], Cause | None]] = [
    _of_rank,
    _of_files,
    _of_seeds,
    _of_uneven_shares,
    _of_spectral_norm,
    _of_plan,
    _of_phase,
]
