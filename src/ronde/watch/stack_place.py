"""Where a process is, from the stack that faulthandler wrote: the line of the script, and whether
it waits there for other ranks.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["StackPlace", "locate", "threads_of"]

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_THREADS = "Thread 0x", "Stack (most recent"
_RANK = re.compile(r"\b(\w*rank\w*|is_main\w*|is_master\w*)\b")
_RONDE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, _RONDE, "<")
_PACKAGES = ("site-packages", "dist-packages")
_SHOWN = 60

# A frame that is innermost where the main thread waits: part of its file's name, its function (a
# pattern), and what it means. ``exchange`` and ``meeting`` wait for other ranks.
_MEANINGS = (
    ("ronde/world/rendezvous.py", r"_wait|meet", "meeting"),
    ("torch/distributed/distributed_c10d.py", r".*", "exchange"),
    ("torch/distributed/_functional_collectives", r".*", "exchange"),
    ("torch/distributed/fsdp/", r".*(wait|unshard|reduce|gather).*", "exchange"),
    ("torch/distributed/pipelining/", r".*", "exchange"),
    ("torch/distributed/tensor/", r".*", "exchange"),
    ("tensorflow/python/eager/", r".*", "exchange"),  # or it computes: then it uses CPU
    ("tensorflow/python/training/server_lib.py", "join", "exchange"),
    ("ronde/horovod/", r".*", "exchange"),
    ("ronde/exchange/", r".*", "exchange"),
    ("ronde/parallel/ddp.py", r"_complete|finish|_broadcast", "exchange"),
    ("ronde/parallel/stage_run.py", r".*", "exchange"),
    ("ronde/world/consensus.py", r".*", "exchange"),
    ("torch/_dynamo/", r".*", "compiling"),
    ("torch/_inductor/", r".*", "compiling"),
    ("torch/fx/", r".*", "compiling"),
    ("triton/", r".*", "compiling"),
    ("ronde/loader/", r".*", "loading"),
    ("torch/utils/data/", r".*", "loading"),
    ("ronde/cache/", r".*", "loading"),
    ("ronde/checkpoint/", r".*", "saving"),
    ("subprocess.py", r"communicate|_communicate|wait|_wait|_try_wait|run", "a subprocess"),
    ("threading.py", r"wait|acquire|__enter__|join|_wait_for_tstate_lock", "a lock"),
    ("multiprocessing/synchronize.py", r".*", "a lock"),
    ("queue.py", r"get|put", "a queue"),
)


@dataclass(frozen=True)
class StackPlace:
    """Where a process is.

    Attributes:
        file: of the script's innermost line; empty if none of its code runs.
        line: its number, from 1.
        source: its text.
        inside: the innermost condition around it that depends on the rank: ``if rank == 0``; empty
            if there is none.
        waits: what it waits for: ``exchange`` or ``meeting`` (other ranks), ``compiling``,
            ``loading``, ``saving``, ``a subprocess``, ``a lock``, ``a queue``; empty if unknown.
        function: innermost function of a library, as ``all_reduce``.
        chain: the frames of the main thread, innermost first, to compare two looks.
        helped: whether another thread runs code of the script.
    """

    file: str = ""
    line: int = 0
    source: str = ""
    inside: str = ""
    waits: str = ""
    function: str = ""
    chain: str = ""
    helped: bool = False

    @property
    def text(self) -> str:
        """The place in words: ``train.py:88 (`time.sleep(9)`), inside `if rank == 0```."""
        if not self.file:
            return f"in {self.function}()" if self.function else "at an unknown place"
        source = f" (`{self.source}`)" if self.source else ""
        inside = f", inside `{self.inside}`" if self.inside else ""
        return f"at {Path(self.file).name}:{self.line}{source}{inside}"


def threads_of(dump: str) -> list[list[tuple[str, int, str]]]:
    """The threads of a dump, the main one first, which is its last: frames ``(file, line,
    function)``, innermost first.
    """
    threads: list[list[tuple[str, int, str]]] = []
    for line in dump.splitlines():
        if line.startswith(_THREADS):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append((frame[1], int(frame[2]), frame[3]))
    return threads[::-1]


def _is_script(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and not any(p in file for p in _PACKAGES)


def _meaning(frames: Sequence[tuple[str, int, str]]) -> tuple[str, str]:
    """What the innermost frames, up to the script's own, wait for; and the innermost function."""
    library = list(itertools.takewhile(lambda frame: not _is_script(frame[0]), frames))
    if any(function == "<module>" for _, _, function in library):
        return "", "import"  # it waits for nobody
    for number, (file, _, function) in enumerate(library):
        if number == 0 and file.endswith("torch/autograd/graph.py"):
            continue  # a backward pass: who called it tells
        for part, functions, meaning in _MEANINGS:
            if part in file and re.fullmatch(functions, function):
                return meaning, function
    return "", frames[0][2] if frames and not _is_script(frames[0][0]) else ""


def locate(dump: str, children: Sequence[str] = ()) -> StackPlace:
    """Find the place in a process's dump.

    Args:
        dump: stacks of its threads as faulthandler writes them, the main one last.
        children: dumps of its loading processes.

    Example:
        >>> locate('Stack (most recent call first):\\n'
        ...        '  File "/home/me/train.py", line 8 in <module>\\n').text
        'at train.py:8'
    """
    threads = threads_of(dump)
    if not threads:
        return StackPlace()
    main = threads[0]
    waits, function = _meaning(main)
    others = [t for each in ([dump], children) for d in each for t in threads_of(d)]
    chain = repr(main)
    script = next((f for f in main if _is_script(f[0])), None)
    if waits == "loading":
        # the data set's own code runs in loading threads or processes
        loading = [t for t in others if t != main and _loads(t)]
        chain = repr([main, *loading])
        inner = next((f for t in loading for f in t if _is_script(f[0])), None)
        script = inner or script
        waits = next((w for t in loading if (w := _meaning(t)[0]).startswith("a ")), waits)
    if script is None:
        return StackPlace(waits=waits, function=function, chain=chain)
    helped = any(_is_script(file) for frames in threads[1:] for file, _, _ in frames)
    file, line, _ = script
    source, inside = _source(file, line)
    return StackPlace(file, line, source, inside, waits, function, chain, helped)


def _loads(frames: Sequence[tuple[str, int, str]]) -> bool:
    return any("ronde/loader/" in f or "torch/utils/data/" in f for f, _, _ in frames)


@functools.lru_cache(maxsize=16)
def _parsed(file: str) -> tuple[list[str], ast.Module | None]:
    try:
        text = Path(file).read_text()
        return text.splitlines(), ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return [], None


def _source(file: str, line: int) -> tuple[str, str]:
    """The line's text, and the condition on the rank around it."""
    lines, tree = _parsed(file)
    source = lines[line - 1] if 0 < line <= len(lines) else ""
    source = re.sub(r"\s{2,}#.*", "", source).strip()  # without its comment
    if len(source) > _SHOWN:
        source = source[: _SHOWN - 1] + "…"
    inside = ""
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or 0):
            test = ast.unparse(node.test)
            if not _RANK.search(test):
                continue
            # The else part begins there; one line below, if there is none.
            low = node.orelse[0].lineno if node.orelse else line + 1
            if node.body[0].lineno <= line < low:
                inside = f"if {test}"
            elif line >= low and not isinstance(node.orelse[0], ast.If):
                inside = f"else of if {test}"
    return source, inside
