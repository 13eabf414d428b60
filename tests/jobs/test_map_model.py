"""``ronde map --model``: a trained run's weights in every worker, the same as alone."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import ronde
from processes import ronde_run
from ronde.cli.app import app
from ronde.jobs.handed import Chunk
from ronde.jobs.items import find_items
from ronde.world import ArgumentError, CheckpointError

TRAIN = """
import torch, ronde
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.ones(8, 1), torch.zeros(8, 1))
run = ronde.distribute(
    model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=2, save_every=2
)
for _ in run.epochs(1):
    for batch in run.batches():
        run.step(batch)
"""
APPLY = """
import ronde
weights = ronde.weights("line")
slope, shift = weights["weight"].item(), weights["bias"].item()
for chunk in ronde.items("lines:items.txt"):
    with chunk.output("out.txt") as out:
        for batch in chunk.batches(3):
            for _, line in batch:
                print(slope * float(line) + shift, file=out)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "train.py").write_text(TRAIN)
    (folder / "apply.py").write_text(APPLY)
    (folder / "items.txt").write_text("".join(f"{i}\n" for i in range(20)))
    done = ronde_run(["run", "-q", "--workers", "1", "--name", "line", "train.py"], folder)
    assert done.returncode == 0, done.stderr
    return folder


def expected(folder: Path, checkpoint: str) -> str:
    weights = load_file(folder / "runs/line/checkpoints" / checkpoint / "model.safetensors")
    slope, shift = weights["weight"].item(), weights["bias"].item()
    return "".join(f"{slope * float(i) + shift}\n" for i in range(20))


def test_a_script_gets_the_weights_of_a_run(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, older = expected(trained, "step-000000004"), expected(trained, "step-000000002")
    assert newest != older
    words = ["map", "-q", "--items", "lines:items.txt", "--workers", "2", "--chunk", "5"]
    for name, model, output in (("new", "line", newest), ("old", "runs/line@2", older)):
        done = ronde_run([*words, "--model", model, "--out", name, "apply.py"], trained)
        assert done.returncode == 0, done.stderr
        assert (trained / name / "out.txt").read_text() == output
    refused = ronde_run([*words, "--out", "none", "apply.py"], trained)
    assert refused.returncode == 1
    said = (
        "error: the script ends before its first item: ronde.world.errors.ArgumentError: weights: "
    )
    assert said + "tell ronde map which run: --model line. Go on with: ronde" in refused.stderr
    assert not (trained / "none" / "failed.jsonl").exists()
    monkeypatch.chdir(trained)
    weights = ronde.weights("line")
    assert f"{weights['weight'].item() * 0.0 + weights['bias'].item()}" == newest.split()[0]


def test_a_command_gets_the_file(trained: Path) -> None:
    words = ["map", "-q", "--items", "lines:items.txt", "--chunk", "20", "--workers", "1"]
    done = ronde_run(
        [*words, "--model", "line", "--out", "sums", "--", "wc", "-c", "{model}"], trained
    )
    assert done.returncode == 0, done.stderr
    size = (trained / "sums" / ".map" / "model.safetensors").stat().st_size
    lines = (trained / "sums" / "output.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == [str(size)] * 20


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("lime", r"no run 'lime' in runs. Did you mean line\?"),
        ("line@3", "--model line@3: line has no checkpoint of step 3; it has those of steps 2, 4."),
    ],
)
def test_wrong_models_are_told(
    trained: Path, monkeypatch: pytest.MonkeyPatch, model: str, error: str
) -> None:
    monkeypatch.chdir(trained)
    words = ["--items", "lines:items.txt", "--out", "wrong", "--model", model, "apply.py"]
    with pytest.raises(ArgumentError, match=error):
        app(["map", *words], standalone_mode=False)
    assert not (trained / "wrong").exists()
    with pytest.raises(CheckpointError, match="no whole checkpoint of lime: there is none in"):
        ronde.weights("lime")


def test_batches_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines").write_text("a\nb\nc\n")
    chunk = Chunk(0, 3, tmp_path, find_items("lines:lines"))
    assert list(chunk.batches(2)) == [[(0, "a"), (1, "b")], [(2, "c")]]
    assert chunk.end() == []
    with pytest.raises(ArgumentError, match="size 0: expected 1 or more"):
        next(chunk.batches(0))
