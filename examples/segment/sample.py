"""Write images/ and masks/: scikit-learn's digits on noise, and where their ink is."""

from pathlib import Path

import numpy
from PIL import Image
from sklearn.datasets import load_digits

draw = numpy.random.default_rng(0)
for name in ("train", "valid"):
    for kind in ("images", "masks"):
        Path(name, kind).mkdir(parents=True, exist_ok=True)
for i, image in enumerate(load_digits().images[:600]):
    large = numpy.kron(image / 16, numpy.ones((4, 4)))
    noisy = 0.5 * large + 0.5 * draw.random(large.shape)
    folder = Path("valid" if i % 5 == 0 else "train")
    Image.fromarray((noisy * 255).astype("uint8")).save(folder / "images" / f"{i:04}.png")
    Image.fromarray((large > 0.5).astype("uint8")).save(folder / "masks" / f"{i:04}.png")
