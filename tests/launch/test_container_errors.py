"""Hosts that a service starts: files and names that contradict each other."""

from __future__ import annotations

import json
import re
import socket

import pytest

from ronde.cli.app import app
from ronde.launch.container import Container, container
from ronde.launch.kubernetes import pod
from ronde.world import WorldError


def files(folder, **config):
    (folder / "input" / "config").mkdir(parents=True)
    (folder / "input" / "config" / "resourceconfig.json").write_text(json.dumps(config))
    return {"SAGEMAKER_BASE_DIR": str(folder)}


def test_an_unknown_host(tmp_path):
    env = files(tmp_path, current_host="algo-3", hosts=["algo-1", "algo-2"])
    with pytest.raises(WorldError, match=r"this host is 'algo-3', which is not among its hosts"):
        container(env)
    (tmp_path / "input" / "config" / "resourceconfig.json").write_text("{")
    with pytest.raises(WorldError, match=r"resourceconfig.json cannot be read"):
        container(env)


def test_hyperparameters_stay_as_they_are(tmp_path):
    """Strings in quotes, as one SDK writes them, and without, as others do."""
    values = {"version": "1.10", "quoted": '"1.10"', "lr": "1e-3", "flag": "true", "n": 3}
    values |= {"layers": "[1,2]", "name": "007", "nan": "NaN", "text": "a b", "sagemaker_x": "1"}
    env = files(tmp_path, current_host="a", hosts=["a"])
    (tmp_path / "input" / "config" / "hyperparameters.json").write_text(json.dumps(values))
    told = container(env).arguments
    assert dict(zip(told[::2], told[1::2], strict=True)) == {
        "--version": "1.10",
        "--quoted": "1.10",
        "--lr": "1e-3",
        "--flag": "true",
        "--n": "3",
        "--layers": "[1,2]",
        "--name": "007",
        "--nan": "NaN",
        "--text": "a b",
    }


def test_the_end_of_a_traceback_is_what_the_service_keeps(tmp_path):
    box = container(files(tmp_path, current_host="a", hosts=["a"]))
    box.tell("Traceback\n" + 2000 * "line\n" + "ValueError: the cause", 3)
    said = (tmp_path / "output" / "failure").read_text()
    assert len(said) == 1024 and said.startswith("rank 3: …") and said.endswith(": the cause")
    box.tell("ValueError: short", 0)
    assert (tmp_path / "output" / "failure").read_text() == "rank 0: ValueError: short"


@pytest.mark.parametrize("processing", [False, True])
def test_refusals_reach_the_service(tmp_path, monkeypatch, processing):
    script = tmp_path / "train.py"
    script.write_text("")
    lines = {
        "run --plan pipeline=3 --workers 2": "workers in multiples of 3",
        "run --time-limit soon": "soon",
        "run --hang-timeout soon": "Invalid value for .--hang-timeout",
        "run --wrokers 2": "Did you mean --workers",
        "run --workers 9000": "9000",
    }
    monkeypatch.chdir(tmp_path)
    for line, told in lines.items():
        base = tmp_path / line
        env = files(base, current_host="a", hosts=["a"])
        if processing:
            (base / "input" / "config").rename(base / "config")
        monkeypatch.setenv("SAGEMAKER_BASE_DIR", env["SAGEMAKER_BASE_DIR"])
        with pytest.raises(Exception):
            app([*line.split(), str(script)], standalone_mode=False)
        reason = base / "output" / ("message" if processing else "failure")
        assert re.search(told, reason.read_text()), line
    base = tmp_path / "damaged"
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", files(base, hosts=["a"])["SAGEMAKER_BASE_DIR"])
    with pytest.raises(WorldError):
        app(["run", str(script)], standalone_mode=False)
    assert "not among its hosts" in (base / "output" / "failure").read_text()
    with pytest.raises(Exception):
        app(["show", "nothing", "--runs", str(tmp_path / "none")], standalone_mode=False)
    assert "not among its hosts" in (base / "output" / "failure").read_text()


def test_a_port_that_is_taken(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("SM_MASTER_PORT", str(port))
        env = files(tmp_path, current_host="localhost", hosts=["localhost", "other"])
        env_of_pod = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost"}
        env_of_pod |= {"PET_MASTER_PORT": str(port), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        for found, cure in ((container(env), "SM"), (pod(env_of_pod), "PET")):
            here = Container(found.hosts, found.current, "lo", (), {}, None, tmp_path, found.port)
            with pytest.raises(WorldError) as error:
                here.nodes()
            assert f"port {port} of localhost cannot be opened" in str(error.value)
            assert f"Set {cure}_MASTER_PORT to a free one" in str(error.value)


def test_a_first_host_whose_name_leads_to_this_one(tmp_path):
    """As Debian's /etc/hosts does for the host's own name, where a list of hosts was copied."""
    found = container(files(tmp_path, current_host="other", hosts=["localhost", "other"]))
    with pytest.raises(WorldError, match=r"localhost, resolves to 127.0.0.1 on other: that is"):
        found.nodes()
