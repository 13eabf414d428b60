"""How many lines of a training script change, from plain PyTorch to Ronde and to Accelerate?

Counts the lines that a diff adds and removes, without blank ones. Needs no packages.
"""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = {  # plain script, and with Ronde -> title
    ("tests/ports/imagenet/plain.py", "train.py"): "image classifier, best accuracy kept",
    ("tests/ports/horovod/plain.py", "train.py"): "Horovod's MNIST",
    ("examples/gpt/plain.py", "train.py"): "GPT",
    ("tests/ports/word_lm/plain.py", "train.py"): "language model with a hidden state",
    ("examples/gan/dcgan_plain.py", "dcgan.py"): "DCGAN",
    ("examples/diffusion/plain.py", "train.py"): "diffusion with EMA",
    ("examples/reinforce/plain.py", "train.py"): "REINFORCE",
    ("tests/ports/gcn/plain.py", "train.py"): "graph network",
    ("examples/simclr/plain.py", "train.py"): "SimCLR",
}


def changed(plain: Path, other: Path) -> tuple[int, int]:
    """Lines added and removed."""
    lines = [[line for line in p.read_text().splitlines() if line.strip()] for p in (plain, other)]
    signs = [line[0] for line in difflib.ndiff(*lines)]
    return signs.count("+"), signs.count("-")


def rows() -> list[tuple[str, str, str, str]]:
    """For each script: its title, its lines, and the lines that Ronde and Accelerate change."""
    found = []
    for (path, train), title in SCRIPTS.items():
        plain = ROOT / path
        kind = plain.parent.name if train == "train.py" else train.removesuffix(".py")
        lines = sum(bool(line.strip()) for line in plain.read_text().splitlines())
        others = (plain.with_name(train), ROOT / "benchmarks" / "ports" / f"{kind}_accelerate.py")
        ronde, accelerate = ("+{} −{}".format(*changed(plain, other)) for other in others)
        found.append((title, str(lines), ronde, accelerate))
    return found


def main() -> None:
    print("| script | lines | Ronde | Accelerate |")
    print("|---|---|---|---|")
    for row in rows():
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
