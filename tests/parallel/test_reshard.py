"""Checkpoints that are written under one plan and read under another, pieces that are damaged, and
models built on meta.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ronde
from damage import damage_manifest, flip
from processes import TESTS, python
from ronde import ArgumentError, CheckpointError
from ronde.checkpoint import (
    Box,
    find_valid,
    group_names,
    join_optimizer,
    model_wants,
    optimizer_pieces,
    optimizer_wants,
    tied_names,
    verify,
)
from ronde.parallel.meta_init import materialise, meta_names
from sampling import some

WORKER = TESTS / "reshard_worker.py"
CPU = torch.device("cpu")


def worker(what: str, folder: Path):
    done = python([str(WORKER), what, str(folder)], WORKER.parent, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# -- from plan to plan -----------------------------------------------------------------


@pytest.mark.parametrize("matrix", some(["model", "data"], 2))
def test_written_under_one_plan_and_continued_under_another(matrix, tmp_path):
    differences = worker(matrix, tmp_path)
    assert differences.pop("trained") > 0.1
    assert len(differences) >= 7 + 7 + 7 and max(differences.values()) <= 1e-10, {
        k: v for k, v in differences.items() if v > 1e-10
    }
    whole = {"manifest.json", "model.safetensors", "optimizer.safetensors", "random.safetensors"}
    # as any tool reads it
    for plan in ("single", "replicate") if matrix == "data" else ("single",):
        assert {
            p.name for p in next((tmp_path / plan / "checkpoints").iterdir()).iterdir()
        } == whole
    names = {p.name for p in next((tmp_path / "zero3" / "checkpoints").iterdir()).iterdir()}
    assert names >= {
        f"{part}-0000{rank}-of-00002.safetensors"
        for part in ("model", "optimizer")
        for rank in (0, 1)
    }


def test_a_state_dict_of_a_part_is_refused(tmp_path):
    answers = worker("states", tmp_path)
    assert answers["replicate"] == {} and list(answers["zero1"]) == ["optimizer"]
    for plan in ("zero3", "pipeline", "tensor"):
        assert list(answers[plan]) == ["model", "blocks", "load", "optimizer"], plan
        for name, text in answers[plan].items():
            assert ("before ronde.distribute" if name == "load" else "run.export(path)") in text


# -- pieces ----------------------------------------------------------------------------


def test_boxes():
    draw = random.Random(0)
    for _ in range(300):
        shape = [draw.randrange(0, 6) for _ in range(draw.randrange(0, 4))]

        def box() -> Box:
            low = [draw.randrange(0, n + 1) for n in shape]
            return Box(
                tuple(low),
                tuple(draw.randrange(0, n - a + 1) for a, n in zip(low, shape, strict=True)),
            )

        a, b, whole = box(), box(), Box.whole(shape)
        assert (
            a.fits(shape)
            and Box.parse(str(a)) == a
            and a.numel == torch.zeros(shape)[a.inside(whole)].numel()
        )
        count = torch.zeros(shape)
        count[a.inside(whole)] += 1
        count[b.inside(whole)] += 1
        both = a.overlap(b)
        assert int((count == 2).sum()) == (both.numel if both else 0)
        if both:
            assert (count[both.inside(whole)] == 2).all()
    assert (
        not Box((0,), (3,)).fits([2])
        and not Box((-1,), (1,)).fits([2])
        and not Box((), ()).fits([2])
    )


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    return folder, worker("pieces", folder)


def test_pieces_of_every_kind_from_any_number_of_workers_to_any(pieces):
    """What is compared is in the worker: types, 0-d, empty and uneven tensors, 1-D and 2-D meshes,
    1 to 4 workers; torch's own reader.
    """
    folder, _ = pieces
    checkpoint = verify(folder / "4" / "step-000000001")
    assert (
        checkpoint.state == {"n": 4}
        and len(checkpoint.files) == 5
        and set(checkpoint.load("random.safetensors")) == {"x"}
    )
    entry = checkpoint.tensors["model"]["grid"]
    assert {str(b) for b in entry.pieces.values()} == {"0:3,0:4", "0:3,4:8", "3:6,0:4", "3:6,4:8"}
    # what all hold, the first one writes
    assert list(checkpoint.tensors["model"]["plain"].pieces) == ["model-00000-of-00004.safetensors"]
    # 2 × 2: each once
    assert list(checkpoint.tensors["model"]["f64"].pieces) == [
        f"model-0000{r}-of-00004.safetensors" for r in (0, 1)
    ]
    whole = checkpoint.whole("model")
    assert (
        whole["zero-d"] == 3.5
        and whole["empty"].shape == (0, 3)
        and whole["bf16"].dtype == torch.bfloat16
    )


def test_if_one_worker_cannot_write_all_say_so_and_nothing_is_lost(pieces):
    _, answers = pieces
    (main, left), (other, _) = answers["refused"]
    assert main == other and len(main) == 3 and left == ["step-000000001"]
    assert (
        "could not be written" in main[0]
        and "rank 1: [Errno 28] No space left on device" in main[0]
    )
    assert "rank 1 holds 'x' as float32 [4], an earlier rank as float32 [3]" in main[1]
    assert "'y' of shape [4] is not whole among the workers (rank 0: 0:2; rank 1: 1:3)" in main[2]


def test_damaged_pieces_are_named_and_the_older_checkpoint_is_used(pieces, tmp_path):
    shard = "model-00001-of-00003.safetensors"

    def change(name: str, field: str, value):
        return lambda path: damage_manifest(
            path, lambda body: body["tensors"]["model"][name].__setitem__(field, value)
        )

    for damage, text in (
        (lambda path: (path / shard).unlink(), f"{shard} is missing"),
        (
            lambda path: (path / shard).write_bytes((path / shard).read_bytes()[:-8]),
            rf"{shard} has \d+ bytes, expected \d+",
        ),
        (
            lambda path: flip(path / shard, 8 * (path / shard).stat().st_size - 20),
            f"{shard} does not match its digest",
        ),
        (lambda path: flip(path / "manifest.json", 9000), "manifest.json"),
        (
            change("f64", "pieces", {"../x.safetensors": "0:7,0:3"}),
            r"\.\./x\.safetensors holds pieces, and does not list it",
        ),
        (change("f64", "pieces", {shard: "a:b"}), "manifest.json cannot be understood"),
        (change("f64", "pieces", 3), "manifest.json cannot be understood"),
    ):
        folder = tmp_path / "c"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pieces[0] / "3", folder)
        newest = folder / "step-000000002"
        damage(newest)
        with pytest.raises(CheckpointError, match=text) as caught:
            verify(newest)
        assert str(newest) in str(caught.value)
        checkpoint, refused = find_valid(folder)
        assert (
            checkpoint.step == 1
            and len(refused) == 1
            and torch.equal(checkpoint.whole("model")["int"], torch.arange(12).reshape(6, 2))
        )


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    return model, torch.optim.AdamW(
        [{"params": model[1].parameters()}, {"params": [model[2].bias, model[0].weight], "lr": 0.1}]
    )


def test_what_does_not_fit_is_refused_by_name():
    model, optimizer = small()
    assert tied_names(model) == {"2.weight": "0.weight"}
    groups = group_names(model, optimizer)
    assert groups == [["1.weight", "1.bias"], ["2.bias", "0.weight"]]  # the script's own order
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if n != "2.weight"}
    wants, _ = model_wants(model, shapes.get, {"2.weight": "0.weight"}, lambda name: True)
    assert [w.name for w in wants] == ["0.weight", "1.weight", "1.bias", "0.weight", "2.bias"]
    wants, _ = model_wants(
        model, shapes.get, {"2.weight": "0.weight"}, lambda name: name.startswith("1")
    )
    assert [w.name for w in wants] == ["1.weight", "1.bias"]
    with pytest.raises(
        CheckpointError,
        match=r"another model: '1\.weight' has shape \[9, 4\] there, \[4, 4\] here; it has no "
        r"'1\.bias'",
    ):
        model_wants(
            model,
            {**shapes, "1.weight": (9, 4), "1.bias": None}.get,
            {"2.weight": "0.weight"},
            lambda name: True,
        )
    # Two workers, of which each holds one group's parameters, say the same as one that holds all.
    model[1](torch.ones(4)).sum().backward()
    model[2](model[0](torch.tensor([1]))).sum().backward()
    optimizer.step()
    tied = tied_names(model)
    whole, record = optimizer_pieces(model, optimizer, groups, tied)
    parts = []
    for held in (0, 1):
        kept = [list(g["params"]) for g in optimizer.param_groups]
        optimizer.param_groups[1 - held]["params"] = []
        parts.append(optimizer_pieces(model, optimizer, groups, tied))
        for group, p in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = p
    assert (
        parts[0][0].keys() | parts[1][0].keys() == whole.keys()
        and not parts[0][0].keys() & parts[1][0].keys()
    )
    saved = join_optimizer(groups, [r for _, r in parts])
    assert (
        saved == join_optimizer(groups, [record])
        and [g["params"] for g in saved["groups"]] == groups
    )
    state = {k: p.shape for k, p in whole.items()}
    wants, done = optimizer_wants(model, optimizer, groups, tied, state, saved)
    for want in wants:
        want.give(whole[want.name].tensor * 2)
    done()
    assert all(
        torch.equal(optimizer.state[p]["step"], torch.tensor(2.0)) for p in model.parameters()
    )
    with pytest.raises(CheckpointError, match="groups are not those of the checkpoint"):
        optimizer_wants(model, optimizer, [[*groups[0], *groups[1]]], tied, state, saved)
    with pytest.raises(CheckpointError, match="is of AdamW, the script now builds SGD"):
        optimizer_wants(
            model, torch.optim.SGD(model.parameters(), lr=1), groups, tied, state, saved
        )


# -- meta ------------------------------------------------------------------------------


def test_a_model_on_meta_begins_and_trains_alike_under_every_plan(tmp_path):
    differences = worker("meta", tmp_path)
    assert differences.pop("at all") > 0.1 and len(differences) == 7
    assert max(differences.values()) <= 1e-10, differences
    assert differences["from a checkpoint"] == differences["from a file"] == 0


def test_no_worker_ever_holds_a_model_on_meta_whole(tmp_path):
    for grown, held, whole in worker("peak", tmp_path):
        assert whole == 400_400_000 and held == whole / 4
        assert held < grown < 0.5 * whole  # its quarter, and some modules of 4 MB


class Table(nn.Module):
    """A buffer that the constructor computes, and a parameter that nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.gain = nn.Parameter(torch.ones(2))


def on_meta(build) -> nn.Module:
    with torch.device("meta"):
        return build()


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()
    if isinstance(module, Table):
        nn.init.ones_(module.gain)
        module.table.copy_(torch.arange(6.0))
        module.mask.fill_(True)


def test_parameters_stay_the_objects_that_they_are():
    model = on_meta(lambda: small()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.mark = "kept"
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    drawn = torch.get_rng_state()
    materialise(model, "reset", seed=0, device=CPU)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (
        [id(p) for p in model.parameters()] == before
        and model[2].weight is model[0].weight
        and model[0].weight.mark == "kept"
    )
    # as the embedding draws it, which owns it first; not the layer that it is tied to
    assert model[0].weight.std() > 0.5
    again = on_meta(lambda: small()[0])
    materialise(again, "reset", seed=0, device=CPU, keep=lambda name: name.startswith("2"))
    assert meta_names(again) == ["1.weight", "1.bias"]
    assert torch.equal(again[2].weight, model[2].weight) and torch.equal(
        again[2].bias, model[2].bias
    )
    other = on_meta(lambda: small()[0])
    materialise(other, "reset", seed=1, device=CPU)
    assert not torch.equal(other[0].weight, model[0].weight)


def test_what_stays_without_values_is_named(tmp_path):
    model = on_meta(Table)
    with pytest.raises(
        ArgumentError,
        match=r"the model \(Table\) owns 'gain', 'table', 'mask' on the meta device and has no "
        r"reset_parameters",
    ):
        materialise(model, "reset", seed=0, device=CPU)
    materialise(on_meta(Table), fill, seed=0, device=CPU)
    for forgotten in ("gain", "table", "mask"):

        def partly(module: nn.Module, forgotten: str = forgotten) -> None:
            kept = getattr(module, forgotten, None)
            kept = None if kept is None else kept.detach().clone()
            fill(module)
            if kept is not None:
                module._buffers.pop(forgotten, None)
                module._parameters.pop(forgotten, None)

        with pytest.raises(
            ArgumentError,
            match=rf"the function left '{forgotten}' of the model \(Table\) without values",
        ):
            materialise(on_meta(Table), partly, seed=0, device=CPU)
    with pytest.raises(ArgumentError, match=r"left 'bias' of module 'inner' \(Linear\)"):
        materialise(
            on_meta(Table),
            lambda m: fill(m) if isinstance(m, Table) else nn.init.ones_(m.weight),
            seed=0,
            device=CPU,
        )
    save_file(
        {"inner.weight": torch.ones(3, 3), "inner.bias": torch.ones(3), "gain": torch.ones(2)},
        tmp_path / "x.safetensors",
    )
    with pytest.raises(ArgumentError, match=r"has no 'mask', which the model has"):
        materialise(on_meta(Table), tmp_path, seed=0, device=CPU)
    save_file({"inner.weight": torch.ones(3, 4)}, tmp_path / "x.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'inner\.weight' has shape \[3, 4\] in .*, \[3, 3\] in the model"
    ):
        materialise(
            on_meta(lambda: nn.ModuleDict({"inner": nn.Linear(3, 3)})),
            str(tmp_path / "x.safetensors"),
            seed=0,
            device=CPU,
        )
    with pytest.raises(ArgumentError, match="there is none"):
        materialise(model, str(tmp_path / "nothing"), seed=0, device=CPU)


def test_weights_in_several_files_and_in_other_types(tmp_path):
    save_file({"0.weight": torch.full((5, 4), 2.0).bfloat16()}, tmp_path / "model-1.safetensors")
    save_file(
        {"1.weight": torch.ones(4, 4), "1.bias": torch.ones(4), "2.bias": torch.ones(5)},
        tmp_path / "model-2.safetensors",
    )
    model = on_meta(lambda: small()[0])
    materialise(model, tmp_path, seed=0, device=CPU)
    assert (
        model[2].weight is model[0].weight
        and model[0].weight.dtype == torch.float32
        and (model[0].weight == 2).all()
    )


def test_arguments(monkeypatch):
    monkeypatch.setenv("RONDE_RUNS", "none")
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1))

    def start(model: nn.Module, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ronde.distribute(
            model, optimizer, data, loss=nn.functional.mse_loss, batch_size=4, **options
        )

    for model, options, text in (
        (
            nn.Linear(4, 1, device="meta"),
            {},
            r"on the meta device \('weight' has no values\).*init=",
        ),
        (nn.Linear(4, 1), {"init": "reset"}, "has its values already"),
        (
            nn.Linear(4, 1, device="meta"),
            {"init": 3},
            "init must be a function of a module, 'reset' or a path; found int",
        ),
        (nn.Linear(4, 1, device="meta"), {"init": "nowhere"}, "there is none"),
    ):
        with pytest.raises(ArgumentError, match=text):
            start(model, **options)
    run = start(nn.Linear(4, 1, device="meta"), init="reset")
    for batch in run.batches():
        assert run.step(batch).isfinite()
