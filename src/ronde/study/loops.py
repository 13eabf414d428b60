"""Does a script go through its steps itself? Read in its source: ``ronde plan`` ends at ``distribute``, before the loop begins."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import ronde

__all__ = ["own_loop"]


def own_loop() -> str | None:
    """Where the script that called ``distribute`` calls ``run.backward(loss)`` and ``run.update()``: it owns its loop, and a pipeline,
    where a step is one call, cannot be carried out under it.

    Returns:
        File and line, as ``train.py:31``; None where there is no such call, or ``run.step(batch)`` is called too.

    Example:
        >>> own_loop() is None
        True
    """
    files = dict.fromkeys([_caller(), getattr(sys.modules.get("__main__"), "__file__", None)])
    for file in files:
        if file and (line := _line(file)) is not None:
            return f"{Path(file).name}:{line}"
    return None


def _caller() -> str | None:
    """The file from which Ronde was entered."""
    inside = str(Path(ronde.__file__).parent)
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_filename if frame is not None else None


def _line(file: str) -> int | None:
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, ValueError, SyntaxError):  # typed in, or not Python
        return None
    called: dict[str, dict[str, int]] = {"backward": {}, "update": {}, "step": {}}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in called):
            continue
        if bool(node.args) == (node.func.attr != "update"):  # loss.backward() and optimizer.step() are not the run's
            called[node.func.attr].setdefault(ast.unparse(node.func.value), node.lineno)
    for run, line in called["backward"].items():
        if run in called["update"] and run not in called["step"]:
            return line
    return None
