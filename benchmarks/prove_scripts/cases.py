"""Every planted fault with what ``ronde prove`` must say of it: the cause, where it shows first,
and the name told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    fault: str
    cause: str
    phase: str
    name: str = ""
    step: int | None = None
    plan: str = "replicate"
    script: str = "faults.py"

    @property
    def command(self) -> list[str]:
        return [str(HERE / self.script), self.fault]

    @property
    def plans(self) -> list[str]:
        """What is proved: the fault of a pipeline's own is looked for there alone."""
        return (
            [self.plan]
            if self.plan.startswith("pipeline")
            else list(dict.fromkeys(["replicate", self.plan]))
        )


FAULTS = [
    # order and data
    Fault("unseeded_sampler", "unseeded-sampler", "order", "place", 1),
    Fault("sampler_by_workers", "sampler-depends-on-workers", "order", "place", 1),
    Fault("augment_urandom", "unseeded-data", "data", "sample", 1),
    Fault("data_by_rank", "data-depends-on-rank", "data", "sample", 1),
    Fault(
        "data_by_workers", "data-depends-on-workers", "contract", "the length of the data set", 0
    ),
    Fault(
        "data_length_by_rank", "data-depends-on-rank", "distribute", "the length of the data set", 0
    ),
    # what distribute is given
    Fault("init_urandom", "unseeded-init", "initial weights", "first.weight", 0),
    Fault("init_by_workers", "init-depends-on-workers", "initial weights", "first.weight", 0),
    Fault("model_by_workers", "model-depends-on-workers", "initial weights", "first.weight", 0),
    Fault("lr_by_workers", "learning-rate-depends-on-workers", "contract", "the optimizer's lr", 0),
    Fault("batch_by_workers", "batch-size-depends-on-workers", "contract", "batch_size", 0),
    # forward
    Fault("batchnorm", "batchnorm", "outputs", "mix", 1),
    Fault("standardise", "batch-dependent-layer", "outputs", "mix", 1),
    Fault("rank_forward", "rank-dependent-forward", "outputs", "mix", 1),
    Fault("flaky", "nondeterministic-kernel", "outputs", "mix", 1),
    # loss
    Fault("loss_sum", "loss-is-a-sum", "loss", "loss", 1),
    Fault("micro_sum", "loss-is-a-sum", "loss", "loss", 1),
    Fault("own_sum", "loss-is-a-sum", "loss", "loss", 1),
    Fault("loss_ignored", "loss-is-a-weighted-mean", "loss", "loss", 1),
    Fault("loss_class_weights", "loss-is-a-weighted-mean", "loss", "loss", 1),
    Fault("loss_contrastive", "loss-over-the-batch", "loss", "loss", 1),
    Fault("loss_rmse", "loss-over-the-batch", "loss", "loss", 1),
    Fault("padding", "padding", "loss", "loss", 1, script="healthy.py"),
    Fault("accumulate_twice", "accumulation", "loss", "loss", 1),
    # gradients
    Fault("hook_divide", "rank-dependent-gradients", "gradients", "second.weight", 1),
    Fault("own_divides", "rank-dependent-gradients", "gradients", "first.weight", 1),
    Fault("clip_micro", "clipping", "gradients", "first.weight", 1),
    Fault("batch_gradient", "gradients-changed", "gradients", "first.weight", 1),
    Fault("tied_by_data", "tied-weights", "weights", "first.weight", 1, plan="shard=parameters"),
    # update
    Fault("langevin", "optimizer-depends-on-workers", "weights", "first.weight", 1),
    Fault("optimizer_by_workers", "optimizer-depends-on-workers", "weights", "first.weight", 1),
    Fault("frozen_copy", "stale-optimizer", "optimizer"),
    Fault("replaced_head", "stale-optimizer", "optimizer", "head", 1),
    Fault("scheduler_by_rank", "scheduler", "learning rate", "learning rate of group 0", 2),
    Fault("scheduler_by_workers", "scheduler", "learning rate", "learning rate of group 0", 2),
    Fault(
        "weights_on_rank_0", "weights-changed-by-script", "weights between steps", "head.bias", 2
    ),
    Fault("weights_by_share", "weights-changed-by-script", "weights between steps", "head.bias", 2),
    Fault("buffer", "buffers", "buffers", "mix.seen", 1),
    # loop and evaluation
    Fault("stops_early", "rank-dependent-loop", "evaluation", "number of evaluations", 4),
    Fault("metric_max", "metric-not-a-mean", "evaluation", "worst"),
    Fault("metric_f1", "metric-not-a-mean", "evaluation", "f1"),
    Fault("evaluate_a_part", "evaluation-depends-on-workers", "evaluation", "samples"),
    Fault("dropout_eval", "dropout-in-evaluation", "evaluation", "faults.py"),
]

# Written after the diagnosis: what it makes of faults that it was not written for.
LATER = [
    Fault(name, *what[:3], script="more_faults.py", plan=what[3] if len(what) > 3 else "replicate")
    for name, *what in [
        ("softmax_over_batch", "batch-dependent-layer", "outputs", "5"),
        ("clock", "not-repeatable", "outputs", "5"),
        ("backward_hook", "gradients-changed", "gradients", "0.weight"),
        ("batchnorm_2d", "batchnorm", "outputs", "1"),
        ("batchnorm_micro", "batchnorm", "outputs", "1"),
        ("spectral_micro", "batch-dependent-layer", "outputs", "5"),
        ("counts_calls", "batch-dependent-layer", "outputs", "5"),
        (
            "running_mean",
            "batch-dependent-layer",
            "outputs",
            "(argument 1 of the loss)",
            "pipeline=2",
        ),
        ("batchnorm_2d", "batchnorm", "outputs", "(argument 1 of the loss)", "pipeline=2"),
        ("running_scale", "state-outside-the-model", "gradients", "0.weight"),
        ("own_scale", "loss-over-the-batch", "gradients", "0.weight"),
        ("scheduler_by_world", "scheduler", "scheduler", "learning rate of group 0"),
        ("hard_examples", "loss-over-the-batch", "loss", "loss"),
        ("loss_by_world", "rank-dependent-forward", "loss", "loss"),
        ("loss_batch_times", "loss-is-a-sum", "loss", "loss"),
        ("focal_norm", "loss-is-a-weighted-mean", "loss", "loss"),
        ("lr_root", "learning-rate-depends-on-workers", "contract", "the optimizer's lr"),
        (
            "weight_decay_by_rank",
            "arguments-depend-on-workers",
            "distribute",
            "the optimizer's weight_decay",
        ),
        ("seed_by_rank", "data-depends-on-rank", "data", "sample"),
        ("subset_by_rank", "data-depends-on-workers", "contract", "the length of the data set"),
        (
            "weighted_by_rank",
            "sampler-depends-on-workers",
            "distribute",
            "the order that the sampler draws",
        ),
        ("mixup", "loop-mixes-rows", "batch", "(batch)[0]"),
        ("scheduler_per_sample", "scheduler", "learning rate", "learning rate of group 0"),
        ("lr_by_rank", "learning-rate", "learning rate", "learning rate of group 0"),
        ("ema_into_weights", "weights-changed-by-script", "weights between steps", "0.weight"),
        ("early_stop_local", "rank-dependent-loop", "steps", ""),
        ("evaluate_on_main", "rank-dependent-loop", "steps", ""),
        ("metric_std", "metric-not-a-mean", "evaluation", "spread"),
    ]
]

# Of a review by somebody who had not read the diagnosis: what it named wrongly or not at all, until
# it was taught.
NEWER = [
    Fault(name, *what, script="newer_faults.py")
    for name, *what in [
        ("time_seed", "unseeded-init", "initial weights", ""),
        # and the script asks for its rank, which is not why
        (
            "one_generator",
            "data-not-by-index",
            "data",
            "sample",
        ),
        ("read_counter", "data-not-by-index", "data", "sample"),
        ("stop_on_local", "rank-dependent-loop", "steps", ""),
        ("own_generator", "randomness", "outputs", "head"),
        ("own_mixup", "loop-mixes-rows", "batch", ""),
        ("collate_random", "randomness", "data", "(batch)"),
        ("collate_standardise", "batch-dependent-collate", "data", "(batch)"),
        ("functional_batchnorm", "batch-dependent-layer", "outputs", "head"),
        ("dict_rmse", "loss-over-the-batch", "loss", "loss"),
        ("own_rmse", "loss-over-the-batch", "loss", "loss"),
        ("own_balance", "loss-over-the-batch", "loss", "loss"),
        ("own_tilted", "loss-over-the-batch", "loss", "loss"),
        ("own_temperature", "state-outside-the-model", "loss", "loss", 2),
        ("worst_sample", "loss-over-the-batch", "loss", "loss"),
        ("zero_in_parts", "gradients-changed", "gradients", ""),
        ("own_ignores", "loss-over-the-batch", "loss", "loss"),
        ("sum_with_penalty", "loss-is-a-sum", "loss", "loss"),
        ("pair_of_mean", "loss-pair", "loss", "loss"),
        ("pair_of_constant", "loss-pair", "loss", "loss"),
        ("replicas", "rank-dependent-forward", "loss", "loss"),
        ("gathered_negatives", "exchange-by-script", "gradients", ""),
        ("own_adds_up", "exchange-by-script", "gradients", ""),
        ("hand_clamp", "gradients-changed", "gradients", ""),
        ("max_norm", "weights-changed-by-script", "weights", "lookup.weight"),
        (
            "cosine_by_world",
            "scheduler",
            "learning rate",
            "learning rate of group 0",
        ),
        ("epochs_by_world", "rank-dependent-loop", "contract", "the number of epochs"),
        ("break_by_world", "rank-dependent-loop", "evaluation", "number of evaluations"),
        ("skip_on_rank", "rank-dependent-loop", "steps", ""),
        ("split_by_rank", "evaluation-depends-on-workers", "evaluation", "sample"),
        ("average_by_world", "evaluation-depends-on-workers", "evaluation", "loss"),
        ("replacement", "data-depends-on-rank", "data", "sample"),
        ("second_training", "loss-is-a-sum", "loss", "loss"),
    ]
]

# Of a second such review: what was called equal, or named wrongly.
HIDDEN = [
    Fault(name, *what, script="hidden_faults.py")
    for name, *what in [
        ("hand_synced", "exchange-by-script", "outputs", "1", 3),
        ("fails_later", "batchnorm", "outputs", "1", 1),
        ("rate_of_means", "exchange-by-script", "learning rate", "learning rate of group 0", 3),
        ("empty_counted", "exchange-by-script", "outputs", "", 4),
        ("empty_exchange", "rank-dependent-loop", "steps", "what the workers exchange", 3),
        ("unseeded_data", "unseeded-data", "data", "sample", 1),
        ("unseeded_split", "unseeded-data", "data", "sample", 1),
        ("unseeded_target", "unseeded-script", "outputs", "(argument 2 of the loss)", 1),
        ("unseeded_rate", "unseeded-script", "distribute", "the optimizer's lr", 0),
        ("own_centres", "state-outside-the-model", "loss", "loss", 2),
        ("remembered_outputs", "state-outside-the-model", "loss", "loss", 4),
        ("seen_temperature", "batch-dependent-layer", "outputs", "(argument 1 of the loss)", 2),
        ("hidden_state", "batch-dependent-layer", "outputs", "cells[0]"),
        ("by_another_name", "unknown", "outputs", "(argument 1 of the loss)", 1),
        ("scaled_between", "gradients-changed", "gradients", "0.weight", 1),
        ("signs_between", "gradients-changed", "gradients", "0.weight", 1),
        ("decay_between", "gradients-changed", "gradients", "0.weight", 1),
        ("metric_of_a_probe", "metric-not-a-mean", "evaluation", "probe", 3),
        ("kept_for_evaluation", "evaluation-depends-on-batch", "evaluation", "loss", 3),
        ("late_standardise", "batch-dependent-layer", "outputs", "(argument 1 of the loss)", 2),
        ("standardised_evaluation", "evaluation-depends-on-batch", "evaluation", "loss", 3),
        ("dropout_by_world", "model-depends-on-workers", "contract", "the dropout of '1'", 0),
        ("dropout_on_rank_0", "model-depends-on-workers", "contract", "the dropout of '1'", 0),
        (
            "lstm_dropout_by_world",
            "model-depends-on-workers",
            "contract",
            "the dropout of 'cells'",
            0,
        ),
        (
            "functional_dropout",
            "rank-dependent-forward",
            "dropout",
            "the rate at hidden_faults.py:",
            1,
        ),
        (
            "evaluating_on_main",
            "rank-dependent-forward",
            "dropout",
            "the rate at hidden_faults.py:",
            1,
        ),
        (
            "dropout_on_rank_1",
            "rank-dependent-forward",
            "dropout",
            "the rate at hidden_faults.py:",
            1,
        ),
        ("gradient_noise", "replicas-drift", "gradients", "0.weight", 1),
    ]
]

# What the loop does to a batch, rows that are not the samples asked for, and what one rank does.
LOOP = [
    Fault(name, *what, script="loop_faults.py")
    for name, *what in [
        ("flip_mixes", "loop-mixes-rows", "batch", "(batch)[0]", 1),
        ("in_place_mixes", "loop-mixes-rows", "batch", "(batch)[0]", 1),
        ("standardizes", "loop-mixes-rows", "batch", "(batch)[0]", 1),
        ("drawn_partners", "loop-mixes-rows", "batch", "(batch)[0]", 1),
        ("targets_mixed", "loop-mixes-rows", "batch", "(batch)[1]", 1),
        ("keeps_hard_half", "loop-mixes-rows", "loss", "loss", 1),
        ("last_batch_blended", "loop-mixes-rows", "batch", "(batch)[0]", 4),
        ("own_loop_mixes", "loop-mixes-rows", "outputs", "0", 1),
        ("scaled_by_rank", "loop-mixes-rows", "batch", "(batch)[0]", 1),
        ("keeps_longest", "rows-are-not-samples", "data", "rows of the batch", 1),
        ("divides_itself", "data-depends-on-workers", "contract", "the length of the data set"),
        ("stream_divides_itself", "data-depends-on-rank", "data", "sample 1", 1),
        ("same_index", "data-depends-on-rank", "data", "sample", 1),
        ("decay_of_rank_1", "optimizer-settings", "optimizer settings", "weight_decay of", 1),
        ("momentum_after_step_2", "optimizer-settings", "optimizer settings", "momentum of", 3),
        ("rate_of_rank_1", "learning-rate", "learning rate", "learning rate of group 0", 2),
        ("state_of_rank_1", "optimizer-depends-on-workers", "weights", "0.weight", 4),
        ("left_out_update", "optimizer-depends-on-workers", "weights", "2.bias", 3),
        (
            "frozen_on_rank_1",
            "optimizer-settings",
            "optimizer settings",
            "parameters of group 0",
            1,
        ),
        ("alike_on_all", "unknown", "gradients", "0.weight", 1),
        ("buffer_of_rank_1", "buffers", "buffers", "seen", 2),
        ("rate_by_clock", "not-repeatable", "learning rate", "learning rate of group 0", 2),
        ("rate_by_elapsed", "not-repeatable", "learning rate", "learning rate of group 0", 2),
        ("scheduled_by_clock", "not-repeatable", "contract", "the optimizer's lr", 0),
        ("weights_by_clock", "not-repeatable", "weights between steps", "0.bias", 2),
        ("broken_off", "rank-dependent-loop", "loop", "the batch that the loop is at"),
    ]
]

# Equal on 2 workers.
THREE = Fault("even_shares", "exchange-by-script", "outputs", "1", 1, script="loop_faults.py")

# Faults behind random draws, which differ between N workers and one process anyway.
BEHIND = [
    Fault(name, *what, script="noisy.py")
    for name, *what in [
        ("vae_sum", "loss-is-a-sum", "loss", "loss", 1),
        ("looped_sum", "loss-is-a-sum", "loss", "loss", 1),
        ("layers_sum", "loss-is-a-sum", "loss", "loss", 1),
        ("diffusion_batchnorm", "batchnorm", "outputs", "body.0", 1),
        ("contrast_pairs", "loss-over-the-batch", "loss", "loss", 1),
        ("diffusion_evaluation", "metric-not-a-mean", "evaluation", "worst"),
        ("shuffled_pairs", "randomness", "outputs", "inner", 1),
        ("twice_sum", "loss-is-a-sum", "loss", "loss", 1),
        ("attention_sum", "loss-is-a-sum", "loss", "loss", 1),
        ("jittered_sum", "loss-is-a-sum", "loss", "loss", 1),
        ("poisson", "randomness", "evaluation", ""),
    ]
]
EVERY = [*FAULTS, *LATER, *NEWER, *HIDDEN, *BEHIND, *LOOP]
# Sound scripts that draw random numbers: equal, and the draws are told.
NOISY = [
    ("faults.py", "noise"),
    ("more_faults.py", "layer_drop"),
    ("more_faults.py", "noise_on_input"),
    *(
        ("noisy.py", name)
        for name in [
            "vae",
            "looped",
            "diffusion",
            "diffusion_recomputed",
            "layers",
            "tokens",
            "contrast",
        ]
    ),
]

HEALTHY = [
    "mlp",
    "cnn",
    "residual",
    "groupnorm",
    "gpt",
    "lstm",
    "packed",
    "translator",
    "bag",
    "frozen",
    "groups",
    "accumulated",
    "clipped",
    "grown",
    "half",
    "own",
    "complex",
    "synced",
    "asks_its_process",
    "of_a_record",
    "of_a_mapping",
    "drops_rows",
    "hook_clip",  # hooks on parameters run on averaged gradients
]
_IN_NEWER = ("complex", "synced", "asks_its_process")
_IN_HIDDEN = ("of_a_record", "of_a_mapping")


def healthy_command(name: str) -> list[str]:
    script = (
        "faults.py"
        if name == "hook_clip"
        else "hidden_faults.py"
        if name in _IN_HIDDEN
        else "newer_faults.py"
        if name in _IN_NEWER
        else "loop_faults.py"
        if name == "drops_rows"
        else "healthy.py"
    )
    return [str(HERE / script), name]


def judge(case: Fault, verdict: object) -> tuple[bool, bool, str]:
    """Whether the fault was found, whether it was named, and what was said."""
    found = verdict.difference is not None and verdict.exit_status != 0
    d, cause = verdict.difference, verdict.cause
    said = (
        f"{cause.id if cause else None}: {d.phase} step {d.step} {d.name!r}"
        if d
        else f"{verdict.status}: {verdict.error[:300]}"
    )
    named = (
        found
        and cause is not None
        and cause.id == case.cause
        and d.phase == case.phase
        and d.name.startswith(case.name)
        and case.step in (None, d.step)
    )
    return found, named, said
