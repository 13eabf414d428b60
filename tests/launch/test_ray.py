"""``ronde run --ray`` on this machine: the same training, and errors."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tempfile
from pathlib import Path

import pytest
from test_hosts import equal

from processes import ronde_run
from sampling import ALL

DOCS = Path(__file__).parents[2] / "docs"
ABSENT = "" if importlib.util.find_spec("ray") else "Ray is not installed: pip install '.[ray]'"

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)


def test_the_documentation_on_a_cluster_of_its_own(place, one):
    """The page's command, without an address where no cluster is; then errors."""
    page = (DOCS / "engines" / "ray.md").read_text()
    (line,) = re.findall(r"^ronde run --ray --workers .*$", page, re.M)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # for Ray's sockets
        told_by_the_page(place, one, line, {"RAY_TMPDIR": short, "RAY_ADDRESS": "local"})


def told_by_the_page(place, one, line, home):
    words = [*shlex.split(line)[1:], "alone.st", "4"]
    words[words.index("--workers") + 1] = "2"
    done = ronde_run(words, place, env=home)
    assert done.returncode == 0, done.stdout + done.stderr
    equal(place / "alone.st", one)
    refused = [("127.0.0.1:1", "nothing answers at 127.0.0.1:1")]
    if ALL:
        refused += [("local", "500 workers need 500 CPUs; the cluster has ")]
    for address, told in refused:
        done = ronde_run(
            ["run", "--ray", address, "-n", "500", "train.py", "x.st", "1"], place, env=home
        )
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
