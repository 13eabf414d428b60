"""Parameters that another pipeline worker holds: shape and type, but no values.

Each worker keeps only its stages' weights. The others must not pass for zeros: a logged norm or a
moving average would be silently wrong. Shape, type and device can be read; freezing, casting,
copying the model and ``state_dict()`` work. Everything else is an error that names the parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ronde.world import PlanError

__all__ = ["RemoteParameters", "held_elsewhere", "element", "make_remote"]

# Attributes of a tensor that show its values, and functions that do not.
_VALUES = {"T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}
_ABOUT = """
    __hash__ __len__ _has_compatible_shallow_copy_type _is_view data_ptr dim element_size
    get_device has_names is_complex is_conj is_contiguous is_floating_point is_inference
    is_neg is_pinned is_same_size is_shared is_signed ndimension nelement numel register_hook
    register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride
    untyped_storage empty_like full_like ones_like rand_like randint_like randn_like
    zeros_like new_empty new_empty_strided new_full new_ones new_zeros
""".split()  # noqa: SIM905
# What Module.to() and state_dict() call: the result has no values either.
_ALIKE = {"bfloat16", "cpu", "cuda", "detach", "double", "float", "half", "to", "type"}


@dataclass(eq=False)
class RemoteParameters:
    """Shared by all remote parameters of a model."""

    plan: str  # as a user writes it, for errors
    open: bool = False  # the pipeline itself is at work and may do anything with them
    parameters: list[nn.Parameter] = field(default_factory=list)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Give the parameters their own class back: fake tensors accept no unknown class."""
        classes = [(p, p.__class__) for p in self.parameters]
        try:
            for p, kind in classes:
                p.__class__ = kind.__mro__[2]
            yield
        finally:
            for p, kind in classes:
                p.__class__ = kind


class _Absent:
    """A tensor or parameter without values: refuses reads and writes."""

    __slots__ = ()
    _ronde_remote: RemoteParameters
    _ronde_name: str
    _ronde_stage: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        one = next(_absent_in((*args, *kwargs.values())), None)
        with torch._C.DisableTorchFunctionSubclass():
            if one is None or one._ronde_remote.open:
                return func(*args, **kwargs)
            name = func.__name__
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "__get__" and attribute not in _VALUES:
                return _same_shape(one, one) if attribute == "data" else func(*args)
            if name == "__set__" and held_elsewhere(args[0]):
                settable = ("data",) if held_elsewhere(args[1]) else ("grad", "requires_grad")
                if attribute in settable:
                    return func(*args)
            if name in _ABOUT:
                return func(*args, **kwargs)
            if name in _ALIKE and one is args[0]:
                made = func(element(one.dtype, one.device), *args[1:], **kwargs)
                return _same_shape(one, made) if isinstance(made, torch.Tensor) else made
        raise _refusal(one)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = _same_shape(self, self)
            if isinstance(self, nn.Parameter):
                plain, remote = (
                    made.as_subclass(torch.Tensor),
                    RemoteParameters(self._ronde_remote.plan),
                )
                made = nn.Parameter(plain, requires_grad=self.requires_grad)
                make_remote(made, self._ronde_name, self._ronde_stage, remote)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            shape = list(self.shape)  # type: ignore[attr-defined]
        return f"<{self._ronde_name!r}, {shape}: held by another worker, stage {self._ronde_stage}>"


@functools.cache
def _without_values(kind: type) -> Any:
    return type(kind.__name__, (_Absent, kind), {"__slots__": ()})


def held_elsewhere(value: Any) -> bool:
    """Whether another worker holds a tensor's values."""
    return isinstance(value, _Absent)


def make_remote(parameter: nn.Parameter, name: str, stage: int, remote: RemoteParameters) -> None:
    """Mark a parameter, already shrunk to one element, as held by another worker.

    It stays the same object: optimizers and the script's own lists refer to it.
    """
    _label(parameter, remote, name, stage)
    parameter.__class__ = _without_values(type(parameter))
    remote.parameters.append(parameter)


def _absent_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Absent):
            yield value
        elif isinstance(value, list | tuple):
            yield from _absent_in(value)


def _refusal(one: Any) -> PlanError:
    return PlanError(
        f"The script reads or writes {one._ronde_name!r}, which belongs to stage "
        f"{one._ronde_stage}: under plan={one._ronde_remote.plan!r} another worker holds its "
        "values. model.state_dict(keep_vars=True) has this worker's parameters (for a moving "
        "average, see docs/checkpoints.md). run.export(path) writes the whole model. Under "
        "replicate or shard='optimizer' every worker holds all values."
    )


def element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one element behind a remote tensor: NaN if the type has it, so that stray reads show."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


def _same_shape(one: Any, like: Any) -> Any:
    """A tensor without values, with the shape of ``one`` and the type of ``like``."""
    whole = element(like.dtype, like.device).expand(one.shape)
    made = whole.as_subclass(_without_values(torch.Tensor))
    _label(made, one._ronde_remote, one._ronde_name, one._ronde_stage)
    return made


def _label(tensor: Any, remote: RemoteParameters, name: str, stage: int) -> None:
    tensor._ronde_remote, tensor._ronde_name, tensor._ronde_stage = remote, name, stage
