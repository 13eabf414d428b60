"""What plain.py and train.py share: the digits, a small U-Net, and the noise schedule."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from torch import Tensor


def digits() -> Tensor:
    """Images (1,797, 1, 8, 8) from -1 to 1."""
    return torch.Tensor(load_digits().images)[:, None] / 8 - 1


def unet(width: int) -> UNet2DModel:
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(width, 2 * width), attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def schedule() -> DDPMScheduler:
    return DDPMScheduler(num_train_timesteps=100)


@torch.no_grad()
def sample(model: UNet2DModel, images: int) -> Tensor:
    """New images, from noise."""
    draw, noise_schedule = torch.Generator().manual_seed(0), schedule()
    device = next(model.parameters()).device
    noisy = torch.randn(images, 1, 8, 8, generator=draw).to(device)
    noise_schedule.set_timesteps(20)
    for time in noise_schedule.timesteps:
        noise = model(noisy, time.to(device)).sample
        noisy = noise_schedule.step(noise, time, noisy, generator=draw).prev_sample
    return noisy
