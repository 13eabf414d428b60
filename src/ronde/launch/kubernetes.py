"""Kubernetes: manifests of training jobs, and the variables that their pods get.

Every pod runs the same ``ronde run``. The operators set torchrun's variables (``PET_NNODES`` …), by
which the pods find each other; in a JobSet, the manifest sets them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ronde.launch.container import REASON, Container
from ronde.launch.job import Submission
from ronde.world import ArgumentError, WorldError

__all__ = ["KINDS", "Manifest", "pod"]

KINDS = ("pytorchjob", "jobset")
_PORT = 29400


def pod(env: Mapping[str, str] = os.environ) -> Container | None:
    """What the variables of a pod say about the pods of its job; None if they say nothing.

    Raises:
        WorldError: the variables are partial or contradict each other.
    """
    # inside torchrun, it has read them
    if not env.get("KUBERNETES_SERVICE_HOST") or env.get("TORCHELASTIC_RUN_ID"):
        return None
    count = _whole(env, "PET_NNODES")
    if not count:
        return None
    rank = _whole(env, "PET_NODE_RANK")
    if rank is None:
        rank = _whole(env, "JOB_COMPLETION_INDEX") if count > 1 else 0
    address = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    if count == 1:
        address = address or "localhost"
    if rank is None or not address:
        lacks = "PET_NODE_RANK" if rank is None else "PET_MASTER_ADDR"
        raise WorldError(
            f"PET_NNODES={count} says that this is one of {count} pods, but {lacks} is not set. "
            "Set it in the pod's template, or unset PET_NNODES to train in this pod alone."
        )
    if rank >= count:
        raise WorldError(f"PET_NODE_RANK={rank} is not below PET_NNODES={count}.")
    port = _whole(env, "PET_MASTER_PORT") or _whole(env, "MASTER_PORT") or _PORT
    hosts = (address, *(f"pod-{n}" for n in range(1, count)))
    reason = REASON if REASON.exists() else Path(os.devnull)
    return Container(hosts, hosts[rank], "eth0", (), {}, None, reason, port)


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name) or ""
    if not text:
        return None
    if not text.isdecimal():
        raise WorldError(f"{name}={text!r} is not a whole number of nodes: elastic jobs have none.")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Manifest(Submission):
    """A training job of Kubernetes, of one pod a node.

    Attributes:
        kind: ``pytorchjob`` (Kubeflow) or ``jobset``.
        image: the container's image, which holds Ronde and the script.
        limit: seconds after which the job is ended.
        volumes: claims and where they are mounted: ``"claim:/path"``.
        restarts: how often the job may start again; it resumes.
    """

    kind: str
    image: str
    limit: int | None = None
    volumes: Sequence[str] = ()
    restarts: int = 0

    def __post_init__(self) -> None:
        """Refuse what Kubernetes would refuse later."""
        if self.kind not in KINDS:
            raise ArgumentError(f"--kubernetes {self.kind}: expected {' or '.join(KINDS)}.")
        for volume in self.volumes:
            if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*:/\S*", volume):
                raise ArgumentError(f"--volume {volume!r}: expected CLAIM:/PATH, as in runs:/runs.")

    @property
    def _label(self) -> str:
        """The name as Kubernetes takes one: lower-case letters, digits, and dashes."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].strip("-")
        return plain if plain[:1].isalpha() else f"run-{plain}".strip("-")

    @property
    def _workers(self) -> int:
        return self.tasks or self.gpus or 1

    def text(self) -> str:
        """The manifest, as YAML."""
        made = {"pytorchjob": self._pytorchjob, "jobset": self._jobset}
        return yaml.safe_dump(made[self.kind](), sort_keys=False, width=100)

    def _command(self) -> list[str]:
        """What a pod runs. Kubernetes puts variables in for ``$(NAME)``, and ``$`` for ``$$``."""
        return [re.sub(r"\$+(?=\()|\${2,}", r"\g<0>\g<0>", w) for w in self._words()]

    def _words(self) -> list[str]:
        own = ["ronde", "run", "--workers", str(self._workers), "--name", self.name]
        runs = [v.partition(":")[2] for v in self.volumes[:1]]
        kept = ["--runs", f"{runs[0]}/runs"] if runs else []
        return [*own, *kept, *self.options, *self.command]

    def _resources(self) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        if self.gpus:
            limits["nvidia.com/gpu"] = self.gpus
        if self.cores:
            limits["cpu"] = self.cores * self._workers
        return {"limits": limits} if limits else {}

    def _head(self, version: str, kind: str) -> dict[str, Any]:
        return {"apiVersion": version, "kind": kind, "metadata": {"name": self._label}}

    def _pod(self, container: str, variables: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        claims = dict(v.split(":", 1) for v in self.volumes)
        mounts = [{"name": f"volume-{i}", "mountPath": p} for i, p in enumerate(claims.values())]
        own: dict[str, Any] = {
            "name": container,
            "image": self.image,
            "command": self._command(),
            # loading processes share memory
            "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
        }
        if variables:
            own["env"] = list(variables)
        if resources := self._resources():
            own["resources"] = resources
        volumes: list[dict[str, Any]] = [
            {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
            for i, claim in enumerate(claims)
        ]
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        return {"containers": [own], "volumes": volumes}

    def _pytorchjob(self) -> dict[str, Any]:
        policy = "OnFailure" if self.restarts else "Never"

        def replicas(count: int) -> dict[str, Any]:
            template = {"spec": self._pod("pytorch")}
            return {"replicas": count, "restartPolicy": policy, "template": template}

        specs = {"Master": replicas(1)}
        if self.nodes > 1:
            specs["Worker"] = replicas(self.nodes - 1)
        run: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": self.restarts}
        if self.limit:
            run["activeDeadlineSeconds"] = self.limit
        spec = {
            "nprocPerNode": str(self._workers),
            "runPolicy": run,
            "pytorchReplicaSpecs": specs,
        }
        return {**self._head("kubeflow.org/v1", "PyTorchJob"), "spec": spec}

    def _jobset(self) -> dict[str, Any]:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        first = f"{self._label}-node-0-0.{self._label}"
        variables: list[dict[str, Any]] = [
            {"name": "PET_NNODES", "value": str(self.nodes)},
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            {"name": "PET_MASTER_ADDR", "value": first},
            {"name": "PET_MASTER_PORT", "value": str(_PORT)},
        ]
        job: dict[str, Any] = {
            "parallelism": self.nodes,
            "completions": self.nodes,
            "completionMode": "Indexed",
            # a pod that fails is not started again alone: the JobSet starts all
            "backoffLimit": 0,
            "template": {"spec": {"restartPolicy": "Never", **self._pod("ronde", variables)}},
        }
        if self.limit:
            job["activeDeadlineSeconds"] = self.limit
        spec = {
            "failurePolicy": {"maxRestarts": self.restarts},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        }
        return {**self._head("jobset.x-k8s.io/v1alpha2", "JobSet"), "spec": spec}
