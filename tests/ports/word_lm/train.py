"""Train a recurrent language model: each batch starts from the hidden state of the last one."""

import argparse
import math

import torch
import word_lm
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--words", type=int, default=60_000, help="length of the text")
parser.add_argument("--vocabulary", type=int, default=1000)
parser.add_argument("--columns", type=int, default=20, help="texts that are read side by side")
parser.add_argument("--bptt", type=int, default=35, help="words of a text in a training step")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--lr", type=float, default=20.0)
parser.add_argument("--clip", type=float, default=0.25)
args = parser.parse_args()

torch.manual_seed(0)
train_words, test_words = word_lm.corpus(args.words, args.vocabulary)
train_data = word_lm.columns(train_words, args.columns)
test_data = word_lm.columns(test_words, 10)
model = word_lm.WordLM(args.vocabulary, args.width, dropout=args.dropout)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
criterion = nn.CrossEntropyLoss()


class Pieces(Dataset):
    """Piece 0 of each column, then piece 1 of each: a batch reads all columns side by side."""

    def __len__(self):
        return args.columns * math.ceil((train_data.shape[1] - 1) / args.bptt)

    def __getitem__(self, index):
        piece, column = divmod(index, args.columns)
        start = piece * args.bptt
        stop = min(start + args.bptt, train_data.shape[1] - 1)
        words = train_data[column]
        return words[start:stop], words[start + 1 : stop + 1], column


def whole_columns(model, words):
    output, _ = model(words[:, :-1])
    return output.flatten(0, 1), words[:, 1:].flatten()


hidden = model.init_hidden(args.columns)
loader = DataLoader(Pieces(), batch_size=args.columns)
run = ronde.distribute(
    model, optimizer, loader, loss=criterion, forward=whole_columns, clip_norm=args.clip
)
kept = run.register(best=math.inf, hidden=hidden)
for _ in run.epochs(args.epochs):
    for words, target, column in run.batches():
        output, hidden = run.model(words, kept.hidden[column])
        run.backward(criterion(output.flatten(0, 1), target.flatten()))
        kept.hidden[run.gather(column)] = run.gather(hidden.detach())
        run.update()
    kept.hidden.zero_()
    loss = run.evaluate(test_data)["loss"]
    if loss < kept.best:
        kept.best = loss
    else:
        optimizer.param_groups[0]["lr"] /= 4
