"""Parameters that another worker holds: a shape, a type, and no values.

A worker of a pipeline keeps the weights of its own stages. What stands for the others must not pass for zeros: a norm that a script
logs, or a moving average that it keeps, would be wrong without a word. So reading one is an error that says whose it is, and what can be
done for every parameter by every worker alike still can be: asking for shapes, changing types, freezing, copying the model, and writing
(weight decay by hand, an initialisation between epochs), which happens where the values are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ronde.plan.following import changes_in_place
from ronde.world import PlanError

__all__ = ["Keeper", "absent", "element", "let_go"]

# What a tensor has besides its values, as attributes are named; the rest is looked at by the functions below.
_VALUES = {"T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}
_ABOUT = {
    "__hash__", "__len__", "_has_compatible_shallow_copy_type", "_is_view", "data_ptr", "dim", "element_size", "get_device", "has_names", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed", "ndimension", "nelement", "numel",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage_offset", "stride", "untyped_storage",
}  # fmt: skip
_ALIKE = {
    "alias",
    "bfloat16",
    "clone",
    "contiguous",
    "cpu",
    "cuda",
    "detach",
    "detach_",
    "double",
    "float",
    "half",
    "pin_memory",
    "to",
    "type",
    "type_as",
}
_BY_SHAPE = {
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "ones_like", "rand_like",
    "randint_like", "randn_like", "zeros_like",
}  # fmt: skip


@dataclass(eq=False)
class Keeper:
    """What the absent parameters of one model have in common.

    Attributes:
        plan: under which others hold them, as a person writes it.
        open: whether they are looked at by the pipeline itself, which knows what they are.
        parameters: those of the model.
    """

    plan: str
    open: bool = False
    parameters: list[nn.Parameter] = field(default_factory=list)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """They are like any other for now: fake tensors take no class that they do not know."""
        of_theirs = [(p, p.__class__) for p in self.parameters]
        try:
            for p, _ in of_theirs:
                p.__class__ = nn.Parameter
            yield
        finally:
            for p, kind in of_theirs:
                p.__class__ = kind


class _Absent:
    """What both kinds do with torch's functions."""

    __slots__ = ()
    _ronde_keeper: Keeper
    _ronde_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        one = next(_absent_in((*args, *kwargs.values())), None)
        with torch._C.DisableTorchFunctionSubclass():
            if one is None or one._ronde_keeper.open:
                return func(*args, **kwargs)
            name = func.__name__
            if name in ("__get__", "__set__", "__delete__"):
                return _attribute(func, name, args, one)
            if name in _ABOUT:
                return func(*args, **kwargs)
            if name in _ALIKE:
                return _alike(one, func(_element(one), *[_element(a) if absent(a) else a for a in args[1:]], **kwargs))
            if name in _BY_SHAPE:
                return func(*[_some(a) for a in args], **{k: _some(v) for k, v in kwargs.items()})
            if "out" not in kwargs and changes_in_place(name, kwargs):
                return _written(func, args, kwargs, one)
            with torch.no_grad():
                result = func(*map(_some, args), **{k: _some(v) for k, v in kwargs.items()})
            if "out" not in kwargs and isinstance(result, torch.Tensor) and result.shape == one.shape:
                return _alike(one, element(result.dtype, result.device))  # element by element: absent as well
        raise _refusal(one)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = _alike(self, _element(self))
            if isinstance(self, nn.Parameter):
                made = nn.Parameter(made.as_subclass(torch.Tensor), requires_grad=self.requires_grad)
                let_go(made, self._ronde_name, Keeper(self._ronde_keeper.plan))
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"<{self._ronde_name!r}, {list(self.shape)}: held by another worker>"  # type: ignore[attr-defined]


class _AbsentTensor(_Absent, torch.Tensor):  # type: ignore[misc]
    __slots__ = ()


class _AbsentParameter(_Absent, nn.Parameter):  # type: ignore[misc]
    __slots__ = ()


def absent(value: Any) -> bool:
    """Whether another worker holds its values."""
    return isinstance(value, _Absent)


def let_go(parameter: nn.Parameter, name: str, keeper: Keeper) -> None:
    """From now on another worker holds this one. It stays the same object, for whoever has it.

    Args:
        parameter: one element stands for all of it already.
        name: in the model, for errors.
        keeper: shared by all of a model's.
    """
    if type(parameter) is not nn.Parameter:  # a class of the script's own, whose functions are not ours to replace
        return
    parameter._ronde_keeper, parameter._ronde_name = keeper, name  # type: ignore[attr-defined]
    parameter.__class__ = _AbsentParameter
    keeper.parameters.append(parameter)


def _absent_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Absent):
            yield value
        elif isinstance(value, list | tuple):
            yield from _absent_in(value)


def _refusal(one: Any) -> PlanError:
    return PlanError(
        f"the script reads {one._ronde_name!r} itself, and under plan={one._ronde_keeper.plan!r} another worker holds its values. Go through "
        "model.state_dict(), which has what this worker holds (a moving average: docs/checkpoints.md), write the whole with run.export(path), or "
        "use a plan under which every worker holds all: replicate, or shard='optimizer'."
    )


def element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Stands for all of an absent tensor: no number, where the type has that, so that what gets past these functions is seen."""
    return torch.full((), float("nan") if dtype.is_floating_point or dtype.is_complex else 0, dtype=dtype, device=device)


def _element(one: Any) -> torch.Tensor:
    return element(one.dtype, one.device)


def _some(value: Any) -> Any:
    """Values of that shape, of no meaning, in the place of what is absent."""
    if isinstance(value, _Absent):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return type(value)(map(_some, value))
    return value


def _alike(one: Any, element: torch.Tensor) -> Any:
    made = element.detach().expand(one.shape).as_subclass(_AbsentTensor)
    made._ronde_keeper, made._ronde_name = one._ronde_keeper, one._ronde_name
    return made


def _attribute(func: Any, name: str, args: tuple[Any, ...], one: Any) -> Any:
    attribute = func.__self__.__name__
    if name == "__get__":
        if attribute in _VALUES:
            raise _refusal(one)
        return _alike(one, _element(one)) if attribute == "data" else func(*args)
    if not isinstance(args[0], _Absent) or (attribute == "grad" and isinstance(args[1], _Absent)):
        raise _refusal(one)
    if attribute == "data" and not isinstance(args[1], _Absent):
        return None  # written where the values are
    return func(*args)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], one: Any) -> Any:
    """A function that writes into its first argument. Absent ones are written into where they are held.

    Here the function runs too, on values of no meaning: it may draw from a generator, which has to go on alike on every worker.
    """
    given = (*args, *kwargs.values())
    into = given[0]
    if isinstance(into, list | tuple):  # _foreach_…_: one by one with the lists that follow
        theirs = [isinstance(v, _Absent) for v in into]
        for value in given[1:]:
            if isinstance(value, list | tuple) and any(isinstance(v, _Absent) and not t for v, t in zip(value, theirs, strict=False)):
                raise _refusal(one)
    elif not isinstance(into, _Absent):
        raise _refusal(one)
    with torch.no_grad():
        func(*map(_some, args), **{k: _some(v) for k, v in kwargs.items()})
    return into
