"""The notebook of a recipe, run by marimo: controls change the picture and the file."""

import runpy

import pytest

pytest.importorskip("marimo")
pytest.importorskip("matplotlib")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from processes import ronde_batch, ronde_run  # noqa: E402
from ronde.tables import Recipe  # noqa: E402
from ronde.tables.explore import steps_of  # noqa: E402

RECIPE = """\
target: gone
columns:
  age: {impute: median, clip: [0.0, 1.0], scale: standard}
  city: {codes: true, rare: 2}
"""


def test_controls_are_steps():
    given = {"impute": "median", "clip": "{min: 0}", "log": True, "scale": "none", "bins": " "}
    assert steps_of(given) == {"impute": "median", "clip": {"min": 0}, "log": True}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "prepare.yaml").write_text(RECIPE)
    rows = {"age": [30.0, None, 50.0, 60.0] * 25, "city": ["Oslo", "Oslo", "Rome", None] * 25}
    pq.write_table(pa.table({**rows, "gone": [0, 1, 0, 1] * 25}), tmp_path / "train.parquet")
    return tmp_path


class Given:
    """What a person has chosen in a control."""

    def __init__(self, value):
        self.value = value


def test_a_control_changes_the_picture_and_the_button_saves_the_recipe(folder, monkeypatch):
    words = ["prepare", "prepare.yaml", "train.parquet", "--notebook", "explore.py"]
    done = ronde_run(words, folder)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(folder)
    app = runpy.run_path("explore.py")["app"]

    def shown(**controls):
        outputs, defined = app.run(defs=controls)
        return " ".join(o.text for o in outputs if o is not None), defined

    before = (folder / "prepare.yaml").read_text()
    page, defined = shown()
    assert page.count('role="img"') == 4  # two columns, before and after
    age, city = (defined[f"column_{i}"].value for i in range(2))
    assert age["clip"] == "[0.0, 1.0]"
    others = {"column_1": Given(city), "save": Given(False)}
    page, _ = shown(column_0=Given({**age, "clip": "[0.0, 2.0]"}), **others)
    assert "clip: [0.0, 2.0] must be two quantiles" in page
    chosen = Given({**age, "clip": "[0.1, 0.9]", "log": True})
    page, _ = shown(column_0=chosen, **others)
    assert page.count('role="img"') == 4
    assert (folder / "prepare.yaml").read_text() == before
    page, _ = shown(column_0=chosen, column_1=Given(city), save=Given(True))
    assert "prepare.yaml is saved." in page
    saved = Recipe.read(folder / "prepare.yaml")
    assert saved.target == "gone"
    expected = {"impute": "median", "clip": [0.1, 0.9], "log": True, "scale": "standard"}
    assert saved.steps == {"age": expected, "city": {"codes": True, "rare": 2}}


def test_what_cannot_be_edited_is_refused(folder):
    Recipe.read(folder / "prepare.yaml").fit(folder / "train.parquet").write(folder / "r.json")
    wrong = {
        "r.json train.parquet --notebook explore.py": "edits a recipe in YAML; r.json is a fitted",
        "prepare.yaml none.parquet --notebook explore.py": "no such file or folder: none.parquet.",
        "prepare.yaml train.parquet": "--out FOLDER is missing",
    }
    refused = ronde_batch([["prepare", *words.split()] for words in wrong], folder)
    for done, says in zip(refused, wrong.values(), strict=True):
        assert done.returncode == 2 and says in done.stderr and not (folder / "explore.py").exists()
