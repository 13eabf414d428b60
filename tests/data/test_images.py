"""Images: decoders and transforms against Pillow and plain torch, by any number of workers."""

import io
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from feeding import feed_of, read, take, with_executor
from ronde import feed
from ronde.data import image_decoders
from ronde.data.images import with_decoder
from ronde.data.named_stages import sample_key
from ronde.feed import (
    CenterCrop,
    HorizontalFlip,
    Normalize,
    RandomResizedCrop,
    Resize,
)
from ronde.plan.batch import shares
from ronde.world import ArgumentError, SampleError
from sampling import some


def photo(width=120, height=90, seed=0):
    """Smooth colours, some edges and some noise: as a JPEG encoder meets them in photographs."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(
        rng.integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8)
    )
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    smooth = smooth + rng.integers(-12, 13, smooth.shape)
    smooth[height // 3 : height // 2, width // 4 : width // 2] = rng.integers(0, 256, 3)
    return Image.fromarray(smooth.clip(0, 255).astype(np.uint8))


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 90} if kind == "JPEG" else {}) | options)
    return file.getvalue()


def by_pillow(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 JPEG files of different sizes in two classes."""
    root = tmp_path_factory.mktemp("photos")
    for i in range(24):
        place = root / ("cat", "dog")[i % 2] / f"{i:02}.jpg"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(encoded(photo(90 + 7 * i, 140 - 3 * i, seed=i)))
    return root


def batch(pipeline, ids=range(12), keys=None):
    samples = []
    for i in ids:
        with sample_key(1000 + (i if keys is None else keys)):
            samples.append(pipeline[i])
    made = pipeline.collate(samples)
    return pipeline.finish(made) if pipeline.finish is not None else made


# -- decoding --------------------------------------------------------------------------

FILES = {
    "jpeg": partial(encoded),
    "jpeg 4:4:4": partial(encoded, subsampling=0),
    "jpeg 4:2:2": partial(encoded, subsampling=1),
    "jpeg progressive": partial(encoded, progressive=True),
    "jpeg odd size": lambda image: encoded(image.crop((0, 0, 61, 43))),
    "jpeg one pixel": lambda image: encoded(image.crop((0, 0, 1, 1))),
    "jpeg grey": lambda image: encoded(image.convert("L")),
    "jpeg CMYK": lambda image: encoded(image.convert("CMYK")),
    "png": lambda image: encoded(image, "PNG"),
    "png alpha": lambda image: encoded(
        Image.merge("RGBA", (*image.split(), image.split()[0])), "PNG"
    ),
    "png palette": lambda image: encoded(image.quantize(31), "PNG"),
    "png grey": lambda image: encoded(image.convert("LA"), "PNG"),
    "webp": lambda image: encoded(image, "WEBP"),
    "webp lossless alpha": lambda image: encoded(
        Image.merge("RGBA", (*image.split(), image.split()[0])), "WEBP", lossless=True
    ),
    "gif": lambda image: encoded(image.quantize(16), "GIF"),
}


@pytest.mark.parametrize("decoder", ["auto", *image_decoders.available()])
@pytest.mark.parametrize("kind", FILES)
def test_every_decoder_gives_pillows_pixels(kind, decoder):
    data = FILES[kind](photo())
    found = image_decoders.decode_image(data, decoder)
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    assert np.array_equal(found, by_pillow(data))


def test_what_a_decoder_will_not_have_goes_to_pillow():
    good = FILES["jpeg"](photo())
    middle = len(good) // 2
    # the data in the middle make no sense
    broken = good[:middle] + b"\xff\x00\x12\x00" * 8 + good[middle + 32 :]
    for data in (FILES["jpeg CMYK"](photo()), broken):
        with pytest.raises(Exception):
            image_decoders.DECODERS["simplejpeg"](data)
        assert np.array_equal(
            image_decoders.decode_image(data, "simplejpeg", name="x/y.jpg"), by_pillow(data)
        )


@pytest.mark.parametrize("decoder", ["auto", *image_decoders.available()])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (encoded(photo())[:2000], "truncated"),
        (encoded(photo(), "PNG")[:3000], r"\(3,000 bytes\) cannot be decoded"),
        (b"", "it is empty"),
        (
            b"hello, I am no image",
            "Pillow does not recognize it as an image; it begins with b'hello, I'",
        ),
    ],
)
def test_what_cannot_be_decoded_names_the_file(decoder, data, says):
    with pytest.raises(SampleError, match=rf"^cat/7\.jpg .*{says}"):
        image_decoders.decode_image(data, decoder, name="cat/7.jpg")


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", some(range(1, 9), 5))
def test_an_image_is_turned_once(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(7, 5), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    turned = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(image_decoders.decode_image(data, orient=True), turned)
    assert np.array_equal(image_decoders.decode_image(data), by_pillow(data))


def test_decoders_that_cannot_be_used(folder):
    known = "decoder='gif' is not known: choose 'auto' or one of simplejpeg, pillow"
    with pytest.raises(ArgumentError, match=known):
        feed.images(folder, decoder="gif")


# -- transforms ------------------------------------------------------------------------


def tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("size", [(45, 60), (31, 77), (90, 120), (200, 300), (90, 50), (1, 1)])
def test_resize_is_pillows(size):
    image = photo()
    found = Resize(size)(tensor(image))
    expected = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR), dtype=np.int16)
    apart = np.abs(found.permute(1, 2, 0).numpy().astype(np.int16) - expected)
    assert found.shape == (3, *size) and apart.mean() <= 0.1 and apart.max() <= 1


def test_crops_and_flips_are_exact():
    x = tensor(photo(121, 90))
    assert torch.equal(CenterCrop((40, 50))(x), x[:, 25:65, 36:86])
    assert torch.equal(HorizontalFlip(1.0)(x), x[:, :, torch.arange(120, -1, -1)])
    assert torch.equal(HorizontalFlip(0.0)(x), x)
    crop = RandomResizedCrop(24)
    for key in range(20):
        with sample_key(key):
            top, left, h, w = crop.box(90, 121)
        with sample_key(key):
            found = crop(x)
        part = x[:, top : top + h, left : left + w].contiguous()
        assert torch.equal(
            found, F.interpolate(part[None], (24, 24), mode="bilinear", antialias=True)[0]
        )
    with pytest.raises(ValueError, match="the image is only 90 × 121 there"):
        CenterCrop(100)(x)


def test_an_image_that_is_too_small_is_named_and_can_be_skipped(tmp_path):
    for i in range(6):
        Image.new("RGB", (40, 40) if i != 2 else (5, 40), (i, i, i)).save(tmp_path / f"{i}.png")
    data = feed.images(tmp_path, labels="none", augment=[CenterCrop(16)], normalize=None)
    with pytest.raises(
        SampleError, match=r"sample 2 \(2\.png\), stage augment: .*the image is only 40 × 5 there"
    ):
        data.__getitems__(range(6))
    reading = feed_of(take(data.skip_bad(0.2), shuffle=False))
    ((share, batches),) = reading.read(lambda: shares(0, 0, 6, 6, 0, 1))
    assert [i for i, _ in reading.skipped] == [2] and len(reading.finish(share, batches)[0]) == 6


def test_normalised_as_torchvision_does():
    x = torch.stack([tensor(photo(seed=s)) for s in range(3)])
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in feed.IMAGENET)
    expected = (x.to(torch.float64) / 255 - mean) / std
    for given in (
        x,
        x.contiguous(memory_format=torch.channels_last),
        x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
    ):
        found = Normalize().normalized(given, torch.float32)
        assert found.dtype == torch.float32
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert (found - expected).abs().max() < 1e-6
    assert (Normalize()(x[0]) - expected[0]).abs().max() < 1e-6
    assert Normalize().normalized(x, torch.bfloat16).dtype == torch.bfloat16


def test_transforms_say_what_is_wrong():
    for make, says in (
        (lambda: RandomResizedCrop(0), r"RandomResizedCrop\(size\)=0"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), "the smaller one first"),
        (lambda: Resize((3, 4, 5)), r"expected a whole number of pixels, or \(height, width\)"),
        (lambda: HorizontalFlip(2), "expected a probability"),
        (lambda: Normalize((0, 0), (1, 1)), "three numbers each"),
    ):
        with pytest.raises(ArgumentError, match=says):
            make()


# -- pipelines -------------------------------------------------------------------------


def test_evaluation_is_what_one_writes_with_pillow(folder):
    images, labels = batch(feed.images(folder, size=56, augment=False, normalize=None))
    files = sorted(folder.glob("*/*.jpg"))
    assert images.shape == (12, 3, 56, 56)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0] * 12
    for found, file in zip(images, files, strict=False):
        image = Image.open(file).convert("RGB")
        w, h = image.size
        short = 64
        image = image.resize(
            (short, int(short * h / w)) if w <= h else (int(short * w / h), short),
            Image.Resampling.BILINEAR,
        )
        left, top = round((image.width - 56) / 2), round((image.height - 56) / 2)
        expected = np.asarray(image.crop((left, top, left + 56, top + 56)), dtype=np.int16)
        apart = np.abs(found.permute(1, 2, 0).numpy().astype(np.int16) - expected)
        assert apart.mean() <= 0.1 and apart.max() <= 2  # both passes may round otherwise


def test_the_same_bits_whoever_reads(folder):
    augment = [RandomResizedCrop(40), HorizontalFlip()]
    data = feed.images(folder, size=40, augment=augment)
    taken = take(data, seed=3)
    first = read(with_executor(taken, "none"), batch=8, seed=3)
    for executor, workers in (("processes", 1), ("processes", 2), ("threads", 3)):
        found = read(with_executor(taken, executor, workers), batch=8, seed=3)
        assert len(found) == len(first) == 3
        for (x, y), (x_first, y_first) in zip(found, first, strict=True):
            assert torch.equal(x, x_first) and torch.equal(y, y_first)
    again = read(with_executor(taken, "none"), batch=8, epochs=(1,), seed=3)
    assert not torch.equal(again[0][0], first[0][0])


def test_what_a_cache_keeps_serves_any_crop(folder):
    augment = [RandomResizedCrop(24), HorizontalFlip()]
    plain = [batch(feed.images(folder, augment=augment), keys=key)[0] for key in (1, 2)]
    assert not torch.equal(*plain)
    kept = feed.cached(
        feed.images(folder, augment=augment),
        after="decode",
        limit="64MiB",
    )
    for key in (1, 2):
        # the first time it is decoded, the second time not
        assert torch.equal(batch(kept, keys=key)[0], plain[key - 1])
    assert kept.source.report().hits >= 12
    kept.source.close()


def test_the_decoder_can_be_changed_afterwards(folder):
    data = feed.images(folder, size=24)
    mapped = data.map(lambda sample: sample)
    changed = with_decoder(mapped, "pillow")
    assert changed.steps[0].call.decoder == "pillow"
    assert changed.steps[1:] == mapped.steps[1:]
    assert torch.equal(batch(changed)[0], batch(data)[0])
    with pytest.raises(ArgumentError, match=r"feed\.images pipelines only"):
        with_decoder(feed.Pipeline(feed.dataset([1, 2])), "pillow")


def test_tars_packs_and_images_without_labels(folder, tmp_path):
    import tarfile

    files = sorted(folder.glob("*/*.jpg"))
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        for i, file in enumerate(files):
            for ending, raw in (("jpg", file.read_bytes()), ("cls", str(i % 5).encode())):
                member = tarfile.TarInfo(f"{i:03}.{ending}")
                member.size = len(raw)
                out.addfile(member, io.BytesIO(raw))
    expected, _ = batch(feed.images(folder, size=24, augment=False))
    found, labels = batch(feed.images(tmp_path / "a.tar", size=24, augment=False))
    assert torch.equal(found, expected) and labels.tolist() == [i % 5 for i in range(12)]
    feed.pack(folder, tmp_path / "packed")
    packed, classes = batch(feed.images(tmp_path / "packed", size=24, augment=False))
    assert torch.equal(packed, expected) and classes.tolist() == [0] * 12
    alone = batch(feed.images(folder, size=24, augment=False, labels="none"))
    assert isinstance(alone, torch.Tensor) and alone.shape == expected.shape


def test_arguments_that_cannot_be_used_are_named(folder):
    for options, says in (
        ({"dtype": "f"}, "dtype='f': expected a floating-point type"),
        ({"size": 2.5}, "=2.5: expected a whole number of pixels"),
        ({"size": 2.5, "augment": False}, "=2.5: expected a whole number of pixels"),
    ):
        with pytest.raises(ArgumentError, match=says):
            feed.images(folder, **options)
    with pytest.raises(TypeError, match=r"folder\(\) got an unexpected keyword argument 'bogus'"):
        feed.images(folder, bogus=1)
    with pytest.raises(ArgumentError, match=r"suffixes= goes with a path: give it to the source"):
        feed.images(feed.folder(folder), suffixes=[".jpg"])
