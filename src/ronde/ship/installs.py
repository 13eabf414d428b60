"""Bundles on a device: installed beside each other, one of them current, older ones refused."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ronde.ship.bundle import Bundle, ShipError, verify_bundle
from ronde.ship.runtime import MODEL, ShippedModel
from ronde.world.whole_file import whole_folder, write_whole

__all__ = ["current_bundle", "install_bundle", "restore_previous"]

_STATE = "installed.json"


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Installs and rollbacks of one folder wait for each other."""
    folder = os.open(root, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no folder
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _serial(root: Path) -> int:
    """Of the current bundle; 0 if there is none. The link decides."""
    link = root / "current"
    return int(link.readlink().name.removeprefix("serial-")) if link.is_symlink() else 0


def _state(root: Path) -> dict[str, int]:
    """``newest``: the largest serial that was ever current; ``previous``: the one before."""
    state = {"newest": 0, "previous": 0}
    with contextlib.suppress(FileNotFoundError):
        state |= json.loads((root / _STATE).read_text())
    state["newest"] = max(state["newest"], _serial(root))  # it may have been killed in between
    return state


def _write(root: Path, newest: int, previous: int) -> None:
    write_whole(root / _STATE, json.dumps({"newest": newest, "previous": previous}))


def make_current(root: Path, serial: int) -> None:
    """Point the link at a bundle, at one moment."""
    link = root / f".current.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(f"serial-{serial}")
    link.replace(root / "current")


def install_bundle(bundle: Path, root: Path, key: Path) -> Bundle:
    """Verify a bundle, run its stored samples, copy it, verify the copy, and make it current.

    Whatever fails, the current one stays. The one before is kept for :func:`restore_previous`.

    Args:
        bundle: its folder.
        root: where bundles are installed: ``ROOT/current`` is a link to the current one.
        key: public key that must have signed it.

    Raises:
        ShipError: it was changed, fails on this device, or is older than one installed before.
    """
    verified = verify_bundle(bundle, key)
    root.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(root):
        return _install(verified, bundle, root, key)


def _install(verified: Bundle, bundle: Path, root: Path, key: Path) -> Bundle:
    state = _state(root)
    if verified.serial <= state["newest"]:
        raise ShipError(
            "this bundle is not newer than one installed before "
            f"(serial {verified.serial}, there was {state['newest']})."
        )
    if MODEL in verified.about["files"]:
        ShippedModel(bundle, key).check()
    target = root / f"serial-{verified.serial}"
    with whole_folder(target) as copy:
        shutil.copytree(bundle, copy, symlinks=True, dirs_exist_ok=True)
        verify_bundle(copy, key)
        shutil.rmtree(target, ignore_errors=True)  # of an install that was killed
    before = _serial(root)
    _write(root, state["newest"], before)  # then the link, then the serial: killed anywhere, both
    make_current(root, verified.serial)  # bundles are there, and the link says which is current
    _write(root, verified.serial, before)
    for old in root.glob("serial-*"):
        if old.name not in (f"serial-{verified.serial}", f"serial-{before}"):
            shutil.rmtree(old, ignore_errors=True)
    return Bundle(target, verified.about, True)


def restore_previous(root: Path) -> int:
    """Make the bundle before the current one current again.

    Returns:
        Its serial number. The one that was left is not installed again under its number.

    Raises:
        ShipError: there is none.
    """
    if not root.is_dir():
        raise ShipError(f"nothing is installed in {root}.")
    with _one_at_a_time(root):
        return _restore(root)


def _restore(root: Path) -> int:
    state, now = _state(root), _serial(root)
    previous = state["previous"]
    if previous in (0, now) or not (root / f"serial-{previous}").is_dir():
        raise ShipError(f"{root} has no bundle before the current one.")
    verify_bundle(root / f"serial-{previous}")
    _write(root, state["newest"], previous)  # no way back is lost where it is killed now
    make_current(root, previous)
    shutil.rmtree(root / f"serial-{now}", ignore_errors=True)
    return previous


def current_bundle(root: Path, key: Path | None = None) -> Bundle:
    """The installed bundle that is current, verified.

    Raises:
        ShipError: there is none, or it was changed.
    """
    if not (root / "current").exists():
        raise ShipError(f"nothing is installed in {root}.")
    return verify_bundle((root / "current").resolve(), key)
