"""Boosted trees of XGBoost or LightGBM: the same model on one worker or on several."""

import argparse

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="prepared", help="Parquet: a file, or a folder")
parser.add_argument("--valid", default="prepared_valid", help="the same, held out")
parser.add_argument("--target", default="target", help="the column to predict")
parser.add_argument("--objective", default="binary", help="binary, regression, or multiclass")
parser.add_argument("--library", default="xgboost", help="or lightgbm")
parser.add_argument("--rounds", type=int, default=200, help="most rounds of trees")
parser.add_argument("--depth", type=int, default=6, help="of a tree")
parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
parser.add_argument("--early-stop", type=int, default=20, help="rounds without a better metric")
parser.add_argument("--save-every", type=int, default=50, help="rounds between checkpoints")
parser.add_argument("--out", default="trees.json", help="the library's own model")
args = parser.parse_args()

model = ronde.algorithms.trees(
    args.data,
    label=args.target,
    objective=args.objective,
    library=args.library,
    rounds=args.rounds,
    depth=args.depth,
    rate=args.rate,
    validate=args.valid,
    early_stop=args.early_stop,
    save_every=args.save_every,
)
if ronde.world().is_main:
    model.save(args.out)
    print(f"{model.rounds} rounds: {args.out}")
