"""Write scikit-learn's handwritten digits as PNG files, a folder for each class."""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for i, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
    folder = Path("valid" if i % 5 == 0 else "train", str(label))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * 15.9).astype("uint8")).resize((32, 32)).save(folder / f"{i:04}.png")
