"""Actor-critic: learn to balance a pole on a cart."""

import argparse

import cartpole
import torch
from torch.utils.data import DataLoader

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--episodes", type=int, default=128, help="in an epoch")
parser.add_argument("--batch", type=int, default=16, help="episodes in a training step")
args = parser.parse_args()

torch.manual_seed(0)
loader = DataLoader(cartpole.Episodes(args.episodes), batch_size=args.batch)
actor, critic = cartpole.network(2), cartpole.network(1)
optimizer_a = torch.optim.Adam(actor.parameters(), lr=0.01)
optimizer_c = torch.optim.Adam(critic.parameters(), lr=0.02)

run_a = ronde.distribute(actor, optimizer_a, loader, loss=cartpole.actor_loss)
run_c = ronde.distribute(critic, optimizer_c, run_a, loss=cartpole.critic_loss, name="critic")
for epoch in run_a.epochs(args.epochs):
    for start, dice in run_a.batches():  # each worker plays its share of the episodes
        states, actions, alive, returns = cartpole.play(actor, start, dice)
        values = critic(states)
        run_c.backward(cartpole.critic_loss(values, returns, alive))
        run_c.update()
        advantage = returns - values.detach().squeeze(-1)
        run_a.backward(cartpole.actor_loss(actor(states), actions, advantage, alive))
        run_a.update()
    if run_a.is_main:
        print(f"epoch {epoch + 1}  stands {alive.sum(1).mean():.0f} of {cartpole.STEPS} steps")
