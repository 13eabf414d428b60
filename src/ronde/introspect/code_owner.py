"""Whose code is this: Ronde's, an installed package's, or the user's?"""

from __future__ import annotations

import functools
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
    """Whether a file belongs to Python or an installed package, through any links."""
    path = Path(file).resolve()
    # A user's own site-packages, and the ones below a venv's, are in no path of sysconfig.
    return str(path).startswith(LIBRARY_FOLDERS) or bool(
        {"site-packages", "dist-packages"} & set(path.parts)
    )


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a frame of this file runs user code, not a package's or Python's."""
    return not file.startswith(_OWN) and not is_library_file(file)


def is_user_module(module: str) -> bool:
    """Whether an imported module is the script or one of the user's files."""
    file = getattr(sys.modules.get(module), "__file__", None)
    # torch.ops says _ops.py, without a folder
    return module == "__main__" or (
        file is not None and Path(file).is_absolute() and is_user_file(file)
    )


def user_modules() -> list[ModuleType]:
    """The script and the user's modules."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and is_user_module(name)
    ]
