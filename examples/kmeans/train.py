"""Clusters of a table's rows by k-means: the same centers on one worker or on several."""

import argparse

import pandas
from pyarrow import dataset

import ronde

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="prepared", help="Parquet: a file, or a folder")
parser.add_argument("--clusters", type=int, default=10)
parser.add_argument("--rounds", type=int, default=300, help="most passes over the rows")
parser.add_argument("--seed", type=int, default=0, help="key of the first centers")
parser.add_argument("--out", default="centers.csv", help="a center a row")
args = parser.parse_args()

found = ronde.algorithms.kmeans(args.data, args.clusters, rounds=args.rounds, seed=args.seed)
if ronde.world().is_main:
    names = dataset.dataset(args.data).schema.names
    pandas.DataFrame(found.centers, columns=names).to_csv(args.out, index=False)
    print(f"{found.rounds} rounds, squared distances {found.inertia:.6g}: {args.out}")
