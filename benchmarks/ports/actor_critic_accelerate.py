"""Actor-critic: learn to balance a pole on a cart."""

import argparse

import cartpole
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--episodes", type=int, default=128, help="in an epoch")
parser.add_argument("--batch", type=int, default=16, help="episodes in a training step")
args = parser.parse_args()

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
loader = DataLoader(cartpole.Episodes(args.episodes), batch_size=args.batch)
actor, critic = cartpole.network(2), cartpole.network(1)
optimizer_a = torch.optim.Adam(actor.parameters(), lr=0.01)
optimizer_c = torch.optim.Adam(critic.parameters(), lr=0.02)
actor, critic, optimizer_a, optimizer_c, loader = accelerator.prepare(
    actor, critic, optimizer_a, optimizer_c, loader
)

for epoch in range(args.epochs):
    for start, dice in loader:
        states, actions, alive, returns = cartpole.play(
            accelerator.unwrap_model(actor), start, dice
        )
        values = critic(states)
        total, steps = cartpole.critic_loss(values, returns, alive)
        optimizer_c.zero_grad()
        steps = accelerator.gather(steps).sum() / accelerator.num_processes
        accelerator.backward(total / steps)
        optimizer_c.step()
        advantage = returns - values.detach().squeeze(-1)
        total, steps = cartpole.actor_loss(actor(states), actions, advantage, alive)
        optimizer_a.zero_grad()
        steps = accelerator.gather(steps).sum() / accelerator.num_processes
        accelerator.backward(total / steps)
        optimizer_a.step()
    accelerator.print(
        f"epoch {epoch + 1}  stands {alive.sum(1).mean():.0f} of {cartpole.STEPS} steps"
    )
