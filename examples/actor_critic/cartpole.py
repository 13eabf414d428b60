"""What plain.py and train.py share: a pole on a cart, the two networks, and how episodes are
played (Barto, Sutton and Anderson 1983).
"""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

STEPS = 200  # at most, of an episode


class Episodes(Dataset[tuple[Tensor, Tensor]]):
    """Where each episode starts, and the dice for its actions: all that is random in it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(4) * 0.1 - 0.05, torch.rand(STEPS)


def network(outputs: int) -> nn.Module:
    """Of the four numbers that say where cart and pole are, and how they move."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


def move(state: Tensor, right: Tensor) -> Tensor:
    """A fiftieth of a second later, after a push to the right or to the left."""
    _, speed, angle, spin = state.unbind(1)
    force = torch.where(right, 10.0, -10.0)
    sine, cosine = angle.sin(), angle.cos()
    push = (force + 0.05 * spin**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    drive = push - 0.05 * turn * cosine / 1.1
    change = torch.stack([speed, drive, spin, turn], 1)
    return state + 0.02 * change


@torch.no_grad()
def play(actor: nn.Module, start: Tensor, dice: Tensor) -> tuple[Tensor, ...]:
    """States, actions, whether the pole still stands, and the discounted steps left."""
    state, alive = start, torch.ones(len(start), dtype=torch.bool, device=start.device)
    states, actions, standing = [], [], []
    for step in range(STEPS):
        right = dice[:, step] < actor(state).softmax(1)[:, 1]
        states.append(state)
        actions.append(right.long())
        standing.append(alive)
        state = torch.where(alive[:, None], move(state, right), state)
        alive = alive & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < math.radians(12))
    left, returns = torch.zeros(len(start), device=start.device), []
    for now in reversed(standing):
        left = now * (1 + 0.99 * left)
        returns.append(left)
    return (
        torch.stack(states, 1), torch.stack(actions, 1), torch.stack(standing, 1).float(),
        torch.stack(returns[::-1], 1),
    )  # fmt: skip


def actor_loss(logits: Tensor, actions: Tensor, advantage: Tensor, alive: Tensor):
    """Policy gradient: the sum over all steps, and their number."""
    chosen = logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    return -(chosen * advantage * alive).sum(), alive.sum()


def critic_loss(values: Tensor, returns: Tensor, alive: Tensor):
    """Squared error: the sum over all steps, and their number."""
    return ((values.squeeze(-1) - returns) ** 2 * alive).sum(), alive.sum()
