"""Fine-tune a BERT to tell whether two sentences are about one topic."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from transformers import get_scheduler

import glue

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

accelerator = Accelerator(
    gradient_accumulation_steps=args.accumulate,
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
torch.manual_seed(0)
train_set, test_set = glue.sentences(args.pairs, 0), glue.sentences(args.pairs // 5, 1)
loader = DataLoader(train_set, args.batch, shuffle=True, collate_fn=glue.collate)
test_loader = DataLoader(test_set, args.batch, collate_fn=glue.collate)
model = glue.bert(args.width, args.layers, args.dropout)
optimizer = torch.optim.AdamW(glue.groups(model, weight_decay=0.01), lr=args.lr)
steps = args.epochs * -(-len(loader) // args.accumulate)
scheduler = get_scheduler(
    "linear", optimizer, num_warmup_steps=args.warmup, num_training_steps=steps
)
model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, loader, test_loader, scheduler
)

for epoch in range(args.epochs):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test_loader:
            guess = model(**batch).logits.argmax(1)
            guess, labels = accelerator.gather_for_metrics((guess, batch["labels"]))
            right += (guess == labels).sum().item()
    accelerator.print(f"epoch {epoch + 1}  evaluate  accuracy {right / len(test_set):.4f}")

if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(args.out)
