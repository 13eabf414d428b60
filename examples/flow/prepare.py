"""Split scikit-learn's handwritten digits into files: what is trained on, and what decides."""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=Path("data"))
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
parts = {"train": order[:1200], "validation": order[1200:1500], "test": order[1500:]}
args.out.mkdir(exist_ok=True)
for name, rows in parts.items():
    tensors = {"images": images[rows].contiguous(), "labels": labels[rows].contiguous()}
    save_file(tensors, args.out / f"{name}.safetensors")
