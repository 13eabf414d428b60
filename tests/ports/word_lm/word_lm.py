"""What plain.py and train.py share: the words, and a recurrent model."""

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

FILES = ("argparse", "ast", "calendar", "csv", "datetime", "doctest", "inspect", "typing")


def corpus(words: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Numbers of the words in the standard library's source: to train on, and held out.

    The rarest words share the last number.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(Path(folder, f"{name}.py").read_text(encoding="utf-8") for name in FILES)
    found = re.findall(r"\w+|[^\w\s]", text)[:words]
    common = [word for word, _ in Counter(found).most_common(vocabulary - 1)]
    number = {word: i for i, word in enumerate(common)}
    numbers = torch.tensor([number.get(word, vocabulary - 1) for word in found])
    cut = len(numbers) - len(numbers) // 10
    return numbers[:cut], numbers[cut:]


def columns(numbers: Tensor, count: int) -> Tensor:
    """The text cut into ``count`` columns of equal length: (column, word)."""
    length = len(numbers) // count
    return numbers[: count * length].view(count, length)


class WordLM(nn.Module):
    """An LSTM over words. Its state is one tensor (sample, 2 × layer, width): h and c."""

    def __init__(self, vocabulary: int, width: int, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def init_hidden(self, samples: int) -> Tensor:
        return self.decoder.weight.new_zeros(samples, 2 * self.layers, self.width)

    def forward(self, words: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        before = None if hidden is None else hidden.transpose(0, 1).contiguous().chunk(2)
        output, state = self.rnn(self.drop(self.encoder(words)), before)
        return self.decoder(self.drop(output)), torch.cat(state).transpose(0, 1)
