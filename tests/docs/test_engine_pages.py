"""Every command of the pages about engines is carried out, on hosts of this machine, with the one
example of these pages: ``train.py`` of the first page.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from test_docs import DOCS, blocks

from engines import absent
from lab import lab, missing, slurm
from processes import child
from sampling import some

PAGES = sorted((DOCS / "engines").glob("*.md"))
EXAMPLE = next(b.code for b in blocks(DOCS / "five-minutes.md") if b.title == "train.py")
_SMALL = (  # two cores are what is here
    (r"gpu1:8,gpu2:8", "{first}:1,{second}:1"),
    (r"gpu1,gpu2", "{first},{second}"),
    (r"(--workers|-n|--ntasks-per-node)( |=)8", r"\1\g<2>2"),
    (r"--gpus 8", "--tasks 1"),
    (r"--partition gpu", "--partition debug"),
    (r"#SBATCH --gpus-per-node=8\n", ""),
    (r"--epochs \d+", "--epochs 1"),
    (r"--ray ", "--ray local "),
    (r"spark://head:7077", "local[2]"),
    (r"/runs/runs", "runs"),
    (r" \| kubectl create -f -", ""),
)


def scripts() -> list[tuple[str, str]]:
    """Page and command, or batch script, of all pages, as they stand there."""
    lines = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash" and "exec " not in block.code:  # of a dry run
                whole = block.code.startswith("#!")
                lines += [
                    (page.stem, c) for c in ([block.code] if whole else block.code.split("\n"))
                ]
            elif block.language == "dockerfile":
                words = shlex.split(re.sub(r'[\[\],"]', " ", block.code))
                lines.append((page.stem, shlex.join(words[1:])))
    return [(page, text) for page, text in lines if text.strip()]


def test_all_pages_have_commands_and_the_same_example() -> None:
    assert {page for page, _ in scripts()} == {p.stem for p in PAGES}
    for page, text in scripts():
        known = "train.py", "ronde check", "ronde map"
        assert any(words in text for words in known), f"{page}: {text}"
    for page in PAGES:
        assert "../five-minutes.md#1-call-distribute" in page.read_text(), page


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "train.py").write_text(EXAMPLE)
    return folder


@pytest.fixture(scope="module")
def hosts(place):
    with lab(place / "lab", 2) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts):
    with slurm(hosts) as made:
        yield made


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(("page", "text"), some(scripts(), 40))
def test_the_command_runs(page, text, place, hosts, request) -> None:
    engine = {"slurm": "slurm", "mpi": "mpirun.openmpi", "ray": "ray", "spark": "spark"}.get(page)
    if engine and (why := absent(engine)):
        pytest.skip(why)
    first, second = hosts.names
    for pattern, small in _SMALL:
        text = re.sub(pattern, small.format(first=first, second=second), text)
    if page in ("ssh", "mpi") and "--hosts" in text:
        text = text.replace("--hosts", f"--ssh-config {hosts.ssh_config} --hosts")
    (place / "bin").mkdir(exist_ok=True)
    if (mpirun := shutil.which("mpirun.openmpi")) and not (place / "bin" / "mpirun").exists():
        (place / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec {mpirun} "$@"\n')
        (place / "bin" / "mpirun").chmod(0o755)
    here = f"{place}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = {"PATH": here, **root, "COLUMNS": "120"}
    if page == "slurm":
        variables |= request.getfixturevalue("cluster").env
    if page == "sagemaker":
        base = place / "ml"
        (base / "input" / "config").mkdir(parents=True, exist_ok=True)
        (base / "input" / "config" / "resourceconfig.json").write_text(
            '{"current_host": "algo-1", "hosts": ["algo-1"]}'
        )
        variables["SAGEMAKER_BASE_DIR"] = str(base)
    words = shlex.split(text)
    if text.startswith("#!"):
        (place / "job.sh").write_text(text)
        words = ["sbatch", "--wait", "--output=job.out", "job.sh"]
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        with child(words, place, {**variables, "RAY_TMPDIR": short, "TMPDIR": short}) as started:
            done = started.done(120)
    said = done.stdout + done.stderr
    if text.startswith("#!"):
        said += (place / "job.out").read_text()
    assert done.returncode == 0, f"{shlex.join(words)}\n{said}"
    wanted = {"check": "the hosts are alike", "--kubernetes": "kind: PyTorchJob"}
    wanted["mpirun -n"] = "accuracy"
    ending = next((w for mark, w in wanted.items() if mark in text), "completed")
    assert ending in said, said
