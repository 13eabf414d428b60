"""SageMaker's container contract: ``ronde run`` as the entry point on every host.

Nothing starts agents here: the service starts this same command on each host, and files say who
takes part. Sources: the documentation of training and processing containers, and the files that
its toolkit reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ronde.launch.job import Nodes
from ronde.world import WorldError
from ronde.world.launchers import natural_order
from ronde.world.network import addresses, listen_on

__all__ = ["REASON", "Container", "container", "tell_service"]

REASON = Path("/dev/termination-log")
"""The termination message of a pod."""

_RESOLVE_SECONDS = 900.0  # hosts of a new cluster come up minutes apart


@dataclass(frozen=True)
class Container:
    """What the files of the container say.

    Attributes:
        hosts: all of them, ``algo-2`` before ``algo-10``.
        current: this one.
        interface: the network interface that leads to the others.
        arguments: hyperparameters as arguments of the script.
        environment: folders and channels under the names that scripts know (``SM_MODEL_DIR``, …).
        checkpoints: a folder that the service keeps; None where there is none.
        failure: the file for the reason of a failure.
        inputs: folder of each channel -> how its files are spread over the hosts.
        port: on which the first host's workers meet the others; 0: ``SM_MASTER_PORT``, or 7777.
    """

    hosts: tuple[str, ...]
    current: str
    interface: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    checkpoints: Path | None
    failure: Path
    port: int = 0
    inputs: Mapping[Path, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Place of this host among the hosts."""
        return self.hosts.index(self.current)

    def nodes(self) -> Nodes:
        """Where this host's workers meet those of the others. Waits for the first host's name.

        Raises:
            WorldError: the first host's name does not resolve, or the port is taken.
        """
        if len(self.hosts) == 1:
            return Nodes()
        asked = os.environ.get("SM_MASTER_PORT") or os.environ.get("MASTER_PORT")
        port = self.port or int(asked or 7777)
        address = _resolved(self.hosts[0])
        listener = None
        if self.rank > 0 and address.startswith("127."):
            raise WorldError(
                f"the name of the first host, {self.hosts[0]}, resolves to {address} on "
                f"{self.current}: that is this host itself. Mend /etc/hosts, or name its address."
            )
        if self.rank == 0:
            own = dict(addresses()).get(self.interface, address)
            try:
                listener = listen_on(own, port)
            except OSError as error:
                raise WorldError(
                    f"port {port} of {self.current} cannot be opened ({error.strerror}): another "
                    f"program has it. Set {'PET' if self.port else 'SM'}_MASTER_PORT to a free one "
                    "on all hosts."
                ) from None
            address = own
        return Nodes(
            self.rank,
            len(self.hosts),
            address,
            port,
            listener,
            self.interface,
            patience=_RESOLVE_SECONDS,
            tells=True,
        )

    def tell(self, text: str, rank: int | None = None) -> None:
        """Write the reason of a failure where the service looks for it."""
        _tell(self.failure, text, "" if rank is None else f"rank {rank}: ")


def _tell(file: Path, text: str, who: str = "") -> None:
    """The end of a text that is too long: a traceback names the error there."""
    text, room = text.strip(), 1024 - len(who)  # characters that the service keeps
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(who + (text if len(text) <= room else f"…{text[1 - room :]}"))


def tell_service(text: str, env: Mapping[str, str] = os.environ) -> None:
    """Write why nothing was started where the service looks for it; nothing outside a container."""
    base = Path(env.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    if (base / "input" / "config" / "resourceconfig.json").exists():
        _tell(base / "output" / "failure", text)
    elif (base / "config" / "resourceconfig.json").exists():
        _tell(base / "output" / "message", text)
    elif env.get("KUBERNETES_SERVICE_HOST") and env.get("PET_NNODES") and REASON.exists():
        _tell(REASON, text)


def _resolved(host: str) -> str:
    """The address of a host; names of a new cluster come late."""
    limit, pause = time.monotonic() + _RESOLVE_SECONDS, 0.1
    while True:
        try:
            return socket.gethostbyname(host)
        except OSError as error:
            if time.monotonic() > limit:
                raise WorldError(f"the name of host {host} does not resolve: {error}") from None
            time.sleep(pause)
            pause = min(2 * pause, 10.0)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WorldError(f"{path} cannot be read: {error}") from None


def _value(text: Any) -> str:
    """A hyperparameter as it was given: a string of JSON is unquoted, ``1.10`` stays ``1.10``."""
    if not isinstance(text, str):
        return json.dumps(text)
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _arguments(values: Mapping[str, Any]) -> tuple[str, ...]:
    words: list[str] = []
    for name, text in values.items():
        if not name.startswith(("sagemaker_", "_tuning_")):
            words += [f"--{name}", _value(text)]
    return tuple(words)


def container(env: Mapping[str, str] = os.environ) -> Container | None:
    """Read the container's files; None outside one.

    Raises:
        WorldError: a file is damaged, or this host is not among the hosts.
    """
    base = Path(env.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    inputs = base / "input"
    config = _json(inputs / "config" / "resourceconfig.json")
    processing = config is None
    if processing:  # a processing job has its files elsewhere
        config = _json(base / "config" / "resourceconfig.json")
    if config is None:
        return None
    # the same order on every host, which the service does not promise
    hosts = tuple(sorted(map(str, config.get("hosts") or ()), key=natural_order))
    current = str(config.get("current_host") or "")
    if current not in hosts:
        raise WorldError(
            f"resourceconfig.json says that this host is {current!r}, which is not among its hosts "
            f"{list(hosts)}: the file is not the one of this container."
        )
    variables = {
        "SM_HOSTS": json.dumps(list(hosts)),
        "SM_CURRENT_HOST": current,
        "SM_MODEL_DIR": str(base / "model"),
        "SM_OUTPUT_DATA_DIR": str(base / "output" / "data"),
    }
    data = inputs / "data"
    channels = _json(inputs / "config" / "inputdataconfig.json") or {}
    for name in channels:
        variables[f"SM_CHANNEL_{str(name).upper()}"] = str(data / name)
    kept = _json(inputs / "config" / "checkpointconfig.json")
    checkpoints = base / "checkpoints"
    if kept:
        checkpoints = Path(kept.get("LocalPath") or checkpoints)
    failure = base / "output" / ("message" if processing else "failure")
    return Container(
        hosts,
        current,
        str(config.get("network_interface_name") or "eth0"),
        _arguments(_json(inputs / "config" / "hyperparameters.json") or {}),
        {k: v for k, v in variables.items() if not env.get(k)},
        checkpoints if kept or checkpoints.is_dir() else None,
        failure,
        inputs=_inputs(channels, data) | _processing_inputs(base),
    )


def _inputs(channels: Mapping[str, Mapping[str, Any]], data: Path) -> dict[Path, str]:
    """How the files of a training job's channels are spread over its hosts."""
    return {
        data / name: "Pipe" if c.get("TrainingInputMode") == "Pipe" else c["S3DistributionType"]
        for name, c in channels.items()
        if c.get("S3DistributionType")
    }


def _processing_inputs(base: Path) -> dict[Path, str]:
    """The same of a processing job."""
    spreads = {}
    for each in (_json(base / "config" / "processingjobconfig.json") or {}).get(
        "ProcessingInputs", ()
    ):
        source = each.get("S3Input") or each.get("DatasetDefinition") or {}
        spread = source.get("S3DataDistributionType") or source.get("DataDistributionType")
        pipe = "Pipe" in (source.get("S3InputMode"), source.get("InputMode"))
        if source.get("LocalPath"):
            spreads[Path(source["LocalPath"])] = "Pipe" if pipe else spread or "FullyReplicated"
    return spreads
