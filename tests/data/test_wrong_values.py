"""What is no number, no text, or no sample: skipped, counted as missing, or an error by name."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image, ImageOps

from ronde import feed
from ronde.data import image_decoders
from ronde.feed import Pipeline, rng, rngs
from ronde.plan.batch import shares
from ronde.world import ArgumentError
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


# -- tables ----------------------------------------------------------------------------


def written(path, **columns):
    pa.parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("wrong", some([float("inf"), float("-inf"), 1e300], 3))
def test_an_infinite_number_counts_as_missing(wrong, tmp_path):
    path = written(tmp_path / "t.parquet", x=[1.0, wrong, 3.0, None, 5.0])
    for missing, filled in (("mean", 3.0), ("nan", float("nan")), (-1.0, -1.0)):
        data = feed.table(path, numeric=["x"], missing=missing, cache=tmp_path / "c")
        assert (
            data.source.mean == [3.0]
            and data.source.std == [pytest.approx((8 / 3) ** 0.5)]
            and data.source.missing == {"x": 2}
        )
        read = data.source.read(range(5)).collated[0][:, 0]
        assert torch.equal(
            read.nan_to_num(7), torch.tensor([1, filled, 3, filled, 5]).nan_to_num(7)
        )
    read = (
        feed.table(path, numeric=["x"], normalize=True, cache=tmp_path / "c")
        .source.read(range(5))
        .collated[0][:, 0]
    )
    assert torch.allclose(read, torch.tensor([-1.0, 0, 0, 0, 1]) * 1.5**0.5)
    other = feed.table(
        written(tmp_path / "u.parquet", x=[wrong, 2.0]), like=data, cache=tmp_path / "c"
    )
    # as in the other table
    assert other.source.read([0, 1]).collated[0].tolist() == [
        [-1.0],
        [2.0],
    ]
    other = feed.table(tmp_path / "u.parquet", like=data, missing="mean", cache=tmp_path / "c")
    assert other.source.read([0, 1]).collated[0].tolist() == [[3.0], [2.0]]


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


# -- tables: one meaning in every format -----------------------------------------------


@pytest.mark.parametrize("wrong", some(["inf", "1e39", "-inf", "1e300"], 2))
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_an_infinite_target_is_an_error_with_its_row(tmp_path, wrong, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        path.write_text(f"x,y\n1,0.5\n2,{wrong}\n")
    else:
        written(path, x=[1.0, 2.0], y=[0.5, float(wrong)])
    with pytest.raises(
        ArgumentError,
        match=r"the target 'y' is infinite as float32 \(.*\); the first such row of the table is 1",
    ):
        feed.table(path, numeric=["x"], target="y", cache=tmp_path / "cache")
