"""Find out from its source whether a script runs its own training loop.

``ronde plan`` ends at ``distribute``, before the loop begins, so it cannot observe the loop.
"""

from __future__ import annotations

import ast
from pathlib import Path

from ronde.introspect import user_modules


def own_loop() -> str | None:
    """Find where the script calls ``run.backward(loss)`` and ``run.update()`` itself.

    Such a script cannot run a pipeline, whose step is one call.

    Returns:
        File and line, as ``train.py:31``; None if there is no such call or the script calls
        ``run.step(batch)`` too.
    """
    first: str | None = None
    for module in user_modules():
        file = getattr(module, "__file__", None)
        line, steps = _search(file) if file else (None, False)
        if steps:
            return None  # the script may use either loop
        if line is not None and first is None:
            first = f"{Path(str(file)).name}:{line}"
    return first


def _search(file: str) -> tuple[int | None, bool]:
    """The line of a ``run.backward(loss)`` with a ``run.update()``, and whether ``run`` steps."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, ValueError, SyntaxError):  # typed in, or not Python
        return None, False
    calls: dict[str, dict[str, int]] = {"backward": {}, "update": {}, "step": {}}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        # self.backward(…) is the script's own; loss.backward() and optimizer.step() have no
        # arguments.
        owner = ast.unparse(node.func.value).rpartition(".")[2]
        has_arguments = bool(node.args or node.keywords)
        if name in calls and owner != "self" and has_arguments == (name != "update"):
            calls[name].setdefault(owner, node.lineno)
    runs = calls["backward"].keys() & calls["update"].keys() - calls["step"].keys()
    steps = any(run in calls["backward"] or run == "run" for run in calls["step"])
    return min((calls["backward"][run] for run in runs), default=None), steps
