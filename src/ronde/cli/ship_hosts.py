"""``ronde ship install`` and ``rollback`` on the hosts of ``ronde run``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ronde.cli.answer_screen import tell
from ronde.cli.hosts import Places
from ronde.ship.delivery import pack_order
from ronde.watch import plain_console


def order_hosts(
    places: Places, root: Path, bundle: Path | None = None, key: Path | None = None
) -> bool:
    """Install a bundle on hosts, or go back to the one before, and print a line for each.

    A host that fails keeps what it has; the others go on.

    Returns:
        Whether all did.
    """
    with tempfile.NamedTemporaryFile(prefix="ronde-ship-") as packed:
        pack_order(packed, str(root), bundle, key)
        packed.flush()
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda host: _order(places, host, packed.name), places.hosts)
            failed = []
            for host, (serial, error) in zip(places.hosts, answers, strict=True):
                line = f"serial {serial} is current: {root / 'current'}" if serial else error
                failed += [] if serial else [host.name]
                plain_console(stderr=not serial).print(f"{host.name:9} {line}", soft_wrap=True)
    if failed:
        tell(
            f"error: {len(failed)} of {len(places.hosts)} hosts failed and keep what they had. "
            f"Try them again with --hosts {','.join(failed)}.",
            err=True,
        )
    return not failed


def _order(places: Places, host: Any, packed: str) -> tuple[int, str]:
    """The serial number that is current on a host now, or 0 and why the order failed."""
    python = places.python or sys.executable
    # -P: a folder named ronde on the host must not be taken for the package.
    command = places.engine.command(host, [python, "-P", "-m", "ronde.ship.delivery"])
    try:
        with open(packed, "rb") as order:
            done = subprocess.run(
                command, stdin=order, capture_output=True, text=True, errors="replace", check=False
            )
    except OSError as error:  # no ssh, or no such Python on this machine
        return 0, f"{command[0]} cannot be started: {error.strerror}."
    if done.returncode == 0:
        answer = json.loads(done.stdout.splitlines()[-1])
        return answer.get("serial", 0), answer.get("error", "")
    if meaning := places.engine.meaning(host, done.returncode, done.stderr):
        return 0, meaning
    if done.returncode == 127:
        return 0, f"there is no {python}. Name the Python there with --python."
    if "No module named" in done.stderr:
        return 0, f"ronde is not installed for {python} there. Name another Python with --python."
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return 0, f"ended with status {done.returncode}: {lines[-1] if lines else 'it said nothing'}"
