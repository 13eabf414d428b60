"""Train a recurrent language model: each batch starts from the hidden state of the last one."""

import argparse
import math

import torch
import word_lm
from accelerate import Accelerator
from torch import nn

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

accelerator = Accelerator()
torch.manual_seed(0)
train_words, test_words = word_lm.corpus(args.words, args.vocabulary)
train_data = word_lm.columns(train_words, args.columns).to(accelerator.device)
test_data = word_lm.columns(test_words, 10).to(accelerator.device)
model = word_lm.WordLM(args.vocabulary, args.width, dropout=args.dropout)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
model, optimizer = accelerator.prepare(model, optimizer)
share = args.columns // accelerator.num_processes
mine = train_data[share * accelerator.process_index :][:share]
criterion = nn.CrossEntropyLoss()


def get_batch(source, start):
    stop = min(start + args.bptt, source.shape[1] - 1)
    return source[:, start:stop], source[:, start + 1 : stop + 1].flatten()


@torch.no_grad()
def evaluate():
    model.eval()
    total = 0.0
    hidden = accelerator.unwrap_model(model).init_hidden(len(test_data))
    for start in range(0, test_data.shape[1] - 1, args.bptt):
        words, target = get_batch(test_data, start)
        output, hidden = model(words, hidden)
        total += words.shape[1] * criterion(output.flatten(0, 1), target).item()
    model.train()
    return total / (test_data.shape[1] - 1)


best = math.inf
for epoch in range(args.epochs):
    hidden = accelerator.unwrap_model(model).init_hidden(share)
    for start in range(0, train_data.shape[1] - 1, args.bptt):
        words, target = get_batch(mine, start)
        optimizer.zero_grad()
        output, hidden = model(words, hidden.detach())
        loss = criterion(output.flatten(0, 1), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
    loss = evaluate()
    accelerator.print(f"epoch {epoch + 1}  evaluate  loss {loss:.4f}")
    if loss < best:
        best = loss
    else:
        optimizer.param_groups[0]["lr"] /= 4
