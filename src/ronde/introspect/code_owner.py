"""Whose code is this: Ronde's, an installed package's, or the user's?"""

from __future__ import annotations

import functools
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

_PATHS = {
    path
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
}
LIBRARY_FOLDERS = tuple({f"{Path(path).resolve()}/" for path in _PATHS})
"""Python's own modules and this environment's packages, without links."""
# By the names that Python imports them by: an installer (uv) may have linked each file to its
# store. torch may be a build in its own checkout, outside of these folders.
_OWN = (
    *(*LIBRARY_FOLDERS, *(f"{path}/" for path in _PATHS)),
    *(f"{Path(__file__).resolve().parents[1]}/", f"{Path(torch.__file__).parent}/", "<frozen"),
)


def is_ronde(thing: Any) -> bool:
    """Whether a class, a function, or an object's class is Ronde's own."""
    module = getattr(
        thing if isinstance(thing, type | FunctionType) else type(thing), "__module__", None
    )
    return str(module).partition(".")[0] == "ronde"


@functools.cache
def is_library_file(file: str) -> bool:
    """Whether a file belongs to Python or an installed package, through any links.

    Fingerprints rely on it: of other files the code itself counts.
    """
    path = Path(file).resolve()
    # A user's own site-packages, and the ones below a venv's, are in no path of sysconfig.
    return str(path).startswith(LIBRARY_FOLDERS) or bool(
        {"site-packages", "dist-packages"} & set(path.parts)
    )


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a frame of this file runs user code, not a package's or Python's."""
    return not file.startswith(_OWN) and not is_library_file(file)


def is_installed(module: str | None) -> bool:
    """Whether a module is Python's, a package's or Ronde's: its version stands for its code."""
    if module in (None, "__main__", "__mp_main__"):
        return False
    top = str(module).partition(".")[0]
    if top == "ronde":
        return True
    found = sys.modules.get(str(module)) or sys.modules.get(top)
    if found is None:
        return _is_installable(top)
    file = getattr(found, "__file__", None)
    if file is not None and not Path(file).is_absolute():  # torch.ops says _ops.py
        file = getattr(sys.modules.get(top), "__file__", None)
    if file is not None:
        return is_library_file(file)
    folders = list(getattr(found, "__path__", ()))  # without an __init__.py
    if folders:
        return all(map(is_library_file, folders))
    return getattr(found, "__spec__", None) is not None or top in sys.builtin_module_names


def _is_installable(top: str) -> bool:
    """The same for a package that is not imported."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None:
        return False
    places = (
        [spec.origin]
        if spec.has_location and spec.origin
        else list(spec.submodule_search_locations or ())
    )
    return all(map(is_library_file, places))  # none at all: built in


def is_user_module(module: str) -> bool:
    """Whether an imported module is the script or one of the user's files."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (
        file is not None and is_user_file(file) and not is_installed(module)
    )


def user_modules() -> list[ModuleType]:
    """The script and the user's modules."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and is_user_module(name)
    ]
