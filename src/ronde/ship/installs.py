"""Bundles on a device: installed beside each other, one of them current, older ones refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ronde.ship.bundle import Bundle, ShipError, verify_bundle
from ronde.ship.runtime import MODEL, ShippedModel

__all__ = ["current_bundle", "install_bundle", "restore_previous"]

_STATE = "installed.json"


def _state(root: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads((root / _STATE).read_text())
        return values
    except FileNotFoundError:
        return {"newest": 0, "order": []}


def _write(root: Path, state: dict[str, Any]) -> None:
    """The state and the link, each replaced in one go; the link last: it decides."""
    temporary = root / f".{_STATE}.{os.getpid()}"
    temporary.write_text(json.dumps(state))
    temporary.replace(root / _STATE)
    link = root / f".current.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(f"serial-{state['order'][-1]}")
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
    found = verify_bundle(bundle, key)
    root.mkdir(parents=True, exist_ok=True)
    state = _state(root)
    if found.serial <= state["newest"]:
        raise ShipError(
            f"this bundle is not newer than one installed before (serial {found.serial}, there was "
            f"{state['newest']})."
        )
    if MODEL in found.about["files"]:
        ShippedModel(bundle, key).check()
    target = root / f"serial-{found.serial}"
    temporary = root / f".serial-{found.serial}.{os.getpid()}"
    try:
        shutil.copytree(bundle, temporary, symlinks=True)
        verify_bundle(temporary, key)
        shutil.rmtree(target, ignore_errors=True)  # of an install that was killed
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _write(root, {"newest": found.serial, "order": [*state["order"], found.serial]})
    for old in state["order"][:-1]:
        shutil.rmtree(root / f"serial-{old}", ignore_errors=True)
    return Bundle(target, found.about, True)


def restore_previous(root: Path) -> int:
    """Make the bundle before the current one current again.

    Returns:
        Its serial number. The one that was left is not installed again under its number.

    Raises:
        ShipError: there is none.
    """
    state = _state(root)
    order = state["order"]
    if len(order) < 2 or not (root / f"serial-{order[-2]}").is_dir():
        raise ShipError(f"{root} has no bundle before the current one.")
    _write(root, {**state, "order": order[:-1]})
    shutil.rmtree(root / f"serial-{order[-1]}", ignore_errors=True)
    return int(order[-2])


def current_bundle(root: Path, key: Path | None = None) -> Bundle:
    """The installed bundle that is current, verified.

    Raises:
        ShipError: there is none, or it was changed.
    """
    if not (root / "current").exists():
        raise ShipError(f"nothing is installed in {root}.")
    return verify_bundle((root / "current").resolve(), key)
