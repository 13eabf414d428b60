"""Hosts through the ``mpirun`` at hand: Open MPI, MPICH or Intel MPI."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ronde.launch.engine import Engine, Host, ssh_meaning
from ronde.world import ArgumentError
from ronde.world.processes import temporary_prefix

__all__ = ["Mpi"]

_NO_PYTHON = ("could not access", "could not be found", "execvp error on file")
_SLOTS = (
    "mpirun has no free slot there: the scheduler's allocation that this is called in lacks the "
    "host, or is full. Name hosts of the allocation, or leave --mpi out."
)
_NO_SLOT = (
    "already filled",
    "not enough slots",
    "not included in the allocation",
    "not present in the allocation",
)


class Mpi(Engine):
    """Starts each agent as a job of one process, whose input and output ``mpirun`` carries.

    Args:
        config: a configuration file of ssh, over which ``mpirun`` reaches hosts.
    """

    name = "mpirun"

    def __init__(self, config: Path | None = None) -> None:
        mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
        if mpirun is None:
            raise ArgumentError(
                "mpirun was not found: --mpi needs Open MPI, MPICH or Intel MPI. --hosts alone "
                "needs ssh only."
            )
        self._mpirun, self._python = mpirun, ""
        asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20)
        said = (asked.stdout + asked.stderr).lower()
        self._open = any(name in said for name in ("open mpi", "openrte", "prrte"))
        if not self._open and not any(n in asked.stdout.lower() for n in ("hydra", "intel")):
            raise ArgumentError(
                f"{mpirun} is none of Open MPI, MPICH and Intel MPI, as far as its --version tells."
            )
        # mpirun of Open MPI 5 does not tell the agent that the launcher is gone
        dies = shutil.which("setpriv")
        self._dies = [] if dies is None else [dies, "--pdeathsig", "KILL"]
        self._ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]
        if config is not None:
            self._ssh += ["-F", str(config.absolute())]
        if self._open and os.geteuid() == 0:
            os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
            os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        # mpiruns that share a folder for their sockets take it from each other as they start: Open
        # MPI 4 removes it where it is empty
        self._folder = tempfile.TemporaryDirectory(
            prefix=temporary_prefix(), ignore_cleanup_errors=True
        )
        over, options = shlex.join(self._ssh), shlex.join(self._ssh[1:])
        os.environ.update(
            {
                "OMPI_MCA_plm_rsh_agent": over,  # Open MPI 4
                "PRTE_MCA_plm_ssh_agent": over,  # Open MPI 5
                "HYDRA_LAUNCHER_EXTRA_ARGS": options,  # MPICH
                "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": options,
                # Open MPI: tell of a lost agent at once, not after two seconds for its peers
                "OMPI_MCA_odls_base_sigkill_timeout": "0",
                "PRTE_MCA_odls_base_sigkill_timeout": "0",
            }
        )

    def command(self, host: Host, agent: Sequence[str]) -> list[str]:
        """``mpirun`` with one process on one host."""
        self._python = agent[0]
        options = ["--bind-to", "none", "--host"] if self._open else ["-launcher", "ssh", "-hosts"]
        return [*self._start(host.name), *options, host.name, "-n", "1", *agent]

    def world(
        self, hosts: Sequence[tuple[str, int]], argv: Sequence[str], variable: str
    ) -> list[str]:
        """``mpirun`` with one process a worker, in the order of the hosts; ``variable`` reaches
        them. A host without a name is this machine.
        """
        if self._open:
            # as many as are asked for, whatever slots a scheduler's allocation has
            words = [*self._start("world"), "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
            passed = ["-x", variable]
            passed += ["-x", "PYTHONPATH"] if os.environ.get("PYTHONPATH") else []
            for name, n in hosts:
                where = ["--host", f"{name}:{n}"] if name else []
                words += [*where, *passed, "-n", str(n), *argv, ":"]
            return words[:-1]
        count, named = sum(n for _, n in hosts), ",".join(f"{h}:{n}" for h, n in hosts if h)
        where = ["-launcher", "ssh", "-hosts", named] if named else []
        return [*self._start("world"), *where, "-genvlist", variable, "-n", str(count), *argv]

    def _start(self, folder: str) -> list[str]:
        """``mpirun``, with a folder of its own for its sockets."""
        own = Path(self._folder.name, folder)
        own.mkdir(exist_ok=True)
        folders = [f"{name}_local_tmpdir_base={own}" for name in ("OMPI_MCA_orte", "PRTE_MCA_prte")]
        return ["env", *folders, *self._dies, self._mpirun]

    def close(self) -> None:
        """Remove what the mpiruns had."""
        self._folder.cleanup()

    def meaning(self, host: Host, status: int, printed: str) -> str:
        """What mpirun, or ssh below it, meant."""
        said = re.sub(r"\s+", " ", printed.lower())
        if self._python.lower() in said and any(words in said for words in _NO_PYTHON):
            return f"there is no {self._python}. Name the Python there with --python."
        has_none = any(words in said for words in _NO_SLOT)
        return ssh_meaning(host, printed) or (_SLOTS if has_none else "")
