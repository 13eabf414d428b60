"""What a Keras model or optimizer asks for that some plans cannot give."""

from __future__ import annotations

from typing import Any

from ronde.keras.keras_loss import regularized
from ronde.keras.keras_optimizer import KerasOptimizer
from ronde.keras.owned_variables import layers_of
from ronde.plan import Plan
from ronde.world import ArgumentError

__all__ = ["check_keras", "refusals"]


def refusals(model: Any, optimizer: Any) -> dict[str, str]:
    """Ways to divide the model that cannot be exact: the way -> why.

    Example:
        >>> dense = keras.layers.Dense(2, kernel_regularizer="l2")
        >>> model = keras.Sequential([keras.layers.Input((4,)), dense])
        >>> sorted(refusals(model, torch.optim.SGD(model.parameters())))
        ['pipeline', 'shard=gradients', 'shard=parameters', 'tensor']
    """
    refused = {"tensor": "Keras's layers cannot be divided by tensor parallelism"}
    if names := regularized(model):
        why = f"the Keras layer {names[0]!r} has a regularizer, which needs whole weights"
        refused |= dict.fromkeys(("shard=gradients", "shard=parameters", "pipeline"), why)
    if isinstance(optimizer, KerasOptimizer) and (why := optimizer.reads_whole):
        refused |= dict.fromkeys(("shard=gradients", "shard=parameters"), why)
        if optimizer.coupling == "coupled":
            refused |= dict.fromkeys(("pipeline", "shard=optimizer"), why)
    return refused


def check_keras(model: Any, optimizer: Any, plan: Plan) -> None:
    """Refuse a plan that cannot carry a Keras model or optimizer out exactly.

    Raises:
        ArgumentError: what is in the way is named.
    """
    ways = [way for way in ("pipeline", "tensor") if getattr(plan, way) > 1]
    if plan.shard != "none" and plan.replicas > 1:
        ways.append(f"shard={plan.shard}")
    refused = refusals(model, optimizer)
    for way in ways:
        if way in refused:
            others = [w for w in ("shard=parameters", "shard=optimizer") if w not in refused]
            raise ArgumentError(
                f"plan={plan.spec!r}: {refused[way]}. Use plan='replicate'"
                + (f" or {others[0]!r}." if others else ".")
            )
    vars(model)["_ronde_shares"] = plan.replicas > 1 or plan.micro_batch is not None
    if set(ways) - {"shard=optimizer"}:
        for layer in layers_of(model):
            vars(layer)["add_loss"] = _refuse_added_loss(layer.name, plan)


def _refuse_added_loss(name: str, plan: Plan) -> Any:
    def add_loss(_loss: Any) -> None:
        raise ArgumentError(
            f"plan={plan.spec!r}: the Keras layer {name!r} calls add_loss(), which this plan "
            "cannot see on all workers. Use plan='replicate' or 'shard=optimizer'."
        )

    return add_loss
