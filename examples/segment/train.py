"""Segment images: the class of each pixel, by a U-Net."""

import argparse
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset
from unet import UNet

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="train", help="a folder with images/ and masks/")
parser.add_argument("--valid", default="valid", help="the same, held out")
parser.add_argument("--classes", type=int, default=2, help="a mask's pixels are 0 to classes - 1")
parser.add_argument("--size", type=int, default=256, help="pixels of an image's side")
parser.add_argument("--width", type=int, default=32, help="channels of the first layers")
parser.add_argument("--depth", type=int, default=4, help="how often the size is halved")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=16, help="images in a training step")
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()


class Masks(Dataset):
    """Images and their masks, which have the same file names; half of them are flipped."""

    def __init__(self, folder, flips):
        self.images = sorted(Path(folder, "images").iterdir())
        self.masks = [Path(folder, "masks", f"{path.stem}.png") for path in self.images]
        self.flips = flips

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        size = (args.size, args.size)
        image = Image.open(self.images[index]).convert("RGB").resize(size)
        mask = Image.open(self.masks[index]).resize(size, Image.Resampling.NEAREST)
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 127.5 - 1
        classes = torch.from_numpy(numpy.array(mask)).long()
        if self.flips and torch.rand(()) < 0.5:
            return pixels.flip(2), classes.flip(1)
        return pixels, classes


def overlap(logits, masks):
    """Intersection over union of the classes above 0, for each image."""
    found = logits.argmax(1)
    both = ((found == masks) & (masks > 0)).sum((1, 2))
    either = ((found > 0) | (masks > 0)).sum((1, 2))
    return both / either.clamp(min=1)


torch.manual_seed(0)
model = UNet(args.classes, args.width, args.depth)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
run = ronde.distribute(
    model, optimizer, Masks(args.data, flips=True), loss=F.cross_entropy, batch_size=args.batch,
    keep_best="max:overlap",
)  # fmt: skip
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(Masks(args.valid, flips=False), {"overlap": overlap})
