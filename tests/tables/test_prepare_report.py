"""The report of a preparation: leaks, drift, and what it refuses."""

import re

import numpy as np
import pytest

pytest.importorskip("duckdb")
pytest.importorskip("matplotlib")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from processes import ronde_batch  # noqa: E402
from ronde.tables import Recipe, prepare_report  # noqa: E402

COLUMNS = {
    "age": {"impute": "median", "scale": "standard"},
    "city": {"codes": True},
    "closed_by": {"bins": 4},
    "word": {"text": {"length": True}},
}


def table(rows, seed, older=0.0, target=None):
    draw = np.random.default_rng(seed)
    gone = draw.random(rows) < 0.3
    age = draw.normal(40 + older, 10, rows)
    age[draw.random(rows) < 0.1] = np.nan
    return pa.table(
        {
            "age": pa.array(age, from_pandas=False),
            "city": list(draw.choice(["Oslo", "Tromsø", ""], rows)),
            "closed_by": gone * 5.0 + draw.random(rows),
            "word": list(draw.choice(["a", "bb"], rows)),
            "gone": list(np.array(["no", "yes"])[gone * 1]) if target is None else target(gone),
        }
    )


def write(folder, first, second):
    pq.write_table(first, folder / "a.parquet")
    pq.write_table(second, folder / "b.parquet")
    recipe = Recipe(COLUMNS, "gone", where="prepare.yaml")
    recipe.write(folder / "prepare.yaml")
    return recipe.fit(folder / "a.parquet")


def test_a_leak_and_a_drift_are_found_and_nothing_else(tmp_path):
    recipe = write(tmp_path, table(4000, 0), table(3000, 1, older=10))
    views = prepare_report.write_prepare_report(
        tmp_path / "r.html", recipe, [tmp_path / "a.parquet"], [tmp_path / "b.parquet"]
    )
    assert [v.name for v in views if v.leaks] == ["closed_by"]
    assert [v.name for v in views if v.drifts] == ["age"]
    text = (tmp_path / "r.html").read_text()
    assert text.count("<svg") == 2 * len(COLUMNS)
    assert "closed_by predicts the target alone" in text and "age has drifted" in text


def test_a_number_is_explained_and_many_rows_are_drawn_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_report, "MOST_ROWS", 500)
    first = table(4000, 3, target=lambda gone: gone * 2.5 + np.linspace(0, 1, len(gone)))
    recipe = write(tmp_path, first, table(10, 4))
    sample = prepare_report.take_sample(recipe, [tmp_path / "a.parquet"])
    assert (sample.rows, sample.stride) == (4000, 8)
    assert sample.table.select(["word"]).equals(
        first.select(["word"]).take(list(range(0, 4000, 8)))
    )
    alone = {v.name: v.alone for v in prepare_report.view_columns(recipe, sample, None)}
    assert alone["closed_by"] > 0.8 and abs(alone["age"]) < 0.2


def test_the_command_writes_it_and_says_what_it_shows(tmp_path):
    write(tmp_path, table(2000, 0), table(2000, 1, older=10))

    wrong = {
        "--out o --against b.parquet": "--against needs --report",
        "--out o --report no/r.html": "there is no folder",
        "--out o --report r.html --engine spark": "--report draws local files",
    }
    written = "--out out --report r.html --against b.parquet"
    head = ["prepare", "prepare.yaml", "a.parquet"]
    done, *refused = ronde_batch([[*head, *words.split()] for words in (written, *wrong)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report   r.html" in done.stdout and (tmp_path / "r.html").exists()
    assert re.search(r"closed_by predicts gone alone \((1|0\.99\d*|1\.000)\)", done.stdout)
    assert re.search(r"age has drifted: PSI \d", done.stdout)
    for done, says in zip(refused, wrong.values(), strict=True):
        assert done.returncode == 2 and says in done.stderr and not (tmp_path / "o").exists()
