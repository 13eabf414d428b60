"""A ledger in a folder: state is a file's name, and each move is one ``rename``.

    todo/KEY.F.T           to be done; F times failed, T times taken from a lost owner
    lease/KEY.F.T.OWNER    under way; its time of change is the owner's sign of life
    work/KEY.F.T.OWNER/    what the owner writes
    out/KEY/               committed, and never touched again

*Executed at least once, committed exactly once*, whatever is killed at any moment: a folder is
renamed onto a name that must not be there, and the file system lets one do it. No database, no
daemon. Times are compared by the file system's own clock, so clocks of hosts do not matter.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.world.whole_file import sync

__all__ = ["Lease", "JobLedger", "LeaseLost"]


class LeaseLost(Exception):
    """The task is another owner's now, or committed by one: what was done here is void."""


@dataclass(frozen=True)
class Lease:
    """A task that this owner does.

    Attributes:
        key: its name.
        failed: how often it failed before.
        lost: how often its owner vanished before.
        path: the lease.
        folder: where its output goes.
    """

    key: str
    failed: int
    lost: int
    path: Path
    folder: Path


class JobLedger:
    """One owner's view of the ledger.

    Args:
        root: its folder, seen by all owners.
        patience: seconds without a sign of life after which an owner is taken for lost.

    Example:

        ledger = JobLedger(Path("work"))
        ledger.add(["a", "b"])
        while lease := ledger.claim():
            (lease.folder / "result").write_text(lease.key)
            ledger.commit(lease)
    """

    def __init__(self, root: Path, patience: float = 10.0) -> None:
        self.root, self.patience = root, patience
        host = socket.gethostname().replace(".", "-")
        self.owner = f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
        for name in ("todo", "lease", "work", "out", "clock"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._seconds: dict[str, float] = {}

    def add(self, keys: Iterable[str]) -> None:
        """Add tasks. Keys have no dots."""
        for key in keys:
            (self.root / "todo" / f"{key}.0.0").touch()

    def claim(self, size: Callable[[str], float] = lambda key: 0.0, only: str = "") -> Lease | None:
        """Take a task: the largest one that waits, else one whose owner is lost, else one that
        takes much longer than others do. None if there is none at the moment. ``only`` names one.
        """
        waiting = [w for w in map(_parse, self._names("todo")) if only in ("", w[0])]
        for key, failed, lost, _ in sorted(waiting, key=lambda w: (-size(w[0]), w[0])):
            path = self.root / "todo" / f"{key}.{failed}.{lost}"
            if self.is_committed(key):
                self._settle(key, path)
            elif lease := self._take(path, key, failed, lost):
                return lease
        return self._from_others(only)

    def tidy(self) -> None:
        """Once nothing is left, remove what killed owners left behind."""
        for name in self._names("lease"):
            (self.root / "lease" / name).unlink(missing_ok=True)
        for name in self._names("work"):
            _remove(self.root / "work" / name)

    def _names(self, folder: str) -> list[str]:
        return os.listdir(self.root / folder)  # noqa: PTH208 - thousands of names

    def _from_others(self, only: str) -> Lease | None:
        names = [name for name in self._names("lease") if only in ("", _parse(name)[0])]
        if not names or (now := self._now()) is None:
            return None
        owned = [_parse(name)[0] for name in names]
        for name in names:
            key, failed, lost, owner = _parse(name)
            path = self.root / "lease" / name
            try:
                silent = now - path.stat().st_mtime
            except FileNotFoundError:
                continue
            if silent > self.patience:
                if self.is_committed(key):  # killed between its commit and the end of its lease
                    self._settle(key, path)
                elif lease := self._take(path, key, failed, lost + 1):
                    _remove(self.root / "work" / name)
                    return lease
            elif self.is_committed(key) or owner == self.owner or owned.count(key) > 1:
                continue
            elif not only and self._straggles(name, now):
                lease = self._lease(key, failed, lost)
                lease.path.touch()
                return self._begun(lease)
        return None

    def _straggles(self, name: str, now: float) -> bool:
        if self._names("todo") or not (known := list(self.seconds().values())):
            return False
        with suppress(OSError):
            began = (self.root / "work" / name / ".began").stat().st_mtime
            # a second at least: of short tasks, the start of a process alone is three medians
            return now - began > max(3 * statistics.median(known), 1.0)
        return False

    def seconds(self) -> dict[str, float]:
        """How long each committed task took."""
        for key in set(self._names("out")) - self._seconds.keys():
            self._seconds[key] = self.info(key).get("seconds", 0.0)
        return {key: taken for key, taken in self._seconds.items() if taken}

    def _lease(self, key: str, failed: int, lost: int) -> Lease:
        name = f"{key}.{failed}.{lost}.{self.owner}"
        return Lease(key, failed, lost, self.root / "lease" / name, self.root / "work" / name)

    def _take(self, path: Path, key: str, failed: int, lost: int) -> Lease | None:
        lease = self._lease(key, failed, lost)
        try:
            os.utime(path)  # before anybody can see the new name: it is never old
            path.rename(lease.path)
        except FileNotFoundError:
            if not lease.path.exists():  # over NFS, the winner may be told so by a repeated rename
                return None
        return self._begun(lease)

    def _begun(self, lease: Lease) -> Lease:
        with suppress(FileExistsError):  # back here after it was lost
            lease.folder.mkdir()
        (lease.folder / ".began").touch()
        return lease

    def _now(self) -> float | None:
        """The file system's clock; None where the disk stalls: nobody is lost then."""
        path, began = self.root / "clock" / self.owner, time.monotonic()
        path.touch()
        os.utime(path)
        now = path.stat().st_mtime
        # a disk that stalls makes all owners look dead
        return now if time.monotonic() - began < 2.0 else None

    def beat(self, lease: Lease) -> None:
        """Give a sign of life: several times within ``patience``.

        Raises:
            LeaseLost: another owner has the task, or has committed it.
        """
        try:
            os.utime(lease.path)
        except FileNotFoundError:
            raise LeaseLost(lease.key) from None
        if self.is_committed(lease.key):
            self.drop(lease)
            raise LeaseLost(lease.key)

    @contextmanager
    def alive(self, lease: Lease) -> Iterator[None]:
        """Give signs of life while the block does what may take longer than ``patience``."""
        ended = threading.Event()

        def beats() -> None:
            while not ended.wait(self.patience / 8):
                with suppress(OSError):  # another owner's by now: ``commit`` finds out
                    os.utime(lease.path)

        thread = threading.Thread(target=beats, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def commit(self, lease: Lease, info: dict[str, Any] | None = None) -> bool:
        """Make the task's folder its output. False if it is committed already, or another's."""
        facts = {"owner": lease.path.name, **(info or {})}
        try:  # the folder is gone where another owner has taken over
            (lease.folder / ".info").write_text(json.dumps(facts))
            with self.alive(lease):
                for path in [*lease.folder.rglob("*"), lease.folder]:
                    if path.is_file() or path.is_dir():  # no link to nothing, and no pipe
                        with suppress(FileNotFoundError):  # somebody's temporary file
                            sync(path)  # a rename may reach the disk before what it names
            lease.folder.rename(self.root / "out" / lease.key)
            committed = True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            # Over NFS, the winner may be told so by a repeated rename.
            there = self.is_committed(lease.key)
            committed = there and self.info(lease.key)["owner"] == lease.path.name
        if committed:
            self._children(lease.key)
        self.drop(lease)
        return committed

    def divide(self, lease: Lease, parts: Sequence[str]) -> None:
        """Put other tasks in its place."""
        self._empty(lease)
        self.commit(lease, {"divided": list(parts)})

    def set_aside(self, lease: Lease, error: str) -> None:
        """Commit it as one that cannot be done."""
        self._empty(lease)
        self.commit(lease, {"error": error, "attempts": lease.failed + 1})

    def fail(self, lease: Lease) -> None:
        """Put it back, with one more failure; others that try as well give up. Nothing happens
        where it is another owner's by now: he decides about it.
        """
        if self._put_back(lease, lease.failed + 1):
            for path in self._leases(lease.key):
                if _parse(path.name)[1] <= lease.failed:  # not of who has taken it again since
                    path.unlink(missing_ok=True)

    def give_back(self, lease: Lease) -> None:
        """Put it back as it was."""
        if len(self._leases(lease.key)) > 1:  # another owner goes on
            self.drop(lease)
            if not self.is_known(lease.key):  # or has given it back at the same time
                (self.root / "todo" / f"{lease.key}.{lease.failed}.{lease.lost}").touch()
        else:
            self._put_back(lease, lease.failed)

    def _put_back(self, lease: Lease, failed: int) -> bool:
        _remove(lease.folder)
        with suppress(FileNotFoundError):
            lease.path.rename(self.root / "todo" / f"{lease.key}.{failed}.{lease.lost}")
            return True
        return False

    def _leases(self, key: str) -> list[Path]:
        return list((self.root / "lease").glob(f"{key}.*"))

    def is_doomed(self, lease: Lease) -> bool:
        """Whether so many owners vanished with it that it must be what kills them."""
        return lease.lost >= 10  # one lost host takes all its tasks: a few losses are no sign

    def drop(self, lease: Lease) -> None:
        """Forget a lease and what was done under it."""
        _remove(lease.folder)
        lease.path.unlink(missing_ok=True)

    def _empty(self, lease: Lease) -> None:
        _remove(lease.folder)
        with suppress(FileExistsError):
            lease.folder.mkdir()

    def _settle(self, key: str, path: Path) -> None:
        self._children(key)
        path.unlink(missing_ok=True)

    def _children(self, key: str) -> None:
        """Add the parts of a divided task that are nowhere yet. One that is added twice is done
        twice, and committed once.
        """
        if parts := self.info(key).get("divided"):
            names = self._names("todo") + self._names("lease")
            seen = {_parse(name)[0] for name in names}
            self.add(p for p in parts if p not in seen and not self.is_committed(p))

    def is_committed(self, key: str) -> bool:
        """Whether it has its output."""
        return (self.root / "out" / key).exists()

    def is_known(self, key: str) -> bool:
        """Whether it waits, is under way, or is committed."""
        waiting = any((self.root / "todo").glob(f"{key}.*"))
        return waiting or bool(self._leases(key)) or self.is_committed(key)

    def is_under_way(self, fits: Callable[[str], bool]) -> bool:
        """Whether an owner that gives signs of life has a task whose key fits."""
        names = [name for name in self._names("lease") if fits(_parse(name)[0])]
        if not names or (now := self._now()) is None:
            return bool(names)
        for name in names:
            with suppress(FileNotFoundError):
                if now - (self.root / "lease" / name).stat().st_mtime <= self.patience:
                    return True
        return False

    def forget(self, key: str) -> None:
        """Remove its output, so that it can be done again."""
        with suppress(FileNotFoundError):
            trash = self.root / "work" / f"{key}.0.0.old~{secrets.token_hex(4)}"
            (self.root / "out" / key).rename(trash)
            shutil.rmtree(trash, ignore_errors=True)

    def committed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Committed tasks by name, and what their owners said; those that were divided are not."""
        for key in sorted(self._names("out")):
            if "divided" not in (info := self.info(key)):
                yield key, info

    def output(self, key: str) -> Path:
        """The folder of what a committed task wrote."""
        return self.root / "out" / key

    def info(self, key: str) -> dict[str, Any]:
        """What its owner said in ``commit``."""
        facts: dict[str, Any] = json.loads((self.root / "out" / key / ".info").read_text())
        return facts

    @property
    def has_output(self) -> bool:
        """Whether any task is committed."""
        return bool(self._names("out"))

    @property
    def left(self) -> int:
        """How many tasks wait or are under way; 0 when all is done."""
        # A task moves from todo to lease and back: seen in the order lease, todo, lease, never 0.
        held = self._held()
        return len(self._names("todo")) + (held or self._held())

    def _held(self) -> int:
        """Leases that matter: not those whose owner was killed after its commit."""
        keys = {_parse(name)[0] for name in self._names("lease")}
        return sum(not self.is_committed(k) or "divided" in self.info(k) for k in keys)


def _parse(name: str) -> tuple[str, int, int, str]:
    key, failed, lost, *owner = name.split(".", 3)
    return key, int(failed), int(lost), owner[0] if owner else ""


def _remove(folder: Path) -> None:
    """Remove a folder that its owner may be about to commit: away first, so he commits all or
    nothing.
    """
    gone = folder.with_name(f"{folder.name}~{secrets.token_hex(2)}")
    with suppress(FileNotFoundError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
