"""Read rank and size from the variables each launcher sets.

Readers run from the innermost launcher outwards: ``torchrun`` inside ``srun`` or ``mpirun`` sets
RANK last, so it wins. A RANK set by hand that disagrees with MPI or Slurm is refused. All functions
are pure, so tests cover each launcher with the variables it was measured to set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.world.errors import WorldError

__all__ = [
    "LAUNCHERS",
    "Identity",
    "expand_nodelist",
    "identify",
    "natural_order",
    "repeated",
    "without_launcher",
]

Env = Mapping[str, str]

_SET = re.compile(  # SM_CHANNEL_… and the like are the script's
    r"(RONDE_|MASTER_|SLURM_|OMPI_|PMIX?_|PET_|TORCHELASTIC_)|"
    r"((LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|GROUP_RANK|SM_(HOSTS|CURRENT_HOST)|TRAINING_JOB_NAME)$"
)

_SAGEMAKER_CONFIG = Path("/opt/ml/input/config/resourceconfig.json")


def without_launcher(env: Env) -> dict[str, str]:
    """The variables of a process that is to be alone: without those by which one is a rank."""
    return {name: value for name, value in env.items() if not _SET.match(name)}


@dataclass(frozen=True)
class Identity:
    """What the environment says about this process.

    ``local_rank`` and ``local_size`` are None if the launcher does not set them. ``address`` is
    None if it names no meeting point: then all ranks are on one machine, or the user must name one.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    node: int = 0
    address: str | None = None
    port: int | None = None
    interface: str | None = None


def _number(env: Env, name: str) -> int:
    try:
        value = int(env[name])
    except ValueError:
        raise WorldError(
            f"{name}={env[name]!r} is not a whole number. Unset it, or set it as your "
            "launcher does."
        ) from None
    if value < 0:
        raise WorldError(f"{name}={value} is negative. Unset it, or set it as your launcher does.")
    return value


def _optional(env: Env, name: str) -> int | None:
    return _number(env, name) if env.get(name) else None


def _need(env: Env, launcher: str, names: tuple[str, ...], seen: tuple[str, ...]) -> None:
    """Require all of ``names``; the error lists what is set and what is missing."""
    missing = [n for n in names if not env.get(n)]
    if missing:
        there = ", ".join(f"{n}={env[n]}" for n in seen if env.get(n))
        raise WorldError(
            f"The environment is only partly that of {launcher}: {there} set, but "
            f"{' and '.join(missing)} missing. "
            f"Set {'them' if len(missing) > 1 else 'it'}, or unset the rest to run on one device."
        )


def _check_port(env: Env) -> int | None:
    port = _optional(env, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise WorldError(f"MASTER_PORT={port} is not a port: it must be between 1 and 65535.")
    return port


def _torchrun(env: Env) -> Identity | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not any(env.get(n) for n in names):
        return None
    _need(
        env, "torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)", ("RANK", "WORLD_SIZE"), names
    )
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if size > 1:
        _need(
            env,
            "torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)",
            ("MASTER_ADDR", "MASTER_PORT"),
            names,
        )
    return Identity(
        "torchrun" if env.get("TORCHELASTIC_RUN_ID") else "environment",
        rank,
        size,
        _optional(env, "LOCAL_RANK"),
        _optional(env, "LOCAL_WORLD_SIZE"),
        _optional(env, "GROUP_RANK") or 0,
        env.get("MASTER_ADDR") or None,
        _check_port(env),
    )


def _open_mpi(env: Env) -> Identity | None:
    p = "OMPI_COMM_WORLD_"
    names = (p + "RANK", p + "SIZE", p + "LOCAL_RANK", p + "LOCAL_SIZE")
    if not any(env.get(n) for n in names):
        return None
    _need(env, "Open MPI's mpirun", names, names)
    rank, size, local, local_size = (_number(env, n) for n in names)
    return Identity(
        "mpirun", rank, size, local, local_size, 0, env.get("MASTER_ADDR") or None, _check_port(env)
    )


def _pmi(env: Env) -> Identity | None:
    """MPICH, Intel MPI and other launchers built on Hydra."""
    names = ("PMI_RANK", "PMI_SIZE")
    if not any(env.get(n) for n in names):
        return None
    if env.get("SLURM_STEP_ID") and not (env.get("MPI_LOCALRANKID") or env.get("MPI_LOCALNRANKS")):
        # srun --mpi=pmi2 sets PMI_* too, but Slurm's own variables say more. Hydra's ranks inside
        # an srun step have MPI_LOCAL*.
        return None
    _need(env, "MPICH's or Intel's mpirun", names, names)
    local, local_size = _optional(env, "MPI_LOCALRANKID"), _optional(env, "MPI_LOCALNRANKS")
    rank, size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    return Identity(
        "mpirun", rank, size, local, local_size, 0, env.get("MASTER_ADDR") or None, _check_port(env)
    )


def expand_nodelist(text: str) -> list[str]:
    """Expand a Slurm node list in order: ``n[1-2,07],gpu3`` -> n1, n2, n07, gpu3.

    Parsed here because containers often lack ``scontrol``.
    """
    hosts: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        names = [""]
        for literal, group in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            if literal:
                names = [n + literal for n in names]
                continue
            choices: list[str] = []
            for item in group.split(","):
                low, dash, high = item.partition("-")
                if dash and not (low.isdigit() and high.isdigit()):
                    raise WorldError(
                        f"SLURM_STEP_NODELIST={text!r} is not a list of nodes: {item!r} is "
                        "not a range."
                    )
                if dash:
                    choices += [str(i).zfill(len(low)) for i in range(int(low), int(high) + 1)]
                else:
                    choices.append(item)
            names = [n + c for n in names for c in choices]
        hosts += [n.strip() for n in names if n.strip()]
    return hosts


def repeated(text: str, node: int) -> int | None:
    """A node's number in a list of Slurm's: ``2(x3),1`` at node 3 -> 1; None if it has none."""
    for item in text.split(","):
        number = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if not number:
            return None
        repeat = int(number[2] or 1)
        if node < repeat:
            return int(number[1])
        node -= repeat
    return None


def _slurm(env: Env) -> Identity | None:
    # A bare sbatch shell has SLURM_PROCID=0 and SLURM_NTASKS too: only a step (srun) has ranks.
    if not env.get("SLURM_STEP_ID") or not env.get("SLURM_PROCID"):
        return None
    size = _optional(env, "SLURM_STEP_NUM_TASKS") or _optional(env, "SLURM_NTASKS")
    if size is None:
        _need(env, "Slurm's srun", ("SLURM_STEP_NUM_TASKS",), ("SLURM_STEP_ID", "SLURM_PROCID"))
        raise AssertionError
    if size == 1:
        return None  # an interactive srun --pty, or a job of one task: nothing is distributed
    node = _optional(env, "SLURM_NODEID") or 0
    nodes = expand_nodelist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "")
    address = env.get("MASTER_ADDR") or (nodes[0] if nodes else None)
    if address is None:
        _need(env, "Slurm's srun", ("SLURM_STEP_NODELIST",), ("SLURM_STEP_ID", "SLURM_PROCID"))
    job, step = _optional(env, "SLURM_JOB_ID") or 0, _number(env, "SLURM_STEP_ID")
    return Identity(
        "srun",
        _number(env, "SLURM_PROCID"),
        size,
        _optional(env, "SLURM_LOCALID"),
        repeated(env.get("SLURM_STEP_TASKS_PER_NODE", ""), node),
        node,
        address,
        # Every rank derives the same port from job and step, below the ephemeral range.
        _check_port(env) or 20000 + (job * 131 + step * 17) % 10000,
    )


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``algo-2`` before ``algo-10``."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def _sagemaker(env: Env) -> Identity | None:
    """A SageMaker container: one process a host; rank is the host's place in the sorted list."""
    config: dict[str, Any] = {}
    if not env.get("SM_HOSTS") and not env.get("SM_CURRENT_HOST"):
        if not env.get("TRAINING_JOB_NAME"):
            return None
        try:
            config = json.loads(_SAGEMAKER_CONFIG.read_text())
        except (OSError, ValueError):
            return None
    names = ("SM_HOSTS", "SM_CURRENT_HOST")
    if not config:
        _need(env, "a SageMaker container", names, names)
    try:
        hosts = [str(h) for h in (config.get("hosts") or json.loads(env["SM_HOSTS"]))]
    except (ValueError, TypeError):
        raise WorldError(
            f"SM_HOSTS={env['SM_HOSTS']!r} is not a JSON list of host names."
        ) from None
    me = str(config.get("current_host") or env["SM_CURRENT_HOST"])
    if me not in hosts:
        raise WorldError(
            f"SM_CURRENT_HOST={me} is not among SM_HOSTS={hosts}: the variables contradict "
            "each other."
        )
    # algo-2 before algo-10, the same on every host; the service does not promise an order
    hosts.sort(key=natural_order)
    rank = hosts.index(me)
    return Identity(
        "sagemaker",
        rank,
        len(hosts),
        0,
        1,
        rank,
        env.get("MASTER_ADDR") or hosts[0],
        _check_port(env) or _optional(env, "SM_MASTER_PORT") or 7777,
        str(config.get("network_interface_name") or env.get("SM_NETWORK_INTERFACE_NAME") or "")
        or None,
    )


def _kubernetes(env: Env) -> Identity | None:
    """A pod of Kubeflow or a JobSet with torchrun's variables, in which nobody called torchrun."""
    if not env.get("KUBERNETES_SERVICE_HOST") or not env.get("PET_NNODES") or env.get("RANK"):
        return None  # with RANK, another reader answers
    nodes, workers = _number(env, "PET_NNODES"), env.get("PET_NPROC_PER_NODE") or "1"
    if nodes < 2 and workers == "1":
        return None
    if workers != "1":
        raise WorldError(
            f"PET_NPROC_PER_NODE={workers} asks for several workers in this pod, and python starts "
            "one. Start the script with ronde run or torchrun."
        )
    address = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    rank = "PET_NODE_RANK" if env.get("PET_NODE_RANK") else "JOB_COMPLETION_INDEX"
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")
    if not address or not env.get(rank):
        _need(env, "a Kubernetes pod", names, names)
    port = _optional(env, "PET_MASTER_PORT") or _check_port(env) or 29400
    return Identity(
        "kubernetes", _number(env, rank), nodes, 0, 1, _number(env, rank), address, port
    )


LAUNCHERS: dict[str, Callable[[Env], Identity | None]] = {
    "torchrun": _torchrun,
    "Open MPI": _open_mpi,
    "MPICH or Intel MPI": _pmi,
    "Slurm": _slurm,
    "SageMaker": _sagemaker,
    "Kubernetes": _kubernetes,
}
"""The table: name -> reader of the environment. The first that answers is believed."""


def _check(identity: Identity) -> None:
    if identity.size < 1 or identity.rank >= identity.size:
        raise WorldError(
            f"The environment of {identity.launcher} contradicts itself: rank {identity.rank} in "
            f"a world of {identity.size}. "
            f"Ranks go from 0 to {max(identity.size - 1, 0)}: look at RANK and WORLD_SIZE (or "
            "what your launcher sets)."
        )
    if identity.local_rank is not None:
        limit = identity.local_size if identity.local_size is not None else identity.size
        if identity.local_rank >= limit or limit > identity.size:
            raise WorldError(
                f"The environment of {identity.launcher} contradicts itself: local rank "
                f"{identity.local_rank} of {limit} on this node, "
                f"in a world of {identity.size}. Look at LOCAL_RANK and LOCAL_WORLD_SIZE (or "
                "what your launcher sets)."
            )


def identify(env: Env) -> Identity:
    """Read rank, size and meeting point from an environment.

    Args:
        env: a mapping such as ``os.environ``.

    Returns:
        Identity: that of the first launcher in :data:`LAUNCHERS` that set its variables; rank 0 of
        1, launcher ``"python"``, where there is none.

    Raises:
        WorldError: variables are partial, not numbers, out of range, or two launchers disagree.

    Example:
        >>> identify({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        ...     "MASTER_PORT": "29500"}).rank
        1
        >>> identify({}).launcher
        'python'
    """
    answers = {
        name: answer for name, read in LAUNCHERS.items() if (answer := read(env)) is not None
    }
    if not answers:
        return Identity("python", 0, 1, 0, 1)
    for answer in answers.values():
        _check(answer)
    name, first = next(iter(answers.items()))
    # torchrun, or MPI inside Slurm or SageMaker, runs inside the other's allocation: no conflict.
    # A RANK set by hand that differs is a conflict, and so are two MPIs.
    if first.launcher == "environment":
        others = answers
    elif first.launcher == "mpirun":
        others = {k: v for k, v in answers.items() if v.launcher == "mpirun"}
    else:
        others = {}
    for other_name, other in others.items():
        if (other.rank, other.size) != (first.rank, first.size):
            own = " (RANK, WORLD_SIZE)" if name == "torchrun" else ""
            raise WorldError(
                f"Two launchers contradict each other: {name}{own} says rank {first.rank} of "
                f"{first.size}, {other_name} says rank {other.rank} of {other.size}. Unset the "
                "variables that are left over."
            )
    return first
