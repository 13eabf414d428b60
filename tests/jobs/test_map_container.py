"""``ronde map`` in SageMaker's containers: each host does its items, and all are done once."""

import json
from pathlib import Path
from typing import Any

import pytest

from processes import ronde_run
from ronde.cli.app import app
from ronde.cli.map_container import items_of_host
from ronde.jobs.items import Items, find_items, load_items
from ronde.launch import container
from ronde.world import ArgumentError

HOSTS = ["algo-1", "algo-2", "algo-10"]
SCRIPT = """
import os, sys
import ronde
assert "SM_HOSTS" not in os.environ and ronde.world().size == 1
assert sys.argv[1:] == ["--power", "3"]
for chunk in ronde.items("set by ronde map"):
    with chunk.output("out.txt") as out:
        for key, line in chunk:
            print(key, int(line) ** 3, file=out)
"""


def host(base: Path, current: str, kind: str, **channel: str) -> Path:
    """The files of a container with one channel."""
    config = base / "input" / "config"
    config.mkdir(parents=True)
    (base / "input" / "data" / "train").mkdir(parents=True)
    files: dict[str, Any] = {"resourceconfig": {"current_host": current, "hosts": HOSTS[::-1]}}
    files["inputdataconfig"] = {"train": {"S3DistributionType": kind, **channel}}
    files["hyperparameters"] = {"power": "3"}
    for name, values in files.items():
        (config / f"{name}.json").write_text(json.dumps(values))
    return base / "input" / "data" / "train"


def test_hosts_do_their_part_of_what_all_have(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SCRIPT)
    lines = [f"{i}\n" for i in range(100)]
    joined = ""
    for current in HOSTS:
        data = host(tmp_path / current, current, "FullyReplicated")
        (data / "items.txt").write_text("".join(lines))
        words = ["map", "-q", "--items", f"lines:{data}/items.txt", "--workers", "2", "--chunk"]
        words += ["20", "--out", f"out-{current}", "work.py"]
        env = {"SAGEMAKER_BASE_DIR": str(tmp_path / current)}
        done = ronde_run(words, tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        joined += (tmp_path / f"out-{current}" / current / "out.txt").read_text()
    assert joined == "".join(f"{i} {i**3}\n" for i in range(100))


def parts(tmp_path: Path, source: str) -> list[Items | None]:
    """The items of each host."""
    found = []
    for current in HOSTS:
        box = container({"SAGEMAKER_BASE_DIR": str(tmp_path / current)})
        assert box is not None
        found.append(items_of_host(box, source.format(tmp_path / current)))
    return found


def test_hosts_do_all_of_what_they_alone_have(tmp_path: Path) -> None:
    for number, current in enumerate(HOSTS):
        data = host(tmp_path / current, current, "ShardedByS3Key")
        for i in range(number):  # fewer objects than hosts: the first one has none
            (data / f"{number}-{i}.bin").write_bytes(b"x")
    found = parts(tmp_path, "{}/input/data/train/*.bin")
    assert [f and [Path(key).name for key, _ in f.read(0, len(f))] for f in found] == [
        None,
        ["1-0.bin"],
        ["2-0.bin", "2-1.bin"],
    ]
    with pytest.raises(ArgumentError, match="no file matches it"):
        parts(tmp_path, "{}/input/data/train/*.txt")


def test_parts_are_even_in_bytes_and_keep_their_keys(tmp_path: Path) -> None:
    for current in HOSTS:
        data = host(tmp_path / current, current, "FullyReplicated")
        for i, size in enumerate([600, 100, 100, 100, 300, 300, 300]):
            (data / f"{i}").write_bytes(b"x" * size)
    found = [f for f in parts(tmp_path, "{}/input/data/train/*") if f is not None]
    assert [f.bytes_of(0, len(f)) for f in found] == [600, 600, 600]
    names = [Path(key).name for f in found for key, _ in f.read(0, len(f))]
    assert names == [str(i) for i in range(7)]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": list(range(10))}), tmp_path / "t", row_group_size=3)
    rows = find_items(f"rows:{tmp_path}/t").part(2, 9).part(1, 6)
    rows.save(tmp_path)
    assert list(load_items(tmp_path).read(1, 3)) == [(4, {"a": 4}), (5, {"a": 5})]


def test_a_processing_job(tmp_path: Path) -> None:
    base = tmp_path / "ml"
    (base / "config").mkdir(parents=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    resources = {"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}
    (base / "config" / "resourceconfig.json").write_text(json.dumps(resources))
    source = {"LocalPath": str(tmp_path / "in"), "S3DataDistributionType": "ShardedByS3Key"}
    config = {"ProcessingInputs": [{"InputName": "in", "S3Input": source}]}
    (base / "config" / "processingjobconfig.json").write_text(json.dumps(config))
    box = container({"SAGEMAKER_BASE_DIR": str(base)})
    assert box is not None
    items = items_of_host(box, f"{tmp_path}/in/*")
    assert items is not None and len(items) == 1


@pytest.mark.parametrize(
    ("channel", "items", "out", "error"),
    [
        ({}, "lines:items.txt", "out", "in no channel of this container .*, so nothing says"),
        ({"TrainingInputMode": "Pipe"}, "lines:{data}/x", "out", "is of Pipe: give it File or"),
        ({}, "lines:{data}/x", "checkpoints/o", "the service copies .* which has no rename"),
    ],
)
def test_what_cannot_be_is_refused_and_told_to_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channel: dict[str, str], items: str, out: str,
    error: str,
) -> None:  # fmt: skip
    data = host(tmp_path, "algo-2", "FullyReplicated", **channel)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "work.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("HOSTS", "CURRENT_HOST", "MODEL_DIR", "OUTPUT_DATA_DIR", "CHANNEL_TRAIN"):
        monkeypatch.setenv(f"SM_{name}", "as the user set it")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    words = ["map", "--items", items.format(data=data), "--out", str(tmp_path / out), "work.py"]
    with pytest.raises(ArgumentError, match=error):
        app(words, standalone_mode=False)
    assert (tmp_path / "output" / "failure").read_text().startswith("--")
    with pytest.raises(ArgumentError, match=r"hyperparameters \(--power 3\) are arguments of a"):
        command = ["--items", "lines:x", "--out", str(tmp_path / "out"), "echo", "{}"]
        app(["map", *command], standalone_mode=False)
    assert not (tmp_path / "out").exists()
