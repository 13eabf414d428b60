"""A bundle's way to a device: what the sender packs, and the process there that installs it.

``python -m ronde.ship.delivery`` reads a tar of an order, the public key and the bundle from its
input, and prints one line of JSON. It imports no torch.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from ronde.ship.installs import install_bundle, restore_previous
from ronde.world import RondeError

__all__ = ["fulfill", "pack_order"]

_BUNDLE, _KEY = "bundle", "key.pem"


def pack_order(
    file: IO[bytes], root: str, bundle: Path | None = None, key: Path | None = None
) -> None:
    """Write what a device is sent.

    Args:
        file: to write to.
        root: folder of installed bundles, on the device.
        bundle: to install; None goes back to the one before.
        key: public key that must have signed it.
    """
    with tempfile.TemporaryDirectory() as place, tarfile.open(fileobj=file, mode="w|") as tar:
        order = Path(place) / "order.json"
        # said, not concluded from what came: a cut connection must not become a rollback
        order.write_text(json.dumps({"root": root, "install": bundle is not None}))
        tar.add(order, order.name)
        if bundle and key:
            tar.add(key, _KEY)
            tar.add(bundle, _BUNDLE)


def fulfill(stream: IO[bytes]) -> int:
    """Do on this device what was packed.

    Returns:
        The serial number that is current now.

    Raises:
        RondeError: the bundle is not what was signed, fails on this device, or is older than one
            installed before; or there is none to go back to.
    """
    with tempfile.TemporaryDirectory(prefix="ronde-ship-") as place:
        folder = Path(place)
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            tar.extractall(folder, filter="data")
        order = json.loads((folder / "order.json").read_text())
        root = Path(order["root"])
        if order["install"]:
            return install_bundle(folder / _BUNDLE, root, folder / _KEY).serial
        return restore_previous(root)


def _main() -> None:
    """Serve one sender, over standard input and output."""
    answer: dict[str, int | str]
    try:
        answer = {"serial": fulfill(sys.stdin.buffer)}
    except (RondeError, OSError, tarfile.TarError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
