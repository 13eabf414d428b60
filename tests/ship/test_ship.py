"""Exports that are wrong are refused, bundles that were changed too; a server lives through bad clients."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.numpy import save_file
from torch import nn

from processes import python, ronde_batch, ronde_run
from ronde.measure.model_call import ModelCall, call_of
from ronde.ship import (
    Capture,
    ShipError,
    ShippedModel,
    check_export,
    current_bundle,
    export_onnx,
    install_bundle,
    installs,
    make_key,
    restore_previous,
    serve_model,
    verify_bundle,
    watch_captures,
    write_bundle,
)
from ronde.ship.export import export_program
from ronde.ship.exporter import store_samples
from ronde.ship.quantize import judge_int8, quantize
from ronde.ship.runtime import open_session, stored_samples
from ronde.world import ArgumentError, RondeError

Made = tuple[nn.Module, ModelCall, Path, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )  # fmt: skip
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(x)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A trained network, its export, and samples with labels."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    labels = torch.arange(192) % 10
    x = torch.rand(10, 1, 8, 8)[labels] + 0.4 * torch.randn(192, 1, 8, 8)
    model, path = Net(), tmp_path_factory.mktemp("ship") / "model.onnx"
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    call = call_of(model, lambda m: m(x))
    export_onnx(model, call, path)
    assert model.training and len(call.tensors) == 1
    return model, call, path, labels


def tensor_of(graph: onnx.ModelProto, shape: tuple[int, ...]) -> onnx.TensorProto:
    return next(t for t in graph.graph.initializer if tuple(t.dims) == shape)


def change(
    shape: tuple[int, ...], edit: Callable[[np.ndarray], np.ndarray]
) -> Callable[[onnx.ModelProto], None]:
    def planted(graph: onnx.ModelProto) -> None:
        tensor = tensor_of(graph, shape)
        tensor.CopyFrom(
            numpy_helper.from_array(edit(numpy_helper.to_array(tensor).copy()), tensor.name)
        )

    return planted


def tanh_gelu(graph: onnx.ModelProto) -> None:
    for node in (n for n in graph.graph.node if n.op_type == "Gelu"):
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("approximate", "tanh"))


FAULTS = {
    "last weights + 1e-3": change((10, 64), lambda a: a + np.float32(1e-3) * np.sign(a)),
    "a rolled bias": change((16,), lambda a: np.roll(a, 1)),
    "two classes swapped": change((10,), lambda a: a[[1, 0, *range(2, 10)]]),
    "another layout": change((16, 8, 3, 3), lambda a: a.transpose(0, 1, 3, 2).copy()),
    "a weight lost": change((10, 64), lambda a: a * (np.arange(640).reshape(10, 64) != 77)),
    "half precision weights": change((10, 64), lambda a: a.astype(np.float16).astype(np.float32)),
    "another activation": tanh_gelu,
    "NaN for one class": change(
        (10,), lambda a: np.where(np.arange(10) == 3, np.nan, a).astype(np.float32)
    ),
}


def test_a_sound_export_is_at_the_rounding_floor(made: Made) -> None:
    model, call, path, _ = made
    (floor,) = check_export(model, path, call)
    assert 0 < floor.export <= floor.limit and floor.export < 4 * floor.model + 1e-6
    assert floor.samples == 192


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_refused(made: Made, fault: str) -> None:
    model, call, path, _ = made
    graph = onnx.load(path)
    FAULTS[fault](graph)
    with pytest.raises(ShipError, match=r"output 0 is off by \S+ on sample \d+, at batch size"):
        check_export(model, graph.SerializeToString(), call)


def test_accuracy_alone_would_pass_a_wrong_export(made: Made) -> None:
    _, call, path, labels = made

    def right(data: bytes) -> int:
        out = open_session(data).run(None, {"x": call.tensors[0].numpy()})[0]
        return int((out.argmax(1) == labels.numpy()).sum())

    wrong = []
    for plant in FAULTS.values():
        graph = onnx.load(path)
        plant(graph)
        wrong.append(right(graph.SerializeToString()))
    assert max(wrong) >= right(path.read_bytes())


class Masked(nn.Module):
    """Two columns, the second of which is masked: -1e9 says nothing about the rounding of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.sum(1), torch.full_like(x[:, 0], -1e9)], 1)


class Overflows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum(1, keepdim=True).log()


def test_large_and_infinite_values_do_not_hide_a_wrong_export(tmp_path: Path) -> None:
    call = call_of(Masked(), lambda m: m(torch.randn(16, 4)))
    path = tmp_path / "m.onnx"
    export_onnx(Masked(), call, path)
    check_export(Masked(), path, call)
    with pytest.raises(ShipError, match=r"output 0 is off by 2\.\d+ on sample"):
        check_export(nn.Sequential(Masked(), Shift()), path, call)
    call = call_of(Overflows(), lambda m: m(torch.full((4, 4), 200.0)))
    export_onnx(Overflows(), call, path)
    with pytest.raises(
        ShipError, match="the model itself overflows on sample 0: it gives inf where float64"
    ):
        check_export(Overflows(), path, call)


class Shift(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y + torch.tensor([2.5, 0.0], dtype=y.dtype)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(8, 2, 2).sum(2)


def test_models_that_cannot_be_exported_say_why(tmp_path: Path) -> None:
    for model, text in (
        (Branch(), r"test_ship.py:\d+: return self.a\(x\) if x.sum"),
        (Fixed(), "its code takes a batch of 8 only"),
    ):
        call = call_of(model, lambda m: m(torch.ones(8, 4)))
        with pytest.raises(ShipError, match=text):
            export_onnx(model, call, tmp_path / "m.onnx")
            check_export(model, tmp_path / "m.onnx", call)
    with pytest.raises(RondeError, match="without calling the model"):
        call_of(Fixed(), lambda m: None)


class Odd(nn.Module):
    """Positional, variadic, and keyword arguments, a dictionary, and a constant; nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x, *rest, scale, twice=False, **named):  # type: ignore[no-untyped-def]
        out = self.a(x["z"]) + x["b"] * scale + self.a(rest[0]) * (2 if twice else 1)
        return out, {"more": (out.sum(1), out * named["last"]), "none": None}


def test_odd_signatures_are_exported(tmp_path: Path) -> None:
    model, g = Odd(), torch.Generator().manual_seed(0)
    b, rest, scale, last = (torch.randn(9, n, generator=g) for n in (3, 4, 1, 3))
    x = {"z": torch.randn(9, 4, generator=g), "b": b}
    call = call_of(model, lambda m: m(x, rest, last=last, scale=scale, twice=True))
    export_onnx(model, call, tmp_path / "m.onnx")
    assert [f.samples for f in check_export(model, tmp_path / "m.onnx", call)] == [9] * 3
    part = call.rows(0, 2)
    program = export_program(model, call).module()(*part.args, **part.kwargs)
    assert all(torch.equal(*pair) for pair in zip(program[1]["more"], model(*part.args, **part.kwargs)[1]["more"], strict=True))  # fmt: skip


def test_int8_is_judged_by_class(made: Made, tmp_path: Path) -> None:
    _, call, path, labels = made
    feeds = {"x": call.tensors[0].numpy()}
    quantize(path, feeds, tmp_path / "good.onnx")
    good = judge_int8(path, tmp_path / "good.onnx", feeds, labels.numpy(), None, 0.5)
    assert good.accuracy[0] - good.accuracy[1] < 0.1 and "drops" not in good.refused
    quantize(path, {"x": np.zeros((32, 1, 8, 8), np.float32)}, tmp_path / "bad.onnx")
    bad = judge_int8(path, tmp_path / "bad.onnx", feeds, labels.numpy(), None, 0.005)
    assert "int8 drops class '" in bad.refused and "points (limit 0.5)" in bad.refused


@pytest.fixture(scope="module")
def bundle(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    _, call, path, _ = made
    folder = tmp_path_factory.mktemp("bundle")
    make_key(folder / "key.pem", folder / "public.pem")

    def fill(into: Path) -> None:
        shutil.copy(path, into / "model.onnx")
        store_samples(into, call)

    write_bundle(folder / "b", fill, {"limits": [1e-4]}, key=folder / "key.pem", serial=3)
    yield folder / "b"


def test_every_change_of_a_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    public = bundle.parent / "public.pem"
    assert verify_bundle(bundle, public).serial == 3
    for file in sorted(bundle.iterdir()):
        data = file.read_bytes()
        for at in range(0, len(data), 1 if file.name.startswith("about") else 4999):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(ShipError):
                verify_bundle(bundle, public)
        file.write_bytes(data[:-1])
        with pytest.raises(ShipError):
            verify_bundle(bundle, public)
        file.write_bytes(data)
    (bundle / "more").write_text("x")
    with pytest.raises(ShipError, match="more is not the bundle's"):
        verify_bundle(bundle, public)
    (bundle / "more").unlink()
    (bundle / "link").symlink_to("model.onnx")
    with pytest.raises(ShipError, match="link is a link"):
        verify_bundle(bundle, public)
    (bundle / "link").unlink()
    data = (bundle / "about.sig").read_bytes()
    (bundle / "about.sig").write_bytes(data * 1000)
    with pytest.raises(ShipError, match="was changed after signing"):
        verify_bundle(bundle, public)
    (bundle / "about.sig").unlink()
    with pytest.raises(ShipError, match="is not signed"):
        verify_bundle(bundle, public)
    (bundle / "about.sig").write_bytes(data)
    for name in ("model.onnx", "about.json"):  # a pipe would be read for ever
        (bundle / name).rename(tmp_path / "kept")
        os.mkfifo(bundle / name)
        with pytest.raises(ShipError, match=r"is no file: a bundle|has no about\.json"):
            verify_bundle(bundle, public)
        (tmp_path / "kept").rename(bundle / name)
    huge = json.dumps({"files": {str(i): {} for i in range(100_000)}, "serial": 1, "format": 1})
    for text in ("[" * 100_000, '{"files": {"a": 1}, "serial": 1}', "[]", huge):
        odd = tmp_path / "odd"
        odd.mkdir()
        (odd / "about.json").write_text(text)
        with pytest.raises(ShipError, match="is damaged"):
            verify_bundle(odd)
        shutil.rmtree(odd)
    with pytest.raises(ArgumentError, match="files of their own"):
        make_key(tmp_path / "k", tmp_path / "k")
    make_key(tmp_path / "k", tmp_path / "p")
    with pytest.raises(ShipError, match="was changed after signing, or"):
        verify_bundle(bundle, tmp_path / "p")
    with pytest.raises(ArgumentError, match="keys are never written over"):
        make_key(tmp_path / "k", tmp_path / "q")
    about = json.loads((bundle / "about.json").read_text())
    for name in ("../b/model.onnx", "/etc/passwd", "absent.onnx"):
        outside = tmp_path / "outside"
        shutil.copytree(bundle, outside)
        about["files"] = {**about["files"], name: {"bytes": 1, "sha256": ""}}
        (outside / "about.json").write_text(json.dumps(about))
        with pytest.raises(ShipError, match="missing or outside the bundle"):
            verify_bundle(outside)
        shutil.rmtree(outside)
        del about["files"][name]
    verify_bundle(bundle, public)


def test_models_that_anybody_packed_are_refused_in_a_sentence(made: Made, tmp_path: Path) -> None:
    graph, stored = onnx.load(made[2]), tmp_path / "stored.safetensors"
    feeds = {"x": made[1].tensors[0][:2].numpy()}
    outputs = open_session(made[2]).run(None, feeds)
    save_file({"input.x": feeds["x"], "output.0": outputs[0]}, stored)
    weight = tensor_of(graph, (10, 64))
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="../secret")
    (tmp_path / "secret").write_bytes(bytes(10 * 64 * 4))
    for i, (model, about, text) in enumerate((
        (b"garbage", {"limits": [1.0]}, "ONNX Runtime refuses the model: "),
        (graph.SerializeToString(), {"limits": [1.0]}, "ONNX Runtime refuses the model: "),
        (made[2].read_bytes(), {}, "lacks a limit or a stored value for an output"),
        (made[2].read_bytes(), {"limits": []}, "lacks a limit or a stored value for an output"),
    )):  # fmt: skip

        def fill(into: Path, model: bytes = model) -> None:
            (into / "model.onnx").write_bytes(model)
            shutil.copy(stored, into / "expected.safetensors")

        write_bundle(tmp_path / str(i), fill, about)
        with pytest.raises(ShipError, match=text):
            ShippedModel(tmp_path / str(i)).check()


def test_verifying_imports_no_torch(bundle: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from ronde.cli import main\n"
        f"sys.argv = ['ronde', 'ship', 'verify', {str(bundle)!r}, '--key', {str(bundle.parent / 'public.pem')!r}]\n"
        "try: main()\nexcept SystemExit as end: print('status', end.code, 'torch' in sys.modules)"
    )
    done = python(["-c", code], tmp_path)
    assert "serial 3, 2 files, signed by" in done.stdout and "samples   off by" in done.stdout, (
        done.stderr
    )
    assert done.stdout.splitlines()[-1] in ("status None False", "status 0 False")


def test_a_server_answers_bad_clients_and_lives(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.ship.server.PATIENCE_SECONDS", 0.5)
    server = serve_model(ShippedModel(bundle), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    address = ("127.0.0.1", server.server_address[1])
    for port in (address[1], 99_999):
        with pytest.raises(ArgumentError, match=f"{port} cannot be served: "):
            serve_model(ShippedModel(bundle), port)

    def ask(
        body: bytes, path: str = "/predict", headers: dict[str, str] | None = None
    ) -> tuple[int, dict]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{address[1]}{path}", body, headers or {}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def good() -> int:
        return ask(json.dumps({"inputs": {"x": np.zeros((2, 1, 8, 8)).tolist()}}).encode())[0]

    try:
        assert good() == 200
        for body, text in {
            b"\x00\xffgarbage": "codec", b"{": "Expecting", b"[" * 100_000: "", b"{}": "inputs", b"[1]": "shape",
            b'{"inputs": {"y": [1]}}': "the model takes x; there is y.", b'{"inputs": {"x": [["a"]]}}': "input x",
            b'{"inputs": {"x": "a"}}': "input x", b'{"rows": [{}]}': "has no recipe",
        }.items():  # fmt: skip
            status, answer = ask(body)
            assert status == 400 and text in answer["error"], (body[:20], answer)
        assert ask(b"{}", "/nothing")[0] == 404
        for length, status in {"100000000": 413, "9" * 5000: 413, "\xb2": 411, "-1": 411}.items():
            with socket.create_connection(address) as large:  # it says so, and sends none
                head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
                large.sendall(head.encode("latin-1"))
                assert large.recv(1000).startswith(f"HTTP/1.1 {status}".encode()), length
        with socket.create_connection(address) as large, contextlib.suppress(OSError):
            large.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n")
            for _ in range(100):  # it sends them, whatever it is told
                large.sendall(bytes(1_000_000))
        with socket.create_connection(address) as noise:
            noise.sendall(bytes(range(256)) * 20 + b"\r\n\r\n")
            assert b"400" in noise.recv(1000)
        idle = [socket.create_connection(address) for _ in range(100)]
        assert good() == 200
        for client in idle:
            client.close()
        with socket.create_connection(address) as endless:  # a header that never ends
            endless.sendall(b"POST /predict HTTP/1.1\r\nHost: ")
            with pytest.raises(ConnectionError):  # the server hangs up, though each byte is in time
                for _ in range(1200):
                    endless.sendall(b"x")
                    time.sleep(0.05)
                    if endless in select.select([endless], [], [], 0)[0] and not endless.recv(1):
                        raise ConnectionError
        slow = [socket.create_connection(address) for _ in range(8)]
        for client in slow:
            client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert good() == 200
        # 408, or closed, where even the first line came too late on a busy machine
        assert slow[0].recv(1000)[:12] in (b"HTTP/1.1 408", b"")
        for client in slow:
            client.close()
        assert good() == 200
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_installs_are_verified_and_can_be_rolled_back(bundle: Path, tmp_path: Path) -> None:
    public, root = bundle.parent / "public.pem", tmp_path / "root"

    def made(serial: int) -> Path:
        def fill(into: Path) -> None:
            for name in ("model.onnx", "expected.safetensors"):
                shutil.copy(bundle / name, into / name)

        path = tmp_path / f"b{serial}"
        if not path.exists():
            write_bundle(
                path, fill, {"limits": [1e-4]}, key=bundle.parent / "key.pem", serial=serial
            )
        return path

    assert install_bundle(made(4), root, public).serial == 4
    assert install_bundle(made(6), root, public).serial == current_bundle(root, public).serial == 6
    for serial in (5, 6):
        with pytest.raises(
            ShipError, match=rf"not newer than one installed before \(serial {serial}, there was 6"
        ):
            install_bundle(made(serial), root, public)
    with (made(7) / "model.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ShipError, match="was changed after the bundle was made"):
        install_bundle(made(7), root, public)
    assert restore_previous(root) == current_bundle(root, public).serial == 4
    with pytest.raises(ShipError, match="no bundle before the current one"):
        restore_previous(root)
    with pytest.raises(ShipError, match="there was 6"):  # what was left is not taken again
        install_bundle(made(6), root, public)
    assert install_bundle(made(8), root, public).serial == current_bundle(root, public).serial == 8
    make_current = installs.make_current
    for serial, is_linked in ((9, False), (10, True)):  # killed before the link, or after it

        def killed(root: Path, serial: int, is_linked: bool = is_linked) -> None:
            if is_linked:
                make_current(root, serial)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(installs, "make_current", killed)
            install_bundle(made(serial), root, public)
        assert current_bundle(root, public).serial == (10 if is_linked else 8)
        if not is_linked:
            assert install_bundle(made(9), root, public).serial == 9
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(installs, "make_current", lambda root, serial: killed(root, serial, False))
        restore_previous(root)
    assert restore_previous(root) == 9
    for serial in range(11, 17):
        made(serial)

    def install(serial: int) -> bool:
        with contextlib.suppress(ShipError):  # a newer one came first
            return install_bundle(made(serial), root, public).serial == serial
        return False

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(install, range(11, 17)))
    assert done[-1] and current_bundle(root, public).serial == 16
    names = {path.name for path in root.iterdir()} - {"current", "installed.json"}
    assert len(names) == 2 and "serial-16" in names
    assert restore_previous(root) == current_bundle(root, public).serial < 16


def test_captures_tell_drift(bundle: Path, tmp_path: Path) -> None:
    verified = verify_bundle(bundle)
    g = np.random.default_rng(0)
    stored, _ = stored_samples(verified)
    calm, shifted, file = stored["x"], stored["x"] + 3.0, tmp_path / "c.jsonl"
    capture = Capture(file, 1.0, most_bytes=1 << 21)
    for _ in range(30):
        rows = calm[g.integers(0, len(calm), 4)]
        capture.write(3, {"x": rows.tolist()}, [], 0.01)
    values = watch_captures(verified, [*file.open(), '{"torn'])
    counted = [values[name] for name in ("requests", "rows", "unreadable", "serials")]
    assert counted == [30, 120, 1, {"3": 30}]
    assert len(values["columns"]) == 64 and not any(c["shifted"] for c in values["columns"])
    lines = [
        json.dumps({"serial": 4, "seconds": 0.5, "inputs": {"x": shifted.tolist()}, "outputs": []})
    ]
    lines[0] = lines[0].replace(str(float(shifted[0, 0, 0, 0])), "NaN", 1)
    values = watch_captures(verified, lines)
    assert all(c["shifted"] for c in values["columns"]) and values["columns"][0]["missing"] > 0
    size = file.stat().st_size
    for _ in range(200):
        capture.write(3, {"x": calm.tolist()}, [], 0.01)
    assert size < file.stat().st_size <= 1 << 21
    with pytest.raises(ArgumentError, match="no captured request"):
        watch_captures(verified, [])


SCRIPT = """
import torch
from torch import nn
import ronde

torch.manual_seed(0)
x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=nn.functional.cross_entropy, batch_size=16)
run.fit(1, validate=data)
"""


def test_ship_a_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = ronde_run(["run", "--workers", "1", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    np.savez(
        tmp_path / "test.npz",
        input=np.random.default_rng(0).normal(size=(40, 8)),
        target=np.arange(40) % 2,
    )
    done = ronde_run(["ship", "--check", "test.npz", "--out", "b"], tmp_path, 120)
    assert done.returncode == 0 and "checked   40 samples of" in done.stdout, (
        done.stdout + done.stderr
    )
    from safetensors.torch import load_file

    saved = load_file(next((tmp_path / "runs").glob("train-1/checkpoints/*/model.safetensors")))
    x = torch.randn(5, 8)
    hidden = torch.relu(x @ saved["0.weight"].T + saved["0.bias"])
    expected = hidden @ saved["3.weight"].T + saved["3.bias"]
    (out,) = ShippedModel(tmp_path / "b").predict(x.numpy())
    assert np.abs(out - expected.numpy()).max() < 1e-5
    assert json.loads((tmp_path / "b" / "about.json").read_text())["run"] == "train-1"
    done = ronde_run(["ship", "--to", "safetensors", "--out", "s"], tmp_path, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    shipped = load_file(tmp_path / "s" / "model.safetensors")
    assert all(torch.equal(shipped[k], v) for k, v in saved.items())
    card = (tmp_path / "s" / "card.md").read_text()
    assert "- run: train-1, step 4" in card and "## evaluate\n\n- loss: " in card
    (tmp_path / "train.py").write_text(SCRIPT.replace("16, 2", "16, 3"))
    refused = ronde_run(["ship", "--out", "c"], tmp_path, 120)
    assert refused.returncode == 1 and "the script now builds another model" in refused.stderr
    assert not (tmp_path / "c").exists()
    wrong = {
        "--out b": "b is there already",
        "--to tf": "'tf' is not one of",
        "nope": "no run 'nope'",
    }
    refusals = ronde_batch([["ship", *words.split()] for words in wrong], tmp_path)
    for refused, text in zip(refusals, wrong.values(), strict=True):
        assert text in refused.stderr


TABLE = """
import torch
from torch import nn
import ronde

torch.manual_seed(0)
recipe = ronde.feed.Recipe.read("prepare.yaml").fit("t.parquet")
data = ronde.feed.table("t.parquet", recipe=recipe)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.city, self.head = nn.Embedding(data.source.sizes[0], 3), nn.Linear(3 + len(data.source.numeric), 2)

    def forward(self, inputs):
        numbers, codes = inputs
        return self.head(torch.cat([numbers, self.city(codes[:, 0])], dim=1))


model = Net()
run = ronde.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss=nn.functional.cross_entropy, batch_size=16)
run.fit(1)
"""


def test_a_tables_recipe_goes_with_the_model(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    g = np.random.default_rng(0)
    rows = {
        "age": g.normal(40, 9, 64),
        "city": g.choice(["Oslo", "Rome", "Köln"], 64),
        "y": np.arange(64) % 2,
    }
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    (tmp_path / "prepare.yaml").write_text(
        "target: y\ncolumns:\n  age: {impute: median, scale: standard}\n  city: {codes: true}\n"
    )
    (tmp_path / "train.py").write_text(TABLE)
    done = ronde_run(["run", "--workers", "1", "train.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = ronde_run(["ship", "--out", "b"], tmp_path, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    model = ShippedModel(tmp_path / "b")
    some = [{"age": 50.0, "city": "Rome"}, {"age": None, "city": "Atlantis"}]
    (out,) = model.predict_rows(some)
    from ronde.tables.recipe import Recipe

    prepared = (
        Recipe.read(tmp_path / "b" / "recipe.json").apply(pa.Table.from_pylist(some)).to_pydict()
    )
    numbers = np.array(prepared["age"], np.float32)[:, None]
    codes = np.array(prepared[next(n for n in prepared if n.startswith("city"))])[:, None]
    (expected,) = model.predict(dict(zip(model.inputs, (numbers, codes), strict=True)))
    assert np.array_equal(out, expected) and out.shape == (2, 2)
    with pytest.raises(ArgumentError, match="city"):
        model.predict_rows([{"age": 50.0}])
    with pytest.raises(ArgumentError, match="all with the same columns"):
        model.predict_rows([{"age": 50.0, "city": "Rome"}, {"age": 50.0}])
    codes = list(model.inputs)[1]
    for wrong in ([[1.9]], [["1"]], [[None]]):
        with pytest.raises(ArgumentError, match=f"input {codes}"):
            model.predict({**dict(zip(model.inputs, (numbers[:1], 0), strict=True)), codes: wrong})
