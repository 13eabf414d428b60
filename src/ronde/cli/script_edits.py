"""A script's text and syntax tree: full names of what it uses, and edits by place."""

from __future__ import annotations

import ast
import re
from typing import Any

from ronde.world import ArgumentError

__all__ = ["ScriptEdits"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class ScriptEdits:
    """Collects edits of a script.

    Args:
        text: the script.
        file: its name, for messages.
        same: full name -> the name it stands for.
    """

    def __init__(self, text: str, file: str, same: dict[str, str]) -> None:
        self.text, self.file, self.same = text, file, same
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise ArgumentError(f"{file}:{error.lineno}: {error.msg}.") from None
        self.lines = text.splitlines(keepends=True)
        self.nodes: list[Any] = list(ast.walk(self.tree))
        self.parent: dict[Any, Any] = {
            child: node for node in self.nodes for child in ast.iter_child_nodes(node)
        }
        self.edits: dict[tuple[int, int], str] = {}
        self.left: dict[int, str] = {}
        self.imported: dict[str, str] = {}
        for node in self.nodes:
            for a in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                module = getattr(node, "module", None)
                root = a.name if a.asname or module else a.name.split(".")[0]
                self.imported[a.asname or root] = f"{module}.{root}" if module else root

    def dotted(self, node: Any) -> str:
        """``dist.barrier`` -> ``torch.distributed.barrier``; the name of what a call calls."""
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Name):
            return self.same.get(name := self.imported.get(node.id, ""), name)
        if isinstance(node, ast.Attribute):
            name = f"{self.dotted(node.value)}.{node.attr}"
            return self.same.get(name, name)
        return ""

    def segment(self, node: Any) -> str:
        """The text of a node."""
        return ast.get_source_segment(self.text, node) or ""

    def target(self, node: Any) -> str:
        """The name that a statement assigns to; empty for anything else."""
        return self.segment(node.targets[0]) if isinstance(node, ast.Assign) else ""

    def outer(self, node: Any, *kinds: Any) -> Any:
        """The nearest node of these kinds around a node, within its function; or None."""
        while (node := self.parent.get(node)) is not None and not isinstance(node, kinds):
            if isinstance(node, _FUNCTIONS):
                return None
        return node

    def function(self, node: Any) -> Any:
        """The function around a node, or the module."""
        return self.outer(node, *_FUNCTIONS) or self.tree

    def span(self, node: Any) -> tuple[int, int]:
        """Where a node is in the text."""
        places = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        start, end = (
            sum(map(len, self.lines[: line - 1]))
            + len(self.lines[line - 1].encode()[:column].decode())
            for line, column in places
        )
        return start, end

    def replace(self, node: Any, text: str) -> None:
        """Put another text in place of a node."""
        self.edits.setdefault(self.span(node), text)

    def remove(self, statement: Any) -> None:
        """Take a statement out, and blocks that would be empty without it."""
        above = self.parent[statement]
        for block in (getattr(above, name, None) for name in ("body", "orelse")):
            if isinstance(block, list) and statement in block:
                block_gone = all(
                    self.edits.get(self.span(s)) == "" for s in block if s != statement
                )
                if (
                    block_gone
                    and isinstance(above, ast.If | ast.With)
                    and not (isinstance(above, ast.If) and above.orelse)
                ):
                    return self.remove(above)
                self.replace(statement, "pass" if block_gone and above is not self.tree else "")
        return None

    def remove_argument(self, call: Any, keyword: ast.keyword) -> None:
        """Take a keyword out of a call, with the comma before it."""
        start, end = self.span(keyword)
        self.edits[self.text.rindex(",", self.span(call.func)[1], start), end] = ""

    def edited(self, node: Any) -> bool:
        """Whether a node is inside of an edit."""
        start, end = self.span(node)
        return any(a <= start and end <= b for a, b in self.edits)

    def refuse(self, node: Any, why: str) -> ArgumentError:
        """An error that names the line."""
        return ArgumentError(f"{self.file}:{node.lineno if node else 1}: {why}")

    def note(self, node: Any, why: str) -> None:
        """List a line that a person must look at."""
        self.left.setdefault(node.lineno, why)

    def with_comment(self, line: int) -> int:
        """Where comments about a library begin, above a line that is taken out."""
        while line:
            above = self.text.rfind("\n", 0, line - 1) + 1
            if not re.match(r"\s*# *(Horovod|DDP|Accelerate)\b", self.text[above:line]):
                break
            line = above
        return line

    def apply(self) -> str:
        """The new text. An edit inside of another one is dropped."""
        text, done = [], 0
        for (start, end), new in sorted(self.edits.items(), key=lambda e: (e[0][0], -e[0][1])):
            if start < done:
                continue
            line = self.text.rfind("\n", 0, start) + 1
            after = self.text.find("\n", end) + 1 or len(self.text)
            alone = not self.text[line:start].strip() and not self.text[end:after].strip(" ;\n")
            if new == "" and alone and line >= done:
                start, end = self.with_comment(line), after
                start = max(start, done)
            text += [self.text[done:start], new]
            done = end
        return "".join([*text, self.text[done:]])
