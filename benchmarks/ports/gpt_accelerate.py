"""Train a small GPT, byte by byte, on the source code of Python's own standard library."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import gpt

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", default="", help="a text file; default: Python's source code")
parser.add_argument("--epochs", type=int, default=2, help="times through the text")
parser.add_argument(
    "--megabytes", type=float, default=1.0, help="how much text, a twentieth of it held out"
)
parser.add_argument("--batch", type=int, default=32, help="pieces of text in a training step")
parser.add_argument("--context", type=int, default=64, help="bytes in a piece")
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
args = parser.parse_args()

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
train_text, test_text = gpt.load(args.megabytes, args.context, args.text)
loader = DataLoader(train_text, batch_size=args.batch, shuffle=True)
model = gpt.GPT(args.context, args.width, args.layers, args.heads)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, betas=(0.9, 0.98))
scheduler = gpt.warmup_cosine(optimizer, steps=args.epochs * len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for epoch in range(args.epochs):
    for inputs, target in loader:
        accelerator.backward(gpt.loss(model(inputs), target))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    loss = gpt.evaluate(accelerator.unwrap_model(model), test_text)
    accelerator.print(f"epoch {epoch + 1}  evaluate  loss {loss:.4f}")

model = accelerator.unwrap_model(model)
accelerator.print("\nThe model writes:\n\n" + gpt.sample(model, prompt="def ", length=240))
