"""Train a small convolutional network on scikit-learn's 1,797 handwritten digits."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=32, help="images in a training step")
parser.add_argument("--lr", type=float, default=2e-3)
args = parser.parse_args()


def accuracy(output, label):
    return (output.argmax(1) == label).float().mean()


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set, test_set = random_split(TensorDataset(images, labels), [0.8, 0.2])
loader = DataLoader(train_set, batch_size=args.batch, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

run = ronde.distribute(model, optimizer, loader, loss=F.cross_entropy)
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(test_set, metrics={"accuracy": accuracy})
