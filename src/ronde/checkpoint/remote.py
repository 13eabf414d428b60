"""Checkpoints of a run in a store that fsspec reaches: uploaded behind the training, and fetched.

Each is a folder ``URL/NAME/step-000000120``, as in the run directory. Its manifest is written last
and removed first, so a checkpoint there is whole or does not exist. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ronde.checkpoint.manifest import (
    MANIFEST,
    NAME,
    check_files,
    folder_name,
    list_checkpoints,
    load_manifest,
    step_of,
)
from ronde.checkpoint.retention import KeepPolicy
from ronde.world import ArgumentError, CheckpointError

__all__ = ["RemoteCheckpoints", "Uploads", "link_or_copy"]

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WRITER = "writer"  # a token of the run that writes here
_LOOK_SECONDS = 0.5


class RemoteCheckpoints:
    """The checkpoints of one run below a URL.

    Args:
        url: a folder, in the words of fsspec: ``s3://bucket/runs``, ``file:///mnt/runs``.
        name: the run's.

    Raises:
        ArgumentError: nothing here can write to such a URL.
    """

    def __init__(self, url: str, name: str) -> None:
        if "://" not in url or url.startswith("memory:"):
            raise ArgumentError(
                f"--upload {url}: expected a URL that outlives this machine, such as "
                "s3://bucket/runs or file:///mnt/runs."
            )
        try:
            import fsspec
        except ImportError:
            raise ArgumentError(
                f"--upload {url} needs the package fsspec: pip install 'ronde[remote]'."
            ) from None
        try:
            self._system, root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ArgumentError(
                f"--upload {url}: {error}. fsspec needs the package of that protocol."
            ) from error
        self._root, self.url = f"{root.rstrip('/')}/{name}", f"{url.rstrip('/')}/{name}"
        self._token = b""

    def _names(self, *parts: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            paths = self._system.ls("/".join((self._root, *parts)), detail=False)
        except FileNotFoundError:
            return []
        return [str(each).rstrip("/").rpartition("/")[2] for each in paths]

    def steps(self) -> dict[int, bool]:
        """Step -> whether its manifest is there, so that it is whole, oldest first.

        Raises:
            CheckpointError: the store cannot be read.
        """
        try:
            return {
                step_of(name): MANIFEST in self._names(name)
                for name in sorted(filter(NAME.fullmatch, self._names()), key=step_of)
            }
        except Exception as error:  # each protocol has its own
            raise CheckpointError(f"{self.url} cannot be read: {_why(error)}") from error

    def claim(self) -> None:
        """Become the one that writes here: runs of other machines may have the same name.

        Raises:
            CheckpointError: the store cannot be written.
        """
        self._token = secrets.token_hex(16).encode()
        try:
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(f"{self._root}/{_WRITER}", self._token)
        except Exception as error:  # each protocol has its own
            raise CheckpointError(f"{self.url} cannot be written: {_why(error)}") from error

    def put(self, path: Path) -> bool:
        """Upload a checkpoint. Returns whether it was not there yet.

        Args:
            path: a complete checkpoint.

        Raises:
            CheckpointError: another run has claimed this place.
        """
        if self._system.cat_file(f"{self._root}/{_WRITER}") != self._token:
            raise CheckpointError("a run of the same name was started since and writes there")
        place = f"{self._root}/{path.name}"
        manifest = (path / MANIFEST).read_bytes()
        there = self._names(path.name)
        if MANIFEST in there and self._system.cat_file(f"{place}/{MANIFEST}") == manifest:
            return False
        self._remove(place, there)  # an upload that was cut, or another run's of that name
        self._system.makedirs(place, exist_ok=True)
        for file in sorted(path.iterdir(), key=lambda f: (f.name == MANIFEST, f.name)):
            self._system.put_file(str(file), f"{place}/{file.name}")
        return True

    def prune(self, keep: KeepPolicy, protected: list[int]) -> None:
        """Remove what a policy does not keep, and what is not whole.

        Args:
            protected: steps that stay in any case.
        """
        there = self.steps()
        doomed = keep.doomed([step for step, whole in there.items() if whole], protected)
        for step in (*doomed, *(step for step, whole in there.items() if not whole)):
            name = folder_name(step)
            self._remove(f"{self._root}/{name}", self._names(name))

    def _remove(self, place: str, names: list[str]) -> None:
        if MANIFEST in names:
            self._system.rm_file(f"{place}/{MANIFEST}")
        if names:
            self._system.rm(place, recursive=True)

    def fetch(self, folder: Path, above: int) -> tuple[Path | None, list[str]]:
        """Fetch the newest whole checkpoint.

        Args:
            folder: where the run's checkpoints are; made if there is one.
            above: only one of a later step.

        Returns:
            tuple: its path, or None; and why newer ones were passed over.

        Raises:
            CheckpointError: the store cannot be read.
        """
        from ronde.checkpoint.files import verify

        passed: list[str] = []
        for step, whole in reversed(self.steps().items()):
            name = folder_name(step)
            if step <= above:  # the run directory has a later one
                break
            if not whole:
                passed.append(f"{self.url}/{name} is not whole: {MANIFEST} is missing")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            # named as one that is being written: a later save removes what a killed fetch left
            arriving = folder / f".writing-{step:09d}-{os.getpid()}" / name
            try:
                arriving.mkdir(parents=True)
                for file in filter(_FILE.fullmatch, self._names(name)):
                    self._system.get_file(f"{self._root}/{name}/{file}", str(arriving / file))
                verify(arriving)
                if (folder / name).exists():  # damaged, or it would have been the newest here
                    (folder / name).rename(folder / f"broken-{name}-{os.getpid()}")
                arriving.rename(folder / name)
                return folder / name, passed
            except CheckpointError as error:
                passed.append(str(error).replace(str(arriving), f"{self.url}/{name}"))
            except Exception as error:  # each protocol has its own
                raise CheckpointError(
                    f"{self.url}/{name} cannot be fetched: {_why(error)}"
                ) from error
            finally:
                shutil.rmtree(arriving.parent, ignore_errors=True)
        return None, passed


def _written(path: Path) -> int:
    """When a checkpoint was written, which may happen again at its step; -1: it has gone."""
    try:
        return (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return -1


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")


class Uploads:
    """Uploads each checkpoint of a run directory, newest first, until the block ends.

    A failure is told at once, and tried again when the next checkpoint is there.

    Args:
        store: where to.
        directory: the run directory.
        tell: gets a sentence about each failure.
    """

    def __init__(
        self, store: RemoteCheckpoints, directory: Path, tell: Callable[[str], None]
    ) -> None:
        self._store, self._tell = store, tell
        self._folder, self._held = directory / "checkpoints", directory / ".uploading"
        self._done: dict[Path, int] = {}  # and when its manifest was written
        self._failed: Path | None = None  # the newest checkpoint when an upload failed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def __enter__(self) -> Uploads:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2.0)
        if self._thread.is_alive():
            self._tell(f"the last checkpoint goes to {self._store.url}; Ctrl-C leaves it out")
            self._thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            last = self._over.wait(_LOOK_SECONDS)
            while (path := self._next(last)) is not None and self._upload(path):
                pass
        shutil.rmtree(self._held, ignore_errors=True)

    def _next(self, last: bool) -> Path | None:
        """The newest checkpoint that is not there yet; after a failure, once there is another."""
        here = list_checkpoints(self._folder)
        if not here or (here[0] == self._failed and not last):
            return None
        return next((path for path in here if self._done.get(path) != _written(path)), None)

    def _upload(self, path: Path) -> bool:
        try:
            written, held = _written(path), self._hold(path)
            if held is None or _written(path) != written:
                return True
            self._store.put(held)
            self._done[path] = written
            newest = next(iter(list_checkpoints(self._folder)), held)
            with contextlib.suppress(FileNotFoundError):  # it has gone just now
                policy = json.loads((newest / MANIFEST).read_bytes()).get("keep")
                if policy is not None:
                    keep = KeepPolicy(policy["last"], tuple(policy["every"]), policy["best"])
                    self._store.prune(keep, [s for s in (policy["protected"],) if s is not None])
        except Exception as error:  # each protocol has its own; the training goes on
            return self._fail(path, error)
        return True

    def _hold(self, path: Path) -> Path | None:
        """Links to the files of a checkpoint: it may have to go before all of it is uploaded. None
        if it is gone already.
        """
        shutil.rmtree(self._held, ignore_errors=True)
        held = self._held / path.name
        held.mkdir(parents=True)
        try:
            for file in path.iterdir():
                link_or_copy(file, held / file.name)
            check_files(held, load_manifest(held), digests=False)
        except (OSError, CheckpointError) as error:
            time.sleep(_LOOK_SECONDS)  # while it is being removed, file by file
            if path.exists():
                raise CheckpointError(str(error).replace(str(held), str(path))) from None
            return None
        return held

    def _fail(self, path: Path, error: Exception) -> bool:
        self._failed = next(iter(list_checkpoints(self._folder)), None)
        what = "old checkpoints could not be removed" if path in self._done else "it is not there"
        again = "" if self._over.is_set() else "; the next checkpoint tries again"
        self._tell(
            f"warning: upload of {path.name} to {self._store.url} failed: {what} "
            f"({_why(error)}){again}"
        )
        return False


def link_or_copy(file: Path, to: Path) -> None:
    """Give a file a second name; a copy where the file system has no links."""
    try:
        os.link(file, to)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(file, to)
