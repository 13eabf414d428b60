"""How many lines of a training script change, from plain PyTorch to Ronde and to Accelerate?

Counts the lines that a diff adds and removes, without blank ones. Needs no packages.
"""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = {
    "word_lm": "language model with a hidden state",
    "imagenet": "image classifier, best accuracy kept",
    "horovod": "Horovod's MNIST",
    "gpt": "GPT",
    "glue": "fine-tuning of a BERT",
    "vae": "VAE",
    "diffusion": "diffusion with EMA",
    "simclr": "SimCLR",
    "gcn": "graph network",
    "reinforce": "REINFORCE",
}


def changed(plain: Path, other: Path) -> tuple[int, int]:
    """Lines added and removed."""
    lines = [[line for line in p.read_text().splitlines() if line.strip()] for p in (plain, other)]
    signs = [line[0] for line in difflib.ndiff(*lines)]
    return signs.count("+"), signs.count("-")


def rows() -> list[tuple[str, str, str, str]]:
    """For each script: its title, its lines, and the lines that Ronde and Accelerate change."""
    found = []
    for kind, title in KINDS.items():
        folder = ROOT / "examples" / kind
        if not folder.exists():
            folder = ROOT / "tests" / "ports" / kind
        plain = folder / "plain.py"
        lines = sum(bool(line.strip()) for line in plain.read_text().splitlines())
        others = (folder / "train.py", ROOT / "benchmarks" / "ports" / f"{kind}_accelerate.py")
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
