"""Pipelines, text, tables and decoders where they once went wrong without a word, or with a wrong
one.
"""

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
import zlib

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
from ronde.world import ArgumentError, SampleError

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


def stacked(values):
    return list(np.stack(values))


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


def test_the_first_error_of_a_sample_is_the_one_that_is_told():
    with pytest.raises(SampleError, match=r"2\.png .*cannot be decoded"):
        Pipeline(Files()).map(opened, "decode").map(stacked, batched=True)[2]
    found = Pipeline(Files()).map(opened, "decode").map(stacked, batched=True).attempt([1, 2, 3])
    assert found[0] == 1 and found[2] == 3 and "2.png" in found[1].text


# -- tokenizers ------------------------------------------------------------------------


class Shifted:
    """A tokenizer whose method is one code for all of its kind."""

    def __init__(self, by):
        self.by = by

    def tokens(self, text):
        return [b + self.by for b in text.encode()]


class Encoder:
    def __init__(self, table):
        self.table = table

    def encode(self, text):
        return [self.table[c] for c in text]


class Reduced(Encoder):
    """As objects of C and Rust do: it keeps what cannot be looked at, and tells pickle what its
    state is.
    """

    def __init__(self, table):
        super().__init__(table)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {"table": self.table}


class Wrapping:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, text):
        return self.inner.encode(text)


def plus(text, k):
    return [b + k for b in text.encode()]


def closed(k):
    return lambda text: [b + k for b in text.encode()]


def keyword(k):
    def tokens(text, *, k=k):
        return [b + k for b in text.encode()]

    return tokens


def nested(k):
    return {1: lambda text: [f(b) for b in text.encode() for f in [lambda b: b + 1]]}.get(
        k, lambda text: [f(b) for b in text.encode() for f in [lambda b: b + 2]]
    )


FAMILIES = {
    "bound method": (lambda k: Shifted(k).tokens),
    "object with encode": (lambda k: Encoder({"a": k, "b": k + 1})),
    "bound encode": (lambda k: Encoder({"a": k, "b": k + 1}).encode),
    "object with a state": (lambda k: Reduced({"a": k, "b": k + 1})),
    "object inside": (lambda k: Wrapping(Reduced({"a": k, "b": k + 1}))),
    "partial": (lambda k: functools.partial(plus, k=k)),
    "partial of a method": (lambda k: functools.partial(Shifted.tokens, Shifted(k))),
    "closure": closed,
    "keyword default": keyword,
    "nested code": nested,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_tokenizers_never_share_their_tokens(family, tmp_path):
    (tmp_path / "a.txt").write_text("abab")
    read = lambda k: feed.text(tmp_path / "a.txt", 3, FAMILIES[family](k), cache=tmp_path / "cache")  # noqa: E731
    first, second = read(1), read(2)
    assert (second[0][0] - first[0][0]).tolist() == [
        1,
        1,
        1,
    ] and first.fingerprint != second.fingerprint
    assert (
        read(1).fingerprint == first.fingerprint and len(list((tmp_path / "cache").iterdir())) == 2
    )


def test_tokenizers_of_hugging_face_are_known_inside_of_functions(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("a b a b")

    def made(first):
        made = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"a": first, "b": 1 - first}, unk_token="a")
        )
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return made

    read = lambda tokenizer: feed.text(tmp_path / "a.txt", 3, tokenizer, cache=tmp_path / "cache")  # noqa: E731
    makes = [lambda t: t, lambda t: t.encode, lambda t: lambda text: t.encode(text).ids]
    transformers = pytest.importorskip("transformers")

    def fast(t):
        # what each call of transformers' own changes in it is no other tokenizer
        t.enable_truncation(2)
        return transformers.PreTrainedTokenizerFast(tokenizer_object=t).encode

    for make in (*makes, fast):
        one, other = read(make(made(0))), read(make(made(1)))
        assert one[0][0].tolist() == [0, 1, 0] and other[0][0].tolist() == [1, 0, 1]
        assert read(make(made(0))).fingerprint == one.fingerprint
    slow = transformers.ByT5Tokenizer()
    first = read(slow)
    assert (
        first[0][0].tolist() == [b + 3 for b in b"a b"]
        and read(slow).fingerprint == first.fingerprint
    )


def test_what_cannot_be_told_apart_needs_a_name(tmp_path):
    (tmp_path / "a.txt").write_text("abab")
    opaque, words = zlib.compressobj(), {}

    def hidden(text):
        return [*text.encode()] if opaque else []

    def keeping(text):
        return words.setdefault(text, [*text.encode()])

    read = functools.partial(feed.text, tmp_path / "a.txt", 3, cache=tmp_path / "cache")
    with pytest.raises(
        ArgumentError, match=r"tokenizer: opaque is of zlib\.Compress, .* name it with name="
    ):
        read(hidden)
    with pytest.raises(ArgumentError, match=r"changes with its first text.* name it with name="):
        read(keeping)
    with pytest.raises(ArgumentError, match="name=3: expected text"):
        read(hidden, name=3)
    assert list((tmp_path / "cache").iterdir()) == []
    assert read(hidden, name="hidden")[0][0].tolist() == [*b"aba"]
    assert read(keeping, name="keeping").fingerprint != read(hidden, name="hidden").fingerprint
    # the name is all that counts
    assert read(lambda text: [0], name="hidden")[0][0].tolist() == [*b"aba"]


SCRIPT = """
import functools, sys
from ronde import feed

class Words:
    known = frozenset({"to", "be", "or", "not"})

    def __init__(self):
        self.stops = {"that", "is", "the"}

    def tokens(self, text, *, most=(9, "x")):
        return [f(w) for w in text.split() if w not in {"a", "an", "the"} for f in [lambda w: len(w) + (w in self.stops)]]

words = Words()

def outer(text):
    def inner(piece):
        return [len(w) + (w in Words.known) for w in piece.split()]
    return inner(text)

for tokenizer in (words.tokens, outer, lambda text: words.tokens(text), functools.partial(Words.tokens, words)):
    print(feed.text(sys.argv[1], 2, tokenizer, cache=sys.argv[2]).fingerprint)
"""


def test_a_tokenizer_is_the_same_one_in_every_process(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be that is the question")
    (tmp_path / "script.py").write_text(SCRIPT)
    told = []
    for seed in ("1", "2"):
        # Allocations of other sizes, so that addresses differ even where the kernel does not move
        # them.
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "RONDE_TEST_FILLING": "x" * 5000 * int(seed),
        }
        command = [sys.executable, tmp_path / "script.py", tmp_path / "a.txt", tmp_path / "cache"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split())
    assert told[0] == told[1] and len(set(told[0])) == 4
    # the second process found what the first made
    assert len(list((tmp_path / "cache").iterdir())) == 4


# -- text ------------------------------------------------------------------------------


def points(text):
    return [ord(c) for c in text]


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", points])
def test_half_a_character_names_its_line(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine \\ud83d\\ude42"}\n{"text": "a\\ud83d"}\n')
    with pytest.raises(
        SampleError,
        match=r"a\.jsonl, line 2: the field 'text' is not text: half a character at 1\.",
    ):
        feed.text(tmp_path / "a.jsonl", 2, tokenizer, cache=tmp_path / "cache")


def test_a_byte_order_mark_is_no_part_of_json(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\ufeff" + json.dumps({"text": "abc"}) + "\r\n" + json.dumps({"text": "de"}) + "\r\n",
        encoding="utf-8",
    )
    data = feed.text(tmp_path / "a.jsonl", 4, end=False, cache=tmp_path / "cache")
    assert data[0][0].tolist() == [*b"abcd"] and data.source.documents == 2


@pytest.mark.parametrize(
    ("pack", "tokenizer"), itertools.product([True, False], ["bytes", "chars", points])
)
def test_files_without_text_say_so(pack, tokenizer, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("")
    read = functools.partial(
        feed.text, length=2, tokenizer=tokenizer, pack=pack, end=False, cache=tmp_path / "cache"
    )
    with pytest.raises(
        ArgumentError,
        match=r"/a\.txt: 0 tokens in 1 documents are too few for one sample of length=2",
    ):
        read(tmp_path / "a.txt")
    with pytest.raises(
        ArgumentError, match=r"/a\.txt and 1 more: 0 tokens in 2 documents are too few"
    ):
        read([tmp_path / "a.txt", tmp_path / "b.txt"])


def test_every_tokenizer_sees_the_files_very_characters(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\nd")
    read = functools.partial(feed.text, tmp_path / "a.txt", 7, end=False, cache=tmp_path / "cache")
    chars = read("chars")
    assert "".join(chars.source.characters[t] for t in chars[0][0].tolist()) == "a\r\nb\rc\n"
    assert read(points)[0][0].tolist() == read("bytes")[0][0].tolist() == [*b"a\r\nb\rc\n"]


# -- tables ----------------------------------------------------------------------------


def written(path, **columns):
    pa.parquet.write_table(pa.table(columns), path)
    return path


SORTED = (
    "from ronde.data.tabular import _sorted; print(_sorted({'nan', '10', '9', 'inf', '-inf', "
    "'NaN', '-1.5', 'b', 'a', '1e999'}))"
)


def test_categories_that_are_no_numbers_have_one_order():
    expected = str(["-1.5", "9", "10", "-inf", "1e999", "NaN", "a", "b", "inf", "nan"])
    for seed in range(8):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        if seed < 2:
            done = subprocess.run(
                [sys.executable, "-c", SORTED],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.stdout.strip() == expected, done.stderr
        from ronde.data.tabular import _sorted

        values = ["nan", "10", "9", "inf", "-inf", "NaN", "-1.5", "b", "a", "1e999"]
        assert (
            str(_sorted(dict.fromkeys(np.random.default_rng(seed).permutation(values).tolist())))
            == expected
        )


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), 1e300])
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (1.7, r"1\.7"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (1e300, r"1e\+300"),
        (np.uint64(2**64 - 1), "1.84467e"),
    ],
)
def test_targets_that_are_no_whole_numbers_are_refused_where_such_are_trained_on(
    wrong, said, tmp_path
):
    train = feed.table(
        written(tmp_path / "a.parquet", x=[1.0, 2.0], y=[0, 1]),
        numeric=["x"],
        target="y",
        cache=tmp_path / "c",
    )
    bad = written(
        tmp_path / "b.parquet",
        x=[1.0, 2.0, 3.0],
        y=np.asarray([1, 0, wrong], dtype=np.asarray(wrong).dtype),
    )
    with pytest.raises(
        ArgumentError,
        match=rf"b\.parquet: the target 'y' is not a 64-bit integer \({said}.*\); .* is 2\.",
    ):
        feed.table(bad, like=train, cache=tmp_path / "c")
    good = feed.table(
        written(tmp_path / "c.parquet", x=[1.0, 2.0], y=[1.0, 0.0]),
        like=train,
        cache=tmp_path / "c",
    )
    assert good.source.read([0, 1]).collated[1].tolist() == [1, 0]


def test_truth_values_are_one_category_in_any_spelling(tmp_path):
    parquet = written(tmp_path / "a.parquet", new=[True, False, None, True], x=[1, 2, 3, 4])
    for spelling in (str, str.lower, str.upper):
        csv = tmp_path / "b.csv"
        csv.write_text(
            "new,x\n" + "\n".join(f"{spelling(v)},1" for v in ("True", "False", "True")) + "\n"
        )
        for first, then, codes in ((parquet, csv, [2, 1, 2]), (csv, parquet, [2, 1, 0, 2])):
            train = feed.table(first, categorical=["new"], cache=tmp_path / "c")
            test = feed.table(then, like=train, cache=tmp_path / "c")
            assert train.source.vocabularies == {"new": ["false", "true"]}
            assert test.source.read(range(len(test))).collated[0][:, 0].tolist() == codes
    words = feed.table(
        written(tmp_path / "d.parquet", w=["True", "true", "Maybe"]),
        categorical=["w"],
        cache=tmp_path / "c",
    )
    # texts, of which some are like truth values
    assert words.source.vocabularies == {"w": ["Maybe", "True", "true"]}


# -- decoding --------------------------------------------------------------------------


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["TIFF", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
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


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_grey_of_16_bits_keeps_the_upper_8(kind, order):
    values = np.arange(0, 1 << 16, 7, dtype=np.uint16)[:9362].reshape(62, 151)
    image = Image.frombytes(
        "I;16" if order == "<" else "I;16B", (151, 62), values.astype(f"{order}u2").tobytes()
    )
    found = image_decoders.decode_image(saved(image, kind))
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    assert np.array_equal(found, np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


# -- tables: one meaning in every format -----------------------------------------------

COUNTRIES = ["NA", "US", "null", "n/a", "NaN", "", "NULL", "#N/A", "US"]


def codes_of(data):
    return data.source.read(range(len(data))).collated[0].flatten().tolist()


def test_words_that_others_take_for_missing_are_categories_in_every_format(tmp_path):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([("country", "y"), *((c, c or "none") for c in COUNTRIES)])
    (tmp_path / "b.csv").write_text(
        "country,y\n" + "".join(f"{c},{c or 'none'}\n" for c in COUNTRIES)
    )
    parquet = written(
        tmp_path / "c.parquet",
        country=[c or None for c in COUNTRIES],
        y=[c or "none" for c in COUNTRIES],
    )
    with open(tmp_path / "b.csv", newline="") as file:
        read = [row["country"] for row in csv.DictReader(file)]
    known = sorted({c for c in read if c}, key=lambda c: (1, c))
    for first in (tmp_path / "a.csv", tmp_path / "b.csv", parquet):
        train = feed.table(first, categorical=["country"], target="y", cache=tmp_path / "cache")
        assert train.source.vocabularies == {"country": known} and train.source.missing == {
            "country": 1
        }
        assert train.source.classes == sorted({c or "none" for c in read})
        for then in (tmp_path / "a.csv", tmp_path / "b.csv", parquet):
            found = feed.table(then, like=train, cache=tmp_path / "cache")
            assert codes_of(found) == [known.index(c) + 1 if c else 0 for c in read]


def test_of_numbers_in_a_csv_such_words_are_missing(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,1\nNA,2\nNaN,3\nnull,4\n,5\n3,6\n")
    data = feed.table(tmp_path / "a.csv", numeric=["x"], target="y", cache=tmp_path / "cache")
    assert data.source.missing == {"x": 4} and codes_of(data) == [1, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("wrong", ["inf", "-inf", "1e39", "1e300"])
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


def test_texts_where_the_other_table_has_numbers_are_an_error_that_names_the_column(tmp_path):
    train = feed.table(
        written(tmp_path / "a.parquet", x=[1.0, 2.0], y=[5, 6]),
        numeric=["x"],
        target="y",
        cache=tmp_path / "cache",
    )
    (tmp_path / "c.csv").write_text("x,y\n1,5\n2,x\n")
    for path in (written(tmp_path / "b.parquet", x=[1.0, 2.0], y=["5", "x"]), tmp_path / "c.csv"):
        with pytest.raises(
            ArgumentError, match="the target 'y' holds texts, and numbers in the table of like="
        ):
            feed.table(path, like=train, cache=tmp_path / "cache")


def test_whole_numbers_are_the_same_category_however_they_are_written(tmp_path):
    whole = feed.table(
        written(tmp_path / "a.parquet", z=[1, 2, 30]), categorical=["z"], cache=tmp_path / "cache"
    )
    (tmp_path / "b.csv").write_text("z\n1\n2.0\n 30\n30.00\n4\n02\n2.5\n")
    assert codes_of(feed.table(tmp_path / "b.csv", like=whole, cache=tmp_path / "cache")) == [
        1,
        2,
        3,
        3,
        0,
        0,
        0,
    ]
    floats = written(tmp_path / "c.parquet", z=[2.0, None, 30.0])
    assert codes_of(feed.table(floats, like=whole, cache=tmp_path / "cache")) == [2, 0, 3]
    # as pandas writes whole numbers of which one is missing
    (tmp_path / "d.csv").write_text("z\n1.0\n2.0\n")
    pointed = feed.table(tmp_path / "d.csv", categorical=["z"], cache=tmp_path / "cache")
    assert codes_of(feed.table(tmp_path / "b.csv", like=pointed, cache=tmp_path / "cache")) == [
        1,
        2,
        0,
        0,
        0,
        0,
        0,
    ]
    (tmp_path / "e.csv").write_text("z\n1.0\n1\n007\n")  # three texts there, and three here
    three = feed.table(tmp_path / "e.csv", categorical=["z"], cache=tmp_path / "cache")
    assert sorted(codes_of(three)) == [1, 2, 3]


def test_numbers_that_begin_with_nought_are_classes(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,7\n2,007\n3,07\n")
    data = feed.table(tmp_path / "a.csv", numeric=["x"], target="y", cache=tmp_path / "cache")
    assert [data.source.classes[i] for i in data.source.read(range(3)).collated[1].tolist()] == [
        "7",
        "007",
        "07",
    ]
    (tmp_path / "b.csv").write_text("x,y\n1,7\n2,7\n")  # texts here too, since they are there
    other = feed.table(tmp_path / "b.csv", like=data, cache=tmp_path / "cache")
    assert [data.source.classes[i] for i in other.source.read(range(2)).collated[1].tolist()] == [
        "7",
        "7",
    ]
    (tmp_path / "c.csv").write_text("x,y\n1,0\n2,10\n3,-5\n4,0.5\n")
    assert (
        feed.table(
            tmp_path / "c.csv", numeric=["x"], target="y", cache=tmp_path / "cache"
        ).source.classes
        is None
    )


def test_names_and_values_may_go_over_several_lines(tmp_path):
    rows = [("a\nb", "x"), ("one\ntwo", "1"), ('three "3"', "2")]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    data = feed.table(
        tmp_path / "a.csv", numeric=["x"], categorical=["a\nb"], cache=tmp_path / "cache"
    )
    assert data.source.vocabularies == {"a\nb": ["one\ntwo", 'three "3"']}
    assert data.source.read([0, 1]).collated[0][0].flatten().tolist() == [1, 2]


def test_a_column_that_only_folders_name_is_said(tmp_path):
    (tmp_path / "year=1").mkdir()
    written(tmp_path / "year=1" / "a.parquet", x=[1.0])
    with pytest.raises(
        ArgumentError,
        match=r"no column 'year': choose among x\. Values in folder names \(year=…\) are "
        r"not read",
    ):
        feed.table(tmp_path, numeric=["x", "year"], cache=tmp_path / "cache")
    with pytest.raises(
        ArgumentError,
        match=r"no column 'year'.*Values in folder names \(year=…\) are not read",
    ):
        feed.parquet(tmp_path / "year=*" / "*.parquet", columns=["year"])


def test_a_target_and_categories_in_views_are_texts(tmp_path):
    path = written(
        tmp_path / "v.parquet",
        c=pa.array(["b", None, "a"], pa.string_view()),
        y=pa.array(["x", "y", "x"], pa.string_view()),
    )
    data = feed.table(path, categorical=["c"], target="y", cache=tmp_path / "cache")
    assert codes_of(data) == [2, 0, 1] and data.source.read(range(3)).collated[1].tolist() == [
        0,
        1,
        0,
    ]


# -- text: what is none ----------------------------------------------------------------


@pytest.mark.parametrize("ending", [".parquet", ".PARQUET", ".pq", ".Pq", ".jsonl", ".JSONL"])
def test_an_ending_says_what_a_file_is_in_capitals_or_not(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    documents = ["hello world", "", "and more of it"]
    if "jsonl" in ending.lower():
        path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    else:
        pa.parquet.write_table(pa.table({"text": documents}), path)
    data = feed.text(path, 1, end=False, cache=tmp_path / "cache")
    assert (
        bytes(data.source._map().tolist()).decode() == "".join(documents)
        and data.source.documents == 3
    )


def zipped(data):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a.txt", data)
    return out.getvalue()


def tarred(data):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        member = tarfile.TarInfo("a.txt")
        member.size = len(data)
        file.addfile(member, io.BytesIO(data))
    return out.getvalue()


def in_parquet(data):
    out = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": [data.decode()]}), out)
    return out.getvalue()


NO_TEXT = {
    "gzip": (gzip.compress, "compressed with gzip"),
    "bzip2": (bz2.compress, "compressed with bzip2"),
    "xz": (lzma.compress, "compressed with xz"),
    "zstd": (lambda data: pa.compress(data, codec="zstd", asbytes=True), "compressed with zstd"),
    "lz4": (lambda data: pa.compress(data, codec="lz4", asbytes=True), "compressed with lz4"),
    "zip": (zipped, "a zip archive"),
    "tar": (tarred, "a tar"),
    "parquet": (in_parquet, r"a Parquet file, whose name ends in \.parquet or \.pq"),
    "latin-1": (lambda data: data + "é".encode("latin-1") + data, "not text in UTF-8"),
    "cut": (lambda data: data + "é".encode()[:1], "not text in UTF-8"),
    "random": (lambda data: b"\x00\xff" * 100, "not text in UTF-8"),
}


@pytest.mark.parametrize("kind", NO_TEXT)
@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "own"])
def test_what_is_no_text_is_an_error_whatever_the_tokenizer(tmp_path, kind, tokenizer):
    make, said = NO_TEXT[kind]
    for ending in ("txt", "jsonl.gz"):
        path = tmp_path / f"a.{ending}"
        path.write_bytes(make(b"some text " * 50))
        with pytest.raises(SampleError, match=rf"a\.{ending} is {said}"):
            feed.text(
                path,
                4,
                tokenizer=(lambda text: [ord(c) for c in text])
                if tokenizer == "own"
                else tokenizer,
                cache=tmp_path / "c",
            )


def test_letters_that_are_cut_by_a_piece_are_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["ronde.data.text"], "_CHUNK", 3)
    text = "a é 😀 𝄞\r\nb" * 5
    (tmp_path / "a.txt").write_bytes(text.encode())
    data = feed.text(tmp_path / "a.txt", 1, end=False, cache=tmp_path / "cache")
    assert bytes(data.source._map().tolist()).decode() == text
