"""One owner for each variable of a Keras model.

Keras on torch lists every variable again in each layer that contains it, all as parameters, and
its layers compute with ``Variable._value``, whatever a plan has made of the parameter. Here each
variable is a parameter or a buffer of the layer that made it, and ``_value`` is looked up there.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from keras.src.backend.common import dtypes
from keras.src.backend.common.global_state import set_global_attribute
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch.layer import TorchLayer
from torch import nn

import keras
from ronde.keras.batch_statistics import make_synchronizable
from ronde.world import ArgumentError
from ronde.world.tensors import local_part, tensors_in

__all__ = [
    "OwnedVariable",
    "check_backend",
    "layers_of",
    "local_values",
    "own",
    "owned_variables",
    "use_device",
]

_local = False  # whether variables show this worker's part of what a plan has divided
_draws_from_torch = False


@contextmanager
def local_values() -> Iterator[None]:
    """Within the block, variables are this worker's part of their tensors."""
    global _local
    before, _local = _local, True
    try:
        yield
    finally:
        _local = before


class OwnedVariable(keras.Variable):  # type: ignore[misc]
    """A variable whose value is a parameter or buffer of a module, looked up at each use."""

    _owner: nn.Module
    _key: str

    @property
    def whole(self) -> torch.Tensor:
        """The module's tensor, as the plan keeps it."""
        held = self._owner._parameters.get(self._key)
        value = self._owner._buffers.get(self._key) if held is None else held
        assert value is not None
        return value

    @property
    def _value(self) -> torch.Tensor:
        return local_part(self.whole) if _local else self.whole

    def over(self, parameter: torch.Tensor) -> OwnedVariable:
        """The same variable with another tensor, in no model."""
        made = OwnedVariable.__new__(OwnedVariable)
        made.__dict__.update(self.__dict__, _owner=nn.Module())
        made._owner._parameters[self._key] = parameter  # type: ignore[assignment]
        return made

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(self._value.shape) if _local else self._shape


def check_backend() -> None:
    """Refuse another backend than torch, and versions of Keras that are not known."""
    if keras.backend.backend() != "torch":
        raise ArgumentError(
            f"the Keras model runs on {keras.backend.backend()!r}; Ronde trains Keras models on "
            "the torch backend. Set KERAS_BACKEND=torch before Keras is imported."
        )
    if tuple(map(int, keras.__version__.split(".")[:2])) != (3, 15):
        raise ArgumentError(
            f"keras {keras.__version__} is installed; Ronde knows 3.15. pip install 'keras==3.15.*'"
        )


def use_device(model: nn.Module, device: str) -> None:
    """Let Keras make its tensors on this worker's device, and compute in float64 if the model does.

    Keras promotes float64 to float32 on every backend but TensorFlow, in each matrix product and
    normalization (``BIT64_TO_BIT32_DTYPE``).
    """
    set_global_attribute("torch_device", device)
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64" if wide else "float32"


def layers_of(model: Any) -> list[Any]:
    """The Keras layers of a model, itself first, each once."""
    return [m for m in model.modules() if isinstance(m, keras.Layer)]


def owned_variables(model: Any) -> list[OwnedVariable]:
    """The variables of an owned model, each once."""
    return list({id(v): v for v in model.variables if isinstance(v, OwnedVariable)}.values())


def own(model: Any) -> None:
    """Give each variable of a built Keras model one place, in place: see the module's docstring.

    Weights become parameters, statistics buffers. Training follows the module's mode where the
    call does not say, and random layers draw from torch's generator.

    Raises:
        ArgumentError: the model has layers without weights yet, or computes in float16.

    Example:
        >>> model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        >>> own(model)
        >>> [name for name, _ in model.named_parameters()]
        ['dense.kernel', 'dense.bias']
    """
    if "_ronde_owned" in vars(model):
        return
    unbuilt = [layer.name for layer in model._flatten_layers() if not layer.built]
    if unbuilt or not model.variables:
        raise ArgumentError(
            f"the Keras layer {(unbuilt or [model.name])[0]!r} has no weights yet: call the model "
            "on one batch, or give it keras.Input(shape), before ronde.distribute."
        )
    if halves := [x.name for x in model._flatten_layers() if x.compute_dtype == "float16"]:
        raise ArgumentError(
            f"the Keras layer {halves[0]!r} computes in float16, which needs a scaled loss: build "
            "the model in float32, and give ronde.distribute(…, precision='fp16')."
        )
    _place_layers(model, {})
    layers = layers_of(model)
    held = _torch_parameters(model, layers)
    for layer in layers:
        trained = {id(v) for v in layer._trainable_variables}
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            _place_variable(layer, variable, held, id(variable) in trained)
        make_synchronizable(layer)
    _follow_mode(model)
    vars(model)["__deepcopy__"] = lambda memo: _copy(model, memo)
    vars(model)["_ronde_owned"] = True


def _place_layers(layer: Any, seen: dict[int, bool]) -> None:
    """Make the tree of torch modules that of Keras's layers."""
    if seen.setdefault(id(layer), False):
        return
    seen[id(layer)] = True
    children = {k: m for k, m in layer._modules.items() if k != "_torch_params"}
    if "_functional" in children:  # it holds the layers of a Sequential, which calls them
        vars(layer)["_functional"] = children.pop("_functional")
        vars(vars(layer)["_functional"])["_torch_params"] = {}
        vars(layer)["_functional"]._modules.clear()
    known = {id(m) for m in children.values()} | {id(vars(layer).get("_functional"))}
    names = _names_in_containers(layer)
    for child in layer._layers:
        if id(child) not in known:
            name = _free_name(names.get(id(child), child.name), children)
            children[name] = child
            vars(layer).setdefault("_unlisted", set()).add(name)
            known.add(id(child))
    layer._modules.clear()
    layer._modules.update(children)
    vars(layer)["_torch_params"] = {}  # named_parameters() of Keras looks for it
    for child in children.values():
        if isinstance(child, keras.Layer):
            _place_layers(child, seen)


def _names_in_containers(layer: Any) -> dict[int, str]:
    """``blocks_0`` for a layer in ``self.blocks``: names of layers differ from copy to copy."""
    names: dict[int, str] = {}
    if isinstance(layer, keras.Sequential | keras.src.models.Functional):
        return names
    for attribute, value in vars(layer).items():
        items: Any = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list | tuple) and attribute != "_layers":
            items = enumerate(value)
        for key, item in items:
            if isinstance(item, keras.Layer):
                names.setdefault(id(item), f"{attribute.strip('_')}_{key}")
    return names


def _list_names(layer: Any) -> list[str]:
    """What ``dir`` gives: saving walks it, and must find layers where plain Keras does."""
    unlisted = vars(layer).get("_unlisted", ())
    names: list[str] = nn.Module.__dir__(layer)  # type: ignore[no-untyped-call]
    return [name for name in names if name not in unlisted]


keras.Layer.__dir__ = _list_names


def _free_name(name: str, taken: Any) -> str:
    name = name.replace(".", "_").replace("/", "_")
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def _torch_parameters(model: Any, layers: list[Any]) -> dict[int, tuple[nn.Module, str]]:
    """Where parameters of torch modules inside the model are."""
    known = {id(layer) for layer in layers}
    return {
        id(p): (module, name)
        for module in model.modules()
        if id(module) not in known
        for name, p in module._parameters.items()
        if p is not None
    }


def _place_variable(
    layer: Any, variable: Any, held: dict[int, tuple[nn.Module, str]], trained: bool
) -> None:
    if variable._overwrite_with_gradient:
        raise ArgumentError(
            f"{variable.path!r} is a scale of float8 training, which Keras overwrites with its "
            "gradient: Ronde does not. Use another dtype policy."
        )
    if isinstance(variable, OwnedVariable):  # of another layer, too
        if variable._owner is not layer:
            store = layer._parameters if trained else layer._buffers
            store[_variable_name(layer, variable)] = variable.whole
        return
    value = variable._value
    if id(value) in held:
        owner, key = held[id(value)]
    else:
        owner = layer
        key = _variable_name(layer, variable)
        if trained:
            p = value if value.is_leaf else nn.Parameter(value.detach(), value.requires_grad)
            layer._parameters[key] = p
        else:
            layer._buffers[key] = value.detach()
    del variable.__dict__["_value"]
    variable.__class__ = OwnedVariable
    variable._owner, variable._key = owner, key


def _variable_name(layer: Any, variable: Any) -> str:
    """The attribute that holds it, as Keras numbers variables without a name anew in each copy."""
    taken = {**layer._modules, **layer._parameters, **layer._buffers}
    attributes = [k for k, v in vars(layer).items() if v is variable]
    name = attributes[0].strip("_") if attributes else variable.name
    if not attributes and name.rstrip("0123456789_") == "variable":
        name = "variable"
    return _free_name(name, taken)


def _follow_mode(model: Any) -> None:
    """Let training follow the module's mode where a call does not say."""
    signature = model._call_signature
    if "training" in signature.parameters:
        known = signature.parameters.values()
        free = [p.replace(default=None) if p.name == "training" else p for p in known]
        if signature.parameters["training"].default is not inspect.Parameter.empty:
            model._call_signature = signature.replace(parameters=free)

    def forward(*args: Any, **kwargs: Any) -> Any:
        context = model._get_call_context()
        if context.entry_layer is model and context.get_value("training") is None:
            context.set_value("training", model.training)
            if model._call_has_context_arg.get("training", False):
                kwargs["training"] = model.training
        with _torch_draws():
            return type(model).forward(model, *args, **kwargs)

    vars(model)["forward"] = forward


def _keep_masks(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a layer's hooks and its forward pass. Hooks of a plan may copy tensors, and Keras keeps
    masks as attributes of tensors, which attention takes from its inputs.
    """
    if not layer._forward_pre_hooks and not layer._forward_hooks:
        return nn.Module.__call__(layer, *args, **kwargs)
    given, copies, made = tensors_in((args, kwargs)), list[Any](), list[Any]()

    def before(_module: nn.Module, *new: Any) -> None:
        copies.extend(tensors_in(new))
        _hand_masks_on(given, copies)

    def after(_module: nn.Module, _new: Any, output: Any) -> None:
        made.extend(tensors_in(output))

    handles = (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, prepend=True),
    )
    try:
        output = nn.Module.__call__(layer, *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for tensor, copied in zip(given, copies, strict=True):
        if get_keras_mask(copied) is None and get_keras_mask(tensor) is not None:
            set_keras_mask(tensor, None)
    _hand_masks_on(made, tensors_in(output))
    return output


def _hand_masks_on(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
    for tensor, copied in zip(tensors, copies, strict=True):
        if tensor is not copied:
            set_keras_mask(copied, get_keras_mask(tensor))


TorchLayer.__call__ = _keep_masks


@contextmanager
def _torch_draws() -> Iterator[None]:
    """Let random layers draw from torch's generator, which Ronde keys by sample."""
    global _draws_from_torch
    before, _draws_from_torch = _draws_from_torch, True
    try:
        yield
    finally:
        _draws_from_torch = before


_seeded = keras_random.torch_seed_generator


def _generator(seed: Any) -> Any:
    return None if _draws_from_torch else _seeded(seed)


keras_random.torch_seed_generator = _generator


def _copy(model: Any, memo: dict[int, Any]) -> Any:
    """A copy by way of the model's configuration, as ``.keras`` files hold it."""
    state = torch.get_rng_state()
    try:
        made = keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(model), safe_mode=False
        )
        if not made.built:
            made.build_from_config(model.get_build_config())
    finally:
        torch.set_rng_state(state)
    own(made)
    memo[id(model)] = made
    made.train(model.training)
    for (_, old), (_, new) in zip(model.named_modules(), made.named_modules(), strict=True):
        memo.setdefault(id(old), new)
        for store in ("_parameters", "_buffers"):
            theirs, mine = getattr(old, store), getattr(new, store)
            mine.update({k: copy.deepcopy(v, memo) for k, v in theirs.items()})
    for old, new in zip(layers_of(model), layers_of(made), strict=True):
        vars(new)["_trainable"] = old._trainable
    return made
