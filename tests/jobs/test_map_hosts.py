"""``ronde map`` on several hosts: one that is lost costs no item, and is used again."""

import time
from pathlib import Path

import pytest

from lab import lab, missing
from processes import Child, child, ronde

SCRIPT = """
import os, time
import ronde
for chunk in ronde.items("lines:items.txt"):
    with chunk.output("out.txt") as out:
        for key, line in chunk:
            time.sleep(0 if os.path.exists("fast") else 0.2)
            print(key, int(line) ** 3, file=out)
"""


def said(began: Child, *texts: str) -> None:
    """Until it has said them all."""
    limit = time.monotonic() + 60
    while not all(text in began.stderr for text in texts):
        assert time.monotonic() < limit and began.process.poll() is None, began.stderr
        time.sleep(0.05)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_host_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "items.txt").write_text("".join(f"{i}\n" for i in range(800)))
    (tmp_path / "work.py").write_text(SCRIPT)
    with lab(tmp_path / "lab", 2) as hosts:
        named = ",".join(f"{name}:1" for name in hosts.names)
        words = ["--hosts", named, "--ssh-config", str(hosts.ssh_config), "--chunk", "4"]
        words += ["--items", "lines:items.txt", "--out", "out", "work.py"]
        with child(ronde("map", *words), tmp_path) as began:
            limit, done = time.monotonic() + 100, tmp_path / "out" / ".map" / "out"
            while not any(f.name for f in done.glob("*/.info") if hosts.names[1] in f.read_text()):
                assert time.monotonic() < limit and began.process.poll() is None, began.stderr
                time.sleep(0.05)
            hosts.lose(hosts.names[1])
            said(began, f"going on with 1 worker on {hosts.names[0]}:1")
            hosts.boot(hosts.names[1])
            said(began, f"host {hosts.names[1]} is there again", "going on with 2 workers")
            (tmp_path / "fast").touch()
            ended = began.done(100)
    assert ended.returncode == 0, ended.stderr
    assert "restart 1 of 1000, from the chunks that are done: host" in ended.stderr
    assert (tmp_path / "out" / "out.txt").read_text() == "".join(
        f"{i} {i**3}\n" for i in range(800)
    )
