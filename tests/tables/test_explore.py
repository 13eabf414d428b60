"""The notebook of a recipe, in a real browser: controls change the picture and the file."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("marimo")
pytest.importorskip("matplotlib")
sync_api = pytest.importorskip("playwright.sync_api")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from processes import environment, free_port, ronde_batch, ronde_run  # noqa: E402
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


@contextlib.contextmanager
def served(folder):
    """The notebook as an application on loopback."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "marimo", "run", "explore.py", "--headless", "--no-token",
         "--host", "127.0.0.1", "--port", str(port)],
        cwd=folder, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def opened(page, url):
    for _ in range(300):
        with contextlib.suppress(sync_api.Error):
            page.goto(url)
            return
        page.wait_for_timeout(200)
    raise AssertionError("the notebook is not served")


@pytest.mark.timeout(400)
def test_a_control_changes_the_picture_and_the_button_saves_the_recipe(folder):
    path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium")
    words = ["prepare", "prepare.yaml", "train.parquet", "--notebook", "explore.py"]
    done = ronde_run(words, folder)
    assert done.returncode == 0, done.stderr
    with served(folder) as url, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 1400})
        page.set_default_timeout(120_000)
        opened(page, url)
        page.locator("svg[role=img]").nth(3).wait_for()  # two columns, before and after
        text = page.get_by_role("textbox").nth(1)
        assert text.input_value() == "[0.0, 1.0]"
        text.fill("[0.0, 2.0]")
        text.press("Tab")
        page.get_by_text("clip: [0.0, 2.0] must be two quantiles").wait_for()
        text.fill("[0.1, 0.9]")
        text.press("Tab")
        page.locator("svg[role=img]").nth(3).wait_for()
        page.get_by_label("log").first.check()
        page.get_by_role("button", name="Save prepare.yaml").click()
        page.get_by_text("prepare.yaml is saved.").wait_for()
        page.screenshot(path=folder / "page.png", full_page=True)
        browser.close()
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
