"""Causes that prove can name: one table of rules over two traces and short experiments, and what
is said of each cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ronde.prove.compare import BATCH, EPOCHS, ROWS, Difference
from ronde.prove.evidence import Case, module_of
from ronde.prove.experiment import Experiment

__all__ = [
    "ALONE_IS_EQUAL",
    "CAUSES",
    "SEEDED",
    "Cause",
    "cause",
    "diagnose",
    "disagreement",
]

CAUSES: dict[str, tuple[str, str]] = {
    "unseeded-sampler": (
        "The order of samples changes from run to run: the sampler's generator was never seeded.",
        "Draw from global generators, which ronde seeds for it, or leave shuffling to ronde.",
    ),
    "unseeded-data": (
        "The same sample has different values in each run or on each worker: the dataset is "
        "created or augmented with a random generator that was never seeded.",
        "Call torch.manual_seed(0) before the dataset is created, split, or shuffled (also "
        "numpy.random.seed and random.seed if you draw from those). Within __getitem__, draw from "
        "the global generators, which ronde seeds, or seed your own from them.",
    ),
    "data-not-by-index": (
        "A sample has different values on another worker: they depend on samples read earlier (a "
        "counter, a generator, a cache, labels that the loop writes) or on the process (the order "
        "of a set of strings).",
        "Compute each sample from its index alone. Within __getitem__, draw from the global "
        "generators, which ronde seeds for each sample. Use sorted() to give a set an order.",
    ),
    "unseeded-init": (
        "Initial weights differ from run to run, even though prove seeds torch, NumPy, and random.",
        "Initialize from these generators, or from one with a fixed seed.",
    ),
    "unseeded-script": (
        "The script draws from a generator that was never seeded (for arguments, a second "
        "network, targets, or a choice), so its values differ between workers or between runs.",
        "Call torch.manual_seed(0) at the top of the script (also numpy.random.seed and "
        "random.seed if you draw from those). If two runs of one process still differ, look for "
        "the clock or a generator of its own.",
    ),
    "nondeterministic-kernel": (
        "Two equal runs of one process differ: an operation is not deterministic.",
        "Look for nondeterministic kernels, separate generators, uninitialized memory, or a clock.",
    ),
    "not-repeatable": (
        "Two equal runs of one process differ: the script depends on the clock, or on a generator "
        "that was never seeded.",
        "Compute it from run.state.step, and draw from generators that the script seeds.",
    ),
    "rows-are-not-samples": (
        "A batch has another number of rows than samples were asked for: the collate function "
        "drops or adds some, and which ones depends on the share.",
        "Filter in the dataset, before ronde.distribute, so that every sample is one row.",
    ),
    "loop-mixes-rows": (
        "Between run.batches() and run.step(), the loop changes the batch in a way that depends "
        "on the worker: it mixes or selects rows of its share, reads its rank, or draws from its "
        "own generator.",
        "Change each row by itself, or mix by what all workers have: run.gather(x) returns the "
        "rows of the global batch. Draw from global generators, which ronde seeds.",
    ),
    "optimizer-settings": (
        "The optimizer's settings (weight decay, momentum, its parameters) are not those of one "
        "process.",
        "Set them alike on every worker, from run.state.step or from values that all workers have.",
    ),
    "data-depends-on-workers": (
        "The dataset depends on the number of workers.",
        "Give every worker the whole dataset: ronde divides the samples among them.",
    ),
    "data-depends-on-rank": (
        "The dataset depends on the rank: workers have different samples under the same index.",
        "Give every worker the same dataset, with the same seed: ronde divides its samples.",
    ),
    "sampler-depends-on-workers": (
        "The order of samples depends on the rank or the number of workers.",
        "Give every worker the same sampler over all samples: ronde divides them.",
    ),
    "init-depends-on-workers": (
        "The initial weights depend on the rank or the number of workers.",
        "Use the same seed on every worker, for any number of workers.",
    ),
    "learning-rate-depends-on-workers": (
        "The script scales the learning rate by the number of workers, but the global batch stays.",
        "Leave the learning rate alone, or pass batch='grow', which scales both by a stated rule.",
    ),
    "batch-size-depends-on-workers": (
        "The script computes batch_size from the number of workers, but it is already global.",
        "Pass the global batch size, or batch='grow' with the size per worker.",
    ),
    "arguments-depend-on-workers": (
        "The arguments of ronde.distribute depend on the rank or the number of workers.",
        "Pass the same arguments on every worker, for any number of workers.",
    ),
    "model-depends-on-workers": (
        "The model depends on the rank or the number of workers.",
        "Build the same model on every worker.",
    ),
    "batchnorm": (
        "Batch normalization takes its statistics from the samples of one worker, not of the "
        "global batch.",
        "sync_batchnorm=True in ronde.distribute, or a normalization that does not mix samples "
        "(GroupNorm, LayerNorm).",
    ),
    "batch-dependent-collate": (
        "The collate function mixes samples, so a batch depends on which samples share a worker.",
        "Do it per sample in the dataset, or in the model, where sync_batchnorm can handle it.",
    ),
    "batch-dependent-layer": (
        "An output depends on more than its own sample: a layer mixes the samples of its batch, "
        "or keeps state that each forward pass changes (a counter, a running mean, a generator of "
        "NumPy's).",
        "Normalize or attend within a sample; a layer over the whole batch cannot be split. Let "
        "each step have one pass, or put a layer whose state must not change in eval() mode.",
    ),
    "padding": (
        "Samples are padded to the longest one in their batch, and the padding changes the result.",
        "Mask the padding in attention, pooling, and loss (src_key_padding_mask, ignore_index), "
        "or pad to a fixed length.",
    ),
    "rank-dependent-forward": (
        "The forward pass takes a different path depending on the rank or the number of workers.",
        "Compute the same on every worker; branch on the rank only for output.",
    ),
    "randomness": (
        "The step draws random numbers, and N workers draw different ones than one process. The "
        "results agree in distribution, not in value.",
        "Nothing, if intended. To prove the rest, switch it off with an argument of the script.",
    ),
    "loss-is-a-sum": (
        "The loss is a sum over samples, not a mean. ronde averages over workers and "
        "micro-batches, so N workers train with a fraction of it.",
        "Use reduction='mean', or return (sum, 1 / scale) or (losses.sum(), number of samples).",
    ),
    "loss-is-a-weighted-mean": (
        "The loss is a mean with unequal weights (tokens that are not padding, class weights), so "
        "the mean of the workers' means is not the mean of all.",
        "Return (sum of losses, sum of weights), for example (F.cross_entropy(…, "
        "reduction='sum'), (target != -100).sum()).",
    ),
    "loss-over-the-batch": (
        "The loss is not a mean over samples: it relates the samples of a batch to each other (a "
        "contrastive loss, a root or maximum over all samples), or weights them unequally.",
        "Return the mean of each sample's part, or (sum of losses, sum of weights). A loss over "
        "the whole batch cannot be split.",
    ),
    "state-outside-the-model": (
        "The forward pass, the loss, or a metric depends on state outside the model's parameters "
        "and buffers, which each worker changes by its own calls and samples (a counter, a running "
        "scale, centers with their own optimizer).",
        "Make it a parameter or buffer, or update it from values that are equal on all workers.",
    ),
    "loss-pair": (
        "The loss returns (sum, weight), but these are not sums over samples. ronde adds both up "
        "over workers and micro-batches, then divides.",
        "Return the plain sum of samples' losses and the sum of their weights, or the mean alone.",
    ),
    "accumulation": (
        "The loss is divided by the number of micro-batches twice: by the script and by ronde.",
        "Pass run.backward() the mean over the micro-batch's samples, unscaled.",
    ),
    "gradients-changed": (
        "Gradients are changed before they cover the whole batch: by the script between backward() "
        "and update() (cleared, scaled, clamped), by a hook, or by a custom autograd function that "
        "mixes samples.",
        "Change gradients after the last run.backward() of a step and before run.update(), which "
        "clears them. clip_norm= of ronde.distribute clips, the optimizer's weight_decay= decays. "
        "Make the gradient of each sample independent of the others.",
    ),
    "clipping": (
        "The script clips gradients of part of the batch: before the all-reduce, or per "
        "micro-batch.",
        "Use clip_norm= in ronde.distribute: it clips the global gradient once per step.",
    ),
    "rank-dependent-gradients": (
        "The script changes gradients depending on the rank or the number of workers.",
        "ronde averages gradients itself: do not divide or change them by rank or world size.",
    ),
    "exchange-by-script": (
        "The script exchanges tensors between workers within the step. all_gather passes no "
        "gradient back, all_reduce sums gradients that ronde averages as well, and a mean of "
        "workers' means is wrong where they have unequal shares.",
        "Leave averaging to ronde, which weights losses and gradients by samples. Gather with "
        "torch.distributed.nn.functional.all_gather; exchange sums and counts, then divide.",
    ),
    "replicas-drift": (
        "Each worker changes gradients or weights by different random numbers after the "
        "all-reduce. Replicas drift apart, and only one is saved.",
        "Draw the same numbers everywhere: torch.Generator().manual_seed(run.state.step).",
    ),
    "tied-weights": (
        "Two parameters share memory but are not one: plans that move or split them separate them.",
        "Tie the parameter itself (decoder.weight = encoder.weight), not its .data.",
    ),
    "learning-rate": (
        "The learning rate differs during the training: it is set from the rank, the number of "
        "workers, or one worker's values.",
        "Set it through the scheduler passed to ronde.distribute, or from the loss that run.step() "
        "and run.update() return, which is the same on all workers.",
    ),
    "scheduler": (
        "The scheduler was stepped a different number of times, or its length, milestones, or "
        "warm-up depend on the number of workers.",
        "Create it as for one process and pass it to ronde.distribute, which steps it once per "
        "optimizer step; do not step it.",
    ),
    "optimizer-depends-on-workers": (
        "With equal gradients, the optimizer takes a different step: it draws random numbers, has "
        "hidden state, or depends on the rank or the number of workers.",
        "An optimizer's step must be a function of gradients, weights, and its state; draw from a "
        "generator with one seed on every worker, keyed by the step.",
    ),
    "stale-optimizer": (
        "The optimizer does not hold the model's parameters: they were replaced or copied after "
        "it was built, so the model is never trained.",
        "Build the optimizer from model.parameters() after the last change to the model's layers.",
    ),
    "weights-changed-by-script": (
        "The script changes weights outside the optimizer's step (between steps, or in the "
        "forward pass, as nn.Embedding(max_norm=…) does), and not alike on every worker.",
        "Change them by values that are the same on all workers: the weights and the global loss, "
        "not this worker's samples or rank.",
    ),
    "buffers": (
        "A buffer is computed from this worker's samples, not the global batch.",
        "Compute it from weights or constants, or average it over workers (dist.all_reduce).",
    ),
    "metric-not-a-mean": (
        "The metric is not a mean over samples, or depends on state that each worker keeps: the "
        "mean of its parts is not its value over all.",
        "Return one value per sample or (sum, weight), or use a torchmetrics object.",
    ),
    "evaluation-depends-on-workers": (
        "The evaluation depends on the rank or the number of workers.",
        "Call run.evaluate() on every worker with the whole dataset: ronde divides it.",
    ),
    "evaluation-depends-on-batch": (
        "The model's output in evaluation depends on more than the sample: on those evaluated "
        "with it, or on state that each worker keeps.",
        "In eval mode, compute each sample independently of the others and of earlier calls.",
    ),
    "dropout-in-evaluation": (
        "Dropout is active during evaluation: the result is random. F.dropout is on by default.",
        "Use F.dropout(x, p, training=self.training), or nn.Dropout.",
    ),
    "rank-dependent-loop": (
        "Workers do not run the same steps, exchanges, or evaluations as one process: the loop "
        "depends on the rank, the number of workers, or a value that one worker computed alone.",
        "Run the loop alike on every worker; use run.is_main only for output. Stop on the result "
        "of run.step(), run.update(), or run.evaluate(), which is the same on all workers.",
    ),
    "plan": (
        "Only this plan differs, replicate is equal: the plan does not train this model exactly.",
        "Use another plan for this model, and report this: ronde should refuse it or get it right.",
    ),
    "unknown": (
        "The cause is not known.",
        "Look at what happens just before the first difference: earlier steps, and what its own "
        "step compares before it, are equal.",
    ),
}
"""Identifier -> (explanation, cure)."""


@dataclass(frozen=True)
class Cause:
    """Why a run differs.

    Attributes:
        id: one of :data:`CAUSES`.
        why: the explanation.
        cure: the recommended fix.
        evidence: the observations behind it.
    """

    id: str
    why: str
    cure: str
    evidence: tuple[str, ...] = ()


def cause(id: str, *evidence: str | None) -> Cause:
    """Look a cause up by its identifier."""
    return Cause(id, *CAUSES[id], tuple(e for e in evidence if e))


ALONE_IS_EQUAL = (
    "told that it is rank 0 of 1 wherever it asks, every worker trains like one process"
)
"""Evidence that the script's own use of its rank is the cause."""
SEEDED = "where all workers start with the same seed"
"""Where an unseeded script is equal."""

Seen = Callable[[Case], str | None]
"""What a rule rests on: the evidence, empty if its phase says enough; None: it does not apply."""

# What reads the rank, by the phase in which that shows first.
_READING_THE_RANK = {
    "loop": "rank-dependent-loop",
    "batch": "loop-mixes-rows",
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
    "learning rate": "learning-rate",
    "scheduler": "learning-rate",
    "weights": "optimizer-depends-on-workers",
    "buffers": "buffers",
    "evaluation": "evaluation-depends-on-workers",
    "steps": "rank-dependent-loop",
}
_PASSES = ("dropout", "outputs", "loss", "gradients", "clipped gradients")
_DRAWING = ("batch", *_PASSES)
_LOSS_KINDS = {
    "sum": ("loss-is-a-sum", "a sum"),
    "weighted": ("loss-is-a-weighted-mean", "a mean with weights"),
    "over-batch": ("loss-over-the-batch", "neither a mean nor a sum, or its gradient does"),
    "state": ("state-outside-the-model", "another value for the same samples"),
    "pair-mean": ("loss-pair", "a mean in the first of the pair"),
    "pair-weight": ("loss-pair", "weights that do not add up"),
    "pair-other": ("loss-pair", "neither a sum nor a mean in the first of the pair"),
}


@dataclass(frozen=True)
class CauseRule:
    """One row of the table.

    Attributes:
        cause: its name, or what tells it.
        phases: of the difference.
        seen: what it rests on.
        splits: also asks one process that splits the batch as the workers do: it differs too
            (True), or does not (False).
    """

    cause: str | Callable[[Case], str]
    phases: tuple[str, ...]
    seen: Seen
    splits: bool | None = None

    def apply(self, case: Case) -> Cause | None:
        """The cause, if the rule applies."""
        if case.difference.phase not in self.phases:
            return None
        evidence = self.seen(case)
        if evidence is None:
            return None
        splitting = ""
        if self.splits is not None:
            left = case.splitting()
            if left is None or bool(left) != self.splits:
                return None
            does = "differs too" if left else "does not differ"
            splitting = f"one process that splits the batch alike {does}"
        name = self.cause if isinstance(self.cause, str) else self.cause(case)
        return cause(name, evidence, splitting)


def diagnose(case: Case) -> Cause:
    """The cause by the first rule of :data:`RULES` that applies; else ``unknown``."""
    diagnosis = next((c for c in (rule.apply(case) for rule in RULES) if c), None)
    if diagnosis is None:
        splitting = ""
        if case.difference.phase in _PASSES and case.splitting() is False:
            splitting = "one process that splits the batch alike does not differ"
        reads = case.reads_of_rank("setup", "step", "between", "update", "evaluate")
        diagnosis = cause("unknown", splitting, reads)
    drift = case.drift()
    if drift is None:
        return diagnosis
    if diagnosis.id == "randomness":  # harmless only while all workers have the same weights
        return cause("replicas-drift", *diagnosis.evidence, drift)
    return replace(diagnosis, evidence=(*diagnosis.evidence, drift))


def disagreement(text: str) -> tuple[Difference, str] | None:
    """The difference in ronde.distribute's message on disagreeing ranks, and its cause's name."""
    pattern = r"The ranks disagree on (.+?) in ronde\.distribute: (.*?)\. Every worker"
    match = re.search(pattern, text, re.S)
    if not match:
        return None
    name = match[1]
    id = _contract(name)
    if id == "data-depends-on-workers":
        id = "data-depends-on-rank"
    if name == "the order that the sampler draws":
        id = "sampler-depends-on-workers"
    return Difference("distribute", 0, name, None, None, match[2]), id


# -- what rules rest on --------------------------------------------------------------------


def _always(case: Case) -> str:
    return ""


def _reads(*phases: str) -> Seen:
    """The script asks for its rank, and it was not seen that this makes no difference."""
    return lambda case: case.asks_for_rank(*phases)


def _read_or_not(*phases: str) -> Seen:
    return lambda case: case.reads_of_rank(*phases) or ""


def _noted(text: str, what: str, *phases: str) -> Seen:
    """The script was seen to do something, in some phases."""

    def seen(case: Case) -> str | None:
        places = case.many.places(what, *phases)
        return f"{text} {', '.join(places[:3])}" if places else None

    return seen


def _named(*starts: str) -> Seen:
    return lambda case: "" if case.difference.name.startswith(starts) else None


def _other_shape(case: Case) -> str | None:
    return (
        case.reads_of_rank("setup") or "" if isinstance(case.difference.one, list | str) else None
    )


def _alone_is_equal(case: Case) -> str | None:
    if not case.is_by_rank():
        return None
    return f"{case.reads_of_rank()}; {ALONE_IS_EQUAL}"


def _seeded_is_equal(case: Case) -> str | None:
    alike = case.experiment(Experiment.ONE_SEED)
    left = case.left(alike) if alike is not None else None
    if alike is None or (left is not None and left.place <= case.difference.place):
        return None
    rest = "it is equal"
    if left is not None:
        rest = f"the next difference is: {left.phase}, step {left.step}, {left.name}"
    drawn = case.draws() if case.difference.phase in _PASSES else None
    return "; ".join(filter(None, (drawn, f"{SEEDED}, {rest}")))


def _uneven_shares(case: Case) -> str | None:
    """The script exchanges tensors, and all is equal until workers have unequal sample counts."""
    exchanges = case.many.places("exchange", "step", "between", "update")
    shares = case.shares()
    uneven = next((k for k, sizes in enumerate(shares) if len(set(sizes)) > 1), None)
    if not exchanges or not uneven or case.difference.step not in (uneven + 1, uneven + 2):
        return None
    return (
        f"it calls {', '.join(exchanges[:3])}; until step {uneven} all workers have the same "
        f"number of samples, and it is equal; in step {uneven + 1} they have {shares[uneven]}"
    )


def _only_this_plan(case: Case) -> str | None:
    return "" if case.replicate_equal and not case.replicated else None


def _tied(case: Case) -> str | None:
    """Parameters that differ share memory without being one parameter."""
    for names in case.opening("shared") if not case.replicated else ():
        if set(case.names) & set(names):
            return f"{' and '.join(names)} share their memory"
    return None


def _draws(case: Case) -> str | None:
    # where each row's draws are the same anyway, the loop does more than draw
    return None if case.difference.phase == "batch" and case.one.has_same_draws else case.draws()


def _recorded(case: Case) -> str | None:
    # without digests, the script's own loading processes read the samples
    recorded = any(step["digests"] for step in case.one.steps())
    return "the samples are the same, the batch is not" if recorded else None


def _collated(case: Case) -> str | None:
    return _recorded(case) if case.difference.name.startswith(BATCH) else None


def _collate_draws(case: Case) -> str | None:
    drawn = case.many.places("collate")
    return f"drawn from {drawn[0]} in the collate function" if drawn and _collated(case) else None


def _changed_batch(case: Case) -> str:
    own = case.many.places("own generator", "step")
    drawn = f"drawn from a generator of its own: {own[0]}" if own else case.draws()
    alone = "the batch that run.batches() yields is the same, the one that run.step() gets is not"
    return "; ".join(filter(None, (alone, drawn, case.dropped_rows("given"))))


def _other_inputs(case: Case) -> str | None:
    alone = "the batch is the same, the model's inputs are not"
    return alone if case.has_other_inputs("(model)") else None


def _written_in_forward(case: Case) -> str | None:
    """Weights are written to before the optimizer's step."""
    names = case.rewritten_weights()
    if case.difference.phase == "outputs":
        again = names and "(call " in case.difference.name
        return (
            "weights are written to within the step, between two forward passes" if again else None
        )
    written = sorted(names & set(case.names))
    return f"{written[0]!r} is written to before the optimizer's step" if written else None


def _batchnorm(case: Case) -> str | None:
    """The layer at which the outputs part is a batch normalization."""
    source = case.source()
    if source.phase == "buffers":
        name = source.name.rpartition(".")[0]
    elif source.phase == "outputs":
        name = module_of(source.name)
    else:
        return None
    synced = ", and sync_batchnorm=True is on: it gets less than the batch"
    if name in case.opening("batchnorms"):
        on = case.one.first("opening").get("contract", {}).get("sync_batchnorm")
        return f"{name!r} is a {case.kind_of(name)}{synced * bool(on)}"
    return None


def _layer(case: Case) -> str:
    """The layer at which the outputs part, and how."""
    source = case.source()
    name = module_of(source.name)
    kind = case.kind_of(name)
    where = f"{name!r} is a {kind}" if kind and source.phase == "outputs" else None
    return "; ".join(filter(None, (where, case.equal_before())))


def _split_outputs(case: Case) -> str | None:
    return _layer(case) if case.source().phase == "outputs" else None


def _loss_kind(case: Case) -> str | None:
    answer = _LOSS_KINDS.get(case.one.loss_kind())
    return f"asked about parts of a batch, the loss gives {answer[1]}" if answer else None


def _loss_cause(case: Case) -> str:
    return _LOSS_KINDS[case.one.loss_kind()][0]


def _mixing_loss(case: Case) -> str | None:
    return _loss_kind(case) if case.one.loss_kind() in ("state", "over-batch") else None


def _divided_twice(case: Case) -> str | None:
    """Every loss of a step is divided by the number of micro-batches twice."""
    d = case.difference
    parts = len(case.many.steps()[case.k]["micro"])
    if parts < 2 or not isinstance(d.one, float) or not isinstance(d.many, float):
        return None
    twice = abs(d.many * parts - d.one) <= 1e-9 * abs(d.one)
    return f"the loss is {d.many / d.one:.4g} times that of one process" if twice else None


def _sum_of_losses(case: Case) -> str | None:
    """The loss of a script that owns its loop: only its values are known."""
    local = [p for steps in case.many.all_steps() for p in steps[case.k]["local"] if p[2]]
    values = [value for value, weight, _ in local if weight is None]
    one = case.difference.one
    known = isinstance(one, float) and 0 < len(values) == len(local)
    if known and abs(sum(values) - one) <= 1e-9 * abs(one):
        return f"the workers' losses add up to {one:.6g}"
    return None


def _hooked(case: Case) -> str | None:
    """A parameter or module has a gradient hook that may have caused the difference."""
    names, hooks = set(case.opening("names")), case.opening("hooked")
    direct = [h for h in hooks if any(n == h or n.startswith(f"{h}.") for n in case.names)]
    # a hook on a module changes gradients below it too
    hooked = direct + [h for h in hooks if h not in names]
    return f"{hooked[0]!r} has a hook" if hooked else None


def _hook_cause(case: Case) -> str:
    return "rank-dependent-gradients" if case.reads_of_rank("step") else "gradients-changed"


def _schedules(case: Case) -> str | None:
    """The script has a scheduler, which ronde or it steps."""
    stepped = case.many.places("scheduler") + case.one.places("scheduler")
    if stepped:
        return f"the script steps a scheduler at {stepped[0]}"
    contract = case.one.first("opening").get("contract", {})
    return "" if contract.get("the scheduler") != "NoneType" else None


def _scheduled_by_rank(case: Case) -> str | None:
    return _schedules(case) if case.is_by_rank() else None


def _evaluation_draws(case: Case) -> str | None:
    drawn = any(e.get("drawn") for run in case.runs for e in run.evaluations())
    return "drawn during evaluation" if drawn else None


def _contract(name: str) -> str:
    """The cause of a difference between arguments."""
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


def _rank_cause(case: Case) -> str:
    phase = case.difference.phase
    if phase == "gradients" and case.many.places("exchange", "step"):
        return "exchange-by-script"
    if phase == "order" and not case.reads_of_rank("setup"):
        return "rank-dependent-loop"  # the loop's body went on without training
    return _READING_THE_RANK[phase]


def _seed_cause(case: Case) -> str:
    d = case.difference
    if d.phase in _PASSES and case.draws():  # in every step: more than a value drawn once
        return "randomness"
    of_data = d.phase == "data" or d.name.startswith("sample ")
    return "unseeded-data" if of_data else "unseeded-script"


_ANY = tuple(_READING_THE_RANK)
_RATES = ("learning rate", "scheduler")
_GRADIENTS = ("gradients", "clipped gradients")
_UPDATED = ("weights", "optimizer state")
_INITIAL = ("initial weights", "initial buffers")
_NOT_BY_SEED = {*_UPDATED, "optimizer settings", "initial weights", "scheduler", "buffers"}
_SEEDED = tuple(p for p in _ANY if p not in {*_NOT_BY_SEED, "clipped gradients"})
_EXCHANGES = _noted("the script calls", "exchange", "step", "between", "update")

RULES = (
    CauseRule("model-depends-on-workers", _INITIAL, _other_shape),
    CauseRule("rank-dependent-loop", ("evaluation",), _named("number of evaluations")),
    # An experiment in which the difference is gone is proof.
    CauseRule("scheduler", _RATES, _scheduled_by_rank),
    CauseRule(_rank_cause, _ANY, _alone_is_equal),
    CauseRule(_seed_cause, _SEEDED, _seeded_is_equal),
    CauseRule("exchange-by-script", (*_PASSES, *_RATES, *_UPDATED), _uneven_shares),
    CauseRule("tied-weights", _UPDATED, _tied),
    # Replicate has one pass a step; one process that splits the batch has several, as this plan.
    CauseRule(
        "batch-dependent-layer", ("outputs", "loss", *_GRADIENTS, "buffers"), _only_this_plan, True
    ),
    CauseRule("plan", _ANY, _only_this_plan),
    CauseRule(lambda case: _contract(case.difference.name), ("contract",), _read_or_not("setup")),
    CauseRule("rank-dependent-loop", ("loop", "steps"), _read_or_not("between", "setup")),
    CauseRule("sampler-depends-on-workers", ("order",), _read_or_not("setup", "between")),
    CauseRule("weights-changed-by-script", ("weights between steps",), _read_or_not("between")),
    CauseRule("randomness", _DRAWING, _draws),
    CauseRule(
        "rows-are-not-samples",
        ("data",),
        lambda case: case.dropped_rows("out") if case.difference.name == ROWS else None,
    ),
    CauseRule("randomness", ("data",), _collate_draws),
    CauseRule("batch-dependent-collate", ("data",), _collated),
    CauseRule("data-depends-on-rank", ("data",), _reads("setup", "between", "step")),
    CauseRule("data-not-by-index", ("data",), _always),  # one process read the same twice
    CauseRule("loop-mixes-rows", ("batch",), _changed_batch),
    # outputs
    CauseRule("loop-mixes-rows", ("outputs",), _other_inputs),
    CauseRule("weights-changed-by-script", ("outputs",), _written_in_forward),
    CauseRule("batchnorm", ("outputs", "loss", "buffers"), _batchnorm),
    # the loss
    CauseRule("rows-are-not-samples", ("loss",), lambda case: case.dropped_rows("out")),
    CauseRule("loop-mixes-rows", ("loss",), lambda case: case.dropped_rows("given")),
    CauseRule(_loss_cause, ("loss",), _loss_kind),
    CauseRule("accumulation", ("loss",), _divided_twice),
    # gradients
    CauseRule("clipping", _GRADIENTS, _noted("the script clips gradients at", "clips")),
    CauseRule("gradients-changed", _GRADIENTS, _noted("zero_grad() at", "cleared", "step")),
    CauseRule("exchange-by-script", _GRADIENTS, _noted("the script calls", "exchange", "step")),
    CauseRule(_hook_cause, _GRADIENTS, _hooked),
    # The same split on one process: it is the workers, or it is the split.
    CauseRule("rank-dependent-gradients", _GRADIENTS, _reads("step", "between"), False),
    CauseRule("rank-dependent-forward", ("outputs", "loss"), _reads("step", "between"), False),
    CauseRule(
        "state-outside-the-model", ("outputs", "loss", *_GRADIENTS), Case.equal_before, False
    ),
    CauseRule("padding", ("outputs", "loss"), Case.padded, True),
    CauseRule("batch-dependent-layer", ("outputs", "loss"), _split_outputs, True),
    CauseRule("state-outside-the-model", ("loss",), Case.equal_before, True),
    CauseRule("loss-is-a-sum", ("loss",), _sum_of_losses),
    CauseRule("loss-over-the-batch", ("loss",), _always, True),
    CauseRule("exchange-by-script", ("outputs", "loss"), _EXCHANGES),
    CauseRule(_loss_cause, _GRADIENTS, _mixing_loss),
    CauseRule("gradients-changed", _GRADIENTS, _always, True),
    # the update
    CauseRule("scheduler", _RATES, _schedules),
    CauseRule("learning-rate", _RATES, _read_or_not("between", "setup")),
    CauseRule("optimizer-settings", ("optimizer settings",), _read_or_not()),
    CauseRule(
        "optimizer-depends-on-workers", _UPDATED, lambda case: case.draws("drawn_by_optimizer")
    ),
    CauseRule("weights-changed-by-script", _UPDATED, _written_in_forward),
    CauseRule("optimizer-depends-on-workers", _UPDATED, _read_or_not("update")),
    CauseRule("buffers", ("buffers",), _read_or_not("step")),
    # evaluation
    CauseRule(
        "evaluation-depends-on-workers",
        ("evaluation",),
        lambda c: (
            _read_or_not("between", "setup", "evaluate")(c)
            if c.difference.name == "samples"
            else None
        ),
    ),
    CauseRule("unseeded-data", ("evaluation",), _named("sample ")),
    CauseRule("randomness", ("evaluation",), _evaluation_draws),
    CauseRule(
        "evaluation-depends-on-workers",
        ("evaluation",),
        lambda case: case.reads_of_rank("evaluate"),
    ),
    CauseRule(
        "metric-not-a-mean",
        ("evaluation",),
        lambda case: "" if case.difference.name != "loss" else None,
    ),
    CauseRule(_loss_cause, ("evaluation",), _loss_kind),
    CauseRule("evaluation-depends-on-batch", ("evaluation",), _always),
)
"""In this order; the first that applies is the cause."""
