"""``ronde new``: what it lists, copies, refuses, and tests."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from processes import TESTS, ronde_batch, ronde_run
from ronde.cli.recipe import built_in, catalogue, filled_in_script
from ronde.world import ArgumentError
from sampling import ALL, some

RECIPES = catalogue(built_in())
_SCRIPT = """import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1, help="größte Rate")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--data", default="")
parser.add_argument("--fast", action="store_true", default=False)
print(vars(parser.parse_args()))
"""


def _own(folder: Path, name: str = "own", **keys: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(_SCRIPT)
    given = {"name": name, "task": "table", "about": "ours", **keys}
    (folder / "recipe.yaml").write_text("".join(f"{k}: {v}\n" for k, v in given.items()))
    return folder


def test_the_list_has_all_recipes_and_one_is_described(tmp_path):
    listed, one = ronde_batch([["new"], ["new", "language-model", "--help"]], tmp_path)
    assert listed.returncode == one.returncode == 0, listed.stderr + one.stderr
    assert sorted(line.split()[0] for line in listed.stdout.splitlines()) == sorted(RECIPES)
    assert "--width" in one.stdout and not any(tmp_path.iterdir())


def test_a_copy_has_the_arguments_as_defaults(tmp_path):
    own = _own(tmp_path / "catalogue" / "a", files="{data: config.json}")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").touch()
    arguments = ["--lr", "2", "--data=d", "--fast"]
    done = ronde_run(
        ["new", "--from", "catalogue", "own", "copy", *arguments], tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    files = {p.name for p in (tmp_path / "copy").iterdir()}
    assert files == {"train.py", "recipe.yaml", "README.md", "test_small.py"}
    changed = (tmp_path / "copy" / "train.py").read_text()
    before, after = _SCRIPT.splitlines(), changed.splitlines()
    assert [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == [
        3,
        5,
        6,
    ]
    printed = subprocess.run(
        ["python3", "train.py"], cwd=tmp_path / "copy", capture_output=True, text=True, check=True
    )
    assert ast.literal_eval(printed.stdout) == {
        "lr": 2.0,
        "epochs": 3,
        "data": str(tmp_path / "d"),
        "fast": True,
    }
    assert (own / "train.py").read_text() == _SCRIPT


def test_a_git_repository_is_a_catalogue(tmp_path):
    own = _own(tmp_path / "recipes" / "a")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(own.parent)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    done = ronde_run(["new", "--from", f"file://{own.parent}", "own"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own" / "train.py").read_text() == _SCRIPT


REFUSED = [
    (["linaer"], "there is no recipe linaer."),
    (["own", "copy", "--lrr", "1"], "recipe own has no argument --lrr. Did you mean --lr?"),
    (["own", "copy", "--epochs", "1.5"], "--epochs 1.5: expected a whole number."),
    (["own", "copy", "--epochs"], "--epochs has no value."),
    (["own", "copy", "more"], "more: expected --NAME VALUE, an argument of train.py."),
    (["own", "full"], "full is there already. Name a new folder."),
    (
        ["own", "copy", "--data", "./none"],
        "--data ./none does not exist, so it has no config.json. Give a folder that "
        "save_pretrained wrote.",
    ),
    (
        ["own", "copy", "--data", "full"],
        "--data full has no config.json. Give a folder that save_pretrained wrote.",
    ),
]


def test_what_cannot_be_copied_is_refused_before_anything_is_written(tmp_path):
    own = _own(tmp_path / "catalogue" / "a", files="{data: config.json}")
    _own(tmp_path / "full")
    _own(tmp_path / "twice" / "a"), _own(tmp_path / "twice" / "b")
    (_own(tmp_path / "link") / "secret").symlink_to("/etc/hostname")
    _own(tmp_path / "key", plan="shard")
    _own(tmp_path / "out", script="../full/train.py")
    _own(tmp_path / "files", files="[data]")
    commands = [["new", "--from", "catalogue", *words] for words, _ in REFUSED]
    sentences = [sentence for _, sentence in REFUSED]
    for place, sentence in (
        ("nowhere", "--from nowhere: no such folder, and no address of a git repository."),
        ("file:///nowhere.git", "--from file:///nowhere.git cannot be cloned: "),
        ("twice", "two recipes are named own: twice/a and twice/b."),
        ("link", "link/secret is a link. A recipe has files only."),
        ("key", "key/recipe.yaml: a recipe has no key plan. Did you mean plans?"),
        ("out", "out/recipe.yaml: script '../full/train.py' is no name of a file in the folder."),
        ("files", "files/recipe.yaml: files is names of arguments, each with the name of a file."),
    ):
        commands.append(["new", "--from", place, "own", "copy"])
        sentences.append(sentence)
    commands.append(["new", "--test", "catalogue"])
    sentences.append(f"{own.relative_to(tmp_path)}/recipe.yaml has no test: a list of commands.")
    for done, sentence in zip(ronde_batch(commands, tmp_path), sentences, strict=True):
        assert (done.returncode, done.stdout) == (2, ""), done.args
        assert f"error: {sentence}" in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "copy").exists()


def test_a_folder_that_a_recipe_needs_is_missed_before_a_worker_starts(tmp_path):
    own = _own(tmp_path / "own", files="{data: config.json}")
    (own / "full").mkdir()
    (own / "full" / "config.json").touch()
    commands = [
        ["run", "-n", "1", "train.py", *words] for words in (["--data", "./none"], ["--data=."])
    ]
    for done, place in zip(ronde_batch(commands, own), ("./none", "."), strict=True):
        assert done.returncode == 2 and f"error: --data {place} " in done.stderr, done.stderr
        assert "config.json. Give a folder that save_pretrained wrote." in " ".join(
            done.stderr.split()
        )
    assert not (own / "runs").exists()
    for words, data in ([], ""), (["--data", "full"], "full"):
        done = ronde_run(["run", "-n", "1", "train.py", *words], own)
        assert done.returncode == 0 and f"'data': {data!r}" in done.stdout, done.stderr
    (own / "train.py").write_text("def main(:\n")
    done = ronde_run(["run", "-n", "1", "--runs", "none", "train.py"], own)
    assert done.returncode == 1 and "rank 0 failed first" in done.stderr, done.stderr
    assert 'train.py", line 1' in done.stderr and "recipe.py" not in done.stderr


def test_a_value_is_of_the_default_s_type():
    text = 'parser.add_argument("--n", default=1)'
    with pytest.raises(ArgumentError, match="expected a whole number"):
        filled_in_script(text, {"--n": "x"}, "own")
    assert filled_in_script(text, {"--n": "-4"}, "own").endswith("default=-4)")


@pytest.mark.parametrize(
    ("learns", "sentence"),
    [
        ("training.loss < 1", "own did not learn: training.loss < 1 does not hold; it is None."),
        ("loss", "learns: loss is not NAME.METRIC OP NUMBER, as evaluate.accuracy >= 0.9."),
    ],
)
def test_a_recipe_that_learns_nothing_fails_its_test(tmp_path, learns, sentence):
    _own(tmp_path / "own", test="[python train.py]", learns=learns)
    done = ronde_run(["new", "--test", "own"], tmp_path)
    assert done.returncode == 2 and sentence in " ".join(done.stderr.split()), done.stderr


def test_a_command_that_fails_is_shown(tmp_path):
    _own(tmp_path / "own", test="[python train.py --nope]")
    done = ronde_run(["new", "--test", "own"], tmp_path)
    assert done.returncode == 2
    assert "python train.py --nope ended with exit status 2" in done.stderr
    assert "unrecognized arguments: --nope" in done.stderr


def test_a_plan_that_is_not_proved_fails_the_test(tmp_path):
    _own(tmp_path / "own", test="[python train.py]", plans="[shard=nothing]")
    done = ronde_run(["new", "--test", "own", "--prove"], tmp_path)
    assert done.returncode == 2
    proof = "ronde prove --workers 2 --steps 3 --plans shard=nothing train.py"
    assert f"own: {proof} ended with exit status 2." in done.stderr


@pytest.mark.timeout(900 if ALL else 180)
@pytest.mark.parametrize("name", some(sorted(RECIPES), 6))
def test_a_recipe_trains_and_learns(tmp_path, name):
    recipe = RECIPES[name]
    for package in recipe.missing:
        pytest.skip(f"needs {package}")
    proves = ["--prove"] if ALL else []
    words = ["new", "--test", str(recipe.folder), *proves]
    done = ronde_run(words, tmp_path, timeout=880 if ALL else 170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: passed" in done.stdout


def test_the_page_has_all_recipes():
    page = (TESTS.parent / "docs" / "recipes.md").read_text()
    for recipe in RECIPES.values():
        assert f"| `{recipe.name}` |" in page and recipe.about in page, recipe.name
