"""A JPEG classification job whose input pipeline starves its device: to be diagnosed by
`ronde doctor`, and cured.

As people write it: a map-style Dataset that opens files with Pillow, the usual transforms, a
DataLoader. The device is simulated, as MLPerf
Storage does it: each batch takes a fixed time per image, in which this process sleeps and its cores
are free.

    python benchmarks/feed_job.py --make DIR                       # photographs, once (needs
    scikit-learn) ronde doctor benchmarks/feed_job.py -- --data DIR              # what is wrong,
    and what would help python benchmarks/feed_job.py --data DIR --workers 1           # as it is
    python benchmarks/feed_job.py --data DIR --feed                # the same job on ronde.feed
    python benchmarks/feed_job.py --data DIR --synthetic           # one batch over and over: what
    the device could do python benchmarks/feed_job.py --data DIR --seconds 10 --json   # measures
    itself and stops
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ronde

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def make_photographs(folder: Path, count: int = 512, classes: int = 8) -> None:
    """JPEG files as ImageNet's in size: crops of scikit-learn's two photographs, always the same
    ones.
    """
    from PIL import Image
    from sklearn.datasets import load_sample_images

    done = folder / f".made-{count}-{classes}"
    if done.exists():
        return
    photos = [Image.fromarray(a) for a in load_sample_images().images]
    rng = np.random.default_rng(0)
    for i in range(count):
        photo = photos[i % len(photos)]
        width, height = int(rng.integers(400, 560)), int(rng.integers(280, 420))
        x, y = (
            int(rng.integers(0, photo.width - width + 1)),
            int(rng.integers(0, photo.height - height + 1)),
        )
        place = folder / f"class{i % classes}" / f"{i:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((x, y, x + width, y + height)).save(place, "JPEG", quality=97)
    done.touch()


class PillowImages(Dataset):
    """What torchvision's ImageFolder with RandomResizedCrop, RandomHorizontalFlip, ToTensor and
    Normalize does, line by line.
    """

    def __init__(self, folder: Path, size: int = 224) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({f.parent.name for f in self.files})
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        with open(self.files[i], "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), self.classes.index(self.files[i].parent.name)

    def transform(self, image: Any) -> torch.Tensor:
        image = random_resized_crop(image, self.size)
        if random.random() < 0.5:
            from PIL import Image

            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = (
            torch.from_numpy(np.array(image, copy=True))
            .permute(2, 0, 1)
            .contiguous()
            .to(torch.float32)
            .div(255)
        )
        return x.sub_(MEAN).div_(STD)


def random_box(width: int, height: int, uniform: Any = random.uniform) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge, as torchvision draws them."""
    for _ in range(10):
        area = width * height * uniform(0.08, 1.0)
        ratio = float(np.exp(uniform(np.log(3 / 4), np.log(4 / 3))))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            x, y = int(uniform(0, width - w)), int(uniform(0, height - h))
            return x, y, x + w, y + h
    return 0, 0, width, height


def random_resized_crop(image: Any, size: int) -> Any:
    from PIL import Image

    return image.crop(random_box(image.width, image.height)).resize(
        (size, size), Image.Resampling.BILINEAR
    )


class Accelerator(nn.Module):
    """A device of a fixed speed: its time passes asleep, and hardly anything is computed."""

    def __init__(self, images_per_second: float, classes: int) -> None:
        super().__init__()
        self.seconds = 1 / images_per_second
        self.head = nn.Linear(3, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        return self.head(x[:, :, ::32, ::32].mean((2, 3)))


class OneBatch(Dataset):
    """Real images, read once: each sample is one of the first few, as a tensor that is there
    already.
    """

    def __init__(self, data: Any, n: int, keep: int = 64) -> None:
        self.held = [data[i] for i in range(min(keep, len(data)))]
        self.batches: dict[int, Any] = {}
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.held[i % len(self.held)]


def recycled(batch: Any) -> Any:
    """Collates nothing: one batch, over and over."""
    global _kept
    if _kept is None or len(_kept[0]) != len(batch):
        _kept = torch.utils.data.default_collate(batch)
    return _kept


_kept: Any = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("FEED_JOB_DATA", "photographs")),
        help="folder of --make",
    )
    parser.add_argument("--make", type=Path, help="write the photographs there, and stop")
    parser.add_argument("--workers", type=int, default=0, help="the DataLoader's num_workers")
    parser.add_argument(
        "--rate", type=float, default=600.0, help="images a second that the simulated device takes"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--feed",
        action="store_true",
        help="read with ronde.feed instead of Pillow and a DataLoader",
    )
    parser.add_argument(
        "--synthetic", action="store_true", help="train on the same batch over and over"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="measure for that long after as long a warm-up (at most 5 s), and stop",
    )
    parser.add_argument("--json", action="store_true", help="print the rate that was measured")
    args = parser.parse_args()
    if args.make:
        make_photographs(args.make)
        return
    if not any(args.data.glob("*/*.jpg")):
        parser.error(f"no photographs in {args.data}: make them with --make {args.data}")

    plain = PillowImages(args.data)
    if args.synthetic:
        data: Any = DataLoader(
            OneBatch(plain, 1 << 20), args.batch, shuffle=False, collate_fn=recycled
        )
    elif args.feed:
        data = ronde.feed.images(args.data, size=224)
    else:
        data = DataLoader(plain, args.batch, shuffle=True, num_workers=args.workers)
    model = Accelerator(args.rate, len(plain.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = ronde.distribute(model, optimizer, data, loss=F.cross_entropy, batch_size=args.batch)

    warm = min(5.0, args.seconds or 0.0)
    begin, start, done = time.perf_counter(), None, 0
    cpu = 0.0
    for _ in run.epochs(args.epochs if args.seconds is None else 1 << 20):
        for batch in run.batches():
            run.step(batch)
            now = time.perf_counter()
            if start is None and now - begin >= warm:
                start, cpu = now, time.process_time()
            elif start is not None:
                done += args.batch
            if args.seconds is not None and start is not None and now - start >= args.seconds:
                if args.json:
                    print(
                        json.dumps(
                            {
                                "images_per_second": done / (now - start),
                                "cpu_seconds": time.process_time() - cpu,
                                "seconds": now - start,
                            }
                        )
                    )
                os._exit(0)


if __name__ == "__main__":
    main()
