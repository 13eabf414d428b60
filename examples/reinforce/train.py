"""REINFORCE: learn to balance a pole on a cart."""

import argparse

import torch
from torch.utils.data import DataLoader

import reinforce
import ronde
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--updates", type=int, default=100)
parser.add_argument("--episodes", type=int, default=8, help="episodes in an update")
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()

torch.manual_seed(0)
model = reinforce.Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

games = feed.dataset(range(args.updates * args.episodes))
games = feed.Pipeline(games).map(lambda _: torch.randint(2**31, ()))
loader = DataLoader(games, batch_size=args.episodes)
run = ronde.distribute(model, optimizer, loader, loss=reinforce.loss)
kept = run.register(average=10.0)
for seeds in run.batches():
    with run.whole_model() as policy:
        played = [reinforce.play(policy, int(seed)) for seed in seeds]
    states, actions = (torch.cat(part) for part in zip(*played, strict=True))
    lengths = torch.tensor([float(len(part)) for _, part in played])
    worth = torch.cat([reinforce.discounted(len(part)) for _, part in played])
    run.backward((reinforce.loss(run.model(states), actions, worth), len(seeds)))
    kept.average = 0.9 * kept.average + 0.1 * run.gather(lengths).mean().item()
    run.update()
    run.log({"length": kept.average})
    if run.state.step % 10 == 0:
        run.print(f"update {run.state.step}  evaluate  average length {kept.average:.4f}")
