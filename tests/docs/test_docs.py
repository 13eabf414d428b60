"""The documentation is true: its code runs, its tables are complete, its links resolve.

Blocks of a page run in order, in one namespace, in a fresh process and an empty folder:

- ```` ```python ````: executed.
- ```` ```python title="train.py" ````: written to that file; some ```` ```bash {.run} ```` block
  must run it.
- ```` ```bash {.run} ````: its lines that start with ``ronde`` or ``python`` are run; each must end with status 0.
- ```` ```python {.norun} ````: code of others that is not installed. Everything else is shown only.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from processes import PATHS, TESTS, environment, python, ronde_run
from sampling import some

ROOT = TESTS.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md")) + [p for p in [ROOT / "README.md"] if p.exists()]

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$",
    re.M | re.S,
)
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    language: str
    marks: frozenset[str]
    title: str | None
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    read = []
    for match in _FENCE.finditer(text):
        info, indent = match["info"].strip(), match["indent"]
        title = re.search(r'title="([^"]*)"', info)
        code = re.sub(f"^{indent}", "", match["body"], flags=re.M) if indent else match["body"]
        read.append(
            Block(
                language=re.match(r"[\w+-]*", info)[0],
                marks=frozenset(re.findall(r"\.(\w+)", re.sub(r'title="[^"]*"', "", info))),
                title=title[1] if title else None,
                code=code,
                line=text.count("\n", 0, match.start()) + 2,
            )
        )
    return read


def commands(block: Block) -> list[list[str]]:
    lines = [line for line in block.code.splitlines() if line.strip() and not line.startswith("#")]
    return [
        shlex.split(line, comments=True) for line in lines if line.split()[0] in ("ronde", "python")
    ]


def is_runnable(block: Block) -> bool:
    if block.language == "python":
        return "norun" not in block.marks
    return block.language == "bash" and "run" in block.marks


RUNNABLE = [page for page in PAGES if any(is_runnable(b) for b in blocks(page))]
FIRST = [ROOT / "README.md", DOCS / "five-minutes.md"]
SAMPLE = [*FIRST, *some([page for page in RUNNABLE if page not in FIRST], 40)]


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def page_environment() -> dict[str, str]:
    """Without what a launcher or a user may have set; on the CPU, so that two workers always fit."""
    launchers = ("RONDE_", "OMPI_", "PMI_", "SLURM_", "SM_", "TORCHELASTIC_", "OMP_")
    return environment(
        {
            **{name: None for name in os.environ if name.startswith(launchers)},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": PATHS,
            "OMP_NUM_THREADS": "1",
            "RONDE_DEVICE": "cpu",
            "RONDE_PROGRESS": "quiet",
            "COLUMNS": "120",
            "NO_COLOR": "1",
        }
    )


# Runs a page's steps; a traceback names the page and its line. torch is imported once, then each
# page has a process of its own, forked before anything was computed.
_DRIVER = """
import json, os, subprocess, sys

import zygote

zygote.load()


def run(page, steps):
    zygote.start_server(fork=True)
    subprocess.Popen = zygote.Popen
    names = {"__name__": "page", "__file__": page}
    for step in steps:
        if "code" in step:
            exec(compile("\\n" * (step["line"] - 1) + step["code"], page, "exec"), names)
            continue
        first, *rest = step["command"]
        command = [sys.executable, *(["-m", "ronde"] if first == "ronde" else []), *rest]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        print("$", *step["command"])
        print(done.stdout, flush=True)
        if done.returncode:
            sys.exit(f"{page}:{step['line']}: {' '.join(step['command'])} ended with status {done.returncode}")


for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(job["folder"])
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT, 0o600)
        for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(stream, target)
        run(job["page"], job["steps"])
        sys.exit()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Driver:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER],
            env=page_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def run(self, page: str, steps: list[dict[str, object]], folder: Path, seconds: float) -> str:
        """What the page's steps printed; fails where one of them does, or after ``seconds``."""
        output = folder / "output.txt"
        (folder / "work").mkdir()
        job = {"page": page, "steps": steps, "folder": str(folder / "work"), "output": str(output)}
        self.process.stdin.write(json.dumps(job) + "\n")
        child = int(self.process.stdout.readline())
        late = threading.Timer(seconds, os.killpg, [child, 9])
        late.start()
        try:
            status = int(self.process.stdout.readline())
        finally:
            late.cancel()
        printed = output.read_text(errors="replace")
        assert status == 0, (
            f"{page} ended with status {status} (−9: after {seconds} s):\n{printed[-6000:]}"
        )
        return printed


@pytest.fixture(scope="module")
def driver():
    driver = Driver()
    yield driver
    driver.process.stdin.close()
    driver.process.wait(10)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", SAMPLE, ids=label)
def test_code_on_the_page_runs(page: Path, driver: Driver, tmp_path: Path) -> None:
    steps: list[dict[str, object]] = []
    written: set[str] = set()
    used: set[str] = set()
    for block in blocks(page):
        if not is_runnable(block):
            continue
        if block.language == "bash":
            for command in commands(block):
                steps.append({"command": command, "line": block.line})
                used |= written & set(command)
        elif block.title:
            assert "/" not in block.title, (
                f"{label(page)}:{block.line}: title={block.title!r} is not a plain file name"
            )
            steps.append(
                {"code": f"open({block.title!r}, 'w').write({block.code!r})", "line": block.line}
            )
            written.add(block.title)
        else:
            steps.append({"code": block.code, "line": block.line})
    assert written <= used, f"{label(page)}: no bash block runs {', '.join(sorted(written - used))}"
    driver.run(label(page), steps, tmp_path, 90)


def test_every_python_block_is_run_but_for_few() -> None:
    skipped = [
        f"{label(p)}:{b.line}"
        for p in PAGES
        for b in blocks(p)
        if b.language == "python" and not is_runnable(b)
    ]
    assert len(skipped) <= 7, f"too much code is shown and not run: {skipped}"


def test_the_reader_of_pages_finds_blocks() -> None:
    """The tests above must not pass because nothing is found."""
    assert len(RUNNABLE) >= 8
    titled = [b for b in blocks(DOCS / "five-minutes.md") if b.title]
    assert [b.title for b in titled] == ["plain.py", "train.py"]
    assert any(
        ["ronde", "runs"] in commands(b) for b in blocks(DOCS / "five-minutes.md") if is_runnable(b)
    )


def test_the_record_is_documented_field_by_field() -> None:
    from ronde.watch import EVENTS, SCHEMA_VERSION

    text = (DOCS / "record.md").read_text()
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", text, re.M | re.S))
    assert set(sections) == set(EVENTS)
    for name, cls in EVENTS.items():
        fields = {f.name for f in dataclasses.fields(cls)} - {"time", "part"}
        listed = set(re.findall(r"^\| `(\w+)` \|", sections[name], re.M))
        assert listed == fields, (
            f"record.md, event {name!r}: missing {fields - listed}, too many {listed - fields}"
        )
    assert "| `time` |" in text and "| `type` |" in text
    assert f"version of this schema: {SCHEMA_VERSION}" in text


def test_the_plan_is_documented_field_by_field() -> None:
    from ronde import Plan

    section = (DOCS / "record.md").read_text().split("## plan.yaml")[1].split("\n## ")[0]
    assert {f.name for f in dataclasses.fields(Plan)} == {
        n
        for row in re.findall(r"^\| (`.*?) \|", section, re.M)
        for n in re.findall(r"`(\w+)`", row)
    }


def options_of(*verb: str) -> set[str]:
    """The options of a verb, or of one in a group."""
    import typer.main

    from ronde.cli import app

    command = typer.main.get_command(app)
    for name in verb:
        command = command.commands[name]
    options = [p for p in command.params if p.param_type_name == "option"]
    return {o for p in options for o in (*p.opts, *p.secondary_opts)} - {"--help", "-h"}


def test_every_option_of_ronde_run_is_documented() -> None:
    text = (DOCS / "run.md").read_text()
    rows = re.findall(r"^\| (`-.*?) \|", text, re.M)
    listed = {o for row in rows for o in re.findall(r"`(-[\w-]+)`", row)} - {"--help", "-h"}
    assert listed == options_of("run") and len(listed) >= 10


@pytest.mark.parametrize(
    ("verb", "page"),
    [
        ("runs", "run.md"),
        ("show", "run.md"),
        ("plan", "plan.md"),
        ("prove", "prove.md"),
        ("doctor", "doctor.md"),
        ("scale", "scale.md"),
        ("new", "recipes.md"),
        ("pack", "pack.md"),
        ("watch", "watch.md"),
        ("bench cluster", "cluster.md"),
    ],
)
def test_every_option_of_a_verb_is_documented(verb: str, page: str) -> None:
    text = (DOCS / page).read_text()
    for option in options_of(*verb.split()):
        named = re.search(rf"`(?:[^`\n]*[ \[|])?{option}(?![\w-])", text)
        assert named, f"{page} does not name {option} of ronde {verb}"


def test_every_extra_is_documented_and_installed_from_a_clone() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", (DOCS / "install.md").read_text(), re.M))
    assert set(rows) == set(extras)
    for extra, packages in extras.items():
        for package in packages if "…" not in rows[extra] else ():
            assert re.match(r"[\w-]+", package)[0].removesuffix("-material") in rows[extra], (
                f"install.md: {extra} brings {package}"
            )
    for page in PAGES:
        assert "ronde[" not in page.read_text(), f"{label(page)}: Ronde is not on PyPI"


def test_the_first_pages_lead_to_all_others() -> None:
    pages = {p.name for p in DOCS.glob("*.md")} - {"index.md"}
    # that feed.md leads to
    further = {
        "feed-cache.md",
        "feed-images.md",
        "feed-sources.md",
        "feed-stages.md",
    }
    for page, section in (
        (DOCS / "index.md", "## Where to go"),
        (ROOT / "README.md", "## Documentation"),
    ):
        linked = {
            target.split("/")[-1].partition("#")[0]
            for target in _LINK.findall(page.read_text().split(section)[1])
        }
        assert pages - further <= linked, (
            f"{label(page)}: nothing leads to {sorted(pages - further - linked)}"
        )


def test_every_variable_that_is_read_is_documented() -> None:
    source = "\n".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    text = (DOCS / "run.md").read_text()
    for name in sorted(set(re.findall(r"\bRONDE_[A-Z_]+\b", source))):
        assert f"`{name}`" in text, f"run.md does not name {name}"
    launchers = (ROOT / "src/ronde/world/launchers.py").read_text()
    read = set(
        re.findall(
            r'(?<!\+ )"((?:SLURM|SM|PMI|MPI|MASTER|LOCAL|GROUP)_[A-Z_]+|RANK|WORLD_SIZE|TRAINING_JOB_NAME|TORCHELASTIC_RUN_ID)"',
            launchers,
        )
    )
    read |= {"OMPI_COMM_WORLD_" + n for n in re.findall(r'p \+ "(\w+)"', launchers)}
    assert len(read) > 20
    for name in sorted(read):
        assert f"`{name}`" in text, f"run.md does not name {name}"


def test_every_public_name_is_documented() -> None:
    import ronde

    text = (DOCS / "api.md").read_text()
    distribute, of_run = text.split("## ronde.distribute")[1].split("## ronde.Run")
    of_run = of_run.split("## ronde.MicroBatches")[0]
    parameters = inspect.signature(ronde.distribute).parameters
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*?)\|", distribute, re.M))
    assert set(rows) == set(parameters)
    for name, parameter in parameters.items():
        default = "" if parameter.default is inspect.Parameter.empty else str(parameter.default)
        assert rows[name].strip().strip('`"') == default, (
            f"api.md: the default of {name} is {default}"
        )
    attributes = [n for n in dir(ronde.Run) if not n.startswith("_")]
    attributes += re.findall(
        r"^        (\w+): ",
        inspect.getdoc(ronde.Run).split("Attributes:")[1].replace("\n    ", "\n        "),
        re.M,
    )
    assert {"model", "dir", "state", "step", "rank"} <= set(attributes)
    for name in attributes:
        assert re.search(rf"`{name}[`(]", of_run), f"api.md does not name Run.{name}"
    for name in ronde.__all__:
        assert re.search(rf"\b{name}\b", text), f"api.md does not name ronde.{name}"
    for field in dataclasses.fields(ronde.World):
        assert f"`{field.name}`" in text.split("## ronde.world")[1], (
            f"api.md does not name World.{field.name}"
        )


def anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text())
    names: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.M):
        plain = (
            re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
            .strip()
            .lower()
        )
        names.add(re.sub(r"[-\s]+", "-", plain))
    return names


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_resolve(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{label(page)} links to {target}, which does not exist"
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), (
                f"{label(page)} links to {target}; {other.name} has {sorted(anchors(other))}"
            )


# Each provokes one error; its text must stand on errors.md as it is. ``x``, ``y``: 64 samples;
# ``start`` is distribute with defaults.
_PROVOKED = """
import json, os, sys
import torch, ronde
from torch import nn
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from ronde.cli import app
from ronde.world import identify, usable_cores

x, y = torch.randn(64, 4), torch.randn(64, 1)
data = TensorDataset(x, y)

def fresh():
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def start(model=None, optimizer=None, data=data, **options):
    one, other = fresh()
    options = {"loss": F.mse_loss, "batch_size": 16, **options}
    return ronde.distribute(model or one, optimizer or other, data, **options)

def train(run, steps=1):
    for batch in run.batches():
        for _ in range(steps):
            run.step(batch)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)

class Buckets(BatchSampler):
    def __iter__(self):  # its own generator, which nothing seeds
        return iter(torch.randperm(64, generator=fresh_generator()).split(8))

def fresh_generator():
    generator = torch.Generator()
    generator.seed()
    return generator

def plateau():
    model, optimizer = fresh()
    start(model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))

def other_batch_size():
    run = start(name="small")
    next(run.step(batch) for batch in run.batches())
    run.save()
    os.environ["RONDE_RESUME"] = "1"
    try:
        start(name="small", batch_size=32)
    finally:
        del os.environ["RONDE_RESUME"]

mpi = {f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}
def command(*arguments):
    app(list(arguments), standalone_mode=False)

os.makedirs("runs/big")
open("runs/big/plan.yaml", "w").close()
open("train.py", "w").close()
by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
errors = [
    lambda: start(batch_size=None),
    lambda: start(data=DataLoader(data, batch_size=8)),
    lambda: start(data=TensorDataset(x[:0], y[:0])),
    lambda: start(data=Stream()),
    lambda: start(batch_size=None, data=DataLoader(data, batch_sampler=Buckets(SequentialSampler(data), 8, False))),
    lambda: train(start(data=[torch.randn(4) for _ in range(64)])),
    lambda: start(nn.Linear(4, 1, device="meta")),
    lambda: start(nn.DataParallel(nn.Linear(4, 1))),
    lambda: start(nn.Linear(4, 1), fresh()[1]),
    plateau,
    lambda: train(start(loss=nn.MSELoss(reduction="none"))),
    lambda: train(start(loss=lambda out, target: F.mse_loss(out, target) * float("nan"))),
    lambda: train(start(loss=nn.MSELoss(reduction="sum"))),
    lambda: start().gather(x),
    lambda: train(start(), steps=0),
    lambda: train(start(), steps=2),
    other_batch_size,
    lambda: identify({"RANK": "0"}),
    lambda: identify({**mpi, **by_hand}),
    lambda: identify({"RANK": "first", "WORLD_SIZE": "2"}),
    lambda: command("run", "trian.py"),
    lambda: command("run", "-m", "my.trian"),
    lambda: command("run", "--name", "big", "train.py"),
    lambda: command("run", "--runs", "other", "--name", "big", "--resume", "train.py"),
    lambda: command("run", "--resume", "train.py"),
    lambda: command("run", "--workers", "9999", "train.py"),
]
texts = []
for provoke in errors:
    try:
        provoke()
    except ronde.RondeError as error:
        texts.append(str(error))
    else:
        texts.append(f"error number {len(texts)} was not raised")
cores = usable_cores()
for was, shown in {  # what differs from machine to machine
    os.getcwd(): "/home/me/project",
    "other/": "runs/",
    "9999 asked": "99 asked",
    f"{cores} usable": "2 usable",
    f"at most {cores * 8} ": "at most 16 ",
    f"--workers {cores}.": "--workers 2.",
}.items():
    texts = [text.replace(was, shown) for text in texts]
print(json.dumps(texts))
"""

_DISAGREE = """
import torch, ronde
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (ronde.world().rank + 1))
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=16)
"""


def shown_errors() -> list[str]:
    return [" ".join(b.code.split()) for b in blocks(DOCS / "errors.md") if b.language == "text"]


@pytest.mark.timeout(60)
def test_errors_have_the_text_that_is_documented(driver: Driver, tmp_path: Path) -> None:
    printed = driver.run("provoked.py", [{"code": _PROVOKED, "line": 1}], tmp_path, 45)
    shown = shown_errors()
    for text in json.loads(printed.splitlines()[-1]):
        assert " ".join(text.split()) in shown, f"errors.md does not show: {text}"


@pytest.mark.timeout(60)
def test_disagreement_has_the_text_that_is_documented(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_DISAGREE)
    done = ronde_run(["run", "--workers", "2", "train.py"], tmp_path)
    assert done.returncode == 1, done.stdout
    text = " ".join((done.stdout + done.stderr).split())
    assert any(shown in text for shown in shown_errors() if "disagree" in shown), text


@pytest.mark.timeout(60)
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    site = tmp_path / "site"
    command = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = python(command, ROOT, 50)
    assert done.returncode == 0, done.stderr[-4000:]
    for asset in re.findall(
        r'(?:src|href)="(https?://[^"]+\.(?:css|js|woff2?))"',
        (site / "index.html").read_text(),
    ):
        pytest.fail(f"the site needs {asset} from the network")
