"""Hosts that a service starts: files and names that contradict each other."""

from __future__ import annotations

import json
import socket

import pytest

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
