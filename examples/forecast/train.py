"""Forecast many series at once, as a distribution: a recurrent network in the manner of DeepAR."""

import argparse

import pandas
import torch
from network import Network, Windows, distribution

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="train.parquet", help="columns series, time, value")
parser.add_argument("--context", type=int, default=24, help="steps that a forecast looks at")
parser.add_argument("--horizon", type=int, default=6, help="steps to forecast")
parser.add_argument("--width", type=int, default=40, help="of the LSTM")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="windows in a training step")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--paths", type=int, default=100, help="sampled futures of a series")
parser.add_argument("--out", default="forecast.csv", help="quantiles of the steps after the end")
args = parser.parse_args()


def forward(model, windows):
    return model(windows[:, :-1]), windows[:, 1:]


def loss(output, following):
    return -distribution(output).log_prob(following).mean()


table = pandas.read_parquet(args.data).sort_values(["series", "time"])
groups = {
    name: torch.tensor(rows["value"].to_numpy("float32")) for name, rows in table.groupby("series")
}
series, span = list(groups.values()), args.context + args.horizon
last = [(i, len(values) - span) for i, values in enumerate(series) if len(values) >= span]
train = [(i, start) for i, end in last for start in range(end - args.horizon + 1)]
sizes = (args.context, args.horizon)
torch.manual_seed(0)
model = Network(args.width, args.layers)
run = ronde.distribute(
    model, torch.optim.Adam(model.parameters(), lr=args.lr), Windows(series, train, *sizes),
    loss=loss, forward=forward, batch_size=args.batch, clip_norm=10.0,
)  # fmt: skip
for _ in run.epochs(args.epochs):
    for batch in run.batches():
        run.step(batch)
    run.evaluate(Windows(series, last, *sizes))

torch.manual_seed(0)
with run.whole_model() as whole, torch.no_grad():
    known = torch.stack([series[i][-args.context :] for i, _ in last])
    size = known.abs().mean(1, keepdim=True) + 1e-6
    paths = (known / size).repeat_interleave(args.paths, 0).to(whole.head.weight)
    for _ in range(args.horizon):
        paths = torch.cat([paths, distribution(whole(paths)[:, -1:]).sample()], 1)
    futures = paths[:, args.context :].float().cpu().view(len(last), args.paths, args.horizon)
    quantiles = futures.quantile(torch.tensor([0.1, 0.5, 0.9]), 1) * size
if run.is_main:
    steps = range(1, args.horizon + 1)
    places = [[list(groups)[i] for i, _ in last], steps]
    index = pandas.MultiIndex.from_product(places, names=["series", "step"])
    rows = quantiles.permute(1, 2, 0).flatten(0, 1).numpy()
    pandas.DataFrame(rows, index, ["p10", "p50", "p90"]).to_csv(args.out)
