"""Train a diffusion model of digits, and an average of its weights to sample from."""

import argparse

import torch
import torch.nn.functional as F
from diffusers.optimization import get_scheduler
from torch.utils.data import DataLoader

import diffusion
import ronde
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--images", type=int, default=1797)
parser.add_argument("--batch", type=int, default=64, help="images in a training step")
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--warmup", type=int, default=50, help="training steps")
args = parser.parse_args()


def with_noise(clean):
    """Draw noise and time with the sample, so that they are the same on any number of workers."""
    return clean, torch.randn(clean.shape), torch.randint(0, 100, ())


def forward(model, batch):
    clean, noise, times = batch
    return model(noise_schedule.add_noise(clean, noise, times), times).sample, noise


torch.manual_seed(0)
images = feed.Pipeline(feed.dataset(diffusion.digits()[: args.images])).map(with_noise)
loader = DataLoader(images, batch_size=args.batch, shuffle=True)
model, noise_schedule = diffusion.unet(args.width), diffusion.schedule()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.95, 0.999))
steps = args.epochs * len(loader)
scheduler = get_scheduler(
    "cosine", optimizer, num_warmup_steps=args.warmup, num_training_steps=steps
)

run = ronde.distribute(
    model, optimizer, loader, loss=F.mse_loss, forward=forward, scheduler=scheduler, clip_norm=1.0
)
average = run.average(decay=lambda step: min(0.99, 1 - (1 + step) ** -0.75))
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)

with average.applied(), run.whole_model() as whole:
    brightness = diffusion.sample(whole, 8).mean()
run.print(f"8 samples, mean brightness {brightness:.4f}")
