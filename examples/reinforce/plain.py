"""REINFORCE: learn to balance a pole on a cart."""

import argparse

import torch

import reinforce

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--updates", type=int, default=100)
parser.add_argument("--episodes", type=int, default=8, help="episodes in an update")
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()

torch.manual_seed(0)
model = reinforce.Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
average = 10.0

for update in range(args.updates):
    seeds = torch.randint(2**31, (args.episodes,))
    played = [reinforce.play(model, int(seed)) for seed in seeds]
    states, actions = (torch.cat(part) for part in zip(*played, strict=True))
    lengths = torch.tensor([float(len(part)) for _, part in played])
    worth = torch.cat([reinforce.discounted(len(part)) for _, part in played])
    loss = reinforce.loss(model(states), actions, worth) / len(seeds)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average = 0.9 * average + 0.1 * lengths.mean().item()
    if (update + 1) % 10 == 0:
        print(f"update {update + 1}  evaluate  average length {average:.4f}")
