"""Fine-tune a BERT to tell whether two sentences are about one topic."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import get_scheduler

import glue
import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--pairs", type=int, default=2000)
parser.add_argument("--batch", type=int, default=8, help="pairs in a forward pass")
parser.add_argument("--accumulate", type=int, default=2, help="forward passes in a training step")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--warmup", type=int, default=20, help="training steps")
parser.add_argument("--out", default="fine-tuned")
args = parser.parse_args()

torch.manual_seed(0)
train_set, test_set = glue.sentences(args.pairs, 0), glue.sentences(args.pairs // 5, 1)
batch_size = args.batch * args.accumulate
loader = DataLoader(train_set, batch_size, shuffle=True, collate_fn=glue.collate)
test_loader = DataLoader(test_set, args.batch, collate_fn=glue.collate)
model = glue.bert(args.width, args.layers, args.dropout)
optimizer = torch.optim.AdamW(glue.groups(model, weight_decay=0.01), lr=args.lr)
steps = args.epochs * len(loader)
scheduler = get_scheduler(
    "linear", optimizer, num_warmup_steps=args.warmup, num_training_steps=steps
)


def forward(model, batch):
    return model(**batch).logits, batch["labels"]


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).double()


run = ronde.distribute(
    model, optimizer, loader, loss=F.cross_entropy, forward=forward, scheduler=scheduler,
    micro_batch=args.batch,
)  # fmt: skip
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(test_loader, metrics={"accuracy": accuracy})

with run.whole_model() as whole:
    if run.is_main:
        whole.save_pretrained(args.out)
