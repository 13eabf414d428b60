"""Intercept every module call and torch function of a forward pass, and classify functions."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from ronde.world.tensors import tensors_in


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# torch tags the dispatched operators that draw, but not the Python functions that are intercepted
# here: their names must tell.
_RANDOM = re.compile(
    "rand|dropout|bernoulli|multinomial|normal|uniform|exponential|poisson|gumbel|cauchy|geometric|rrelu|binomial|_standard_gamma|"
    "_sample_dirichlet|fractional_max_pool"
)
_NAMES_NOT_EVENTS = _words(
    "size dim ndimension numel nelement stride storage_offset is_contiguous element_size "
    "is_floating_point is_complex is_signed "
    "get_device is_same_size __len__ __hash__ is_shared is_pinned untyped_storage storage "
    "requires_grad_ has_names is_inference is_set_to is_conj is_neg result_type promote_types "
    "is_tensor is_storage is_grad_enabled get_default_dtype set_default_dtype can_cast "
    "finfo iinfo is_autocast_enabled "
    "get_rng_state set_rng_state manual_seed is_distributed __dlpack_device__ broadcast_shapes"
)
_TENSOR_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad"})
# No events, unless a shape depends on activations: then they pass values on to Python.
_SIZES = _words("shape size __len__ numel nelement nbytes stride is_same_size")
# Functions that take numbers out of a tensor: these are sent to later stages.
NUMBERS = _words(
    "item tolist __bool__ __int__ __float__ __index__ __complex__ is_nonzero equal "
    "allclose __contains__ numpy"
)
# Functions whose result's shape depends on tensor values.
_DATA_SHAPED = _words(
    "nonzero argwhere masked_select unique unique_consecutive bincount "
    "_pack_padded_sequence combinations"
)
# Functions whose result has the shape of the tensor they write into.
_WRITES = _words(
    "__setitem__ index_add index_copy index_put index_reduce scatter scatter_add "
    "scatter_reduce masked_scatter slice_scatter"
)
_kinds: dict[Any, tuple[str, bool, bool]] = {}


def name_of(function: Any) -> str:
    """A torch function's name; for a tensor property, the property's."""
    name = getattr(function, "__name__", None) or str(function)
    if name in ("__get__", "__set__", "__delete__"):
        return str(getattr(function.__self__, "__name__", name))
    return str(name)


def not_an_event(function: Any) -> bool:
    """Whether a function only reads a tensor's shape, type or device."""
    return kind_of(function)[1]


def is_random(name: str) -> bool:
    """Whether the named function draws random numbers."""
    return _RANDOM.search(name) is not None


def kind_of(function: Any) -> tuple[str, bool, bool]:
    """Name, whether it is not an event, whether it draws random numbers."""
    kind = _kinds.get(function)
    if kind is None:
        name = name_of(function)
        how = getattr(function, "__name__", "")
        if how in ("__get__", "__set__", "__delete__"):
            passive = name not in _TENSOR_PROPERTIES
            name = ".grad" if name == "grad" else name  # not torch.autograd.grad
        else:
            passive = name in _NAMES_NOT_EVENTS
        kind = (name, passive, not passive and is_random(name))
        if len(_kinds) < 10_000:
            _kinds[function] = kind
    return kind


# A fake tensor has its own tolist, written in Python.
_fake_tolist: Any = FakeTensor.__dict__.get("tolist")
_TOLIST = ("tolist", False, False)
_entered: list[Interceptor] = []  # the last one is active
_originals: list[tuple[Any, str, Any]] = []  # class, method, what was there
_plain_call: Any = nn.Module.__call__
_depth = 0


def _begin() -> None:
    """Route module calls, autograd functions, and scripted functions to the active interceptor.

    Replacing a method of a class with many subclasses takes about 300 µs: :func:`watching` does it
    once for many passes, :func:`stay` for an owner's lifetime.
    """
    global _depth, _plain_call
    _depth += 1
    if _depth > 1:
        return
    plain_call = _plain_call = nn.Module.__call__
    plain_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    plain_script = torch.jit.ScriptFunction.__call__
    plain_convert: Any = nn.Module._apply

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _entered:
            return plain_call(module, *args, **kwargs)
        interceptor = _entered[-1]
        if interceptor._off or threading.get_ident() != interceptor._thread:
            if interceptor.used and threading.get_ident() == interceptor._thread:
                interceptor.used[-1].update(
                    {id(p): p for p in module._parameters.values() if isinstance(p, nn.Parameter)}
                )
            return plain_call(module, *args, **kwargs)
        return interceptor.on_call(module, args, kwargs)

    def active() -> Interceptor | None:
        # A checkpointed function runs again in the backward pass, outside any interceptor.
        if not _entered or _entered[-1]._off or threading.get_ident() != _entered[-1]._thread:
            return None
        return _entered[-1]

    def event(plain: Any, args: Any, kwargs: Any, what: tuple[str, bool, bool]) -> Any:
        """Make a plain call, as an event of the active interceptor if there is one."""
        if (interceptor := active()) is None:
            return plain(*args, **kwargs)
        with interceptor.pause():
            return interceptor.on_function(plain, args, kwargs, what)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        def run(*a: Any, **k: Any) -> Any:
            return plain_apply(cls, *a, **k)

        run.__name__ = cls.__name__
        return event(run, args, kwargs, (cls.__name__, False, False))

    def script(function: Any, *args: Any, **kwargs: Any) -> Any:
        what = (function.name, False, is_random(function.name))
        return event(partial(plain_script, function), args, kwargs, what)

    def tolist(tensor: Any) -> Any:
        return event(_fake_tolist, (tensor,), {}, _TOLIST)

    def convert(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Module.to() and the like are no events: every stage converts the gradients that it has.
        interceptor = active()
        with nullcontext() if interceptor is None else interceptor.pause():
            return plain_convert(module, *args, **kwargs)

    for owner, name, method in (
        (nn.Module, "__call__", call),
        (nn.Module, "_apply", convert),
        (torch.autograd.Function, "apply", classmethod(apply)),
        (torch.jit.ScriptFunction, "__call__", script),
        (FakeTensor, "tolist", tolist),
    ):
        if name in vars(owner):  # torch 2.11 may lack a tolist of its own
            _originals.append((owner, name, vars(owner)[name]))
            setattr(owner, name, method)


def _end() -> None:
    global _depth
    _depth -= 1
    if not _depth:
        for owner, name, original in _originals:
            setattr(owner, name, original)
        _originals.clear()


@contextmanager
def watching() -> Iterator[None]:
    """Keep the patches in place over several passes."""
    _begin()
    try:
        yield
    finally:
        _end()


def stay(owner: Any) -> None:
    """Keep the patches in place until ``owner`` is gone."""
    _begin()
    weakref.finalize(owner, _end).atexit = False


class Interceptor(TorchFunctionMode):
    """Intercepts this thread's module calls and torch functions while entered."""

    used: Any = ()  # collects parameters of modules whose calls are not intercepted, if a list
    sizes = False  # whether reading a tensor's size calls on_size

    def __enter__(self) -> Any:
        self._thread = threading.get_ident()
        self._off = False
        _begin()
        _entered.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._off = True
        _entered.remove(self)
        _end()
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        what = _kinds.get(func) or kind_of(func)
        if what[1]:
            if self.sizes and what[0] in _SIZES:
                return self.on_size(func, args, kwargs, what)
            return func(*args, **kwargs)
        self._off = True  # a function written in Python is one event, whatever it calls
        try:
            if func is torch.Tensor.__iter__:
                return iter(
                    self.on_function(torch.Tensor.unbind, args, {}, ("unbind", False, False))
                )
            return self.on_function(func, args, kwargs, what)
        finally:
            self._off = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Intercept nothing within the block."""
        was, self._off = self._off, True
        depth = torch._C._len_torch_function_stack()
        mine = depth > 0 and torch._C._get_function_stack_at(depth - 1) is self
        if mine:
            torch._C._pop_torch_function_stack()
        try:
            yield
        finally:
            if mine:
                torch._C._push_on_torch_function_stack(self)
            self._off = was

    def plain_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Make the call itself, but intercept what it calls."""
        if compiled(module):  # calls inside compiled code cannot be intercepted
            return eagerly(module)(*args, **kwargs)
        return _plain_call(module, *args, **kwargs)

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is called."""
        raise NotImplementedError

    def on_function(
        self, function: Any, args: Any, kwargs: Any, what: tuple[str, bool, bool]
    ) -> Any:
        """A torch function is called, outside modules that are one event."""
        raise NotImplementedError

    def on_size(self, function: Any, args: Any, kwargs: Any, what: tuple[str, bool, bool]) -> Any:
        """A tensor's size is read."""
        raise NotImplementedError


class Reads(TorchFunctionMode):
    """Notes which of some tensors torch functions compute with, by name.

    Args:
        names: identity of a tensor -> its name.

    Attributes:
        read: the names so far. Shapes, types and devices do not count.
        inside: names that do not count now.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.read: set[str] = set()
        self.inside: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not not_an_event(func):
            ids = map(id, tensors_in((args, kwargs)))
            self.read |= {self._names[i] for i in ids if i in self._names}.difference(self.inside)
        return func(*args, **kwargs)


@contextmanager
def calls_heard(
    modules: Mapping[str, nn.Module],
    enter: Callable[[str, Any, Any], None],
    leave: Callable[[str, Any, Any], None] | None = None,
) -> Iterator[None]:
    """Hear of calls of these modules: ``enter(name, args, kwargs)`` before each one, and
    ``leave(name, args, output)`` after it, with no output if it failed.
    """
    handles: list[Any] = []

    def begin(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        enter(name, args, kwargs)

    def end(name: str, _: nn.Module, args: Any, output: Any) -> None:
        assert leave is not None
        leave(name, args, output)

    try:
        for name, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks
            before = partial(begin, name)
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            if leave is not None:
                after = partial(end, name)
                handles.append(module.register_forward_hook(after, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def compiled(module: nn.Module) -> bool:
    """Whether a module is compiled: calls inside it are not seen."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def eagerly(module: nn.Module) -> Callable[..., Any]:
    """Call a compiled module's original code."""
    inner: Any = getattr(module, "_orig_mod", module)
    call: Callable[..., Any] = inner._call_impl
    return call


def keeps_shape(name: str) -> bool:
    """Whether a function's result has its first tensor's shape, whatever the others."""
    return (
        name in _WRITES
        or name.removesuffix("_") in _WRITES
        or (name.endswith("_") and not name.endswith("__"))
    )


def data_shaped(name: str, args: Any) -> bool:
    """Whether a function's result shape depends on tensor values."""
    if name in _DATA_SHAPED or (name == "where" and len(args) == 1):
        return True
    if name == "__getitem__":
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(
            isinstance(k, torch.Tensor) and k.dtype in (torch.bool, torch.uint8) for k in keys
        )
    return name in ("repeat_interleave", "tensor_split") and any(
        isinstance(a, torch.Tensor) for a in args[1:]
    )
