"""The causes that prove can name, each with its sentence and its cure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAUSES", "Cause", "cause"]

CAUSES: dict[str, tuple[str, str]] = {
    "unseeded-sampler": (
        "The order of samples is another one in every run: the sampler draws from a "
        "generator that nothing seeds.",
        "Draw from torch's, numpy's or random's own generators, which ronde seeds for the "
        "sampler, or leave shuffling to ronde.",
    ),
    "unseeded-data": (
        "The same sample has other values in every run or on every worker: the data set is "
        "made or augmented with what nothing seeds.",
        "torch.manual_seed(0) at the top of the script, before the data set is made, split "
        "or shuffled (numpy.random.seed and random.seed where these are "
        "drawn from); within __getitem__, torch's, numpy's and random's own generators are "
        "seeded by ronde; a generator of its own is made there, from them.",
    ),
    "data-not-by-index": (
        "A sample has other values on another worker: they come from more than its index, "
        "from what was read before it (a counter, a generator or a "
        "cache that the data set keeps, labels that the loop writes), or from the process "
        "(the order of a set of strings).",
        "Compute a sample from its index alone. Within __getitem__, torch's, numpy's and "
        "random's own generators are seeded by ronde, sample by sample; "
        "a generator of its own is made there, from them; sorted() gives a set an order.",
    ),
    "unseeded-init": (
        "The initial weights are others in every run, although prove seeds torch, numpy "
        "and random.",
        "Initialise from these generators, or from one with a fixed seed.",
    ),
    "unseeded-script": (
        "The script draws from what nothing seeds, before the training or beside it "
        "(arguments, a second network, targets, a choice): it is another one on "
        "every worker, or in every run.",
        "torch.manual_seed(0) at the top of the script, before the data, the model or a "
        "second network are made (numpy.random.seed and random.seed where "
        "these are drawn from). What another run of one process has otherwise comes from "
        "the clock or a generator of the script's own.",
    ),
    "nondeterministic-kernel": (
        "Two runs with one process, same samples, same weights, differ: something computes "
        "another result each time.",
        "Look at this place for a non-deterministic kernel, a random generator of its own, "
        "uninitialised memory or the clock.",
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
    "reads-another-run": (
        "The script reads a file that another run of it has written (a checkpoint from "
        "which it goes on, a counter, a cache): a run of this proof begins "
        "with what the last one has left.",
        "Prove it where it writes elsewhere, or without going on from a checkpoint.",
    ),
    "learning-rate-depends-on-workers": (
        "The script scales the optimizer's learning rate by the number of workers, but the "
        "global batch stays the same.",
        "Leave the learning rate alone, or ask for batch='grow', which scales both by a "
        "stated rule.",
    ),
    "scheduler-depends-on-workers": (
        "The scheduler is made from the number of workers (its length, its milestones, its "
        "warm-up), but a step is a step of all workers: there are as "
        "many as with one process.",
        "Make it as for one process.",
    ),
    "batch-size-depends-on-workers": (
        "The script computes batch_size from the number of workers, but batch_size is "
        "global already.",
        "Pass the global batch size, or batch='grow' with the size per worker.",
    ),
    "arguments-depend-on-workers": (
        "What the script passes to ronde.distribute depends on the rank or the number of workers.",
        "Pass the same on every worker, whatever their number.",
    ),
    "model-depends-on-workers": (
        "The model depends on the rank or the number of workers.",
        "Build the same model on every worker.",
    ),
    "batchnorm": (
        "Batch normalisation takes its statistics from the samples of one worker, not of "
        "the global batch.",
        "sync_batchnorm=True in ronde.distribute, or a normalisation that does not mix "
        "samples (GroupNorm, LayerNorm).",
    ),
    "state-of-each-pass": (
        "A layer changes a state of its own in every forward pass (a counter, a running "
        "mean, the iterate of spectral normalisation), and a "
        "step has several passes here.",
        "One pass a step: neither micro-batches nor a pipeline; or the layer in eval() "
        "while its state shall stay.",
    ),
    "batch-dependent-collate": (
        "Collating mixes the samples of its batch (it standardises or mixes them), so a "
        "batch depends on which samples are on the same worker.",
        "Do it per sample in the data set, or in the model where sync_batchnorm can see to it.",
    ),
    "batch-changed-by-script": (
        "Between run.batches() and the model the script changes the batch by what depends "
        "on the worker: it mixes samples, or draws from a "
        "generator of its own.",
        "Draw from torch's, numpy's or random's own generators, which ronde seeds, and "
        "change each sample by itself.",
    ),
    "batch-dependent-layer": (
        "A layer mixes the samples of its batch, so its output depends on which of them "
        "are on the same worker.",
        "Normalise or attend within a sample; what must see the whole batch cannot be "
        "split over workers or micro-batches.",
    ),
    "padding": (
        "Samples are padded to the longest of their batch, and the padding changes the "
        "result: it depends on which samples are together.",
        "Mask the padding in attention, pooling and loss (src_key_padding_mask, "
        "ignore_index), or pad to a fixed length.",
    ),
    "rank-dependent-forward": (
        "The forward pass takes another way depending on the rank or the number of workers.",
        "Compute the same on every worker; branch on the rank only for output.",
    ),
    "randomness": (
        "The step draws random numbers: N workers draw others than one process. The same "
        "in distribution, not in value.",
        "Nothing, if that is meant. To prove the rest, switch it off with an argument of "
        "the script.",
    ),
    "loss-is-a-sum": (
        "The loss is a sum over samples, not a mean: ronde averages over workers and "
        "micro-batches, so N workers train with a part of it.",
        "reduction='mean', or return (sum, 1 / scale) or (losses.sum(), number of samples).",
    ),
    "loss-is-a-weighted-mean": (
        "The loss is a mean with unequal weights (tokens that are not padding, class "
        "weights): workers' means are not the mean of all.",
        "Return (sum of losses, sum of weights), for example (F.cross_entropy(…, "
        "reduction='sum'), (target != -100).sum()).",
    ),
    "loss-over-the-batch": (
        "The loss is not a mean over samples: it relates the samples of a batch to each "
        "other (contrastive, a root or a maximum of all).",
        "Return the mean of what each sample contributes. What must see the whole batch "
        "cannot be split over workers.",
    ),
    "state-outside-the-model": (
        "The forward pass, the loss or a metric depends on something outside the model's "
        "parameters and buffers that changes from call to call, on each worker by its "
        "own calls and samples (a counter, a running scale, a hidden state, a temperature "
        "or centres with an optimizer of their own).",
        "Make it a parameter or a buffer of the model, or change it by what is the same on "
        "all workers.",
    ),
    "loss-pair": (
        "The loss returns (sum, weight), but these are not sums over samples: ronde adds "
        "both up over workers and micro-batches, then divides.",
        "Return the plain sum of the samples' losses and the sum of their weights, or the "
        "mean alone.",
    ),
    "accumulation": (
        "Micro-batches are accumulated twice over: the script scales the loss by their "
        "number, and ronde does as well.",
        "Pass run.backward() the mean over the micro-batch's samples, unscaled.",
    ),
    "gradients-cleared": (
        "The script clears gradients between the micro-batches of a step: only the last "
        "ones are left.",
        "Leave zero_grad() out: run.update() clears them.",
    ),
    "gradients-changed": (
        "The script changes gradients between the micro-batches of a step: of a part of "
        "the batch, and what was accumulated before once more.",
        "Change them after the last run.backward() of a step and before run.update(): "
        "there they are of the global batch. clip_norm= in ronde.distribute "
        "clips, an optimizer's weight_decay= decays.",
    ),
    "gradient-hook": (
        "A hook changes the gradients of one worker's samples before they are averaged.",
        "Change gradients after the exchange: between run.backward() and run.update(), or "
        "with clip_norm=.",
    ),
    "clipping": (
        "The script clips gradients of a part of the batch: before the exchange, or for "
        "each micro-batch.",
        "clip_norm= in ronde.distribute clips the global gradient once a step.",
    ),
    "rank-dependent-gradients": (
        "The gradients are changed depending on the rank or the number of workers.",
        "ronde averages gradients by itself: do not divide or change them by rank or world size.",
    ),
    "exchange-by-script": (
        "The script exchanges tensors between workers within the step. "
        "torch.distributed.all_gather passes no gradient back to other workers, "
        "and all_reduce adds gradients up that ronde averages as well.",
        "Leave averaging to ronde; gather outputs with "
        "torch.distributed.nn.functional.all_gather, which is differentiated.",
    ),
    "mean-of-means": (
        "The script averages over workers what each has computed of its own samples, as if "
        "all of them had equally many: of the last batch they have "
        "not, and one may have none (it is given one sample that does not count).",
        "Exchange sums and numbers of samples and divide then; leave losses, gradients and "
        "metrics to ronde, which weighs them.",
    ),
    "batch-dependent-gradients": (
        "The backward pass mixes the samples of its batch (a custom autograd function, a "
        "backward hook).",
        "Make the gradient of each sample independent of the others.",
    ),
    "replicas-drift": (
        "Each worker changes gradients or weights by other random numbers, after the "
        "exchange: they no longer train one model, but drift apart, and what "
        "is saved is one of them.",
        "Draw what is the same on every worker: from a generator that is seeded by the "
        "step, torch.Generator().manual_seed(run.state.step).",
    ),
    "tied-weights": (
        "Two parameters share their memory without being one parameter: a plan that moves "
        "or splits them separates them.",
        "Tie the parameter itself: decoder.weight = encoder.weight, not "
        "decoder.weight.data = encoder.weight.data.",
    ),
    "learning-rate": (
        "The learning rate differs although the optimizer began alike.",
        "Set it through the scheduler passed to ronde.distribute, or from what is the same "
        "on all workers: the loss that run.step() and "
        "run.update() return.",
    ),
    "scheduler": (
        "The scheduler has been stepped another number of times.",
        "Pass it to ronde.distribute, which steps it once per optimizer step, and do not "
        "step it yourself.",
    ),
    "optimizer-randomness": (
        "The optimizer draws random numbers in its step, others on every worker.",
        "Draw from a generator that is seeded alike on every worker, keyed by the step.",
    ),
    "optimizer-depends-on-workers": (
        "With equal gradients the optimizer makes another step: it has state of its own, "
        "or depends on the rank or the number of workers.",
        "An optimizer's step must be a function of gradients, weights and its state.",
    ),
    "stale-optimizer": (
        "The optimizer is over other parameters than the model has: they are replaced or "
        "copied after it was built, and are never trained.",
        "Build the optimizer from model.parameters() after the last change of the model's "
        "layers, and distribute after both.",
    ),
    "weights-changed-in-forward": (
        "The forward pass rewrites weights, and each worker those that its own samples "
        "meet (nn.Embedding(max_norm=…) does).",
        "Leave max_norm out, or renormalise all rows after the update.",
    ),
    "weights-changed-by-script": (
        "The script changes weights between steps, and not alike on every worker.",
        "Change them by what is the same on all workers: the weights and the global loss, "
        "not this worker's samples or rank.",
    ),
    "buffers": (
        "A buffer is computed from this worker's samples, not the global batch.",
        "Compute it from weights or constants, or average it over workers "
        "(torch.distributed.all_reduce).",
    ),
    "metric-not-a-mean": (
        "The metric is not a mean over samples: the values of parts do not average to the "
        "value of all.",
        "Return one value per sample or (sum, weight), or use a torchmetrics object.",
    ),
    "evaluation-depends-on-workers": (
        "The evaluation depends on the rank or the number of workers.",
        "Call run.evaluate() on every worker with the whole data set: ronde deals it out "
        "and counts each sample once.",
    ),
    "evaluation-depends-on-batch": (
        "The model's output in evaluation depends on which samples are evaluated together.",
        "In eval mode each sample must stand for itself.",
    ),
    "dropout-in-evaluation": (
        "Dropout is active during evaluation: the result is random. F.dropout(x, p) is on "
        "unless told otherwise.",
        "F.dropout(x, p, training=self.training), or nn.Dropout.",
    ),
    "rank-dependent-loop": (
        "Workers do not run the same steps, exchanges or evaluations as one process does: "
        "the loop depends on the rank, on their number, or on what one "
        "worker alone has computed (a loss of its own samples).",
        "Every worker goes through run.epochs, run.batches, run.step and run.evaluate "
        "alike; only output is for run.is_main. Stop on what run.step(), "
        "run.update() or run.evaluate() returned, which is the same on all.",
    ),
    "plan": (
        "Only this plan differs, replicate is equal: the plan does not carry this model "
        "out exactly.",
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
