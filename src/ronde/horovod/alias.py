"""Makes ``import horovod.torch`` and ``horovod.keras`` find Ronde's bridge, and sets Horovod's
variables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ronde.world import world

__all__ = ["install"]

_MODULES = {
    "horovod": "ronde.horovod",
    "horovod.torch": "ronde.horovod.torch",
    "horovod.torch.elastic": "ronde.horovod.elastic",
    "horovod.torch.elastic.sampler": "ronde.horovod.elastic",
    "horovod.torch.elastic.state": "ronde.horovod.elastic",
    "horovod.torch.mpi_ops": "ronde.horovod.torch",
    "horovod.torch.functions": "ronde.horovod.torch",
    "horovod.torch.optimizer": "ronde.horovod.torch",
    "horovod.torch.sync_batch_norm": "ronde.horovod.torch",
    "horovod.torch.compression": "ronde.horovod.compression",
    "horovod.common.process_sets": "ronde.horovod.lifecycle",
    "horovod.common.elastic": "ronde.horovod.elastic",
}
_KERAS = {
    f"horovod.{parent}keras{child}": f"ronde.horovod.keras{target}"
    for parent in ("", "tensorflow.")
    for child, target in (("", ""), (".callbacks", "_callbacks"))
}
"""Modules that import Keras: only where a script does."""


class _Keras(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the bridge's modules for Keras when they are imported."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Answer for these names alone."""
        return importlib.machinery.ModuleSpec(name, self) if name in _KERAS else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The bridge's module itself: its state is there once."""
        module = importlib.import_module(_KERAS[spec.name])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already."""
        module.__spec__ = self._spec  # the import system has just put the alias's there
        module.__dict__.setdefault("__path__", [])


def _no_tensorflow(name: str) -> Any:
    raise AttributeError(
        f"horovod.tensorflow.{name}: Ronde's bridge is for PyTorch and for Keras on its torch "
        "backend. ronde run --tensorflow starts scripts that use TensorFlow's own strategies."
    )


def install() -> None:
    """Let the names of Horovod's modules mean Ronde's, and set ``HOROVOD_RANK`` and the like."""
    for name, target in _MODULES.items():
        sys.modules[name] = importlib.import_module(target)
    for name, content in _helpers().items():
        module = ModuleType(name, "A few names of Horovod's, for scripts that use them.")
        vars(module).update(content)
        module.__path__ = []
        sys.modules[name] = module
    tensorflow = sys.modules["horovod.tensorflow"] = ModuleType("horovod.tensorflow")
    vars(tensorflow).update(__path__=[], __getattr__=_no_tensorflow)
    vars(sys.modules["horovod"])["tensorflow"] = tensorflow
    sys.meta_path.insert(0, _Keras())  # before a Horovod that is installed
    os.environ.setdefault("KERAS_BACKEND", "torch")
    me = world()
    nodes = me.size // me.local_size
    os.environ.update(
        HOROVOD_RANK=str(me.rank),
        HOROVOD_SIZE=str(me.size),
        HOROVOD_LOCAL_RANK=str(me.local_rank),
        HOROVOD_LOCAL_SIZE=str(me.local_size),
        HOROVOD_CROSS_RANK=str(me.node),
        HOROVOD_CROSS_SIZE=str(nodes),
        HOROVOD_HOSTNAME=me.host,
        HOROVOD_CONTROLLER="gloo",  # Horovod's own tests ask
        HOROVOD_CPU_OPERATIONS="gloo",
    )


def _helpers() -> dict[str, dict[str, Any]]:
    """Modules of Horovod's own helpers that scripts and its tests import."""
    from ronde.horovod import elastic, lifecycle
    from ronde.horovod.bridge import HorovodInternalError

    built = {
        name: functools.partial(_built, getattr(lifecycle, name))
        for name in ("gloo_built", "mpi_built", "nccl_built", "ddl_built", "ccl_built")
    }
    return {
        "horovod.common": {},
        "horovod.common.exceptions": {
            "HorovodInternalError": HorovodInternalError,
            "HostsUpdatedInterrupt": elastic.HostsUpdatedInterrupt,
        },
        "horovod.common.util": {
            **built,
            "extension_available": lambda name, verbose=False: name == "torch",
            "_cache": functools.cache,  # private, and used by Horovod's own tests
            "env": _environment,
        },
        "horovod.runner": {"run": sys.modules["horovod"].run},
        "horovod.runner.util": {},
        "horovod.runner.util.threads": {"in_thread": _in_thread},
    }


def _built(function: Callable[[], Any], verbose: bool = False) -> Any:
    return function()


@contextlib.contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    """Set environment variables within the block; None removes one."""
    before = {name: os.environ.get(name) for name in values}

    def put(wanted: dict[str, str | None]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    put(values)
    try:
        yield
    finally:
        put(before)


def _in_thread(
    target: Callable[..., Any],
    args: Any = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    thread = threading.Thread(target=target, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread
