"""A WGAN with gradient penalty on scikit-learn's handwritten digits: five critic steps for each
step of the generator.
"""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import gan

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--batch", type=int, default=64, help="images in a training step")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--critic-steps", type=int, default=5)
args = parser.parse_args()


def penalty(critic, real, fake, place):
    between = (place * real + (1 - place) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return 10 * ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
loader = DataLoader(gan.Digits(), batch_size=args.batch, shuffle=True)
critic, G = gan.discriminator(norm=False), gan.generator(norm=False)
optimizer_c = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.9))
optimizer_g = torch.optim.Adam(G.parameters(), lr=args.lr, betas=(0.5, 0.9))
critic, G, optimizer_c, optimizer_g, loader = accelerator.prepare(
    critic, G, optimizer_c, optimizer_g, loader
)

step = 0
for epoch in range(args.epochs):
    for real, noise, place in loader:
        fake = G(noise)
        optimizer_c.zero_grad()
        loss_c = critic(fake.detach()).mean() - critic(real).mean()
        accelerator.backward(loss_c + penalty(critic, real, fake.detach(), place))
        optimizer_c.step()
        step += 1
        if step % args.critic_steps == 0:
            optimizer_g.zero_grad()
            accelerator.backward(-critic(fake).mean())
            optimizer_g.step()
    accelerator.print(f"epoch {epoch + 1}  distance {-loss_c.item():.4f}")

accelerator.print(gan.draw(accelerator.unwrap_model(G)))
