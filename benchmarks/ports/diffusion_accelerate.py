"""Train a diffusion model of digits, and an average of its weights to sample from."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

import diffusion

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--images", type=int, default=1797)
parser.add_argument("--batch", type=int, default=64, help="images in a training step")
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--warmup", type=int, default=50, help="training steps")
args = parser.parse_args()

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
images = diffusion.digits()[: args.images]
loader = DataLoader(images, batch_size=args.batch, shuffle=True)
model, noise_schedule = diffusion.unet(args.width), diffusion.schedule()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.95, 0.999))
steps = args.epochs * len(loader)
scheduler = get_scheduler(
    "cosine", optimizer, num_warmup_steps=args.warmup, num_training_steps=steps
)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
ema = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True, power=0.75)

for epoch in range(args.epochs):
    total = 0.0
    for clean in loader:
        noise = torch.randn(clean.shape, device=clean.device)
        times = torch.randint(0, 100, (len(clean),), device=clean.device)
        noisy = noise_schedule.add_noise(clean, noise, times)
        loss = F.mse_loss(model(noisy, times).sample, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ema.step(model.parameters())
        optimizer.zero_grad()
        total += accelerator.gather(loss * len(clean)).sum().item()
    accelerator.print(f"epoch {epoch + 1}  loss {total / len(images):.4f}")

ema.copy_to(model.parameters())
sampled = diffusion.sample(accelerator.unwrap_model(model), 8)
accelerator.print(f"8 samples, mean brightness {sampled.mean():.4f}")
