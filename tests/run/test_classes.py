"""Labels of a test set count the classes of the training set, whatever occurs in it."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import ronde
from ronde import feed
from ronde.data.pack import pack
from ronde.data.sources.base import Sample
from ronde.world import ArgumentError, SampleError

TRAIN, TEST = ["ant", "bee", "cat", "dog"], ["bee", "dog", "bee"]


def folders(root: Path, names) -> Path:
    for i, name in enumerate(names):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / f"{i}.jpg").write_bytes(name.encode())
    return root


def listed(root: Path, names) -> Path:
    (root / "files").mkdir(parents=True)
    for i, name in enumerate(names):
        (root / "files" / f"{i}.jpg").write_bytes(name.encode())
    with open(root / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [("file", "label"), *((f"{i}.jpg", name) for i, name in enumerate(names))]
        )
    return root


def tars(root: Path, names) -> Path:
    root.mkdir()
    with tarfile.open(root / "a.tar", "w") as out:
        for i, name in enumerate(names):
            for ending in ("jpg", "txt"):
                member = tarfile.TarInfo(f"{i}.{ending}")
                member.size = len(name)
                out.addfile(member, io.BytesIO(name.encode()))
    return root


def texts(root: Path, names) -> Path:
    root.mkdir()
    pq.write_table(
        pa.table({"image": [n.encode() for n in names], "label": list(names)}), root / "a.parquet"
    )
    return root


def hugging(root: Path, names) -> Path:
    """Whole numbers, whose names stand beside the schema."""
    root.mkdir()
    known = sorted(set(names))
    table = pa.table(
        {"image": [n.encode() for n in names], "label": [known.index(n) for n in names]}
    )
    feature = {"info": {"features": {"label": {"_type": "ClassLabel", "names": known}}}}
    pq.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(feature)}), root / "a.parquet"
    )
    return root


def packed(root: Path, names) -> Path:
    pack(folders(root.with_name(root.name + " files"), names), root)
    return root


OPENED = {
    "folder": (folders, feed.folder),
    "csv": (
        listed,
        lambda root, **more: feed.folder(root / "files", labels=root / "labels.csv", **more),
    ),
    "tar": (tars, lambda root, **more: feed.tar(root, data="jpg", label="txt", **more)),
    "texts": (texts, lambda root, **more: feed.parquet(root, data="image", label="label", **more)),
    "hugging": (
        hugging,
        lambda root, **more: feed.parquet(root, data="image", label="label", **more),
    ),
    "packed tar": (packed, feed.tar),
    "images": (folders, lambda root, **more: feed.images(root, **more).source),
}


@pytest.mark.parametrize("kind", OPENED)
def test_labels_count_the_classes_that_are_given(tmp_path, kind):
    make, opened = OPENED[kind]
    train = opened(
        make(tmp_path / "train", TRAIN), **({"classes": TRAIN} if kind in ("tar", "texts") else {})
    )
    assert train.classes == TRAIN
    place = make(tmp_path / "test", TEST)
    given = {
        "like": {"like": train},
        "pipeline": {"like": feed.Pipeline(train).map(lambda sample: sample, "decode")},
        "classes": {"classes": TRAIN},
        "turned": {"classes": TRAIN[::-1]},
    }
    marks = {opened(place).fingerprint}
    for way, more in given.items():
        source = opened(place, **more)
        order = TRAIN[::-1] if way == "turned" else TRAIN
        assert source.classes == order
        samples = source.read(range(len(source)))
        assert all(
            isinstance(s, Sample) and s.label == order.index(s.data.decode()) for s in samples
        )
        marks.add(source.fingerprint)
    assert len(marks) == 3  # by its own classes, by the others', and by these turned
    with pytest.raises(
        (ArgumentError, SampleError),
        match=r"'dog' is not among the 2 given classes \(bee, cat\)",
    ):
        opened(place, classes=["bee", "cat"]).read(range(3))


def test_classes_that_cannot_be_used(tmp_path):
    train = feed.folder(folders(tmp_path / "train", TRAIN))
    for classes in ([], ["a", "a"], [1, 2]):
        with pytest.raises(
            ArgumentError, match="expected the names of the classes, each of them once"
        ):
            feed.folder(tmp_path / "train", classes=classes)
    with pytest.raises(ArgumentError, match="classes= and like= both name the classes"):
        feed.folder(tmp_path / "train", classes=TRAIN, like=train)
    with pytest.raises(
        ArgumentError, match="like= takes a source, or a pipeline of one, with classes"
    ):
        feed.folder(tmp_path / "train", like=feed.folder(tmp_path / "train", labels=None))
    pq.write_table(pa.table({"image": [b"1"], "label": [3]}), tmp_path / "n.parquet")
    with pytest.raises(ArgumentError, match="are unnamed numbers"):
        feed.parquet(tmp_path / "n.parquet", data="image", label="label", like=train)
    with pytest.raises(ArgumentError, match="go with data= and label="):
        feed.parquet(tmp_path / "n.parquet", like=train)


def test_a_class_folder_without_files_is_an_error_unless_the_classes_are_given(tmp_path):
    root = folders(tmp_path / "data", ["ant", "dog"])
    (root / "bee").mkdir()
    (root / ".hidden").mkdir()
    with pytest.raises(
        ArgumentError,
        match=r"the class folder .*/bee holds no file\. Remove it, or name the classes",
    ):
        feed.folder(root)
    (root / "bee" / "notes.txt").write_text("")
    assert feed.folder(root).classes == ["ant", "bee", "dog"]
    with pytest.raises(
        ArgumentError, match=r"the class folder .*/bee holds no file ending in \.jpg"
    ):
        feed.folder(root, suffixes=".jpg")
    source = feed.folder(root, suffixes=".jpg", classes=["ant", "bee", "dog"])
    assert [s.label for s in source.read([0, 1])] == [0, 2]
    # chosen by who gave the pattern
    assert feed.folder(root, suffixes=".jpg", pattern="*/0.jpg").classes == ["ant"]


def test_a_csv_of_numbers_counts_names_where_these_are_given(tmp_path):
    root = listed(tmp_path / "data", ["7", "10"])
    assert feed.folder(root / "files", labels=root / "labels.csv").classes is None
    named = feed.folder(root / "files", labels=root / "labels.csv", classes=["10", "007", "7"])
    assert [s.label for s in named.read([0, 1])] == [2, 0]


@pytest.mark.parametrize("known", [True, False])
def test_an_evaluation_on_other_classes_says_so(tmp_path, capsys, monkeypatch, known):
    monkeypatch.setenv("RONDE_RUNS", "none")
    monkeypatch.chdir(tmp_path)

    def data(root: str, names, **more) -> feed.Pipeline:
        source = feed.folder(folders(tmp_path / root, names), **more)
        return feed.Pipeline(source).map(lambda sample: (torch.zeros(2), sample.label), "decode")

    train = data("train", TRAIN)
    model = torch.nn.Linear(2, len(TRAIN))
    run = ronde.distribute(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        train,
        loss=torch.nn.functional.cross_entropy,
        batch_size=2,
    )
    test = data("test", TEST, **({"like": train} if known else {}))
    run.evaluate(test)
    told = capsys.readouterr()
    said = "label 0 is 'bee' here, and 'ant' in the training data"
    assert (said in told.out + told.err) is not known
