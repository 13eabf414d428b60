"""Catalogue of the causes that prove can name, each with an explanation and a cure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAUSES", "Cause", "cause"]

CAUSES: dict[str, tuple[str, str]] = {
    "unseeded-sampler": (
        "The order of samples changes from run to run: the sampler's generator was never seeded.",
        "Draw from global generators, which ronde seeds for it, or leave shuffling to ronde.",
    ),
    "unseeded-data": (
        "The same sample has different values in each run or on each worker: the dataset is "
        "created or augmented with a random generator that was never seeded.",
        "Call torch.manual_seed(0) at the top of the script, before the dataset is created, "
        "split, or shuffled (also numpy.random.seed and random.seed if you draw from those). "
        "Within __getitem__, ronde seeds the global generators of torch, NumPy, and random; "
        "create any other generator there, seeded from them.",
    ),
    "data-not-by-index": (
        "A sample has different values on another worker. They depend on more than its index: on "
        "samples read earlier (a counter, a generator, or a cache in the dataset, labels that the "
        "loop writes) or on the process (the order of a set of strings).",
        "Compute each sample from its index alone. Within __getitem__, ronde seeds the global "
        "generators of torch, NumPy, and random for each sample; create any other generator "
        "there, seeded from them. Use sorted() to give a set an order.",
    ),
    "unseeded-init": (
        "Initial weights differ from run to run, even though prove seeds torch, NumPy, and random.",
        "Initialize from these generators, or from one with a fixed seed.",
    ),
    "unseeded-script": (
        "The script uses a random generator that was never seeded (for arguments, a second "
        "network, targets, or a choice), so its values differ between workers or between runs.",
        "Call torch.manual_seed(0) at the top of the script, before the data, the model, or a "
        "second network is created (also numpy.random.seed and random.seed if you draw from "
        "those). If two runs of one process still differ, look for the clock or a generator of "
        "its own.",
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
        "on the worker: it mixes or selects rows of its share (mixup, CutMix, hard samples), "
        "reads its rank, or draws from its own generator.",
        "Change each row by itself, or mix by what all workers have: run.gather(x) returns the "
        "rows of the global batch. Draw from global generators, which ronde seeds.",
    ),
    "optimizer-settings": (
        "The optimizer's settings (weight decay, momentum, the parameters it holds) are not those "
        "of one process.",
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
        "The collate function mixes samples (it standardizes or blends them), so a batch depends "
        "on which samples share a worker.",
        "Do it per sample in the dataset, or in the model, where sync_batchnorm can handle it.",
    ),
    "batch-dependent-layer": (
        "An output depends on more than its own sample: a layer mixes the samples of its batch, "
        "or keeps state that each forward pass changes (a counter, a running mean, spectral "
        "normalization, a hidden state).",
        "Normalize or attend within a sample; a layer over the whole batch cannot be split. Let "
        "each step have one pass, or put a layer whose state must not change in eval() mode.",
    ),
    "padding": (
        "Samples are padded to the longest one in their batch, and the padding changes the "
        "result, so it depends on which samples share a batch.",
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
        "and buffers. Each worker changes it by its own calls and samples (a counter, a running "
        "scale, a hidden state, a temperature, or centers with their own optimizer).",
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
        "The script clears or changes gradients between the micro-batches of a step: they cover "
        "only part of the batch then.",
        "Change gradients after the last run.backward() of a step and before run.update(), which "
        "clears them. Or let clip_norm= in ronde.distribute clip, and the optimizer's "
        "weight_decay= decay.",
    ),
    "gradient-hook": (
        "A hook changes the gradients of one worker's samples before they are averaged.",
        "Change gradients after the all-reduce: between backward() and update(), or by clip_norm=.",
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
        "The script exchanges tensors between workers within the step. "
        "torch.distributed.all_gather passes no gradient back, all_reduce sums gradients that "
        "ronde averages as well, and a mean of workers' means is wrong in a last batch, where "
        "they have unequal shares.",
        "Leave averaging to ronde, which weights losses and gradients by samples. Gather with "
        "torch.distributed.nn.functional.all_gather; exchange sums and counts, then divide.",
    ),
    "batch-dependent-gradients": (
        "The backward pass mixes samples of its batch (a custom autograd function, a hook).",
        "Make the gradient of each sample independent of the others.",
    ),
    "replicas-drift": (
        "Each worker changes gradients or weights by different random numbers after the "
        "all-reduce. The workers no longer train one model: replicas drift apart, and only one is "
        "saved.",
        "Draw the same numbers everywhere: torch.Generator().manual_seed(run.state.step).",
    ),
    "tied-weights": (
        "Two parameters share memory but are not one: plans that move or split them separate them.",
        "Tie the parameter itself (decoder.weight = encoder.weight), not its .data.",
    ),
    "learning-rate": (
        "The learning rate differs during the training, although the optimizers started alike: it "
        "is set from the rank, the number of workers, or one worker's values.",
        "Set it through the scheduler passed to ronde.distribute, or from a value that is the "
        "same on all workers: the loss that run.step() and run.update() return.",
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
        "forward pass, as nn.Embedding(max_norm=…) does), and not in the same way on every "
        "worker.",
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
        "Return one value per sample or (sum, weight), or use a torchmetrics object. Keep state "
        "in the model's parameters and buffers.",
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
        "Run run.epochs, run.batches, run.step, and run.evaluate alike on every worker; use "
        "run.is_main only for output. Stop on the result of run.step(), run.update(), or "
        "run.evaluate(), which is the same on all workers.",
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
