"""A WGAN with gradient penalty on scikit-learn's handwritten digits: five critic steps for each
step of the generator.
"""

import argparse

import torch
from torch.utils.data import DataLoader

import gan
import ronde

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


def loss(output):
    return -output.mean()


torch.manual_seed(0)
loader = DataLoader(gan.Digits(), batch_size=args.batch, shuffle=True)
critic, G = gan.discriminator(norm=False), gan.generator(norm=False)
optimizer_c = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.9))
optimizer_g = torch.optim.Adam(G.parameters(), lr=args.lr, betas=(0.5, 0.9))

run_c = ronde.distribute(critic, optimizer_c, loader, loss=loss)
run_g = ronde.distribute(G, optimizer_g, run_c, loss=loss, name="generator")
for epoch in run_c.epochs(args.epochs):
    for real, noise, place in run_c.batches():
        fake = G(noise)
        loss_c = critic(fake.detach()).mean() - critic(real).mean()
        run_c.backward(loss_c + penalty(critic, real, fake.detach(), place))
        loss_c = run_c.update()
        if run_c.state.step % args.critic_steps == 0:  # right after a resume too
            run_g.backward(loss(critic(fake)))
            run_g.update()
    if run_c.is_main:
        print(f"epoch {epoch + 1}  loss {loss_c.item():.4f}")

with run_g.whole_model() as whole:
    run_c.print(gan.draw(whole))
