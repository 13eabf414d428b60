"""Fine-tune an image classifier of transformers, or train a small ResNet from nothing."""

import argparse

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForImageClassification, ResNetConfig

import ronde
from ronde import feed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="train", help="a folder of images for each class")
parser.add_argument("--valid", default="valid", help="the same, held out")
parser.add_argument("--model", default="", help="a folder that save_pretrained wrote; or nothing")
parser.add_argument("--size", type=int, default=224, help="pixels of an image's side")
parser.add_argument("--width", type=int, default=64, help="of a ResNet from nothing")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=64, help="images in a training step")
parser.add_argument("--micro-batch", type=int, default=64, help="most images in a forward pass")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--out", default="fine-tuned", help="folder of the result")
args = parser.parse_args()


def forward(model, batch):
    images, labels = batch
    return model(images).logits, labels


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).float()


torch.manual_seed(0)
train = feed.images(args.data, args.size)
valid = feed.images(args.valid, args.size, augment=False, like=train)
names = {i: str(name) for i, name in enumerate(train.source.classes)}
head = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
if args.model:
    try:  # downloads nothing
        config = AutoConfig.from_pretrained(args.model, **head, local_files_only=True)
    except OSError:
        raise ronde.ArgumentError(
            f"--model {args.model} has no config.json. Give a folder that save_pretrained wrote."
        ) from None
    model = AutoModelForImageClassification.from_pretrained(
        args.model, config=config, ignore_mismatched_sizes=True
    )
else:
    config = ResNetConfig(
        embedding_size=args.width, hidden_sizes=[args.width * k for k in (1, 2, 4)],
        depths=[1, 1, 1], layer_type="basic", **head,
    )  # fmt: skip
    model = AutoModelForImageClassification.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
run = ronde.distribute(
    model, optimizer, train, loss=F.cross_entropy, forward=forward, batch_size=args.batch,
    micro_batch=args.micro_batch, clip_norm=1.0, sync_batchnorm=True,
)  # fmt: skip
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(valid, {"accuracy": accuracy})

with run.whole_model() as whole:
    if run.is_main:
        whole.save_pretrained(args.out)
