"""Hosts through the ``mpirun`` at hand: Open MPI, MPICH or Intel MPI."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ronde.launch.engine import Engine, Host
from ronde.launch.ssh import ssh_meaning
from ronde.world import ArgumentError

__all__ = ["Mpi"]


class Mpi(Engine):
    """Starts each agent as a job of one process, whose input and output ``mpirun`` carries.

    Args:
        config: a configuration file of ssh, over which ``mpirun`` reaches hosts.
    """

    name = "mpirun"

    def __init__(self, config: Path | None = None) -> None:
        found = shutil.which("mpirun") or shutil.which("mpiexec")
        if found is None:
            raise ArgumentError(
                "mpirun was not found: --mpi needs Open MPI, MPICH or Intel MPI. --hosts alone "
                "needs ssh only."
            )
        self._mpirun = found
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20)
        said = (told.stdout + told.stderr).lower()
        self._open = any(name in said for name in ("open mpi", "openrte", "prrte"))
        if not self._open and not any(n in told.stdout.lower() for n in ("hydra", "intel")):
            raise ArgumentError(
                f"{found} is none of Open MPI, MPICH and Intel MPI, as far as its --version tells."
            )
        self._ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]
        if config is not None:
            self._ssh += ["-F", str(config.absolute())]
        if self._open and os.geteuid() == 0:
            os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
            os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        # Options of ssh, under the names of Open MPI 4 and 5, of MPICH, and of Intel MPI. Open MPI
        # tells of a lost agent at once, not after the two seconds that its peers would get.
        os.environ["OMPI_MCA_plm_rsh_agent"] = shlex.join(self._ssh)
        os.environ["PRTE_MCA_plm_ssh_agent"] = shlex.join(self._ssh)
        os.environ["OMPI_MCA_odls_base_sigkill_timeout"] = "0"
        os.environ["PRTE_MCA_odls_base_sigkill_timeout"] = "0"
        os.environ["HYDRA_LAUNCHER_EXTRA_ARGS"] = shlex.join(self._ssh[1:])
        os.environ["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = shlex.join(self._ssh[1:])

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """``mpirun`` with one process on one host."""
        if self._open:
            return [self._mpirun, "--bind-to", "none", "--host", host.name, "-n", "1", *agent]
        return [self._mpirun, "-launcher", "ssh", "-hosts", host.name, "-n", "1", *agent]

    def meaning(self, host: Host, status: int, printed: str) -> str:
        """What mpirun, or ssh below it, meant."""
        if "could not be found" in printed.lower() or "no such file" in printed.lower():
            return ""
        return ssh_meaning(host, printed)
