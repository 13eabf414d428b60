"""REINFORCE: learn to balance a pole on a cart."""

import argparse

import torch
from accelerate import Accelerator

import reinforce

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--updates", type=int, default=100)
parser.add_argument("--episodes", type=int, default=8, help="episodes in an update")
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(0)
model = reinforce.Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
model, optimizer = accelerator.prepare(model, optimizer)
share = args.episodes // accelerator.num_processes
average = 10.0

for update in range(args.updates):
    seeds = torch.randint(2**31, (args.episodes,))
    seeds = seeds[share * accelerator.process_index :][:share]
    policy = accelerator.unwrap_model(model)
    played = [reinforce.play(policy, int(seed)) for seed in seeds]
    states, actions = (torch.cat(part) for part in zip(*played, strict=True))
    lengths = torch.tensor([float(len(part)) for _, part in played])
    worth = torch.cat([reinforce.discounted(len(part)) for _, part in played])
    loss = reinforce.loss(model(states), actions, worth) / len(seeds)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    average = 0.9 * average + 0.1 * accelerator.gather(lengths).mean().item()
    if (update + 1) % 10 == 0:
        accelerator.print(f"update {update + 1}  evaluate  average length {average:.4f}")
