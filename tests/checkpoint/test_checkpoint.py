"""Checkpoints: whole or not at all, whatever happens to the bytes, the disk or the process. And
nothing is unpickled.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import random
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ronde
from damage import damage_manifest, flip
from processes import python
from ronde import CheckpointError
from ronde.checkpoint import (
    decode_exact,
    encode,
    export,
    find_valid,
    group_names,
    list_checkpoints,
    model_state,
    model_wants,
    optimizer_state,
    optimizer_wants,
    random_state,
    restore_random,
    verify,
    write,
)

SOURCE = Path(ronde.__file__).parent


def files(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(int(value * 10))
    weights = {
        "a.weight": torch.randn(8, 4, generator=generator) * value,
        "a.bias": torch.randn(8, generator=generator),
    }
    return {
        "model.safetensors": weights,
        "optimizer.safetensors": {"a.weight/step": torch.tensor(value)},
    }


STATE = {
    "epoch": 1,
    "betas": encode((0.9, 0.999)),
    "eps": 1e-08,
    "lr": 0.30000000000000004,
    "big": 2**70,
    "text": "größer",
}


def contents(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# -- damage ----------------------------------------------------------------------------


def test_every_flipped_bit_is_found(tmp_path):
    path = write(tmp_path, 7, files(), STATE)
    parts = sorted(path.iterdir())
    assert [p.name for p in parts] == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    sizes = [p.stat().st_size for p in parts]
    draw, missed = random.Random(0), []
    for _ in range(200):
        part = draw.choices(parts, sizes)[0]
        bit = draw.randrange(part.stat().st_size * 8)
        flip(part, bit)
        try:
            verify(path)
            missed.append((part.name, bit))
        except CheckpointError as error:
            assert str(path) in str(error)
        flip(part, bit)
    assert not missed
    assert verify(path).state == STATE  # and with every bit back it is whole


def test_every_single_bit_of_the_manifest_counts(tmp_path):
    """All of them, one after the other: no flip is without consequence, 1e-08 to 1E-08 included."""
    state = {"eps": 1e-08, "text": "größer"}
    path = write(tmp_path, 7, {"model.safetensors": {"x": torch.ones(2)}}, state)
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    missed = []
    for bit in range(len(whole) * 8):
        at, damaged = bit // 8, bytearray(whole)
        damaged[at] ^= 1 << bit % 8
        manifest.write_bytes(damaged)
        try:
            verify(path)
        except CheckpointError:
            continue
        missed.append(f"{whole[at - 12 : at + 8]!r} -> {bytes(damaged[at - 12 : at + 8])!r}")
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        (
            "model.safetensors",
            lambda data: data[:-1],
            r"model\.safetensors has \d+ bytes, expected",
        ),
        ("model.safetensors", None, r"model\.safetensors is missing"),
        ("manifest.json", None, r"manifest\.json is missing"),
        ("manifest.json", lambda data: b"", r"manifest\.json cannot be read"),
        ("manifest.json", lambda data: data[:100], r"manifest\.json cannot be read"),
        ("manifest.json", lambda data: b"[" * 100_000, r"manifest\.json cannot be read"),
        ("manifest.json", lambda data: b"[]", "not of a Ronde checkpoint"),
        ("manifest.json", lambda data: b'{"format": "other"}', "not of a Ronde checkpoint"),
    ],
)
def test_damage_is_named(file, damage, why, tmp_path):
    path = write(tmp_path, 1, files(), STATE)
    data = (path / file).read_bytes()
    (path / file).unlink()
    if damage is not None:
        (path / file).write_bytes(damage(data))
    with pytest.raises(CheckpointError, match=why):
        verify(path)


def test_another_version_and_files_that_changed_places_are_refused(tmp_path):
    path = write(tmp_path, 1, files(), STATE)
    damage_manifest(path, lambda body: body.update(version=99))
    with pytest.raises(CheckpointError, match="version 99 of the format"):
        verify(path)
    # Two files of one size: sizes are right, digests are not.
    same = {"a.safetensors": {"x": torch.zeros(4)}, "b.safetensors": {"x": torch.ones(4)}}
    path = write(tmp_path, 2, same, {})
    (path / "a.safetensors").rename(path / "t")
    (path / "b.safetensors").rename(path / "a.safetensors")
    (path / "t").rename(path / "b.safetensors")
    with pytest.raises(CheckpointError, match="does not match its digest"):
        verify(path)


OUTSIDE = ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"]


@pytest.mark.parametrize("name", [*OUTSIDE, "model.pkl", ".safetensors", "x.safetensors\n"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    path = write(tmp_path, 1, files(), STATE)
    damage_manifest(path, lambda body: body["files"].update({name: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(CheckpointError, match="is not a file of a checkpoint"):
        verify(path)
    with pytest.raises(CheckpointError, match="not a name for a file of tensors"):
        write(tmp_path, 2, {name: {"x": torch.zeros(1)}}, {})
    assert contents(tmp_path) == ["step-000000001"]


def test_files_that_are_not_its_own(tmp_path):
    path = write(tmp_path / "c", 1, files(), STATE)
    damage_manifest(
        path, lambda body: body["files"].update({"more.safetensors": {"bytes": 1, "sha256": "0"}})
    )
    with pytest.raises(CheckpointError, match=r"more\.safetensors is missing"):
        verify(path)
    path = write(tmp_path / "d", 1, files(), STATE)
    outside = tmp_path / "outside"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        verify(path)
    path = write(tmp_path / "e", 1, files(), STATE)
    (path / "stray.safetensors").write_bytes(b"x")  # beside it, and not in its manifest: never read
    assert verify(path).load("stray.safetensors") == {}


def test_the_newest_whole_one_is_found(tmp_path):
    assert find_valid(tmp_path / "none") == (None, [])
    for step in (1, 20, 300):
        write(tmp_path, step, files(step), {"n": step})
    assert find_valid(tmp_path)[0].step == 300
    flip(tmp_path / "step-000000300" / "model.safetensors", 800)
    (tmp_path / "step-000000020" / "manifest.json").write_text("[" * 100_000)
    found, refused = find_valid(tmp_path)
    assert found.step == 1 and found.state == {"n": 1} and len(refused) == 2
    assert (
        "step-000000300" in refused[0] and "digest" in refused[0] and "step-000000020" in refused[1]
    )
    loaded = found.load("model.safetensors")
    assert all(torch.equal(loaded[k], v) for k, v in files(1)["model.safetensors"].items())
    for folder in ("step-1", "step-abc", ".writing-000000999-1", "broken-step-000000999-1"):
        (tmp_path / folder).mkdir()
    (tmp_path / "step-000000999").write_text("a file")
    assert [p.name for p in list_checkpoints(tmp_path)] == [
        "step-000000300",
        "step-000000020",
        "step-000000001",
    ]


# -- writing ---------------------------------------------------------------------------


def test_only_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step * 1000, files(), {}, keep=2)
    assert contents(tmp_path) == ["step-000004000", "step-000005000"]
    write(tmp_path, 10**9, files(), {}, keep=1)  # ten digits: newer, though its name sorts first
    assert contents(tmp_path) == ["step-1000000000"]
    write(tmp_path, 10**9 + 1, files(), {}, keep=None)
    assert len(contents(tmp_path)) == 2


def test_the_same_step_twice(tmp_path):
    path = write(tmp_path, 5, files(1.0), {"n": 1})
    assert write(tmp_path, 5, files(3.0), {"n": 3}) == path  # the script may have changed something
    assert verify(path).state == {"n": 3} and contents(tmp_path) == [path.name]
    flip(path / "model.safetensors", 99)
    write(tmp_path, 5, files(2.0), {"n": 2})  # it was broken: put aside, and written anew
    assert (
        verify(path).state == {"n": 2}
        and sum(n.startswith("broken-") for n in contents(tmp_path)) == 1
    )


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot exchange two folders")
def test_killed_while_one_takes_the_place_of_another(tmp_path, monkeypatch):
    path, rename = write(tmp_path, 5, files(), {"n": 1}), Path.rename

    def killed(old: Path, new: Path) -> None:
        rename(old, new)
        if old == path:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with contextlib.suppress(KeyboardInterrupt):
        write(tmp_path, 5, files(), {"n": 2}, keep=1)
    assert verify(path).state["n"] in (1, 2) and contents(tmp_path) == [path.name]


def test_tensors_that_share_memory_or_have_strides(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": base,
        "same": base,
        "row": base[1],
        "turned": base.t(),
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5),
    }
    loaded = verify(write(tmp_path, 1, {"m.safetensors": tensors}, {})).load("m.safetensors")
    assert loaded.keys() == tensors.keys() and all(
        torch.equal(loaded[k], v) for k, v in tensors.items()
    )


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from ronde.checkpoint import find_valid, list_checkpoints, verify, write

folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(1)
tensors = {"model.safetensors": {"x": torch.arange(60_000.0)}, "optimizer.safetensors": {"x": torch.ones(60_000)}}
write(folder, 1, tensors, {"n": 1})
torn, last, longest = 0, 1, 0.06
for _ in range(rounds):
    pid = os.fork()
    if pid == 0:
        step = last
        while True:
            step += 1
            write(folder, step, tensors, {"n": step}, keep=3)
    time.sleep(draw.uniform(0.0, longest))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    torn += any(folder.glob(".writing-*"))
    for path in list_checkpoints(folder):
        verify(path)
    found, refused = find_valid(folder)
    assert not refused and found.step == found.state["n"] >= last, (found, refused, last)
    assert torch.equal(found.load("model.safetensors")["x"], tensors["model.safetensors"]["x"])
    longest *= 1.3 if found.step == last else 0.9  # a busy machine writes slowly
    last = found.step
write(folder, last + 1, tensors, {})
print(json.dumps({"torn": torn, "last": last, "left": sorted(p.name for p in folder.iterdir())}))
"""


def test_killed_while_writing(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    done = python([str(tmp_path / "killed.py"), str(tmp_path / "c"), "40"], tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # it was killed in the middle of writing, and it had written
    assert told["torn"] > 5 and told["last"] > 5, told
    # what the killed ones left is swept by the next
    assert all(n.startswith("step-") for n in told["left"]), told


FULL = """
import resource, sys
from pathlib import Path
import torch
import ronde
from ronde.checkpoint import export, find_valid, write

folder, out = Path("c"), Path("e")
small, large = ({"model.safetensors": {"x": torch.ones(n)}} for n in (1000, 400_000))
write(folder, 1, small, {"n": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
for call in (lambda: write(folder, 2, large, {"n": 2}, keep=1), lambda: export(large["model.safetensors"], out / "x.safetensors")):
    try:
        call()
    except ronde.CheckpointError as error:
        print(type(error).__name__, error)
print(sorted(p.name for p in folder.iterdir()), sorted(p.name for p in out.iterdir()))
print(find_valid(folder)[0].state)
write(folder, 3, small, {"n": 3})  # and there is room for a small one still
print(find_valid(folder)[0].step)
"""


def test_a_file_that_cannot_be_written_to_its_end(tmp_path):
    """A disk that is really full: test_background.py."""
    done = python(["-c", FULL], tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, *rest = done.stdout.splitlines()
    assert first.startswith("CheckpointError the checkpoint of step 2 could not be written to c")
    assert "Earlier ones are untouched" in first
    assert second.startswith("CheckpointError") and "could not be written" in second
    assert rest == ["['step-000000001'] []", "{'n': 1}", "3"]


def test_export_is_whole_or_nothing(tmp_path):
    target = tmp_path / "deep" / "m.safetensors"
    export({"x": torch.ones(3)}, target)
    with pytest.raises(CheckpointError):
        export({"x": torch.ones(3)}, tmp_path / "deep" / "m.safetensors" / "below")
    assert contents(tmp_path / "deep") == ["m.safetensors"]


# -- state -----------------------------------------------------------------------------


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.isnan(), b.isnan())
            and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, list | tuple | deque):
        limits = not isinstance(a, deque) or a.maxlen == b.maxlen
        return limits and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


PLAIN = [None, True, 0, -1, 2**70, 0.1, -0.0, 5e-324, math.nan, math.inf, -math.inf, ""]
LISTS = [[], {}, (), [1, (2, [3])], {"a": {"b": (1,)}}, deque([1, 2], maxlen=3), deque()]
KEYED = [{1: "x", -2: "y"}, {(1, 2): 3, None: 4, 1.5: 5}, {"__ronde__": "tuple", "items": []}]
COUNTS = [Counter([3, 3, 7]), Counter(), OrderedDict([("b", 1), ("a", 2)]), "ä\u2028\x00"]
TENSORS = [
    torch.tensor(1.5),
    torch.tensor([math.nan, math.inf, -0.0]),
    torch.arange(6).reshape(2, 3),
    torch.tensor([True, False]),
    torch.tensor([0.1, -1 / 3, 1e-300], dtype=torch.float64),
    torch.tensor([0.1, -2.5, 1e30, 3]).to(torch.bfloat16),
    torch.tensor([], dtype=torch.int8),
    torch.zeros(0, 3),
]


@pytest.mark.parametrize("value", [*PLAIN, *LISTS, *KEYED, *COUNTS, *TENSORS], ids=repr)
def test_what_is_encoded_comes_back(value):
    through = decode_exact(json.loads(json.dumps(encode(value))))
    assert same(value, through), (value, through)
    nested = {"k": [value, (value,)]}
    assert same(nested, decode_exact(json.loads(json.dumps(encode(nested)))))


def test_numpy_numbers_become_plain_ones():
    assert same(
        decode_exact(encode({"a": np.float64(0.1), "b": np.int32(3), "c": np.bool_(True)})),
        {"a": 0.1, "b": 3, "c": True},
    )
    assert decode_exact(encode(defaultdict(int, {"a": 1}))) == {"a": 1}


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Thing(), "Thing"),
        (lambda: 0, "function"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (np.zeros(2), "ndarray"),
        (1j, "complex"),
        (Path(), "P"),
    ],
)
def test_unknown_objects_are_refused_by_name(value, kind):
    with pytest.raises(
        CheckpointError,
        match=rf"scheduler\.a\[1\] is a {kind}\w*, which cannot be written .* without pickle",
    ):
        encode({"a": [0, value]}, "scheduler")


def test_large_or_complex_tensors_are_refused_beside_the_numbers():
    with pytest.raises(CheckpointError, match="tensor of 5000 elements"):
        encode({"a": torch.zeros(5000)})
    with pytest.raises(CheckpointError, match=r"of type torch\.complex64"):
        encode(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "value",
    [
        {"__ronde__": "os.system", "items": []},
        {"__ronde__": "tensor", "dtype": "load", "values": []},
    ],
)
def test_unknown_kinds_are_not_decoded(value):
    with pytest.raises(CheckpointError, match="in a checkpoint"):
        decode_exact(value)


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(6, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)
    )
    model[3].weight = model[0].weight  # tied
    return model


def make(kind: str, model: nn.Module):
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[:1], "lr": 0.02},
        {"params": parameters[1:], "weight_decay": 0.1},
    ]
    built = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
        "rprop": lambda: torch.optim.Rprop(groups, lr=0.1),
        "tensor lr": lambda: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
    }
    return built[kind]()


def train(model, optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", ["sgd", "adamw", "rprop", "tensor lr"])
@pytest.mark.parametrize("schedule", ["multistep", "cosine", "chain", "onecycle"])
def test_model_optimizer_and_scheduler_go_on_bit_for_bit(kind, schedule, tmp_path):
    def scheduler(optimizer):
        s = torch.optim.lr_scheduler
        if schedule == "chain":
            return s.SequentialLR(
                optimizer,
                [s.LinearLR(optimizer, 0.1, total_iters=2), s.CosineAnnealingLR(optimizer, 9)],
                [2],
            )
        if schedule == "onecycle":
            return s.OneCycleLR(optimizer, 0.01, total_steps=20, cycle_momentum=False)
        return (
            s.MultiStepLR(optimizer, [2, 2, 5])
            if schedule == "multistep"
            else s.CosineAnnealingLR(optimizer, 9)
        )

    if kind == "tensor lr" and schedule in ("chain", "onecycle"):
        pytest.skip("torch's own schedulers do not take it")
    model = net()
    optimizer = make(kind, model)
    schedule_ = scheduler(optimizer)
    train(model, optimizer, schedule_, 3)
    weights, shared = model_state(model)
    moments, values = optimizer_state(model, optimizer)
    assert shared == {"3.weight": "0.weight"} and "3.weight" not in weights
    state = {"same": shared, "optimizer": values, "scheduler": encode(schedule_.state_dict())}
    path = write(
        tmp_path, 3, {"model.safetensors": weights, "optimizer.safetensors": moments}, state
    )

    other = net()
    with torch.no_grad():
        for p in other.parameters():
            p.fill_(9.0)
    second = make(kind, other)
    third = scheduler(second)
    found = verify(path)
    load_model(other, found.load("model.safetensors"), found.state["same"])
    load_optimizer(other, second, found.load("optimizer.safetensors"), found.state["optimizer"])
    third.load_state_dict(decode_exact(found.state["scheduler"]))
    for each in ((model, optimizer, schedule_), (other, second, third)):
        train(*each, 4)
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert same(
        decode_exact(encode(optimizer.state_dict()["param_groups"])),
        decode_exact(encode(second.state_dict()["param_groups"])),
    )
    assert other[3].weight is other[0].weight


def load_model(model, tensors, same):
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wants, done = model_wants(model, shapes.get, same, lambda name: True)
    for want in wants:
        want.give(tensors[want.name])
    done()


def load_optimizer(model, optimizer, tensors, saved):
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    groups = group_names(model, optimizer)
    wants, done = optimizer_wants(model, optimizer, groups, {}, shapes, saved)
    for want in wants:
        want.give(tensors[want.name])
    done()


def test_states_of_something_else_are_refused():
    model = net()
    optimizer = make("sgd", model)
    weights, shared = model_state(model)
    with pytest.raises(CheckpointError, match=r"another model.*has shape \[6, 4\] there, \[6, 5\]"):
        load_model(nn.Sequential(nn.Embedding(6, 5)), weights, {})
    with pytest.raises(CheckpointError, match="another model"):
        load_model(model, {k: v for k, v in weights.items() if k != "0.weight"}, shared)
    tensors, values = optimizer_state(model, optimizer)
    with pytest.raises(CheckpointError, match="is of SGD, the script now builds AdamW"):
        load_optimizer(model, make("adamw", model), tensors, values)
    with pytest.raises(CheckpointError, match="groups are not those of the checkpoint"):
        load_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), tensors, values)

    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"n": 1}

    with pytest.raises(CheckpointError, match=r"'_extra_state' in model\.state_dict\(\) is a dict"):
        model_state(Odd(1, 1))


def test_generators_go_on_where_they_were(tmp_path):
    before = random_state()
    try:
        random.gauss(0, 1)
        np.random.randn()
        tensors, values = random_state()
        path = write(tmp_path, 1, {"random.safetensors": tensors}, {"values": values})

        def draw():
            return [
                torch.rand(3).tolist(),
                random.gauss(0, 1),
                random.random(),
                np.random.randn(),
                np.random.rand(),
            ]

        expected = draw()
        draw()
        found = verify(path)
        restore_random(found.load("random.safetensors"), found.state["values"])
        assert draw() == expected
    finally:
        restore_random(*before)


# -- nothing is unpickled --------------------------------------------------------------

FORBIDDEN = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "_pickle.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "dill.loads",
    "joblib.load",
    "marshal.loads",
    "shelve.open",
    "torch.load",
    "os.system",
    "os.popen",
    "eval",
    "exec",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.all_gather_object",
    "torch.distributed.gather_object",
    "torch.distributed.scatter_object_list",
    "torch.distributed.recv_object_list",
    "torch.distributed.checkpoint.load",
}


def dangers(source: str) -> list[str]:
    """Calls that run what they are given, under whatever name they were imported."""
    words = set(re.findall(r"\w+", source))
    parts = [set(name.split(".")) for name in FORBIDDEN]
    if not words & {"shell", "allow_pickle"} and not any(part <= words for part in parts):
        return []  # most files: to parse them all takes seconds
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                names[a.asname or a.name.partition(".")[0]] = (
                    a.name if a.asname else a.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})

    def full(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return names.get(node.id, node.id)
        return f"{full(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = full(node.func)
            if name in FORBIDDEN:
                found.append(name)
            for keyword in node.keywords:
                if keyword.arg in ("shell", "allow_pickle") and not (
                    isinstance(keyword.value, ast.Constant) and not keyword.value.value
                ):
                    found.append(f"{keyword.arg}=")
    return found


def test_nothing_in_the_source_unpickles_or_starts_a_shell():
    # which is what they are for
    allowed = {
        # objects of other ranks, only where HOROVOD_PICKLE_OBJECTS=1 allows it
        ("horovod/objects.py", "pickle.loads"),
        ("launch/worker.py", "exec"),
        # a call of ronde.launch and its results, in the private folder of one process
        ("launch/call.py", "pickle.load"),
        ("launch/call.py", "pickle.loads"),
        ("prove/pool_worker.py", "exec"),
    }
    sources = sorted(SOURCE.rglob("*.py"))
    found = {(str(p.relative_to(SOURCE)), name) for p in sources for name in dangers(p.read_text())}
    assert len(sources) > 30 and found == allowed


def test_the_search_finds_what_it_is_for():
    assert dangers("from pickle import loads as f\nf(b'')") == ["pickle.loads"]
    assert dangers("import torch as t\nt.load('x')") == ["torch.load"]
    assert dangers("import torch.distributed as d\nd.all_gather_object(a, b)") == [
        "torch.distributed.all_gather_object"
    ]
    assert dangers("import subprocess\nsubprocess.run('ls', shell=True)") == ["shell="]
    assert dangers("import numpy as np\nnp.load(f, allow_pickle=True); eval('1')") == [
        "allow_pickle=",
        "eval",
    ]
    assert dangers("model.eval(); json.loads('1'); subprocess.run([], shell=False)") == []


def test_a_parameter_that_the_model_has_no_more_is_named_by_its_shape():
    """Of a layer that was replaced: nothing in a checkpoint could say whose its state is."""
    from ronde.checkpoint.state import group_names

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    assert group_names(model, optimizer) == [["0.weight", "0.bias", "1.weight", "1.bias"]]
    model[1] = torch.nn.Linear(4, 2)
    with pytest.raises(
        CheckpointError,
        match=r"group 0 holds a parameter of shape \(2, 4\) that the model does not have.*take "
        r"its old parameters out",
    ):
        group_names(model, optimizer)
    optimizer.param_groups[0]["params"][2:] = model[1].parameters()
    assert group_names(model, optimizer) == [["0.weight", "0.bias", "1.weight", "1.bias"]]
