"""Names the cause of a difference: rules over the two traces and over short experiments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ronde.prove.catalogue import Cause, cause
from ronde.prove.compare import BATCH, EPOCHS, ROWS, Difference
from ronde.prove.evidence import Case, clock_of, first_steps, module_of
from ronde.prove.experiment import Experiment
from ronde.prove.loss_evidence import LOSS_ANSWERS, LOSS_CAUSES, ask_gradients

__all__ = ["GONE", "SEEDED", "diagnose", "disagreement"]

GONE = "told that it is rank 0 of 1 wherever it asks, every worker trains like one process"
"""Evidence that the script's own use of its rank is the cause."""
SEEDED = "where all workers start with the same seed"
"""Where an unseeded script is equal."""
_STARTS = ("contract", "initial weights", "initial buffers", "data", "order")
_AFTER_FORWARD = ("outputs", "loss", "gradients", "buffers")
_DRAWING = ("batch", "dropout", "outputs", "loss", "gradients", "clipped gradients")
# phase -> cause, and where asking for the rank would explain it
_BY_READING = {
    "loop": ("rank-dependent-loop", "between", "setup"),
    "order": ("sampler-depends-on-workers", "setup", "between"),
    "weights between steps": ("weights-changed-by-script", "between"),
    "steps": ("rank-dependent-loop", "between", "setup"),
}
_BY_RANK = {
    "loop": "rank-dependent-loop",
    "batch": "batch-changed-by-script",
    "optimizer settings": "optimizer-settings",
    "optimizer state": "optimizer-depends-on-workers",
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
_BY_SEED = _BY_RANK.keys() - {
    "optimizer settings",
    "optimizer state",
    "initial weights",
    "clipped gradients",
    "scheduler",
    "weights",
    "buffers",
}


def diagnose(case: Case) -> Cause:
    """The cause by the first rule of :data:`RULES` that applies."""
    diagnosis = next((c for c in (rule(case) for rule in RULES) if c), None) or _unknown(case)
    drift = _drift(case)
    if drift is None:
        return diagnosis
    if diagnosis.id == "randomness":  # harmless only while all workers have the same weights
        return cause("replicas-drift", *diagnosis.evidence, drift)
    return replace(diagnosis, evidence=(*diagnosis.evidence, drift))


def _drift(case: Case) -> str | None:
    """Whether workers that hold the whole model have different weights after the step."""
    steps = min(map(len, case.many.all_steps()))
    if not case.replicated or not 0 < case.difference.step <= steps:
        return None
    first = case.many.of(0, case.k, "weight")
    for rank in range(1, case.many.size):
        for name, theirs in case.many.of(rank, case.k, "weight").items():
            mine = first.get(name, theirs)
            floor = 1e-9 * float(np.abs(mine).max(initial=0.0))
            if mine.shape == theirs.shape and not np.allclose(
                mine, theirs, rtol=0.0, atol=floor, equal_nan=True
            ):
                return (
                    f"after step {case.difference.step} the workers' own weights differ: {name!r} "
                    f"of rank {rank} is not that of rank 0"
                )
    return None


# -- rules that rest on an experiment, or on the plan --------------------------------------


def _of_rank(case: Case) -> Cause | None:
    """The script asks for its rank or the number of workers, and that makes the difference."""
    d = case.difference
    if d.phase not in _BY_RANK or not case.is_by_rank():
        return None
    id = _BY_RANK[d.phase]
    if d.phase in ("initial weights", "initial buffers") and isinstance(d.one, list | str):
        id = "model-depends-on-workers"
    if d.phase in ("learning rate", "scheduler"):
        id = _of_rate(case).id
    if d.phase == "evaluation" and d.name == "number of evaluations":
        id = "rank-dependent-loop"
    exchanges = case.many.places("exchange", "step")
    if d.phase == "gradients" and exchanges:
        return cause("exchange-by-script", f"the script calls {', '.join(exchanges[:3])}")
    if d.phase == "order" and not case.reads_of_rank("setup"):
        id = "rank-dependent-loop"  # the loop's body went on without training
    return cause(id, case.reads_of_rank(), GONE)


def _of_files(case: Case) -> Cause | None:
    """It differs from the start, and the script reads a file that another run wrote."""
    read = case.many.places("reread")
    if not read or case.difference.phase not in _STARTS:
        return None
    return cause("reads-another-run", f"it reads {', '.join(read[:3])}")


def _of_seeds(case: Case) -> Cause | None:
    """The difference goes away if all workers start with the same seed."""
    d = case.difference
    alike = case.experiment(Experiment.ALIKE) if d.phase in _BY_SEED else None
    if alike is None:
        return None
    left = case.left(alike)
    if left is not None and left.place <= d.place:
        return None
    evidence = f"{SEEDED}, {_rest(left)}"
    drawn = case.draws() if d.phase in ("outputs", "loss", "gradients") else None
    if drawn:  # in every step: that is more than a value drawn once
        return cause("randomness", drawn, evidence)
    of_data = d.phase == "data" or d.name.startswith("sample ")
    return cause("unseeded-data" if of_data else "unseeded-script", evidence)


def _of_uneven_shares(case: Case) -> Cause | None:
    """The script exchanges tensors, and all is equal until workers have unequal sample counts."""
    if not case.replicated or case.difference.phase in ("order", "data", "evaluation"):
        return None
    exchanges = case.many.places("exchange", "step", "between", "update")
    shares = case.shares()
    uneven = next((k for k, sizes in enumerate(shares) if len(set(sizes)) > 1), None)
    if not exchanges or uneven is None or case.difference.step not in (uneven + 1, uneven + 2):
        return None
    evidence = (
        f"until step {uneven} all workers have the same number of samples, and it is equal; in "
        f"step {uneven + 1} they have {shares[uneven]}"
    )
    if uneven == 0:
        even = case.shares(case.fewer)[: case.difference.step] if case.fewer else []
        if not even or any(len(set(sizes)) > 1 for sizes in even):
            return None
        evidence = (
            f"on {len(even[0])} workers all have the same number of samples, and it is equal; on "
            f"{len(shares[0])} they have {shares[0]}"
        )
    return cause("mean-of-means", evidence, f"the script calls {', '.join(exchanges[:3])}")


def _of_spectral_norm(case: Case) -> Cause | None:
    """A spectral norm iterates in every forward pass, and a step has several."""
    iterating = case.opening("iterating")
    if (
        not iterating
        or not case.has_several_passes()
        or case.difference.phase not in _AFTER_FORWARD
    ):
        return None
    return cause("state-of-each-pass", f"{iterating[0]!r} is normalized by its spectrum")


def _of_plan(case: Case) -> Cause | None:
    """The plan splits the model, and replicate is equal."""
    if case.replicated or not case.replicate_equal:
        return None
    tied = _tied(case)
    if tied is not None:
        return tied
    change = case.changes_per_call() if case.difference.phase in _AFTER_FORWARD else None
    return cause("state-of-each-pass", change) if change else cause("plan")


def _tied(case: Case) -> Cause | None:
    """Parameters that differ share memory without being one parameter."""
    for names in case.one.first("opening").get("shared", []):
        if set(case.names) & set(names):
            return cause("tied-weights", f"{' and '.join(names)} share their memory")
    return None


def _of_state(case: Case) -> Cause | None:
    """State that each worker carries from batch to batch: an earlier step with as many samples is
    equal. A layer that mixes samples would differ as soon as they are dealt out.
    """
    k, shares = case.k, case.shares()
    if (
        not 0 < k < len(shares)
        or shares[k] not in shares[:k]
        or case.asks_for_rank("step", "between")
    ):
        return None
    if case.difference.phase == "outputs" and case.mixes_samples("step", k):
        return None
    are = "is" if k == 1 else "are"
    return cause(
        "state-outside-the-model",
        f"{first_steps(k)} {are} equal, with as many samples on each worker",
    )


def _not_of_splitting(case: Case, by_rank: str) -> Cause:
    """One process that splits the batch alike does not differ: the rank, if the script asks."""
    reads = case.asks_for_rank("step", "between") or case.asks_for_rank()
    evidence = "one process that splits the batch alike does not differ"
    if reads:
        return cause(by_rank, reads, evidence)
    unseen = f"{evidence}, and the script was not seen to ask for its rank"
    return _of_state(case) or _unknown(case, unseen)


# -- rules by phase ------------------------------------------------------------------------


def _of_phase(case: Case) -> Cause:
    """The rule for the phase of the difference."""
    phase = case.difference.phase
    if phase in _BY_READING:
        id, *phases = _BY_READING[phase]
        return cause(id, case.reads_of_rank(*phases))
    # where each row's draws are the same anyway, the loop does more than draw
    mixed = phase == "batch" and case.one.is_keyed
    drawn = case.draws() if phase in _DRAWING and not mixed else None
    return cause("randomness", drawn) if drawn else _BY_PHASE.get(phase, _unknown)(case)


def _unknown(case: Case, *evidence: str | None) -> Cause:
    """What is known, where no cause is."""
    reads = case.reads_of_rank("setup", "step", "between", "update", "evaluate")
    return cause("unknown", *evidence, case.who_differs(), case.what_is_equal(), reads)


def _of_contract(case: Case) -> Cause:
    return cause(_contract_id(case.difference.name), case.reads_of_rank("setup"))


def _contract_id(name: str) -> str:
    if name == EPOCHS:
        return "rank-dependent-loop"
    if name in ("the length of the data set", "the samples of an epoch"):
        return "data-depends-on-workers"
    if "'s lr " in name:
        return "learning-rate-depends-on-workers"
    if name == "batch_size":
        return "batch-size-depends-on-workers"
    of_model = name.startswith(("parameter", "buffer", "the dropout"))
    return "model-depends-on-workers" if of_model else "arguments-depend-on-workers"


def disagreement(text: str) -> tuple[Difference, str] | None:
    """The difference in ronde.distribute's message on disagreeing ranks, and its cause's name."""
    pattern = r"The ranks disagree on (.+?) in ronde\.distribute: (.*?)\. Every worker"
    match = re.search(pattern, text, re.S)
    if not match:
        return None
    name = match[1]
    id = _contract_id(name)
    if id == "data-depends-on-workers":
        id = "data-depends-on-rank"
    if name == "the order that the sampler draws":
        id = "sampler-depends-on-workers"
    return Difference("distribute", 0, name, None, None, match[2]), id


def _of_init(case: Case) -> Cause:
    if isinstance(case.difference.one, list | str):
        return cause("model-depends-on-workers", case.reads_of_rank("setup"))
    if reads := case.asks_for_rank("setup"):
        return cause("init-depends-on-workers", reads)
    alike = "one process starts alike every time, and the script was not seen to ask for its rank"
    return _unknown(case, alike)


def _of_data(case: Case) -> Cause:
    if case.difference.name == ROWS:
        return cause("rows-are-not-samples", case.dropped_rows("out"))
    # without digests, the script's own loading processes read the samples
    recorded = any(s["digests"] for s in case.one.steps())
    if case.difference.name.startswith(BATCH) and recorded:
        if drawn := case.many.places("collate"):
            return cause("randomness", f"drawn from {drawn[0]} in the collate function")
        return cause("batch-dependent-collate", "the samples are the same, the batch is not")
    reads = case.asks_for_rank("setup", "between", "step")
    # one process read the same twice
    return cause("data-depends-on-rank" if reads else "data-not-by-index", reads)


def _of_batch(case: Case) -> Cause:
    """The batch that the loop passes to ``run.step``, made of the same rows."""
    if own := case.many.places("own generator", "step"):
        return cause("batch-changed-by-script", f"drawn from a generator of its own: {own[0]}")
    alone = "the batch that run.batches() yields is the same, the one that run.step() gets is not"
    drawn = case.draws()
    return cause("loop-mixes-rows", alone, drawn, case.dropped_rows("given"))


def _of_dropout(case: Case) -> Cause:
    if reads := case.asks_for_rank():
        return cause("rank-dependent-forward", reads)
    return _of_state(case) or _unknown(case)


def _of_outputs(case: Case) -> Cause:
    if case.has_other_inputs("(model)"):
        alone = "the batch is the same, the model's inputs are not"
        id = "batch-changed-by-script" if case.reads_of_rank("step") else "loop-mixes-rows"
        return cause(id, alone)
    splitting = case.splitting()
    source = case.difference
    if isinstance(splitting, Difference) and splitting.phase == "outputs":
        source = splitting
    name = module_of(source.name)
    modules = case.one.first("opening").get("modules", {})
    kind = modules.get(name)
    is_batchnorm = name in case.opening("batchnorms")
    evidence = f"{name!r} is a {kind}" if kind else None
    if kind and not is_batchnorm and case.has_other_inputs(name):
        parent = name.rpartition(".")[0]
        holder = f"{repr(parent) if parent else 'the model'} ({modules.get(parent)})"
        evidence = f"the inputs of {name!r} differ already: {holder} computes them"
        if functional := case.one.places("batch_norm", "step"):
            place = functional[0]
            return cause("batchnorm", evidence, f"torch.nn.functional.batch_norm at {place}")
    if "(call " in case.difference.name and case.rewritten_weights():
        return cause(
            "weights-changed-by-script",
            "weights are written to within the step, between two forward passes",
        )
    if is_batchnorm:
        return cause("batchnorm", evidence, _with_sync_batchnorm(case))
    if splitting is False:
        return _not_of_splitting(case, "rank-dependent-forward")
    return _of_mixing(case, name, kind, evidence, splitting)


def _with_sync_batchnorm(case: Case) -> str | None:
    if case.contract("sync_batchnorm"):
        return (
            "sync_batchnorm=True is on: it normalizes over a micro-batch or a piece of the global "
            "batch"
        )
    synced = case.experiment(Experiment.SYNC_BATCHNORM)
    if synced is None:
        return None
    return f"with sync_batchnorm=True {_rest(case.left(synced))}"


def _rest(d: Difference | None) -> str:
    if d is None:
        return "it is equal"
    return f"the next difference is: {d.phase}, step {d.step}, {d.name}"


def _of_mixing(
    case: Case, name: str, kind: str | None, evidence: str | None, splitting: object
) -> Cause:
    """Outputs that differ in one process too, if it splits the batch."""
    if related := case.related_output():
        return cause("loss-over-the-batch", related)
    if padded := case.padded_output():
        return cause("padding", padded)
    if change := case.changes_per_call():
        return cause("state-of-each-pass", change)
    if (kept := _of_state(case)) is not None:
        return kept
    reads = case.reads_of_rank("step")
    if reads and (splitting is None or kind is None or name.startswith("(")):
        return cause("rank-dependent-forward", reads)
    if splitting is None:
        return cause("batch-dependent-layer", evidence)
    also = "one process that splits the batch alike differs too"
    return cause("batch-dependent-layer", evidence, also)


def _of_loss(case: Case) -> Cause:
    if dropped := case.dropped_rows("out"):
        return cause("rows-are-not-samples", dropped)
    if dropped := case.dropped_rows("given"):
        return cause("loop-mixes-rows", dropped)
    kind = case.one.loss_kind()
    if kind in LOSS_CAUSES:
        return cause(LOSS_CAUSES[kind], LOSS_ANSWERS[kind])
    if factor := case.factor_of_micro_batches():
        return cause("accumulation", "without micro-batches it is equal", factor)
    splitting = case.splitting()
    if splitting is False:
        return _not_of_splitting(case, "rank-dependent-forward")
    if related := case.related_output():
        return cause("loss-over-the-batch", related)
    if padded := case.padded_output():
        return cause("padding", padded)
    if kind in ("mean", "pair") and splitting is None and case.asks_for_rank("step"):
        return cause("rank-dependent-forward", case.reads_of_rank("step"))
    if isinstance(splitting, Difference) and splitting.phase == "outputs":
        return _of_outputs(case)  # a pipeline's stages record no outputs
    kept = _of_state(case) if kind == "mean" else None
    if kept is not None:
        return kept
    by_gradients = ask_gradients(case)
    if by_gradients is not None:
        # the loss was a mean over samples before
        if case.k > 0 and by_gradients[0] == "loss-over-the-batch":
            steps = first_steps(case.k)
            evidence = f"the loss of {steps} is equal, with the same weights"
            return cause("state-outside-the-model", evidence)
        return cause(*by_gradients)
    return _of_own_loop(case)


def _of_own_loop(case: Case) -> Cause:
    """The loss of a script that owns its loop: only its values are known."""
    local = [p for steps in case.many.all_steps() for p in steps[case.k]["local"] if p[2]]
    values = [value for value, weight, _ in local if weight is None]
    one = case.difference.one
    known = isinstance(one, float) and 0 < len(values) == len(local)
    if known and abs(sum(values) - one) <= 1e-9 * abs(one):
        return cause("loss-is-a-sum", f"the workers' losses add up to {one:.6g}")
    reads = case.reads_of_rank("step")
    return cause("rank-dependent-forward", reads) if reads else cause("loss-over-the-batch")


def _of_gradients(case: Case) -> Cause:
    changed = _gradients_changed(case)
    if changed is not None:
        return changed
    if factor := case.factor_of_micro_batches():
        return cause("accumulation", "without micro-batches it is equal", factor)
    if exchanges := case.many.places("exchange", "step"):
        return cause("exchange-by-script", f"the script calls {', '.join(exchanges[:3])}")
    splitting, reads = case.splitting(), case.reads_of_rank("step")
    hooked = _hooked(case)
    if splitting is False and not hooked:
        return _not_of_splitting(case, "rank-dependent-gradients")
    if reads and splitting is not False:
        return cause("rank-dependent-gradients", reads)
    kind = case.one.loss_kind()
    if not hooked and kind in ("state", "over-batch"):
        return cause(LOSS_CAUSES[kind], LOSS_ANSWERS[kind])
    if hooked:
        id = "rank-dependent-gradients" if reads else "gradient-hook"
        return cause(id, reads, f"{hooked[0]!r} has a hook")
    if splitting is None:
        return _unknown(case)
    return cause("batch-dependent-gradients", "one process that splits the batch alike differs too")


def _gradients_changed(case: Case) -> Cause | None:
    """The script was seen to change gradients itself."""
    many = case.many
    if any(many.first("notes", r).get("clips_itself") for r in range(many.size)):
        call = "torch.nn.utils.clip_grad_norm_ or clip_grad_value_"
        return cause("clipping", f"the script calls {call}")
    if clamps := many.places("clamps", "step"):
        return cause("clipping", f"the script clips gradients itself: {clamps[0]}")
    if cleared := many.places("cleared", "step"):
        return cause("gradients-cleared", f"zero_grad() at {cleared[0]}")
    regraded = sorted({n for s in many.all_steps() for n in s[case.k].get("regraded", [])})
    if not regraded:
        return None
    by = (f"by {place}" for place in many.places("regraded", "step")[:2])
    return cause("gradients-changed", f"that of {regraded[0]!r}", *by)


def _hooked(case: Case) -> list[str]:
    """Parameters and modules with gradient hooks that may have caused the difference."""
    opening = case.many.first("opening")
    names, hooks = set(opening.get("names", [])), opening.get("hooked", [])
    direct = [h for h in hooks if any(n == h or n.startswith(f"{h}.") for n in case.names)]
    # a hook on a module changes gradients below it too
    return direct + [h for h in hooks if h not in names and h not in direct]


def _of_rate(case: Case) -> Cause:
    scheduled = case.contract("the scheduler") != "NoneType"
    stepped = case.many.places("scheduler") + case.one.places("scheduler")
    where = f"the script steps a scheduler at {stepped[0]}" if stepped else None
    reads = case.asks_for_rank("between", "setup")
    steps = [s for run in case.runs for s in run.all_steps()]
    counts = {s[case.k].get("scheduled") for s in steps if case.k < len(s)}
    if clock := clock_of(case.many, "between", "update"):
        return cause("rate-by-clock", clock)
    # stepped equally often everywhere: its values depend on the number of workers
    if (scheduled or stepped) and len(counts) == 1 and reads:
        starts = {tuple(s[0]["lr"]) for s in steps}
        what = "scheduler" if len(starts) == 1 else "learning-rate"
        return cause(f"{what}-depends-on-workers", reads)
    return cause("scheduler" if scheduled or stepped else "learning-rate", where, reads)


def _of_weights(case: Case) -> Cause:
    drawn = case.draws("drawn_by_optimizer")
    if drawn:
        return cause("optimizer-randomness", drawn)
    tied = None if case.replicated else _tied(case)
    if tied is not None:
        return tied
    if case.rewritten_weights() & set(case.names):
        name = case.difference.name
        evidence = f"{name!r} is written to before the optimizer's step"
        return cause("weights-changed-in-forward", evidence)
    return cause("optimizer-depends-on-workers", case.reads_of_rank("update"))


def _of_buffers(case: Case) -> Cause:
    module = case.difference.name.rpartition(".")[0]
    if module not in case.opening("batchnorms"):
        return cause("buffers", case.reads_of_rank("step"))
    evidence = f"{module!r} is a batch normalization"
    if case.contract("sync_batchnorm"):
        evidence += ", and sync_batchnorm=True is on: it gets less than the batch"
    return cause("batchnorm", evidence)


def _of_evaluation(case: Case) -> Cause:
    d = case.difference
    if d.name == "number of evaluations":
        return cause("rank-dependent-loop", case.reads_of_rank("between"))
    if d.name == "samples":
        reads = case.reads_of_rank("between", "setup", "evaluate")
        return cause("evaluation-depends-on-workers", reads)
    if d.name.startswith("sample "):
        evidence = "the evaluation's data set gives other values under the same index"
        return cause("unseeded-data", evidence)
    if any(e.get("drawn") for run in case.runs for e in run.evaluations()):
        return cause("randomness", "drawn during evaluation")
    reads = case.reads_of_rank("evaluate")
    if reads:
        return cause("evaluation-depends-on-workers", reads)
    shape = next((e["metrics"].get(d.name) for e in case.one.evaluations()), None)
    if shape is not None and not case.mixes_samples("evaluate", d.step):
        return cause(
            "state-outside-the-model",
            f"the metric {d.name!r} returns {shape}: these values depend on a worker's own state",
        )
    if d.name != "loss" and shape is None:
        return cause("metric-not-a-mean")
    kind = case.one.loss_kind()
    if kind in LOSS_CAUSES and shape is None:
        return cause(LOSS_CAUSES[kind])
    if case.mixes_samples("evaluate", d.step) is False:
        return cause(
            "state-outside-the-model",
            "in evaluation a sample's output does not depend on the other samples: it depends on "
            "a worker's own state",
        )
    return cause("evaluation-depends-on-batch")


_BY_PHASE: dict[str, Callable[[Case], Cause]] = {
    "contract": _of_contract,
    "initial weights": _of_init,
    "initial buffers": _of_init,
    "data": _of_data,
    "batch": _of_batch,
    "dropout": _of_dropout,
    "outputs": _of_outputs,
    "loss": _of_loss,
    "gradients": _of_gradients,
    "clipped gradients": _of_gradients,
    "learning rate": _of_rate,
    "optimizer settings": lambda case: cause("optimizer-settings", case.reads_of_rank()),
    "optimizer state": _of_weights,
    "scheduler": _of_rate,
    "weights": _of_weights,
    "buffers": _of_buffers,
    "evaluation": _of_evaluation,
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
