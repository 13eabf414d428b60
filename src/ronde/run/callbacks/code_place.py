"""Where in the script a layer or a parameter was made."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from torch import nn

__all__ = ["code_place"]


def code_place(model: nn.Module, name: str) -> str:
    """``FILE:LINE`` of the line that makes a layer, in the innermost class of the script's own that
    holds it, or of that class; empty without such a class.

    Args:
        name: of a parameter or a module, as ``state_dict()`` has it.

    Example:
        >>> code_place(torch.nn.Sequential(torch.nn.Linear(2, 2)), "0.weight")
        ''
    """
    owner, attribute, module = None, "", model
    for piece in [*name.split("."), ""]:
        if not type(module).__module__.startswith("torch."):
            owner, attribute = type(module), piece
        if not isinstance(child := getattr(module, piece, None), nn.Module):
            break
        module = child
    if owner is None:
        return ""
    try:
        file, (lines, first) = inspect.getsourcefile(owner), inspect.getsourcelines(owner)
    except (OSError, TypeError):  # made by exec, or in a notebook that is gone
        return ""
    made = re.compile(rf"\bself\.{re.escape(attribute)}\b[^=]*=[^=]")
    at = next((i for i, line in enumerate(lines) if attribute and made.search(line)), 0)
    path = Path(file or "")
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name
    return f"{here}:{first + at}"
