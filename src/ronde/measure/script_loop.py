"""Find out from its source whether a script runs its own training loop.

``ronde plan`` ends at ``distribute``, before the loop begins, so it cannot observe the loop.
"""

from __future__ import annotations

import ast
from pathlib import Path

from ronde.introspect import user_modules

__all__ = ["own_loop"]


def own_loop() -> str | None:
    """Find where the script calls ``run.backward(loss)`` and ``run.update()`` itself.

    Such a script cannot run a pipeline, whose step is one call.

    Returns:
        File and line, as ``train.py:31``; None if there is no such call or the script calls
        ``run.step(batch)`` too.

    Example:
        >>> own_loop() is None
        True
    """
    found: str | None = None
    for module in user_modules():
        file = getattr(module, "__file__", None)
        line, steps = _look(file) if file else (None, False)
        if steps:
            return None  # the script may use either loop
        if line is not None and found is None:
            found = f"{Path(str(file)).name}:{line}"
    return found


def _look(file: str) -> tuple[int | None, bool]:
    """Return the line of a ``run.backward(loss)`` with a ``run.update()``, and if one steps."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, ValueError, SyntaxError):  # typed in, or not Python
        return None, False
    called: dict[str, dict[str, int]] = {"backward": {}, "update": {}, "step": {}}
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in called
        ):
            continue
        # self.backward(…) is the script's own; loss.backward() and optimizer.step() are called with
        # nothing.
        owner = ast.unparse(node.func.value).rpartition(".")[2]
        if owner != "self" and bool(node.args or node.keywords) == (node.func.attr != "update"):
            called[node.func.attr].setdefault(owner, node.lineno)
    lines = [
        line
        for run, line in called["backward"].items()
        if run in called["update"] and run not in called["step"]
    ]
    return min(lines, default=None), any(
        run in called["backward"] or run == "run" for run in called["step"]
    )
