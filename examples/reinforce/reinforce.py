"""What plain.py and train.py share: the cart with a pole, the policy, and an episode of it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_STEPS = 200
MOST_ANGLE = 12 * math.pi / 180


class Cart:
    """A cart that balances a pole (Barto, Sutton, and Anderson 1983), in steps of 20 ms."""

    def __init__(self, generator: torch.Generator) -> None:
        self.state = (0.1 * torch.rand(4, generator=generator, dtype=torch.float64) - 0.05).tolist()

    def push(self, right: bool) -> bool:
        """Push the cart for a step. True if the pole still stands."""
        x, speed, angle, turn = self.state
        sine, cosine = math.sin(angle), math.cos(angle)
        force = ((10.0 if right else -10.0) + 0.05 * turn**2 * sine) / 1.1
        faster = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        pull = force - 0.05 * faster * cosine / 1.1
        self.state = [
            x + 0.02 * speed,
            speed + 0.02 * pull,
            angle + 0.02 * turn,
            turn + 0.02 * faster,
        ]
        return abs(self.state[0]) < 2.4 and abs(self.state[2]) < MOST_ANGLE


class Policy(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, hidden), nn.Linear(hidden, 2)

    def forward(self, state: Tensor) -> Tensor:
        return F.log_softmax(self.last(F.relu(self.first(state))), dim=-1)


@torch.no_grad()
def play(policy: Policy, seed: int) -> tuple[Tensor, Tensor]:
    """States (step, 4) and actions (step,) of one episode."""
    generator = torch.Generator().manual_seed(seed)
    cart, states, actions = Cart(generator), [], []
    for _ in range(MOST_STEPS):
        states.append(torch.tensor(cart.state, dtype=torch.get_default_dtype()))
        odds = policy(states[-1][None])[0].exp()
        actions.append(torch.multinomial(odds, 1, generator=generator))
        if not cart.push(bool(actions[-1])):
            break
    return torch.stack(states), torch.cat(actions)


def discounted(steps: int, gamma: float = 0.99) -> Tensor:
    """What each step of an episode was worth, normalized. A step that stands earns 1."""
    worth, total = [], 0.0
    for _ in range(steps):
        total = 1.0 + gamma * total
        worth.append(total)
    values = torch.tensor(worth[::-1], dtype=torch.get_default_dtype())
    return (values - values.mean()) / (values.std(correction=0) + 1e-8)


def loss(log_odds: Tensor, actions: Tensor, worth: Tensor) -> Tensor:
    """Summed over the steps of all episodes."""
    return -(log_odds.gather(1, actions[:, None])[:, 0] * worth).sum()
