"""What a cache costs and saves, in CPU milliseconds a sample on one thread: a folder of JPEGs,
read, decoded, cropped and flipped.

    python benchmarks/cache.py [--images 200] [--rounds 3]

Made here: 500 × 375 JPEGs of about 40 kB. The first epoch pays for decoding and for filling the
cache; the others read from it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ronde import feed
from ronde.data.images import images
from ronde.data.named_stages import sample_keys


def make(folder: Path, n: int) -> None:
    draw = np.random.default_rng(0)
    for i in range(n):
        place = folder / f"class{i % 10}"
        place.mkdir(exist_ok=True)
        small = Image.fromarray(draw.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(place / f"{i}.jpg", quality=90)


def epoch(data: feed.Pipeline, batch: int = 32) -> float:
    """CPU milliseconds a sample."""
    start = time.process_time()
    for low in range(0, len(data), batch):
        ids = range(low, min(low + batch, len(data)))
        with sample_keys(len(ids), lambda j, low=low: low + j):
            data.__getitems__(ids)
    return (time.process_time() - start) / len(data) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "data").mkdir()
        make(Path(place) / "data", options.images)
        plain = images(Path(place) / "data")
        epoch(plain)
        print(
            f"{'':28}{'first epoch':>12}{'others':>10}   ms of CPU a sample, best of "
            f"{options.rounds}"
        )
        print(f"{'no cache':28}{'':12}{min(epoch(plain) for _ in range(options.rounds)):10.3f}")
        for after in ("read", "decode"):
            for where in ("memory", f"{place}/cache"):
                cold = []
                for k in range(options.rounds):
                    kept = plain.cache(after, where=where, version=str(k))
                    cold.append(epoch(kept))
                    warm = min(epoch(kept) for _ in range(options.rounds))
                    report = kept.source.report()
                    kept.source.close()
                name = f"after {after}, {'memory' if where == 'memory' else 'disk'}"
                print(
                    f"{name:28}{min(cold):12.3f}{warm:10.3f}   "
                    f"{report.bytes / report.held / 1e3:.0f} kB a sample"
                )


if __name__ == "__main__":
    main()
