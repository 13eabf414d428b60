"""A device ``cuda:0`` without a GPU: memory and kernels are the processor's, and what would wait for
a real device, or mix devices, raises while :func:`strict` is on.

``load`` must come before torch is imported. ``fake_cuda.cpp`` is the device; here is what
``torch.cuda`` has in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def build(library: Path) -> None:
    """Compile the device."""
    torch = _torch()
    command = ["g++", "-shared", "-fPIC", "-O0", "-w", "-std=c++20", str(SOURCE), "-o"]
    command += [str(library), f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    command += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def load(library: Path) -> None:
    """Make this process have the device. Before ``import torch``, which asks for accelerators."""
    assert "torch" not in sys.modules
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
    _patch()


_strict = False


@contextlib.contextmanager
def strict(value: bool = True) -> Any:
    """Whether waiting for the device is an error."""
    import torch

    global _strict
    before, _strict = _strict, value
    torch.ops.fake_cuda.strict(value)
    try:
        yield
    finally:
        _strict = before
        torch.ops.fake_cuda.strict(before)


def _waits(what: str) -> None:
    if _strict:
        raise RuntimeError(f"waits for the device: {what}")


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        import torch

        self.device, self.cuda_stream = torch.device("cuda", 0), 0

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _waits("torch.cuda.Stream.synchronize")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _waits("torch.cuda.Event.synchronize")

    def elapsed_time(self, _: Any) -> float:
        return 1.0


def _patch() -> None:
    import torch

    stream = Stream()
    properties = SimpleNamespace(
        major=9, minor=0, total_memory=80 << 30, name="no GPU", multi_processor_count=100
    )
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "device": lambda _: contextlib.nullcontext(),
        "is_bf16_supported": lambda *_, **__: True,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda _=None: stream,
        "default_stream": lambda _=None: stream,
        "set_stream": lambda _: None,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda _=None: _waits("torch.cuda.synchronize"),
        "get_device_properties": lambda _=None: properties,
        "get_device_name": lambda _=None: "no GPU",
        "get_device_capability": lambda _=None: (9, 0),
        "mem_get_info": lambda _=None: (60 << 30, 80 << 30),
        "memory_reserved": lambda _=None: 0,
        "memory_allocated": lambda _=None: 0,
        "max_memory_allocated": lambda _=None: 0,
        "reset_peak_memory_stats": lambda _=None: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _=None: torch.set_rng_state(state),
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
    }
    for name, value in values.items():
        setattr(torch.cuda, name, value)
    pinned: set[int] = set()

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        copy = self.clone()
        pinned.add(copy.untyped_storage().data_ptr())
        return copy

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = lambda self, device=None: (  # type: ignore[method-assign,assignment]
        self.untyped_storage().data_ptr() in pinned
    )
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(self)
        torch.ops.fake_cuda.resize_storage(whole, size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
