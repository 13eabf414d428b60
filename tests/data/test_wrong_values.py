"""What is no number, no text, or no sample: skipped, counted as missing, or an error by name."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from ronde import feed
from ronde.data import image_decoders
from ronde.feed import Pipeline, rng, rngs
from ronde.plan.batch import shares
from sampling import some

# -- pipelines -------------------------------------------------------------------------


class Files:
    """PNG files of one grey each; the third does not decode."""

    fingerprint = "files"

    def __len__(self):
        return 10

    def read(self, ids):
        return [feed.Sample(b"broken" if i == 2 else grey(i), None, f"{i}.png") for i in ids]


def grey(value):
    file = io.BytesIO()
    Image.new("L", (2, 2), int(value)).save(file, "PNG")
    return file.getvalue()


def opened(sample):
    return image_decoders.decode_image(sample.data, name=sample.name)[0, 0, 0] / 1.0


def noisy(values):
    return [value + r.random() for value, r in zip(values, rngs(len(values)), strict=True)]


def noisy_one(value):
    return value + rng().random()


@pytest.mark.parametrize("executor", ["none", "threads"])
def test_a_bad_sample_before_a_batched_step_is_skipped(executor):
    """Once it was RecursionError: of no good sample, rngs(0) was refused again and again."""

    def read(pipeline):
        taken = feed.take_over(
            pipeline.skip_bad(0.2),
            seed=3,
            batch_size=None,
            shuffle=True,
            shuffle_dataset=True,
            drop_last=False,
        )
        taken = feed.apply_settings(
            taken, feed.FeedSettings(executor=executor, workers=0 if executor == "none" else 2)
        )
        loader = feed.Feed(taken.dataset, taken.order, taken.settings, 3)
        found = torch.cat(
            [b for _, batches in loader.read(lambda: shares(0, 0, 10, 4, 0, 1)) for b in batches]
        )
        loader.close()
        assert (
            [i for i, _ in loader.skipped] == [2]
            and "2.png" in loader.skipped[0][1]
            and "cannot be decoded" in loader.skipped[0][1]
        )
        return found.tolist()

    pipeline = Pipeline(Files()).map(opened, "decode")
    assert read(pipeline.map(noisy, batched=True)) == read(pipeline.map(noisy_one))


# -- decoding --------------------------------------------------------------------------


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["TIFF", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", some(range(1, 9), 5))
def test_an_image_is_turned_once(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    data = saved(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(image_decoders.decode_image(data, orient=True), np.asarray(expected))
    if orientation != 1:
        assert not np.array_equal(np.asarray(expected), np.asarray(image))
    assert np.array_equal(
        image_decoders.decode_image(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    )
