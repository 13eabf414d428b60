"""Translate torch errors that a script meets when a plan divides the model."""

from __future__ import annotations

from ronde.plan.plan import Plan

_AVERAGE = (
    "A moving average of the weights: keep one of the values of model.state_dict(), as "
    "docs/checkpoints.md shows"
)


def meaning(text: str, plan: Plan) -> str | None:
    """The error in the script's terms, or None if the text is of another kind.

    Args:
        text: the error's.
        plan: that was carried out.

    >>> meaning("aten.lerp_.Scalar got mixed torch.Tensor and DTensor, need to",
    ...     Plan.parse("shard=gradients"))[:56]
    "the script computes with the model's parameters itself, "
    """
    parts = plan.shard in ("gradients", "parameters") or plan.tensor > 1
    if parts and "mixed torch.Tensor and DTensor" in text:
        return (
            "the script computes with the model's parameters itself, which this plan keeps in "
            "parts (DTensor), or its layers run again in a backward pass of their own "
            f"(reversible ones). {_AVERAGE}"
        )
    if parts and "does not support deepcopy" in text:
        return f"the script copies the model, of which this plan keeps parts (DTensor). {_AVERAGE}"
    if parts and "out of bounds for storage of size 0" in text:
        return (
            "the script differentiates by itself (torch.autograd.grad, a gradient "
            "penalty), which FSDP2 takes for the backward pass: the parameters are "
            "gone when they are needed once more. Use shard='optimizer' or replicate."
        )
    if plan.recompute == "selective" and (
        "Trying to backward an extra time" in text
        or "encountered during backward but not found in storage" in text
    ):
        return (
            "what recompute=selective has kept of a block serves one backward pass, and the script "
            "runs several through it (an implicit layer, retain_graph=True), or the block's second "
            "pass computes otherwise. Use recompute=full or none."
        )
    # torch's versions differ in one word
    if parts and "view is being modified inplace" in text.replace("view and is", "view is"):
        return (
            "a block changes its input in place, and under this plan it is given a view. Let it "
            "make a new tensor (x = 2 * x in place of x *= 2), or use shard='optimizer'."
        )
    if (
        plan.pipeline > 1
        and "more than one element of the written-to tensor refers to a single memory location"
        in text
    ):
        return (
            "the script writes into the model's parameters itself, and under this plan a "
            "worker holds those of its own stages only. Write into "
            f"those that run.optimizer has. {_AVERAGE}"
        )
    if "ready only once" in text or "marked as ready twice" in text:
        return (
            "a parameter got a gradient after its exchange had begun: a block that runs twice in a "
            "step is checkpointed with use_reentrant=True. Use "
            "torch.utils.checkpoint.checkpoint(…, use_reentrant=False)."
        )
    return None
