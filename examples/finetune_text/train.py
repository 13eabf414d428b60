"""Fine-tune a transformer to classify texts: all of its weights, or LoRA's."""

import argparse

import torch
import torch.nn.functional as F
from pyarrow import dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_scheduler,
)

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="train.parquet", help="Parquet, CSV, or Arrow: a file")
parser.add_argument("--valid", default="", help="the same, held out; default: a tenth of --data")
parser.add_argument("--text", default="text", help="the column of texts")
parser.add_argument("--label", default="label", help="the column of classes")
parser.add_argument("--model", default="./small", help="a folder that save_pretrained wrote")
parser.add_argument("--lora", type=int, default=0, help="rank of LoRA's matrices; 0 trains all")
parser.add_argument("--length", type=int, default=128, help="most tokens of a text")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=32, help="texts in a training step")
parser.add_argument("--micro-batch", type=int, default=32, help="most texts in a forward pass")
parser.add_argument("--lr", type=float, default=5e-5)
parser.add_argument("--out", default="fine-tuned", help="folder of the result")
args = parser.parse_args()


def read(file):
    table = dataset.dataset(file, format=file.rpartition(".")[2]).to_table([args.text, args.label])
    return list(zip(*table.to_pydict().values(), strict=True))


def collate(rows):
    texts, names = zip(*rows, strict=True)
    tokens = tokenizer(
        texts, padding=True, truncation=True, max_length=args.length, return_tensors="pt"
    )
    return {**tokens, "labels": torch.tensor([number[name] for name in names])}


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).float()


torch.manual_seed(0)
try:
    config = AutoConfig.from_pretrained(args.model, local_files_only=True)  # downloads nothing
except OSError:
    raise ronde.ArgumentError(
        f"--model {args.model} has no config.json. Give a folder that save_pretrained wrote."
    ) from None
train = read(args.data)
valid = read(args.valid) if args.valid else train[::10]
if not args.valid:
    del train[::10]
number = {name: i for i, name in enumerate(sorted({name for _, name in train}))}
tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
config.label2id, config.id2label = number, {i: str(name) for name, i in number.items()}
model = AutoModelForSequenceClassification.from_pretrained(
    args.model,
    config=config,
    ignore_mismatched_sizes=True,  # the head is a new one
)
if args.lora:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(task_type="SEQ_CLS", r=args.lora, lora_alpha=2 * args.lora)
    model = get_peft_model(model, lora)
loader = DataLoader(train, args.batch, shuffle=True, collate_fn=collate)
steps = args.epochs * len(loader)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.01)
scheduler = get_scheduler(
    "linear", optimizer, num_warmup_steps=steps // 10, num_training_steps=steps
)
run = ronde.distribute(
    model, optimizer, loader, loss=F.cross_entropy, scheduler=scheduler,
    forward=lambda model, batch: (model(**batch).logits, batch["labels"]),
    micro_batch=args.micro_batch, clip_norm=1.0,
)  # fmt: skip
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(DataLoader(valid, args.batch, collate_fn=collate), {"accuracy": accuracy})

with run.whole_model() as whole:
    if run.is_main:
        whole.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
