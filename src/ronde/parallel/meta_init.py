"""Give values to models built under ``torch.device("meta")``, keeping only a worker's own part.

Each module's tensors are created whole in host memory, initialized under a seed from its name, cut
to this worker's part, and freed before the next module. Weights therefore do not depend on the plan
or the number of workers, and the peak is the kept part plus one module.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ronde import checkpoint
from ronde.data import key_of
from ronde.world import ArgumentError, CheckpointError
from ronde.world.tensors import is_sharded

__all__ = ["FILL_THEMSELVES", "Init", "materialise", "meta_names", "weights_in"]

Init = Callable[[nn.Module], None] | str | os.PathLike[str]
"""A function of one module; ``"reset"``; or where weights are on disk."""

FILL_THEMSELVES: tuple[str, ...] = ("shard", "pipeline")
"""Families of plans whose strategies call ``work.fill`` when they have divided a model; for others
it is filled before.
"""


def meta_names(model: nn.Module) -> list[str]:
    """Names of parameters and buffers without values."""
    return [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]


def weights_in(path: str | os.PathLike[str], verified: bool = False) -> checkpoint.PieceSource:
    """Tensors of a Ronde checkpoint, a safetensors file, or a folder of them.

    Args:
        verified: a checkpoint's files are known to match their digests.

    Raises:
        ArgumentError: there are none.
        CheckpointError: they are damaged.
    """
    place = Path(path)
    if (place / "manifest.json").is_file():
        trusted = checkpoint.trust(place) if verified else checkpoint.verify(place)
        if trusted is None:
            raise CheckpointError(
                f"{place} is not a whole checkpoint, or not on a file system that this worker sees"
            )
        return trusted.source("model")
    if place.is_file():
        return checkpoint.PieceSource.of_files(place.parent, [place.name])
    files = sorted(f.name for f in place.glob("*.safetensors")) if place.is_dir() else []
    if not files:
        raise ArgumentError(
            f"init={str(path)!r}: expected a function, 'reset', a checkpoint's folder, a "
            ".safetensors file or a folder of such; there is none."
        )
    return checkpoint.PieceSource.of_files(place, files)


def materialise(
    model: nn.Module,
    init: Init,
    *,
    seed: int,
    device: torch.device,
    keep: Callable[[str], bool] = lambda name: True,
    verified: bool = False,
) -> None:
    """Give a meta model its values in place: parameters stay the same objects, also in the
    optimizer.

    DTensors (after ``fully_shard`` or ``parallelize_module``) get only this worker's shard. Tensors
    not on meta stay.

    Args:
        model: as it is now, divided or not.
        init: a function of one module, which initialises the parameters and buffers that this
            module itself owns; ``"reset"`` for each module's ``reset_parameters()``; or a path, see
            :func:`weights_in`.
        seed: the run's; each module has a key of its own from it and its name.
        device: where plain tensors go.
        keep: whether this worker holds what has that name; the rest stays on meta.
        verified: see :func:`weights_in`.

    Raises:
        ArgumentError: something would be left without values; the module is named.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(2, 2)
        >>> materialise(model, "reset", seed=0, device=torch.device("cpu"))
        >>> model.weight.is_meta
        False
    """
    names: dict[int, list[str]] = {}  # a tied tensor has several
    for name, tensor in _named(model):
        names.setdefault(id(tensor), []).append(name)
    todo = {id(t) for n, t in _named(model) if t.is_meta and keep(n)}
    given = init if callable(init) else None
    with ExitStack() as stack:
        source = None
        if given is None and init != "reset":
            source = stack.enter_context(weights_in(init, verified))  # type: ignore[arg-type]
        for name, module in _children_first("", model, set()):
            own = {id(t): (attribute, t) for _, attribute, t in _own(module) if id(t) in todo}
            todo -= own.keys()
            if source is not None:
                for key, (attribute, tensor) in list(own.items()):
                    if _read(source, tensor, names[key], device):
                        del own[key]
                    elif attribute not in module._non_persistent_buffers_set:
                        raise ArgumentError(
                            f"init={str(init)!r} has no {names[key][0]!r}, which the model has."
                        )
            if own:
                _initialise(name, module, {id(t) for _, t in own.values()}, given, seed, device)


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _own(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """A module's own tensors: their dictionary and name."""
    return [
        (held, k, t)
        for held in (module._parameters, module._buffers)
        for k, t in held.items()
        if t is not None
    ]


def _children_first(
    name: str, module: nn.Module, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Modules in the order their constructors end: what a parent does to its children comes
    last.
    """
    if module not in seen:
        seen.add(module)
        for child, each in module.named_children():
            yield from _children_first(f"{name}.{child}" if name else child, each, seen)
        yield name, module


def _marked(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of marker values, to detect that none were given."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan"), dtype=dtype, device="cpu")
    if dtype == torch.bool:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    limits = torch.iinfo(dtype)
    return torch.full(shape, limits.min or limits.max, dtype=dtype, device="cpu")


def _was_given(now: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    if not now.numel():
        return True
    if now.is_meta:
        return False
    if now.dtype.is_floating_point or now.dtype.is_complex:
        return not bool(now.isnan().any())
    if now is not before or now._version != version:
        return True
    return now.dtype != torch.bool and not bool((now == _marked((), now.dtype)).all())


@contextmanager
def _seeded(key: int) -> Iterator[None]:
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _initialise(
    name: str,
    module: nn.Module,
    wanted: set[int],
    init: Callable[[nn.Module], None] | None,
    seed: int,
    device: torch.device,
) -> None:
    """Run ``init`` on a module whose tensors are whole and on the host, and keep this worker's
    part.
    """
    what = f"module {name!r}" if name else "the model"
    what += f" ({type(module).__name__})"
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    own = _own(module)
    missing = [k for _, k, t in own if id(t) in wanted]
    if init is None and reset is None:
        raise ArgumentError(
            f"init: {what} owns {', '.join(map(repr, missing))} on the meta device and has "
            "no reset_parameters(): give it one, or "
            "init=a function of a module, which fills what the module itself owns."
        )
    scratch: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int]] = []
    digest = hashlib.sha256(name.encode()).digest()
    try:
        with (
            torch.no_grad(),
            torch.device("cpu"),
            # 6: the place of initial values among the keys of the run's seed
            _seeded(key_of(seed, 6, int.from_bytes(digest[:8], "little"))),
        ):
            for held, k, t in own:
                # What has its values already (tied weights) is covered too: it must not be drawn
                # again.
                is_empty = t.is_meta or is_sharded(t)
                whole = _marked(tuple(t.shape), t.dtype) if is_empty else t.detach().cpu().clone()
                if isinstance(t, nn.Parameter):
                    whole = nn.Parameter(whole, requires_grad=t.requires_grad)
                scratch.append((held, k, t, whole, whole._version))
                held[k] = whole
            if init is not None:
                init(module)
            else:
                assert reset is not None
                reset()
        made = [held.get(k) for held, k, *_ in scratch]
    finally:
        for held, k, t, *_ in scratch:
            held[k] = t
    for (_, k, t, before, version), value in zip(scratch, made, strict=True):
        if id(t) not in wanted:
            continue
        if value is None or value.shape != t.shape or not _was_given(value, before, version):
            how = "reset_parameters()" if init is None else "the function"
            raise ArgumentError(
                f"init: {how} left {k!r} of {what} without values. It is on the meta "
                "device, so what the constructor computed is not there: "
                "fill it in init, for every parameter and buffer that the module itself owns."
            )
        _fill(t, value.detach(), device)


def _read(
    source: checkpoint.PieceSource, tensor: torch.Tensor, names: Sequence[str], device: torch.device
) -> bool:
    """Fill a tensor's own box from files; returns whether they have it."""
    name = next((n for n in names if n in source.entries), None)
    if name is None:
        return False
    if source.entries[name].shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{name!r} has shape {list(source.entries[name].shape)} in {source.folder}, "
            f"{list(tensor.shape)} in the model"
        )
    _put(tensor, source.read(name, checkpoint.box_of(tensor, name)).to(tensor.dtype), device)
    return True


def _fill(tensor: torch.Tensor, whole: torch.Tensor, device: torch.device) -> None:
    box, all_of_it = checkpoint.box_of(tensor, "a parameter"), checkpoint.Box.whole(whole.shape)
    _put(tensor, whole if box == all_of_it else whole[box.inside(all_of_it)].clone(), device)


def _put(tensor: torch.Tensor, part: torch.Tensor, device: torch.device) -> None:
    """Turn the empty meta ``tensor`` into one that holds ``part``, as the same object."""
    if is_sharded(tensor) and tensor.device_mesh.device_type != device.type:
        device = torch.device(tensor.device_mesh.device_type)
    with torch.no_grad():
        part = part.to(device).to(tensor.dtype).contiguous()
        real: torch.Tensor = checkpoint.shard_like(part, tensor)
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    if not is_sharded(tensor):
        real.__dict__.update(tensor.__dict__)
    # Not ``.data``, which cannot move a tensor from meta to another device.
    try:
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ArgumentError(
            f"a tensor of shape {list(tensor.shape)} on the meta device cannot be given "
            f"values in place ({error}): something else holds on "
            "to it. Build the model right before ronde.distribute, and do nothing with it "
            "in between."
        ) from error
