"""Why two runs differ: what is known from their traces, and further short runs with one thing changed where that is ambiguous."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ronde.study.prove_trace import Difference, Trace, compare

__all__ = ["CAUSES", "Case", "Cause", "diagnose", "disagreement"]

CAUSES: dict[str, tuple[str, str]] = {
    "unseeded-sampler": (
        "The order of samples is another one in every run: the sampler draws from a generator that nothing seeds.",
        "Draw from torch's, numpy's or random's own generators, which ronde seeds for the sampler, or leave shuffling to ronde.",
    ),
    "unseeded-data": (
        "The same sample has other values in every run or on every worker: the data set is made or augmented with what nothing seeds.",
        "Seed before the data set is made (torch.manual_seed); within __getitem__, torch's, numpy's and random's own generators are seeded by ronde.",
    ),
    "unseeded-init": (
        "The initial weights are others in every run, although prove seeds torch, numpy and random.",
        "Initialise from these generators, or from one with a fixed seed.",
    ),
    "unseeded-script": (
        "Two runs of the script with one process pass other arguments to ronde.distribute.",
        "Look for the clock and for unseeded choices.",
    ),
    "nondeterministic-kernel": (
        "Two runs with one process, same samples, same weights, differ: something computes another result each time.",
        "Look at this place for a non-deterministic kernel, a random generator of its own, uninitialised memory or the clock.",
    ),
    "data-depends-on-workers": (
        "The data set depends on the number of workers.",
        "Give every worker the whole data set: ronde deals the samples out.",
    ),
    "data-depends-on-rank": (
        "The data set depends on the rank: workers have other samples under the same index.",
        "Give every worker the same data set (seeded alike): ronde deals the samples out.",
    ),
    "sampler-depends-on-workers": (
        "The order of samples depends on the rank or the number of workers.",
        "Give every worker the same sampler over all samples: ronde deals them out.",
    ),
    "init-depends-on-workers": (
        "The initial weights depend on the rank or the number of workers.",
        "Seed alike on every worker, whatever their number.",
    ),
    "learning-rate-depends-on-workers": (
        "The script scales the optimizer's learning rate by the number of workers, but the global batch stays the same.",
        "Leave the learning rate alone, or ask for batch='grow', which scales both by a stated rule.",
    ),
    "batch-size-depends-on-workers": (
        "The script computes batch_size from the number of workers, but batch_size is global already.",
        "Pass the global batch size, or batch='grow' with the size per worker.",
    ),
    "arguments-depend-on-workers": (
        "What the script passes to ronde.distribute depends on the rank or the number of workers.",
        "Pass the same on every worker, whatever their number.",
    ),
    "model-depends-on-workers": ("The model depends on the rank or the number of workers.", "Build the same model on every worker."),
    "batchnorm": (
        "Batch normalisation takes its statistics from the samples of one worker, not of the global batch.",
        "sync_batchnorm=True in ronde.distribute, or a normalisation that does not mix samples (GroupNorm, LayerNorm).",
    ),
    "state-of-each-pass": (
        "A layer changes a state of its own in every forward pass (a counter, a running mean, the iterate of spectral normalisation), and a "
        "step has several passes here.",
        "One pass a step: neither micro-batches nor a pipeline; or the layer in eval() while its state shall stay.",
    ),
    "batch-dependent-layer": (
        "A layer mixes the samples of its batch, so its output depends on which of them are on the same worker.",
        "Normalise or attend within a sample; what must see the whole batch cannot be split over workers or micro-batches.",
    ),
    "padding": (
        "Samples are padded to the longest of their batch, and the padding changes the result: it depends on which samples are together.",
        "Mask the padding in attention, pooling and loss (src_key_padding_mask, ignore_index), or pad to a fixed length.",
    ),
    "rank-dependent-forward": (
        "The forward pass takes another way depending on the rank or the number of workers.",
        "Compute the same on every worker; branch on the rank only for output.",
    ),
    "randomness": (
        "The step draws random numbers: N workers draw others than one process. The same in distribution, not in value.",
        "Nothing, if that is meant. To prove the rest, switch it off with an argument of the script.",
    ),
    "loss-is-a-sum": (
        "The loss is a sum over samples, not a mean: ronde averages over workers and micro-batches, so N workers train with a part of it.",
        "reduction='mean', or return (sum, 1 / scale) or (losses.sum(), number of samples).",
    ),
    "loss-is-a-weighted-mean": (
        "The loss is a mean with unequal weights (tokens that are not padding, class weights): workers' means are not the mean of all.",
        "Return (sum of losses, sum of weights), for example (F.cross_entropy(…, reduction='sum'), (target != -100).sum()).",
    ),
    "loss-over-the-batch": (
        "The loss is not a mean over samples: it relates the samples of a batch to each other (contrastive, a root or a maximum of all).",
        "Return the mean of what each sample contributes. What must see the whole batch cannot be split over workers.",
    ),
    "accumulation": (
        "Micro-batches are accumulated twice over: the script scales the loss by their number, and ronde does as well.",
        "Pass run.backward() the mean over the micro-batch's samples, unscaled.",
    ),
    "gradient-hook": (
        "A hook changes the gradients of one worker's samples before they are averaged.",
        "Change gradients after the exchange: between run.backward() and run.update(), or with clip_norm=.",
    ),
    "clipping": (
        "The script clips gradients of a part of the batch: before the exchange, or for each micro-batch.",
        "clip_norm= in ronde.distribute clips the global gradient once a step.",
    ),
    "rank-dependent-gradients": (
        "The gradients are changed depending on the rank or the number of workers.",
        "ronde averages gradients by itself: do not divide or change them by rank or world size.",
    ),
    "batch-dependent-gradients": (
        "The backward pass mixes the samples of its batch (a custom autograd function, a backward hook).",
        "Make the gradient of each sample independent of the others.",
    ),
    "tied-weights": (
        "Two parameters share their memory without being one parameter: a plan that moves or splits them separates them.",
        "Tie the parameter itself: decoder.weight = encoder.weight, not decoder.weight.data = encoder.weight.data.",
    ),
    "learning-rate": (
        "The learning rate differs although the optimizer began alike.",
        "Set it through the scheduler passed to ronde.distribute.",
    ),
    "scheduler": (
        "The scheduler has been stepped another number of times.",
        "Pass it to ronde.distribute, which steps it once per optimizer step, and do not step it yourself.",
    ),
    "optimizer-randomness": (
        "The optimizer draws random numbers in its step, others on every worker.",
        "Draw from a generator that is seeded alike on every worker, keyed by the step.",
    ),
    "optimizer-depends-on-workers": (
        "With equal gradients the optimizer makes another step: it has state of its own, or depends on the rank or the number of workers.",
        "An optimizer's step must be a function of gradients, weights and its state.",
    ),
    "stale-optimizer": (
        "The optimizer is over other parameters than the model has: they are replaced or copied after it was built, and are never trained.",
        "Build the optimizer from model.parameters() after the last change of the model's layers, and distribute after both.",
    ),
    "weights-changed-by-script": (
        "The script changes weights between steps, and not alike on every worker.",
        "Change them by what is the same on all workers: the weights and the global loss, not this worker's samples or rank.",
    ),
    "buffers": (
        "A buffer is computed from this worker's samples, not the global batch.",
        "Compute it from weights or constants, or average it over workers (torch.distributed.all_reduce).",
    ),
    "metric-not-a-mean": (
        "The metric is not a mean over samples: the values of parts do not average to the value of all.",
        "Return one value per sample or (sum, weight), or use a torchmetrics object.",
    ),
    "evaluation-depends-on-workers": (
        "The evaluation depends on the rank or the number of workers.",
        "Call run.evaluate() on every worker with the whole data set: ronde deals it out and counts each sample once.",
    ),
    "evaluation-depends-on-batch": (
        "The model's output in evaluation depends on which samples are evaluated together.",
        "In eval mode each sample must stand for itself.",
    ),
    "dropout-in-evaluation": (
        "Dropout is active during evaluation: the result is random. F.dropout(x, p) is on unless told otherwise.",
        "F.dropout(x, p, training=self.training), or nn.Dropout.",
    ),
    "rank-dependent-loop": (
        "Workers do not run the same number of steps or evaluations as one process does: the loop depends on the rank or their number.",
        "Every worker goes through run.epochs, run.batches, run.step and run.evaluate alike; only output is for run.is_main.",
    ),
    "plan": (
        "Only this plan differs, replicate is equal: the plan does not carry this model out exactly.",
        "Use another plan for this model, and report it: this should be refused or be right.",
    ),
    "unknown": ("The cause is not known.", "The names above say where to look."),
}
"""Identifier -> what is the case, and what to do."""


@dataclass(frozen=True)
class Cause:
    """Why a run differs.

    Attributes:
        id: one of :data:`CAUSES`.
        why: what is the case.
        cure: what to do.
        evidence: what was seen that says so.
    """

    id: str
    why: str
    cure: str
    evidence: tuple[str, ...] = ()


def cause(id: str, *evidence: str | None) -> Cause:
    """The cause of that name."""
    return Cause(id, *CAUSES[id], tuple(e for e in evidence if e))


@dataclass
class Case:
    """What a diagnosis has at hand.

    Attributes:
        again: ``again("split")`` runs one process over micro-batches like the workers' shares; ``"twice"`` one process with each forward
            pass computed twice; ``"whole"`` the workers without the script's micro-batches; ``"sync_batchnorm"`` with it on. None where
            that run failed.
        replicated: whether the plan only splits the data.
        replicate_equal: whether plain replicate was found equal.
    """

    one: Trace
    many: Trace
    difference: Difference
    again: Callable[[str], Trace | None]
    replicated: bool = True
    replicate_equal: bool = False


def _reads(case: Case, *phases: str) -> str | None:
    """Where the user's code asked for its rank or the number of workers."""
    found = [n.split("|", 1) for n in case.many.notes().get("rank", [])]
    told = [place.replace("@", " at ") for phase, place in found if phase in phases]
    return f"the script reads {', '.join(told[:3])}" if told else None


def _draws(case: Case, key: str = "drawn") -> str | None:
    """Whether the step drew random numbers, and where."""
    drawn = {g for t in (case.one, case.many) for s in t.steps() for g in s.get(key, [])}
    if not drawn:
        return None
    phase = "step" if key == "drawn" else "update"
    places = [n.split("|", 1)[1].replace("@", " at ") for n in case.one.notes().get("random", []) if n.startswith(phase + "|")]
    return f"drawn from {', '.join(sorted(drawn))}" + (f": {', '.join(places[:3])}" if places else "")


def _module_of(name: str) -> str:
    return re.sub(r"( \(call \d+\)|\[.*)$", "", name)


def diagnose(case: Case) -> Cause:
    """The cause of a difference."""
    iterating = case.one.first("opening").get("iterating", [])
    if iterating and _several_passes(case) and case.difference.phase in ("outputs", "loss", "gradients", "buffers"):
        return cause("state-of-each-pass", f"{iterating[0]!r} is normalised by its spectrum")
    if not case.replicated and case.replicate_equal:
        d = case.difference
        shared = [names for names in case.one.first("opening").get("shared", []) if {d.name, *d.others} & set(names)]
        if shared:
            return cause("tied-weights", f"{' and '.join(shared[0])} share their memory")
        return cause("plan")
    return _BY_PHASE.get(case.difference.phase, _unknown)(case)


def _several_passes(case: Case) -> bool:
    return not case.replicated or case.many.first("opening").get("micro_batch") is not None


def _unknown(case: Case) -> Cause:
    return cause("unknown", _reads(case, "setup", "step", "between", "update", "evaluate"))


def _of_contract(case: Case) -> Cause:
    return cause(_contract_id(case.difference.name), _reads(case, "setup"))


def _contract_id(name: str) -> str:
    if name in ("the length of the data set", "the samples of an epoch"):
        return "data-depends-on-workers"
    if "'s lr " in name:
        return "learning-rate-depends-on-workers"
    if name == "batch_size":
        return "batch-size-depends-on-workers"
    return "model-depends-on-workers" if name.startswith(("parameter", "buffer")) else "arguments-depend-on-workers"


def disagreement(text: str) -> tuple[Difference, str] | None:
    """What ronde.distribute said that ranks disagree on, and the cause's name."""
    found = re.search(r"The ranks disagree on (.+?) in ronde\.distribute: (.*?)\. Every worker", text, re.S)
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
    shapes = isinstance(case.difference.one, list | str)
    return cause("model-depends-on-workers" if shapes else "init-depends-on-workers", _reads(case, "setup"))


def _of_order(case: Case) -> Cause:
    return cause("sampler-depends-on-workers", _reads(case, "setup", "between"))


def _of_data(case: Case) -> Cause:
    reads = _reads(case, "setup", "between", "step")
    return cause("data-depends-on-rank" if reads else "unseeded-data", reads)


def _of_between(case: Case) -> Cause:
    return cause("weights-changed-by-script", _reads(case, "between"))


def _splitting(case: Case) -> Difference | bool | None:
    """Does one process that splits the batch as the workers do differ too? None: it cannot tell."""
    split = case.again("split")
    if split is None or not split.steps():
        return None
    found = compare(case.one, split).difference
    return found if found is not None and found.phase != "steps" and found.step <= case.difference.step else False


def _of_outputs(case: Case) -> Cause:
    drawn = _draws(case)
    if drawn:
        return cause("randomness", drawn)
    opening = case.one.first("opening")
    splitting = _splitting(case)
    d = case.difference
    name = _module_of(splitting.name if isinstance(splitting, Difference) and splitting.phase == "outputs" else d.name)
    kind = opening.get("modules", {}).get(name)
    what = f"{name!r} is a {kind}" if kind else None
    if splitting is False:
        return cause("rank-dependent-forward", _reads(case, "step"), "one process that splits the batch alike does not differ")
    if name in opening.get("batchnorms", []):
        cured = case.again("sync_batchnorm")
        left = compare(case.one, cured).difference if cured is not None else None
        told = None
        if cured is not None and cured.steps():
            told = (
                "with sync_batchnorm=True it is equal"
                if left is None
                else f"with sync_batchnorm=True the next difference is: {left.phase}, step {left.step}, {left.name}"
            )
        return cause("batchnorm", what, told)
    padded = _padded(case)
    if padded:
        return cause("padding", padded)
    moved = _moves(case)
    if moved:
        return cause("state-of-each-pass", moved)
    if splitting is None:
        reads = _reads(case, "step")
        return cause("rank-dependent-forward", reads) if reads else cause("batch-dependent-layer", what)
    if kind is None or name.startswith("("):
        reads = _reads(case, "step")
        if reads:
            return cause("rank-dependent-forward", reads)
    return cause("batch-dependent-layer", what, "one process that splits the batch alike differs too")


def _moves(case: Case) -> str | None:
    """A layer whose output is another one when it is called for the second time with the same."""
    if not _several_passes(case):
        return None
    twice = case.again("twice")
    found = compare(case.one, twice).difference if twice is not None and twice.steps() else None
    if found is None or found.phase != "outputs" or found.step > case.difference.step:
        return None
    return f"computed twice from the same samples, the output of {_module_of(found.name)!r} is another one"


def _padded(case: Case) -> str | None:
    """An output whose samples have another shape with one process than with a worker's share."""
    k = case.difference.step - 1
    one = case.one.steps()[k]["shapes"]
    for rank in range(case.many.size):
        for key, shape in case.many.steps(rank)[k]["shapes"].items():
            if key in one and one[key] != shape:
                return f"a sample of {key.removeprefix('out|')!r} has shape {one[key]} with one process, {shape} on rank {rank}"
    return None


_LOSSES = {
    "sum": "loss-is-a-sum",
    "weighted": "loss-is-a-weighted-mean",
    "over-batch": "loss-over-the-batch",
    "state": "loss-over-the-batch",
}
_LOSS_ANSWERS = {
    "sum": "asked about parts of a batch, the loss answers like a sum",
    "weighted": "asked about parts of a batch, the loss answers like a mean with weights",
    "over-batch": "asked about parts of a batch, the loss or its gradient answers like neither a mean nor a sum",
    "state": "asked about the same samples again, the loss answers otherwise: it keeps a state, computed from what it was given before",
}


def _of_loss(case: Case) -> Cause:
    drawn = _draws(case)
    if drawn:
        return cause("randomness", drawn)
    kind = case.one.loss_kind()
    if kind in _LOSSES:
        return cause(_LOSSES[kind], _LOSS_ANSWERS[kind])
    if _without_micro(case):
        return cause("accumulation", "without micro-batches it is equal")
    splitting = _splitting(case)
    if splitting is False:
        return cause("rank-dependent-forward", _reads(case, "step"), "one process that splits the batch alike does not differ")
    padded = _padded(case)
    if padded:
        return cause("padding", padded)
    if kind in ("mean", "pair") and splitting is None:
        return cause("rank-dependent-forward", _reads(case, "step"))
    if isinstance(splitting, Difference) and splitting.phase == "outputs":
        return _of_outputs(case)  # of a pipeline's stages no outputs are noted
    # A script that owns its loop: its loss is known by its values only.
    d = case.difference
    local = [part for r in range(case.many.size) for part in case.many.steps(r)[d.step - 1]["local"] if part[2]]
    values = [v for v, w, _ in local if w is None]
    reads = _reads(case, "step")
    if values and len(values) == len(local) and isinstance(d.one, float):
        if abs(sum(values) - d.one) <= 1e-9 * abs(d.one):
            return cause("loss-is-a-sum", f"the workers' losses add up to {d.one:.6g}")
        if reads:
            return cause("rank-dependent-forward", reads)
        if min(values) <= d.one <= max(values):
            return cause("loss-is-a-weighted-mean", "the loss of all lies between those of the workers, but is not their mean")
    elif reads:
        return cause("rank-dependent-forward", reads)
    return cause("loss-over-the-batch")


def _without_micro(case: Case) -> bool:
    """Whether the difference goes away without the script's micro-batches."""
    if case.many.first("opening").get("micro_batch") is None:
        return False
    whole = case.again("whole")
    if whole is None or not whole.steps():
        return False
    left = compare(case.one, whole).difference
    return left is None or ((left.phase, left.step) > (case.difference.phase, case.difference.step) and left.step > case.difference.step)


def _of_gradients(case: Case) -> Cause:
    drawn = _draws(case)
    if drawn:
        return cause("randomness", drawn)
    opening = case.many.first("opening")
    d = case.difference
    reads = _reads(case, "step")
    if any(case.many.first("notes", r).get("clips_itself") for r in range(case.many.size)):
        return cause("clipping", "the script calls torch.nn.utils.clip_grad_norm_ or clip_grad_value_")
    if _without_micro(case):
        return cause("accumulation", "without micro-batches it is equal")
    splitting = _splitting(case)
    hooked = [n for n in opening.get("hooked", []) if n in (d.name, *d.others) or any(x.startswith(f"{n}.") for x in (d.name, *d.others))]
    names = set(opening.get("names", []))
    hooked += [n for n in opening.get("hooked", []) if n not in names and n not in hooked]  # a module's changes what is below it too
    if (reads and splitting is not False) or (splitting is False and not hooked):
        return cause(
            "rank-dependent-gradients", reads, None if splitting is not False else "one process that splits the batch alike does not differ"
        )
    if not hooked and case.one.loss_kind() in ("state", "over-batch"):
        return cause("loss-over-the-batch", _LOSS_ANSWERS[case.one.loss_kind()])
    if hooked:
        if reads:
            return cause("rank-dependent-gradients", reads, f"{hooked[0]!r} has a hook")
        return cause("gradient-hook", f"{hooked[0]!r} has a hook")
    return cause("batch-dependent-gradients", "one process that splits the batch alike differs too" if splitting else None)


def _of_rate(case: Case) -> Cause:
    scheduled = case.one.first("opening").get("contract", {}).get("the scheduler") != "NoneType"
    stepped = case.many.notes().get("scheduler", []) + case.one.notes().get("scheduler", [])
    where = f"the script steps a scheduler at {stepped[0].split('|', 1)[1]}" if stepped else None
    reads = _reads(case, "between", "setup")
    if scheduled and not stepped and reads:  # it is stepped as it should be, and gives what the workers' number says
        return cause("learning-rate-depends-on-workers", reads)
    return cause("scheduler" if scheduled or stepped else "learning-rate", where, reads)


def _of_weights(case: Case) -> Cause:
    drawn = _draws(case, "drawn_by_optimizer")
    if drawn:
        return cause("optimizer-randomness", drawn)
    d = case.difference
    shared = [names for names in case.one.first("opening").get("shared", []) if {d.name, *d.others} & set(names)]
    if shared and not case.replicated:
        return cause("tied-weights", f"{' and '.join(shared[0])} share their memory")
    return cause("optimizer-depends-on-workers", _reads(case, "update"))


def _of_buffers(case: Case) -> Cause:
    module = case.difference.name.rpartition(".")[0]
    if module in case.one.first("opening").get("batchnorms", []):
        return cause("batchnorm", f"{module!r} is a batch normalisation")
    return cause("buffers", _reads(case, "step"))


def _of_evaluation(case: Case) -> Cause:
    d = case.difference
    if d.name == "number of evaluations":
        return cause("rank-dependent-loop", _reads(case, "between"))
    if d.name == "samples":
        return cause("evaluation-depends-on-workers", _reads(case, "between", "setup", "evaluate"))
    if any(e.get("drawn") for t in (case.one, case.many) for e in t.evaluations()):
        return cause("randomness", "drawn during evaluation")
    reads = _reads(case, "evaluate")
    if reads:
        return cause("evaluation-depends-on-workers", reads)
    if d.name != "loss":
        return cause("metric-not-a-mean")
    kind = case.one.loss_kind()
    return cause(_LOSSES[kind]) if kind in _LOSSES else cause("evaluation-depends-on-batch")


def _of_steps(case: Case) -> Cause:
    return cause("rank-dependent-loop", _reads(case, "between", "setup"))


_BY_PHASE: dict[str, Callable[[Case], Cause]] = {
    "contract": _of_contract,
    "initial weights": _of_init,
    "initial buffers": _of_init,
    "order": _of_order,
    "data": _of_data,
    "weights between steps": _of_between,
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
