"""Manifests that Kubernetes would take, and variables of pods."""

from __future__ import annotations

import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from processes import ronde_batch
from ronde.cli.launch_plan import RunOptions, plan_launch
from ronde.launch.kubernetes import pod
from ronde.world import ArgumentError, WorldError


def thing(required: str = "", **properties):
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def several(items, least: int = 1):
    return {"type": "array", "items": items, "minItems": least}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 52}
QUANTITY = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}]}
RESOURCES = thing(limits={"type": "object", "additionalProperties": QUANTITY})
VARIABLE = thing(
    "name",
    name={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    value={"type": "string"},
    valueFrom=thing("fieldRef", fieldRef=thing("fieldPath", fieldPath=TEXT)),
)
CONTAINER = thing(
    "name image",
    name=LABEL,
    image=TEXT,
    command=several(TEXT),
    env=several(VARIABLE),
    resources=RESOURCES,
    volumeMounts=several(
        thing("name mountPath", name=LABEL, mountPath={"type": "string", "pattern": "^/"})
    ),
)
VOLUME = {
    **thing(
        "name",
        name=LABEL,
        emptyDir=thing(medium={"enum": ["", "Memory"]}),
        persistentVolumeClaim=thing("claimName", claimName=TEXT),
    ),
    "minProperties": 2,
    "maxProperties": 2,
}
POD = thing(
    "containers",
    containers=several(CONTAINER),
    volumes=several(VOLUME),
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
)
TEMPLATE = thing("spec", spec=POD)
REPLICAS = thing(
    "replicas template",
    replicas=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=TEMPLATE,
)
JOB = thing(
    "template",
    parallelism=COUNT,
    completions=COUNT,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=COUNT,
    activeDeadlineSeconds=COUNT,
    template=TEMPLATE,
)
SPECS = {
    "pytorchjob": (
        "kubeflow.org/v1",
        "PyTorchJob",
        thing(
            "pytorchReplicaSpecs",
            nprocPerNode=TEXT,
            runPolicy=thing(
                cleanPodPolicy={"enum": ["None", "Running", "All"]},
                backoffLimit=COUNT,
                activeDeadlineSeconds=COUNT,
            ),
            pytorchReplicaSpecs=thing("Master", Master=REPLICAS, Worker=REPLICAS),
        ),
    ),
    "jobset": (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        thing(
            "replicatedJobs",
            failurePolicy=thing(maxRestarts=COUNT),
            replicatedJobs=several(
                thing("name template", name=LABEL, replicas=COUNT, template=thing("spec", spec=JOB))
            ),
        ),
    ),
}


def schema(kind: str):
    version, name, spec = SPECS[kind]
    return thing(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": name},
        metadata=thing("name", name=LABEL),
        spec=spec,
    )


def submit(*words: str) -> list[str]:
    return ["submit", "--kubernetes", *words, "--image", "me/train:1", "--dry-run"]


def expanded(word: str) -> str:
    """What Kubernetes makes of a word of a command, in a pod without variables."""
    found = re.findall(r"\$\$|\$\([^)]*\)|.", word)
    assert not any(part.startswith("$(") for part in found), word
    return "".join("$" if part == "$$" else part for part in found)


def test_manifests(tmp_path):
    full = ["--nodes", "4", "--gpus", "8", "--cores", "4", "--time", "1-00"]
    odd = ["$(x)", "a b", "$$", "$$(x)", "$HOME", "a$", "5$$$(y"]
    named = ["--name", "Big_Run.2"]
    wrong = [
        ["submit", "--kubernetes", "--dry-run", "train.py"],
        ["submit", "--kubernetes", "--image", "a", "train.py"],
        [*submit(), "--partition", "p", "train.py"],
        [*submit(), "--volume", "a", "train.py"],
        ["submit", "--image", "a", "--dry-run", "train.py"],
        [*submit("pytorchjobs"), "train.py"],
        [*submit("trainjob"), "train.py"],
    ]
    commands = [
        *([*submit(kind), "train.py"] for kind in SPECS),
        *([*submit(k), *full, *named, "--requeue", "train.py", *odd] for k in SPECS),
        [*submit(), "--volume", "code:/code", "--volume", "data:/data", "-m", "my.train"],
        *wrong,
    ]
    (tmp_path / "train.py").touch()
    done = ronde_batch(commands, tmp_path)
    for kind, small, big in zip(SPECS, done, done[len(SPECS) :], strict=False):
        for each in (small, big):
            assert each.returncode == 0, each.stderr
            jsonschema.Draft202012Validator(schema(kind)).validate(yaml.safe_load(each.stdout))
        (told,) = re.findall(r"command:\n((?: *- .*\n)+)", big.stdout)[:1]
        assert [expanded(word) for word in yaml.safe_load(told)][-len(odd) :] == odd
        assert "- $$(x)\n" in told and "- $HOME\n" in told
        assert "OnFailure" in big.stdout or "maxRestarts: 10" in big.stdout
        assert "note: --requeue resumes" in big.stderr
        assert yaml.safe_load(big.stdout)["metadata"] == {"name": "big-run-2"}
        assert "86400" in big.stdout and "nvidia.com/gpu: 8" in big.stdout
    made = yaml.safe_load(done[4].stdout)
    jsonschema.Draft202012Validator(schema("pytorchjob")).validate(made)
    (container,) = made["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    run = "ronde run --workers 1 --name my.train --runs /code/runs -m my.train"
    assert container["command"] == run.split()
    made["spec"]["typo"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema("pytorchjob")).validate(made)
    told = ["--image", "--dry-run", "--partition is for Slurm", "CLAIM:/PATH", "are for"]
    told += 2 * ["expected pytorchjob or jobset."]
    for each, text in zip(done[-len(wrong) :], told, strict=True):
        assert each.returncode == 2 and text in each.stderr, each


def test_variables_of_pods():
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert pod({}) is None and pod(inside) is None
    assert pod({"PET_NNODES": "2"}) is None
    both = {**inside, "PET_NNODES": "3", "PET_MASTER_ADDR": "first"}
    found = pod({**both, "PET_NODE_RANK": "2", "PET_MASTER_PORT": "1234"})
    assert (found.rank, len(found.hosts), found.hosts[0], found.port) == (2, 3, "first", 1234)
    assert pod({**both, "JOB_COMPLETION_INDEX": "1"}).rank == 1
    assert pod({**both, "TORCHELASTIC_RUN_ID": "x", "PET_NODE_RANK": "1"}) is None
    assert pod({**inside, "PET_NNODES": "1"}).rank == 0
    for wrong, told in (
        ({}, "PET_NODE_RANK is not set"),
        ({"PET_NODE_RANK": "3"}, "not below PET_NNODES=3"),
        ({"PET_NODE_RANK": "1", "PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not set"),
        ({"PET_NNODES": "1:4"}, "elastic jobs have none"),
    ):
        with pytest.raises(WorldError, match=told):
            pod({**both, **wrong})


def test_options_that_several_pods_cannot_take(monkeypatch, tmp_path):
    (tmp_path / "train.py").write_text("")
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "2", "PET_MASTER_ADDR": "a"}
    for name, value in {**inside, "PET_NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    script = [str(tmp_path / "train.py")]
    for option, value in {
        "restarts": 1,
        "until": "5",
        "stop_on": "nan",
        "time_limit": "1h",
    }.items():
        with pytest.raises(ArgumentError, match="is not for containers of several hosts"):
            plan_launch(RunOptions(arguments=script, **{option: value}))
    kept_nowhere = RunOptions(arguments=script, runs=Path("none"))
    assert plan_launch(kept_nowhere).options.name is None
