"""``ronde prepare`` from the shell: what it writes, what it refuses, killed, and on a full disk."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("narwhals")

import pyarrow.csv as pc  # noqa: E402
import pyarrow.feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from processes import child, environment, ronde, ronde_batch  # noqa: E402
from ronde.tables import Recipe  # noqa: E402
from ronde.world import ArgumentError  # noqa: E402

RECIPE = """
target: default
key: id
columns:
  age: {impute: median, scale: standard, missing_flag: true}
  city: {codes: true, rare: 2, target_mean: {smooth: 5, folds: 2}}
  opened: {date: [hour, weekday], cyclic: true}
"""


def rows(n=40, seed=0):
    draw = np.random.default_rng(seed)
    start = np.datetime64("2024-01-01T00:00:00", "us")
    return pa.table(
        {
            "id": np.arange(n) + 1000 * seed,
            "age": pa.array(draw.integers(18, 90, n).astype("f8"), mask=draw.random(n) < 0.2),
            "city": draw.choice(["Rome", "Oslo", "007", "2.0"], n),
            "opened": start + draw.integers(0, 10**12, n).astype("timedelta64[us]"),
            "default": draw.integers(0, 2, n),
        }
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "prepare.yaml").write_text(RECIPE)
    pq.write_table(rows(40), tmp_path / "a.parquet")
    pq.write_table(rows(30, 1), tmp_path / "b.parquet")
    pq.write_table(rows(20, 2).drop_columns("default"), tmp_path / "test.parquet")
    return tmp_path


def test_fit_and_apply_from_the_shell(folder):
    commands = [
        "prepare.yaml a.parquet b.parquet --out prepared",
        "prepared/_recipe.json test.parquet --out tested --json",
        "prepare.yaml a.parquet --out prepared",
    ]
    done, again, refused = ronde_batch([["prepare", *c.split()] for c in commands], folder)
    assert refused.returncode == 2
    assert refused.stderr == "error: --out prepared exists. Delete it, or give a new folder.\n"
    assert done.returncode == again.returncode == 0, done.stderr + again.stderr
    assert "fit      70 rows, 3 columns, DuckDB" in done.stdout
    files = sorted(p.name for p in (folder / "prepared").iterdir())
    assert files == ["_recipe.json", "part-00000.parquet", "part-00001.parquet"]
    recipe = Recipe.read(folder / "prepared" / "_recipe.json")
    answer = json.loads(again.stdout)
    assert answer["sha256"] == recipe.digest and answer["rows"] == 20
    train = pa.concat_tables([rows(40), rows(30, 1)])
    wanted = recipe.apply(train, out_of_fold=True)
    assert pq.read_table(folder / "prepared").equals(wanted)
    test = rows(20, 2).drop_columns("default")
    assert pq.read_table(folder / "tested" / "part-00000.parquet").equals(recipe.apply(test))


def test_csv_and_arrow_files_give_the_recipe_of_parquet(folder):
    table = rows(40)
    pc.write_csv(table, folder / "a.csv")
    pyarrow.feather.write_feather(table, folder / "a.arrow", compression="uncompressed")
    digests = {
        Recipe.read(folder / "prepare.yaml").fit(folder / name, engine=engine).digest
        for name in ("a.parquet", "a.csv", "a.arrow")
        for engine in ("duckdb", "arrow")
    }
    assert len(digests) == 1
    fitted = Recipe.read(folder / "prepare.yaml").fit(folder / "a.csv")
    assert dict(fitted.fitted["city"]["levels"]).keys() == {"Rome", "Oslo", "007", "2.0"}
    made = (fitted.apply(folder / "a.csv"), fitted.apply(table, out_of_fold=True))
    first, second = (each.drop_columns(["id", "default"]) for each in made)
    assert first.equals(second)


WRONG = {
    "columns: {agee: {scale: standard}}": r"'agee': a\.parquet has no such column; did you mean 'a",
    "columns: {age: {scaled: true}}": r"'age': unknown step 'scaled'; did you mean 'scale'\?",
    "columns: {age: {scale: max}}": r"'age': scale: 'max' must be standard or minmax\.",
    "columns: {age: {log: true, codes: true}}": r"log is for a number, codes for a level\. Choose",
    "columns: {city: {scale: standard}}": r"a\.parquet has string, and scale needs number or bool",
    "columns: {city: {target_mean: true}}": r"target_mean needs target: the name of a column\.",
    "colums: {}": r"unknown field 'colums'; did you mean 'columns'\?",
    "target: y\nkey: id\ncolumns: {city: {target_mean: true}}": r"'y', which a\.parquet lacks: fine",
    "columns: {age: {clip: {max: 50}, log: true}}": "above -1, and the smallest is -30",
    "columns: [1, 2": r"prepare\.yaml is neither YAML nor JSON: ",
}


def test_wrong_recipes_are_told_in_a_sentence(folder, monkeypatch):
    monkeypatch.chdir(folder)
    table = rows(40)
    ages = pa.array([-30.0] + [1.0] * 39)
    pq.write_table(table.set_column(1, "age", ages), "a.parquet")
    for text, says in WRONG.items():
        (folder / "prepare.yaml").write_text(text)
        with pytest.raises(ArgumentError, match=says):
            Recipe.read("prepare.yaml").fit("a.parquet")


def test_too_many_columns_and_other_types_are_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)
    zips = pa.table({"zip": [f"{i:05d}" for i in range(1500)]})
    with pytest.raises(ArgumentError, match=r"1,500 of 1,500 values are distinct: one_hot would"):
        Recipe({"zip": {"one_hot": True}}).fit(zips)
    fitted = Recipe({"age": {"scale": "standard"}}).fit("a.parquet")
    other = rows(5).set_column(1, "age", pa.array(["x"] * 5))
    pq.write_table(other, "other.parquet")
    with pytest.raises(ArgumentError, match=r"'age': other\.parquet has string, and scale needs"):
        fitted.apply("other.parquet")
    wide = pa.table({"x": pa.array([1, 2], pa.decimal128(38, 10))})
    with pytest.raises(ArgumentError, match="more digits than a double holds"):
        Recipe({"x": {"scale": "standard"}}).fit(wide)
    with pytest.raises(ArgumentError, match="a key is a whole number in each row"):
        Recipe.read("prepare.yaml").fit(rows(5).set_column(0, "id", pa.array([1.5] * 5)))
    with pytest.raises(ArgumentError, match="dict is no table: expected paths of files"):
        fitted.apply({"age": [1.0]})


KILLED = """
import time
from pathlib import Path
from ronde.tables import Recipe
from ronde.tables.prepared import write_prepared
recipe = Recipe.read("prepare.yaml").fit("a.parquet")
def part_done(rows):
    print("part", flush=True)
    time.sleep(600)
write_prepared(recipe, [Path("a.parquet"), Path("b.parquet")], Path("prepared"), part_done)
"""


def test_killed_between_two_parts_nothing_looks_whole(folder):
    with child([sys.executable, "-c", KILLED], folder) as started:
        started.wait_for("part", 100)
        started.kill()
    assert not (folder / "prepared").exists()
    left = [p.name for p in folder.iterdir() if p.name.startswith(".prepared.")]
    assert all(name.endswith(".writing") for name in left) and len(left) == 1
    assert not [p for p in (folder / left[0]).iterdir() if p.name == "_recipe.json"]


def test_a_full_disk_keeps_the_fitted_recipe(folder):
    full = folder / "full"
    full.mkdir()
    mount = f'mount -t tmpfs -o size=256k none "{full}"'
    alone = ["unshare", "-m", "sh", "-c"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*alone, mount], capture_output=True).returncode
    ):
        pytest.skip("no mount namespaces here")
    big = pa.concat_tables([rows(2000, seed) for seed in range(20)])
    pq.write_table(big, folder / "big.parquet")
    command = " ".join(ronde("prepare", "prepare.yaml", "big.parquet", "--out", "full/prepared"))
    done = subprocess.run(
        [*alone, f"{mount} && {command}; ls -A {full}"],
        cwd=folder, capture_output=True, text=True, env=environment(), timeout=150,
    )  # fmt: skip
    assert "the disk is full after 0 of 1 parts. Kept: full/prepared_recipe.json" in done.stderr
    assert done.stdout.split() == ["prepared_recipe.json"]
