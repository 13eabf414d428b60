"""The command, as a person uses it: real launches, real kills, a real terminal; nothing is left
behind.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import ronde as package
from processes import assert_gone, child, environment, marked, ronde, ronde_batch, ronde_run
from ronde.plan import Plan
from ronde.watch import Ended, Resumed, StepRecorded, curve, read
from sampling import some

TRAIN = """
import argparse, os, sys, time
import torch
import ronde

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--stop-at", type=int, default=0)
parser.add_argument("--how", default="wait")
parser.add_argument("--on", type=int, default=1)
parser.add_argument("--steps-per-second", type=float, default=0)
parser.add_argument("rest", nargs="*")
args = parser.parse_args()

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
generator = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 1, generator=generator))
run = ronde.distribute(model, optimizer, data, loss=torch.nn.functional.mse_loss, batch_size=8, scheduler=scheduler, save_every=2, async_save=False)
names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
print("rank", run.rank, "of", run.world_size, "lr", args.lr, "rest", args.rest, *(f"{n}={os.environ.get(n)}" for n in names))
print("to stderr of", run.rank, file=sys.stderr)
for epoch in run.epochs(4):
    for batch in run.batches():
        if args.stop_at and run.state.step == args.stop_at:
            if args.how == "wait":
                run.port.parts.watcher.flush()
                print("waiting", flush=True)
                time.sleep(100)
            if args.how == "raise" and run.rank == args.on:
                raise ValueError(f"no good on {run.rank}")
            if args.how == "exit" and run.rank == args.on:
                sys.exit(3)
            if args.how == "end" and run.rank == args.on:
                sys.exit()
        run.step(batch)
        if args.steps_per_second:
            time.sleep(1 / args.steps_per_second)
print("done on", run.rank)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "train.py").write_text(TRAIN)
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("")
    (folder / "mine" / "job.py").write_text(
        "import os, sys, json\n"
        "import mine\n"
        "names = ('OMP_NUM_THREADS', 'OMP_WAIT_POLICY', 'WORLD_SIZE', 'RANK')\n"
        "print(json.dumps([__name__, sys.argv[1:], *(os.environ.get(n) for n in names)]))\n"
    )
    return folder


def lacks(text: str, *words: str) -> list[str]:
    """The words that a text does not have."""
    return [word for word in words if word not in text]


def log(place: Path, name: str, rank: int) -> str:
    return (place / "runs" / name / "logs" / f"rank-{rank}.log").read_text()


def curve_of(place: Path, name: str) -> dict[int, float]:
    return {
        e.step: e.loss
        for e in read(place / "runs" / name / "record.jsonl")
        if isinstance(e, StepRecorded)
    }


@pytest.fixture(scope="module")
def whole(place) -> subprocess.CompletedProcess:
    """An uninterrupted run of two workers, to which others are compared."""
    unset = {"OMP_NUM_THREADS": None, "OMP_WAIT_POLICY": None}
    return ronde_run(
        ["run", "--workers", "2", "--name", "whole", "train.py", "--lr", "0.05", "a", "b c"],
        place,
        env=unset,
    )


# -- what goes well --------------------------------------------------------------------


def test_a_run(place, whole):
    assert whole.returncode == 0, whole.stderr
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    out = whole.stdout
    shown = "rank 0 of 2 lr 0.05 rest ['a', 'b c']", "done on 0", "to stderr of 0"
    summary = "whole: completed", "2 workers × 4", "ronde show whole", "⠀", "loss"
    assert lacks(out, *shown, *summary, "12 steps, 96 samples, 4 epochs") == []
    assert lacks(log(place, "whole", 1), "rank 1 of 2", "done on 1", "to stderr of 1") == []
    assert "rank 1 of 2" not in out and "rank 0 of 2" in log(place, "whole", 0)
    threads, waits = re.search(r"OMP_NUM_THREADS=(\d+) OMP_WAIT_POLICY=(\w+)", out).groups()
    assert 1 <= int(threads) <= max(1, cores // 2)
    assert waits == ("PASSIVE" if cores < 4 else "None")
    # no colours and no messages where nobody sees them
    assert "\x1b" not in out + whole.stderr and "\x1e" not in out
    assert sorted(curve_of(place, "whole")) == list(range(1, 13))
    kept = sorted(p.name for p in (place / "runs" / "whole").iterdir())
    kept = [name for name in kept if name != "resources.jsonl"]  # after ten seconds
    assert kept == [".generation", ".lock", "checkpoints", "logs", "plan.yaml", "record.jsonl"]


def test_a_module_quietly_with_variables_of_ones_own(place):
    own = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    done = ronde_run(
        ["run", "-q", "-n", "1", "--name", "quiet", "-m", "mine.job", "--lr", "0.5", "--help"],
        place,
        env=own,
    )
    assert done.returncode == 0, done.stderr
    seen = ["__main__", ["--lr", "0.5", "--help"], "3", "ACTIVE", "1", "0"]
    assert json.loads(done.stdout) == seen and done.stderr == ""


def test_looking_at_runs(place, whole):
    lines = (
        "runs",
        "runs --json",
        "show whole",
        "show whole --json",
        "show",
        "show whol",
        "show NOPE",
        "show whole --curve nothing",
        "runs --runs elsewhere",
        "show --runs elsewhere",
        "show runs/whole",
    )
    table, listed, shown, as_json, last, near, nope, unknown, none, none_to_show, by_path = (
        ronde_batch([line.split() for line in lines], place)
    )
    assert all(c.returncode == 0 for c in (table, listed, shown, as_json, last, none, by_path))
    assert re.search(r"whole +completed +2 +4 +12 ", table.stdout)
    (entry,) = [r for r in json.loads(listed.stdout) if r["run"] == "whole"]
    said = [entry[name] for name in ("status", "workers", "step", "samples")]
    assert said == ["completed", 2, 12, 96]
    assert entry["plan"]["batch_size"] == 8 and entry["loss"] == curve_of(place, "whole")[12]
    assert lacks(shown.stdout, "whole: completed", "⠀") == [] and by_path.stdout == shown.stdout
    assert "completed" in last.stdout
    answer = json.loads(as_json.stdout)
    assert {int(s): v for s, v in answer["curve"]} == curve_of(place, "whole")
    assert answer["series"] == {}
    assert near.returncode == nope.returncode == unknown.returncode == none_to_show.returncode == 2
    assert "no run 'whol' in runs. Did you mean whole?" in near.stderr
    assert "no run 'NOPE' in runs. 'ronde runs' lists them" in nope.stderr
    assert "whole has no 'nothing'" in unknown.stderr
    assert "no runs in elsewhere" in none.stdout and "no runs in elsewhere" in none_to_show.stderr
    for c in (table, listed, shown, as_json, near, nope, unknown, none):
        assert "\x1b" not in c.stdout + c.stderr and "Traceback" not in c.stderr


# -- what the user got wrong -----------------------------------------------------------


def test_mistakes_are_one_line_and_leave_nothing(tmp_path):
    (tmp_path / "train.py").write_text("print('must not run')")
    (tmp_path / "folder").mkdir()
    (tmp_path / "runs" / "there").mkdir(parents=True)
    (tmp_path / "runs" / "there" / "plan.yaml").write_text("mine")
    cases = [
        (["run", "trian.py"], ["script not found: trian.py", "Did you mean train.py?"]),
        (["run", "zzz/other.py"], ["script not found: zzz/other.py"]),
        (["run", "folder"], ["folder is a folder, not a script"]),
        (["run", "-m", "no.such.module"], ["module not found: no.such.module", str(tmp_path)]),
        (["run", "-m", "nosuchmodule"], ["module not found: nosuchmodule"]),
        (["run", "--workers", "2"], ["no script given"]),
        (["run", "--workers", "0", "train.py"], ["--workers '0'", "whole number above 0"]),
        (["run", "--workers", "-1", "train.py"], ["--workers '-1'", "whole number above 0"]),
        (["run", "--workers", "abc", "train.py"], ["--workers 'abc'", "or auto"]),
        (["run", "--workers", "1.5", "train.py"], ["--workers '1.5'"]),
        (
            ["run", "--workers", "999", "train.py"],
            ["more workers than devices: 999 asked", "no GPU"],
        ),
        (
            ["run", "--name", "there", "train.py"],
            ["runs/there exists already", "--resume", "another --name"],
        ),
        (["run", "--name", "../x", "train.py"], ["'../x' is not a name for a run"]),
        (["run", "--resume", "train.py"], ["nothing to resume: no run of 'train' in runs"]),
        (
            ["run", "--resume", "--name", "nope", "train.py"],
            ["nothing to resume", "runs/nope does not exist"],
        ),
    ]
    for (command, words), done in zip(
        cases, ronde_batch([c for c, _ in cases], tmp_path), strict=True
    ):
        assert done.returncode == 2, (command, done)
        assert all(w in done.stderr for w in words), (command, done.stderr)
        assert len(done.stderr.splitlines()) == 1 and done.stdout == "", (command, done)
        assert done.stderr.startswith("error: "), (command, done)
    assert (tmp_path / "runs" / "there" / "plan.yaml").read_text() == "mine"
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert left == ["folder", "runs", "runs/there", "runs/there/plan.yaml", "train.py"]


def test_help_and_version(tmp_path):
    lines = ("show -h", "run", "", "--version", "nosuchverb", "runs --nope")
    show, bare, nothing, version, verb, option = ronde_batch(
        [line.split() for line in lines], tmp_path
    )
    assert show.returncode == version.returncode == 0 and "ronde show gpt-1" in show.stdout
    assert "Usage:" in bare.stdout + bare.stderr and "Usage:" in nothing.stdout + nothing.stderr
    assert version.stdout == f"ronde {package.__version__}\n"
    assert verb.returncode == 2 and "nosuchverb" in verb.stderr
    assert option.returncode == 2 and "--nope" in option.stderr
    # as a process of its own, too
    assert ronde_run(["--version"], tmp_path).stdout == version.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_help_of_each_verb_has_examples_and_fits_the_terminal(tmp_path):
    (top,) = ronde_batch([["--help"]], tmp_path)
    verbs = re.findall(r"^│ ([a-z]+) ", top.stdout, re.M)
    assert top.returncode == 0 and "--version" in top.stdout
    assert {"run", "horovodrun", "ship"} < {*verbs} and len(verbs) == 22 and verbs[0] == "run"
    words = [[verb] for verb in verbs if verb != "bench"] + [["bench", "cluster"]]
    helps = ronde_batch([[*v, "--help"] for v in words], tmp_path, env={"COLUMNS": "60"})
    for verb, done in zip(words, helps, strict=True):
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        assert done.returncode == 0 and " Examples:" in lines, verb
        assert f"ronde {verb[0]}" in done.stdout.partition("Examples:")[2], verb
        assert "bool" not in done.stdout and max(map(len, lines)) <= 60, verb
    # the stars of a pattern are not Markdown's
    assert " */a*.jpg." in helps[words.index(["pack"])].stdout


# -- what fails while it runs ----------------------------------------------------------


def failing(place: Path, name: str, *how: str) -> subprocess.CompletedProcess:
    """The environment is marked, and processes.py sees to it that no process with the mark is
    left.
    """
    done = ronde_run(["run", "-n", "2", "--name", name, "train.py", "--stop-at", "5", *how], place)
    assert done.returncode != 0 and "done on" not in done.stdout
    return done


def the_end(place: Path, name: str) -> Ended:
    return [e for e in read(place / "runs" / name / "record.jsonl") if isinstance(e, Ended)][-1]


def test_one_rank_raises(place):
    done = failing(place, "one", "--how", "raise")
    assert done.returncode == 1
    said = "rank 1 failed first:", "ValueError: no good on 1", "ronde run --resume --name one"
    assert lacks(done.stderr, *said, "its output: runs/one/logs/rank-1.log") == []
    # the script's own lines, once
    assert 'train.py", line' in done.stderr and done.stderr.count("Traceback") == 1
    assert "ronde/launch/worker.py" not in done.stderr and "elastic" not in done.stderr.lower()
    assert "ValueError: no good on 1" in log(place, "one", 1)
    end = the_end(place, "one")
    assert (end.status, end.rank) == ("failed", 1) and "no good on 1" in end.error


def test_no_file_is_named_that_is_not_kept(tmp_path):
    (tmp_path / "fails.py").write_text(
        "import os, signal\nprint('the last words', flush=True)\nos.kill(os.getpid(), "
        "signal.SIGKILL)\n"
    )
    done = ronde_run(["run", "-n", "1", "--runs", "none", "fails.py"], tmp_path)
    assert done.returncode != 0 and "failed first: killed by signal 9" in done.stderr
    assert "the last words\nthe rest of its output was not kept: --runs none" in done.stderr
    assert ".log" not in done.stderr and "--resume" not in done.stderr


def test_a_plan_of_another_version_hides_no_failure(tmp_path):
    (tmp_path / "fails.py").write_text(
        "import os, pathlib\n"
        "pathlib.Path(os.environ['RONDE_RUN_DIR'], 'plan.yaml').write_text('reducer: int8')\n"
        "raise ValueError('no good')\n"
    )
    done = ronde_run(["run", "-n", "1", "--name", "old", "fails.py"], tmp_path)
    assert done.returncode == 1 and "ValueError: no good" in done.stderr
    assert "its output: runs/old/logs/rank-0.log" in done.stderr


def test_a_rank_that_ends_early_is_named(place):
    done = failing(place, "early", "--how", "end")
    text = " ".join(done.stderr.split())
    first = "rank 1 had ended, with status 0, before the others; rank 0 failed then:"
    assert done.returncode == 1 and lacks(text, first, 'train.py", line') == []
    assert "failed first" not in text and done.stderr.count("Traceback") == 1
    end = the_end(place, "early")
    assert end.error.startswith("rank 1 had ended, with status 0, before the others: ")


def test_a_rank_exits_with_a_status_of_its_own(place):
    done = failing(place, "exit", "--how", "exit", "--on", "0")
    assert done.returncode == 3 and "rank 0 failed first" in done.stderr
    assert "Traceback" not in done.stderr
    assert "it ended by itself with exit status 3 (train.py, line " in done.stderr


def test_a_script_without_its_arguments_shows_what_it_printed(tmp_path):
    """argparse prints the usage and exits with status 2: its frames say nothing."""
    (tmp_path / "args.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('data')\nparser.parse_args()\nimport torch, ronde\n"
    )
    for verb in some(("run", "scale", "plan", "doctor", "prove"), 3):
        # A run shows it as it comes, a study keeps the script's output to itself until it fails.
        more = {"plan": ["--device", "H100"], "prove": []}.get(verb, ["--workers", "1"])
        done = ronde_run([verb, *more, "args.py"], tmp_path)
        text = done.stdout + done.stderr
        assert done.returncode == 2, (verb, text)
        assert "Traceback" not in text and "argparse.py" not in text, (verb, text)
        assert text.count("usage: args.py [-h] data") == 1
        assert text.count("args.py: error: the following arguments are required: data") == 1
        if verb != "run":
            cure = f"Its own arguments go after its name: ronde {verb} args.py ARGS…"
            assert lacks(text, "args.py ended by itself", cure) == []


# -- interrupted, and on ---------------------------------------------------------------


def test_interrupted_and_resumed_is_the_run_that_never_stopped(place, whole):
    """SIGINT to the launcher alone; then on, with another number of workers."""
    line = ronde("run", "-n", "2", "--name", "again", "train.py", "--stop-at", "5")
    with child(line, place, fork=True) as started:
        started.wait_for("waiting", 60)
        os.kill(started.pid, signal.SIGINT)
        done = started.done(30)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    cure = "after step 5. Saved: step 4. Go on with: ronde run --resume --name again"
    assert lacks(done.stderr, "stopped by SIGINT; every worker has ended", cure) == []
    assert the_end(place, "again").status == "interrupted"
    assert sorted(curve_of(place, "again")) == [1, 2, 3, 4, 5]

    resumed = ronde_run(["run", "-n", "1", "--resume", "--name", "again", "train.py"], place)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed again at step 4, epoch 2, sample 8 (written by 2 workers)" in resumed.stdout
    (mark,) = [e for e in read(place / "runs" / "again" / "record.jsonl") if isinstance(e, Resumed)]
    assert (mark.step, mark.epoch, mark.samples) == (4, 1, 32)
    assert (mark.workers, mark.written_by_workers) == (1, 2)
    assert the_end(place, "again").status == "completed"
    straight, joined = curve_of(place, "whole"), curve_of(place, "again")
    assert list(joined) == list(straight) and joined == pytest.approx(straight, rel=1e-12)
    states = [place / "runs" / n / "checkpoints" / "step-000000012" for n in ("whole", "again")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(s / file) for s in states)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


class Terminal:
    """A command whose terminal is a pseudo-terminal of its own: what it draws, and keys pressed in
    it.
    """

    def __init__(self, command: list[str], cwd: Path) -> None:
        env = environment(
            {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30", "NO_COLOR": None}
        )
        self.mark = env["RONDE_TEST_MARK"]
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execve(command[0], command, env)
        self.drawn = ""
        self.status: int | None = None

    def read(self, until: str, timeout: float) -> None:
        limit = time.monotonic() + timeout
        while until not in self.drawn:
            if time.monotonic() > limit:
                raise AssertionError(f"{until!r} was never drawn:\n{self.drawn}")
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.drawn += os.read(self.fd, 1 << 16).decode(errors="replace")
                except OSError:  # the other side is closed
                    raise AssertionError(f"{until!r} was never drawn:\n{self.drawn}") from None

    def press(self, key: bytes) -> None:
        os.write(self.fd, key)

    def end(self, timeout: float) -> int:
        limit = time.monotonic() + timeout
        while self.status is None and time.monotonic() < limit:
            if select.select([self.fd], [], [], 0.05)[0]:
                with suppress(OSError):
                    self.drawn += os.read(self.fd, 1 << 16).decode(errors="replace")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return -1 if self.status is None else self.status

    def close(self) -> None:
        if self.status is None:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        os.close(self.fd)
        assert_gone(self.mark)


def test_a_bar_on_a_terminal_and_ctrl_c(place):
    terminal = Terminal(
        ronde("run", "-n", "2", "--name", "bar", "train.py", "--steps-per-second", "4"), place
    )
    try:
        terminal.read("/12", 60)  # the step, of all steps
        terminal.read("samples/s", 30)
        terminal.press(b"\x03")  # to every process of the terminal at once
        status = terminal.end(30)
    finally:
        terminal.close()
    assert status == 130, terminal.drawn
    ended = "stopped by SIGINT; every worker has ended"
    assert lacks(terminal.drawn, "━", "\x1b[", "loss", "rank 0 of 2", ended) == []
    assert "\x1e" not in terminal.drawn and "Traceback" not in terminal.drawn
    shown = terminal.drawn.rfind("\x1b[?25h")
    assert shown > terminal.drawn.rfind("\x1b[?25l")  # the cursor is back
    # nor are messages in the log
    assert "\x1e" not in log(place, "bar", 0) and "epoch" not in log(place, "bar", 0)


def test_a_line_without_an_end_is_shown_on_a_terminal(place):
    """A bar of the script's own, a question, the last word: they end in no newline."""
    (place / "partial.py").write_text(
        r"print('whole line'); print('\rmine 33%', end='', flush=True); print('\rmine 99%', end='')"
    )
    terminal = Terminal(ronde("run", "-n", "1", "--name", "partial", "partial.py"), place)
    try:
        status = terminal.end(60)
    finally:
        terminal.close()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|━", "", terminal.drawn)
    assert status == 0 and "whole line" in drawn and "mine 99%" in drawn, drawn


def test_what_is_left_behind_would_be_seen(tmp_path):
    """The measure of all of the above: a process that slips away from its parent and session is
    found by its mark, and ended.
    """
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        "
        "time.sleep(60)\n    os._exit(0)\nos.wait()"
    )
    with pytest.raises(AssertionError, match=r"left behind:\n\d+ "):
        with child([sys.executable, "-c", code], tmp_path) as started:
            assert started.done(30).returncode == 0
            mark = started.mark
            assert len(marked(mark)) == 1
            assert_gone(mark, within=0.0)
    assert marked(mark) == []


def test_brackets_in_arguments_are_not_markup(tmp_path):
    (tmp_path / "say.py").write_text("import sys; print(sys.argv[1:])")
    done = ronde_run(["run", "-n", "1", "say.py", "[/bold]", "[1,2]"], tmp_path, 60)
    assert done.returncode == 0, done.stderr
    assert "say.py [/bold] [1,2]" in done.stdout and "['[/bold]', '[1,2]']" in done.stdout


def test_a_curve_names_its_values_whole():
    points = [(float(i), i / 10) for i in range(10)]
    short = curve(points, width=20, height=4)
    first, *rest = curve(points, width=20, height=4, label="evaluate/accuracy").splitlines()
    assert "     loss └─" in short and len(short.splitlines()) == 6
    assert first == "evaluate/accuracy" and rest == short.replace("loss", "    ").splitlines()


REFUSED_PLANS = [
    ("tensor=2,pipeline=2", "workers in multiples of 4"),
    ("pipeline=2,pipeline=1", "pipeline is given twice"),
    ("schedule=looped", "schedule applies to pipelines only"),
    ("pipelines=2", "Did you mean pipeline?"),
    ("precision=bf16", "does not split the work: give it to ronde.distribute"),
]
NO_PLANS = [
    ("plan.json", None, "plan.json: no such file"),
    ("plan.json", "{}", "plan.json holds no plan"),
    (
        "answer.json",
        '{"plans": []}',
        "answer.json holds no plan: expected what 'ronde plan --save' writes",
    ),
    ("cluster.txt", "nodes: 2\n", "holds no plan that can be used: a plan has no nodes"),
    ("mine", "a: b: c\n", "mine holds no plan: it is not YAML"),
    (
        "large",
        "workers: 8\n",
        "large: it is for 8 workers: start it with ronde run --workers 8",
    ),
]


def test_a_plan_that_cannot_be_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')")
    commands, expected = [], []
    for plan, message in REFUSED_PLANS:
        commands.append(["run", "-n", "2", "--plan", plan, "train.py"])
        expected.append(message)
    for number, (name, text, message) in enumerate(NO_PLANS):
        file = tmp_path / str(number) / name
        file.parent.mkdir()
        if text is not None:
            file.write_text(text)
        commands.append(["run", "-n", "2", "--plan", f"{number}/{name}", "train.py"])
        expected.append(message)
    for done, message in zip(ronde_batch(commands, tmp_path), expected, strict=True):
        printed = " ".join(done.stderr.split())
        assert done.returncode == 2 and message in printed, (message, done)
        assert "started" not in done.stdout + printed
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


def test_a_plan_is_read_from_a_file_of_any_name(place):
    # YAML, as ronde plan --save plan.json writes
    Plan(workers=2, batch_size=8, shard="optimizer").save(place / "plan.json")
    done = ronde_run(
        ["run", "-n", "2", "--name", "named", "--plan", "plan.json", "train.py"], place
    )
    assert done.returncode == 0, done.stderr
    assert (
        yaml.safe_load((place / "runs" / "named" / "plan.yaml").read_text())["shard"] == "optimizer"
    )
    there = len(list((place / "runs" / "named" / "checkpoints").glob("step-*")))
    # of six: what is kept is counted, not what was written
    assert there == 3 and "3 checkpoints" in done.stdout
