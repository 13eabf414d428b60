"""``ronde ship install --hosts``: every host verifies for itself; one that fails is named, the others go on."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from lab import lab, missing
from processes import python, ronde_run
from ronde.ship import ShipError, current_bundle, install_bundle, make_key, write_bundle
from ronde.ship.delivery import fulfill, pack_order
from ronde.world import RondeError


def write_double(folder: Path) -> None:
    """A model that doubles two columns, with a stored sample."""
    shape = ["batch", 2]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    x = np.float32([[1, 2], [3, 4]])
    save_file({"input.x": x, "output.0": 2 * x}, folder / "expected.safetensors")


def test_a_device_needs_no_torch_and_trusts_nobody(tmp_path: Path) -> None:
    key, public, root = tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "root"
    make_key(key, public)
    write_bundle(tmp_path / "b", write_double, {"limits": [0.0]}, key=key)
    with (tmp_path / "order").open("wb") as file:
        pack_order(file, str(root), tmp_path / "b", public)
    code = (
        "import sys; from ronde.ship.delivery import fulfill\n"
        "print(fulfill(open('order', 'rb')), 'torch' in sys.modules)"
    )
    assert python(["-c", code], tmp_path).stdout == "1 False\n"
    assert current_bundle(root, public).serial == 1
    data = (tmp_path / "order").read_bytes()
    (tmp_path / "order").write_bytes(data.replace(b"Add", b"Mul", 1))
    root.rename(tmp_path / "old")
    with (tmp_path / "order").open("rb") as file, pytest.raises(ShipError, match="was changed"):
        fulfill(file)
    assert not root.exists()


def test_an_order_that_is_cut_or_hostile_changes_nothing(tmp_path: Path) -> None:
    key, public, root = tmp_path / "key.pem", tmp_path / "public.pem", tmp_path / "root"
    make_key(key, public)
    for serial in (1, 2, 3):
        path = tmp_path / f"b{serial}"
        write_bundle(path, write_double, {"limits": [0.0]}, key=key, serial=serial)
    install_bundle(tmp_path / "b1", root, public)
    install_bundle(tmp_path / "b2", root, public)
    packed = io.BytesIO()
    pack_order(packed, str(root), tmp_path / "b3", public)
    whole = packed.getvalue()
    end = len(whole.rstrip(b"\0"))
    for cut in range(0, end, 512):  # a connection that ends there: at worst, it looks like no more
        with pytest.raises((RondeError, OSError, tarfile.TarError)):
            fulfill(io.BytesIO(whole[:cut]))
        assert current_bundle(root, public).serial == 2

    def member(name: str, kind: bytes, link: str = "") -> Callable[[tarfile.TarFile], None]:
        def add(tar: tarfile.TarFile) -> None:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, link, 2 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"xx"))

        return add

    for more, text in {
        member("../../out", tarfile.REGTYPE): "outside the destination",
        member("bundle/../../out", tarfile.REGTYPE): "outside the destination",
        member("bundle/out", tarfile.SYMTYPE, "/etc/passwd"): "absolute path",
        member("bundle/out", tarfile.SYMTYPE, "../../out"): "outside the destination",
        member("bundle/out", tarfile.LNKTYPE, "../out"): "outside the destination",
        member("bundle/out", tarfile.SYMTYPE, "about.json"): "out is a link: a bundle has none",
        member("bundle/out", tarfile.DIRTYPE): "out is no file",
        member("bundle/out", tarfile.CHRTYPE): "is a special file",
        member("bundle/out", tarfile.FIFOTYPE): "is a special file",
        member("bundle/out", tarfile.REGTYPE): "out is not the bundle's",
        member("bundle/model.onnx", tarfile.REGTYPE): "model.onnx was changed",
    }.items():
        order = tmp_path / "order.tar"
        order.write_bytes(whole)
        with tarfile.open(order, "a") as tar:
            more(tar)
        with pytest.raises((RondeError, tarfile.TarError), match=text):
            fulfill(io.BytesIO(order.read_bytes()))
        assert current_bundle(root, public).serial == 2 and not (tmp_path / "out").exists()
    assert fulfill(io.BytesIO(whole + b"more" * 5000)) == 3  # behind its end, a tar is not read


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_fleet_installs_and_rolls_back(tmp_path: Path) -> None:
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    make_key(key, public)
    for serial in (1, 2, 3):
        write_bundle(
            tmp_path / f"b{serial}", write_double, {"limits": [0.0]}, key=key, serial=serial
        )
    own = tmp_path / "own"  # each host's own disk
    own.mkdir()
    with lab(tmp_path / "lab", 3, own) as hosts:
        first, second, third = hosts.names

        def fleet(*words: str, on: str = ",".join(hosts.names)):
            ssh = ["--ssh-config", str(hosts.ssh_config), "--hosts", on]
            return ronde_run(["ship", *words, *ssh], tmp_path, 120)

        def install(serial: int, **more: str):
            words = ("install", f"b{serial}", "--key", "public.pem", "--to", f"{own}/a b")
            return fleet(*words, **more)

        def serials() -> list[str]:
            link = f"readlink '{own}/a b/current' || echo none"
            return [hosts.ssh(n, link).strip().removeprefix("serial-") for n in hosts.names]

        done = install(1)
        assert done.returncode == 0, done.stdout + done.stderr
        assert serials() == ["1", "1", "1"]
        assert all(f"{n} serial 1 is current" in " ".join(done.stdout.split()) for n in hosts.names)
        assert install(2, on=f"{first},{second}").returncode == 0
        hosts.ssh(second, f"touch '{own}/full' && mount -o remount,ro {own}")  # a disk that fails
        done = install(3)
        assert done.returncode == 1 and serials() == ["3", "2", "3"], done.stdout + done.stderr
        assert "Read-only file system" in done.stderr and second in done.stderr
        assert f"1 of 3 hosts failed and keep what they had. Try them again with --hosts {second}." in done.stderr  # fmt: skip
        hosts.ssh(second, f"mount -o remount,rw {own}")
        done = install(3)
        assert done.returncode == 1 and serials() == ["3", "3", "3"]
        assert done.stderr.count("not newer than one installed before (serial 3, there was 3)") == 2
        done = fleet("rollback", f"{own}/a b")
        assert done.returncode == 0 and serials() == ["2", "2", "1"], done.stdout + done.stderr
        hosts.lose(third)
        done = fleet("rollback", f"{own}/a b")
        assert (
            done.returncode == 1 and done.stderr.count("has no bundle before the current one") == 2
        )
        assert (
            "nothing listens for ssh" in done.stderr
            and f"--hosts {first},{second},{third}" in done.stderr
        )
        with (tmp_path / "b3" / "model.onnx").open("ab") as file:
            file.write(b"x")
        assert "model.onnx was changed after the bundle was made" in install(3).stderr


def test_a_host_whose_python_cannot_be_started_is_named(tmp_path: Path) -> None:
    words = ["ship", "rollback", "root", "--hosts", "localhost", "--python", "/no/python"]
    done = ronde_run(words, tmp_path)
    assert done.returncode == 1 and "/no/python cannot be started: No such file" in done.stderr
    assert "Traceback" not in done.stderr and "--hosts localhost" in done.stderr
