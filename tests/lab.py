"""Real hosts on this machine: network namespaces with their own address, name, processes and sshd.

Needs root, iproute2, openssh and util-linux; :func:`missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

TOOLS = ("ip", "nsenter", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd")


def missing() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    absent = [t for t in TOOLS if shutil.which(t) is None]
    if absent:
        return f"{', '.join(absent)} not found: hosts need iproute2, openssh and util-linux"
    alone = ["unshare", "-n", "-m", "-p", "-f", "-u"]
    for words in (["true"], ["ip", "link", "add", "b0", "type", "bridge"]):
        if subprocess.run([*alone, *words], capture_output=True).returncode:
            return "this machine makes no namespaces, or no bridges in them"
    return ""


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


def _free_net(first: int) -> str:
    """A /24 that no interface here has: a run that was killed leaves its bridge, and packets would
    go to the hosts behind that.
    """
    found = {a.address.rpartition(".")[0] for each in psutil.net_if_addrs().values() for a in each}
    nets = (f"10.{77 + n // 200 % 50}.{16 + n % 200}" for n in range(first, first + 10_000))
    return next(net for net in nets if net not in found)


class Lab:
    """Hosts ``<tag>1`` … ``<tag>N``; ``ssh_config`` is what reaches them."""

    def __init__(self, folder: Path, count: int, private: Path | None = None) -> None:
        self.folder, self.count, self.private = folder, count, private
        self.tag = f"r{os.getpid() % 100_000}"
        self.net = _free_net(os.getpid())
        self.names = [f"{self.tag}-{i}" for i in range(1, count + 1)]
        self.ssh_config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self.pids: dict[str, int] = {}

    def address(self, name: str) -> str:
        return f"{self.net}.{10 + int(name.rpartition('-')[2])}"

    def up(self) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        for key in ("host_key", "id"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        shutil.copy(folder / "id.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            f"Port 22\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nStrictModes no\n"
            "PermitRootLogin prohibit-password\nUsePAM no\nPidFile none\nMaxStartups 100\n"
        )
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        self.known_hosts.write_text(
            "".join(f"{n},{self.address(n)} {public}\n" for n in self.names)
        )
        named = "".join(f"Host {n}\n  HostName {self.address(n)}\n" for n in self.names)
        self.ssh_config.write_text(
            f"{named}Host *\n  User root\n  IdentityFile {folder}/id\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  StrictHostKeyChecking yes\n"
            "  LogLevel ERROR\n"
        )
        lines = "".join(f"{self.address(n)} {n}\n" for n in self.names)
        here = f"{self.net}.1 {os.uname().nodename}\n"
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{here}{lines}")
        _do("ip", "link", "add", f"{self.tag}b", "type", "bridge")
        _do("ip", "addr", "add", f"{self.net}.1/24", "dev", f"{self.tag}b")
        _do("ip", "link", "set", f"{self.tag}b", "up")
        for i, name in enumerate(self.names, 1):
            end = f"{self.tag}v{i}"
            _do("ip", "netns", "add", name)
            _do("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("ip", "link", "set", end, "master", f"{self.tag}b", "up")
            _do("ip", "-n", name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _do("ip", "-n", name, "link", "set", "eth0", "up")
            self.boot(name)

    def boot(self, name: str) -> None:
        own = f"mount -t tmpfs tmpfs {self.private}; " if self.private else ""
        script = (
            f"hostname {name}; mount --bind {self.folder}/hosts /etc/hosts; "
            "mount -t tmpfs tmpfs /run; mkdir -p /run/sshd; "
            f"mount -t tmpfs -o size=1g tmpfs /dev/shm; {own}"
            f"exec /usr/sbin/sshd -D -e -f {self.folder}/sshd_config"
        )
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{name}", "unshare", "-u", "-m", "-p", "-f"]
                + ["--kill-child", "--mount-proc", "bash", "-c", script],
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.pids[name] = process.pid
        limit = time.monotonic() + 60
        while b"listening" not in log.read_bytes():
            if time.monotonic() > limit:
                raise RuntimeError(log.read_text())
            time.sleep(0.02)

    def lose(self, name: str) -> None:
        """Power off: every process of the host dies at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.pids[name])
            for process in top.children():
                process.send_signal(signal.SIGKILL)
            top.kill()
            top.wait(5)

    def cut(self, name: str) -> None:
        """Pull the cable."""
        _do("ip", "link", "set", f"{self.tag}v{name.rpartition('-')[2]}", "down")

    def rate(self, name: str, rate: str | None) -> None:
        """Shape both ways of a host's link; None takes the limit away."""
        end = f"{self.tag}v{name.rpartition('-')[2]}"
        for where in (["tc", "-n", name, "qdisc"], ["tc", "qdisc"]):
            device = "eth0" if "-n" in where else end
            if rate is None:
                _do(*where, "del", "dev", device, "root")
            else:
                limit = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
                _do(*where, "replace", "dev", device, "root", *limit)

    def heal(self, name: str) -> None:
        """Put the cable back."""
        _do("ip", "link", "set", f"{self.tag}v{name.rpartition('-')[2]}", "up")

    def ssh(self, name: str, command: str, seconds: float = 20.0) -> str:
        done = subprocess.run(
            ["ssh", "-F", str(self.ssh_config), name, command],
            check=True,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        return done.stdout

    def down(self) -> None:
        for i, name in enumerate(self.names, 1):
            with contextlib.suppress(KeyError, psutil.TimeoutExpired):
                self.lose(name)
            for words in (("netns", "del", name), ("link", "del", f"{self.tag}v{i}")):
                subprocess.run(["ip", *words], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.tag}b"], capture_output=True)


SLURM_TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")


def no_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    absent = [
        t for t in SLURM_TOOLS if shutil.which(t, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    return missing() or (
        f"{', '.join(absent)} not found: install slurm-wlm and munge" if absent else ""
    )


class SlurmLab:
    """A Slurm on the hosts of a lab, its controller here; ``conf`` is its configuration."""

    def __init__(self, hosts: Lab) -> None:
        self._hosts = hosts
        self._folder = hosts.folder / "slurm"
        self.conf = self._folder / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.conf)}

    def up(self) -> None:
        folder, hosts = self._folder, self._hosts
        for name in ("state", "log", "munge", *(f"spool/{n}" for n in hosts.names)):
            (folder / name).mkdir(parents=True)
        munge = folder / "munge"
        munge.chmod(0o700)
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        _do(
            "munged",
            "--force",
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        nodes = "".join(
            f"NodeName={n} NodeAddr={hosts.address(n)} CPUs=4 State=UNKNOWN\n" for n in hosts.names
        )
        port = 20_000 + os.getpid() % 10_000
        self.conf.write_text(
            f"ClusterName=ronde\nSlurmctldHost={os.uname().nodename.split('.')[0]}({hosts.net}.1)\n"
            "SlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\n"
            f"AuthInfo=socket={munge}/socket,cred_expire=5\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid\n"
            f"SlurmctldLogFile={folder}/log/slurmctld.log\n"
            f"SlurmdLogFile={folder}/log/slurmd.%n.log\n"
            f"SlurmctldPort={port}\nSlurmdPort={port + 1}\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\n"
            "MpiDefault=none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n"
            "ReturnToService=2\nSlurmdTimeout=5\nKillWait=5\nJobRequeue=1\n"
            "SlurmdParameters=config_overrides\n"
            "SchedulerParameters=sched_interval=1\nAccountingStorageType=accounting_storage/none\n"
            f"JobAcctGatherType=jobacct_gather/none\n{nodes}"
            "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        )
        _do("slurmctld", "-c", "-f", str(self.conf))
        for name in hosts.names:
            hosts.ssh(name, f"SLURM_CONF={self.conf} slurmd -f {self.conf} -N {name}")
        limit = time.monotonic() + 60
        idle = ["sinfo", "-h", "-N", "-t", "idle"]
        while True:
            said = subprocess.run(
                idle, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=20
            ).stdout
            if len(said.splitlines()) == len(hosts.names):
                return
            if time.monotonic() > limit:
                raise RuntimeError(f"Slurm did not come up: {said}")
            time.sleep(0.2)

    def down(self) -> None:
        for file in (self._folder / "slurmctld.pid", self._folder / "munge" / "pid"):
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                process = psutil.Process(int(file.read_text()))
                process.kill()
                process.wait(5)


@contextlib.contextmanager
def slurm(hosts: Lab) -> Iterator[SlurmLab]:
    """Slurm on hosts for the time of a block."""
    made = SlurmLab(hosts)
    try:
        made.up()
        yield made
    finally:
        made.down()


@contextlib.contextmanager
def lab(folder: Path, count: int, private: Path | None = None) -> Iterator[Lab]:
    """Hosts for the time of a block. ``private``: a folder that each host has for itself."""
    made = Lab(folder, count, private)
    try:
        made.up()
        yield made
    finally:
        made.down()
