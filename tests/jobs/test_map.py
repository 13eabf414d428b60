"""``ronde map``: real workers, bad and hanging items, what one process gives."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ronde
import zygote
from ronde.cli.app import app
from ronde.jobs.items import find_items
from ronde.jobs.ledger import JobLedger
from ronde.jobs.map_plan import (
    MapPlan,
    chunk_key,
    join_outputs,
    load_map,
    plan_map,
    without_output,
    write_failed,
)
from ronde.world import ArgumentError, RondeError

SCRIPT = """
import sys, time
import ronde
for chunk in ronde.items("lines:items.txt"):
    with chunk.output("out.txt") as out:
        for key, line in chunk:
            if "bad" in sys.argv and line in ("17", "70"):
                raise ValueError(f"poison {line}")
            if "hangs" in sys.argv and line == "33":
                time.sleep(1000)
            print(key, int(line) ** 3, file=out)
            if key % 50 == 0:
                (chunk.folder / f"{key}.note").write_text(line)
print("after the loop")
"""


def ronde_map(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ronde", "map", *words]
    return zygote.run(command, cwd=folder, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "items.txt").write_text("".join(f"{i}\n" for i in range(200)))
    (tmp_path / "work.py").write_text(SCRIPT)
    return tmp_path


def test_two_workers_give_the_bytes_of_one_process_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert zygote.run([sys.executable, "work.py"], cwd=folder, timeout=60).returncode == 0
    words = ("--items", "lines:items.txt", "--workers", "2", "--out", "out", "--json", "work.py")
    done = ronde_map(folder, *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert (told["items"], told["done"], told["failed"]) == (200, 200, 0)
    for name in ("out.txt", "0.note", "50.note", "100.note", "150.note"):
        assert (folder / "out" / name).read_bytes() == (folder / name).read_bytes()
    monkeypatch.chdir(folder)
    with pytest.raises(ArgumentError, match="holds a map already: go on with ronde map --resume"):
        app(["map", *words], standalone_mode=False)


def test_bad_and_hanging_items_are_set_aside_alone(folder: Path) -> None:
    words = ("--items", "lines:items.txt", "--workers", "2", "--out", "out", "--retries", "0")
    done = ronde_map(folder, *words, "--limit", "1s", "work.py", "bad", "hangs")
    assert done.returncode == 1, done.stderr
    failed = [json.loads(line) for line in (folder / "out" / "failed.jsonl").open()]
    assert [each["item"] for each in failed] == [17, 33, 70]
    assert "ValueError: poison 17" in failed[0]["error"]
    assert "took longer than 1 s" in failed[1]["error"]
    kept = [line.split() for line in (folder / "out" / "out.txt").read_text().splitlines()]
    expected = [i for i in range(200) if i not in (17, 33, 70)]
    assert [(int(k), int(v)) for k, v in kept] == [(i, i**3) for i in expected]


def test_a_command_an_item_and_what_is_tolerated(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.in").write_text(f"content {i}\n")
    say = ("--", "sh", "-c", "cat {}; test {} != 4.in")
    done = ronde_map(tmp_path, "--items", "*.in", "--workers", "2", "--out", "out", *say)
    assert done.returncode == 1, done.stderr
    expected = "".join(f"content {i}\n" for i in (0, 1, 2, 3, 5))
    assert (tmp_path / "out" / "output.txt").read_text() == expected
    strict = ("--items", "*.in", "--workers", "2", "--out", "strict", "--tolerate", "0", *say)
    done = ronde_map(tmp_path, *strict)
    assert done.returncode == 1
    assert "more items failed (1) than --tolerate allows (0)" in done.stderr
    assert "They are in strict/failed.jsonl; go on with: ronde map --resume strict" in done.stderr
    assert json.loads((tmp_path / "strict" / "failed.jsonl").read_text())["item"] == "4.in"


def test_ctrl_c_ends_all_and_resume_goes_on(folder: Path) -> None:
    (folder / "items.txt").write_text("".join(f"{i}\n" for i in range(40)))
    words = [sys.executable, "-m", "ronde", "map", "--items", "lines:items.txt", "--chunk", "2"]
    item = "echo {} >> begun; [ {} -lt 4 ] || [ -e go ] || sleep 60; echo {}"  # most wait for go
    words += ["--workers", "2", "--out", "out", "--", "sh", "-c", item]
    process = zygote.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (folder / "begun").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "go on with: ronde map --resume out" in said
    (folder / "go").touch()
    job = folder / "out/.map/job.json"
    job.write_text(job.read_text().replace("{", '{"digest": "of an older version", ', 1))
    done = ronde_map(folder, "--resume", "out")
    assert done.returncode == 0, done.stderr
    assert (folder / "out" / "output.txt").read_text() == (folder / "items.txt").read_text()
    left = [p.name for d in ("todo", "lease", "work") for p in (folder / "out/.map" / d).iterdir()]
    assert left == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--items", "*.none", "--out", "o", "work.py"), "no file matches it in"),
        (("--items", "lines:none", "--out", "o", "work.py"), "none: No such file or directory."),
        (("--items", "@none", "--out", "o", "work.py"), "none: No such file or directory."),
        (("--resume", "none"), "holds no map"),
        (("--items", "lines:items.txt", "--out", "o", "wrok.py"), "Did you mean work.py"),
        (("--items", "lines:items.txt", "--out", "o", "ech", "{}"), "command not found: ech"),
        (("work.py",), "name the items, the output, and the script"),
        (("--items", "lines:items.txt", "--chunk", "x", "--out", "o", "work.py"), "--chunk x: exp"),
        (
            ("--items", "lines:items.txt", "--tolerate", "x", "--out", "o", "work.py"),
            "--tolerate x",
        ),
        (("--items", "lines:items.txt", "--limit", "x", "--out", "o", "work.py"), "--limit x: exp"),
    ],
)
def test_wrong_arguments_are_told_and_leave_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...], error: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    with pytest.raises(ArgumentError, match=error.replace("*", r"\*")):
        app(["map", *words], standalone_mode=False)
    assert not (folder / "o" / ".map").exists()


def test_items_without_an_output_are_found(tmp_path: Path) -> None:
    ledger = JobLedger(tmp_path)
    for key in (chunk_key(2, 5), chunk_key(5, 6), chunk_key(8, 9)):
        ledger.add([key])
        lease = ledger.claim()
        assert lease is not None
        ledger.commit(lease)
    assert without_output(ledger, 10) == [chunk_key(0, 2), chunk_key(6, 8), chunk_key(9, 10)]
    assert without_output(ledger, 9) == [chunk_key(0, 2), chunk_key(6, 8)]


def test_several_may_join_at_the_same_time(tmp_path: Path) -> None:
    root, parts = tmp_path / ".map", [f"{i}\n" * 100 for i in range(60)]
    ledger = JobLedger(root)
    ledger.add(chunk_key(i, i + 1) for i in range(60))
    while lease := ledger.claim():
        (lease.folder / "out.txt").write_text(parts[int(lease.key.split("-")[0])])
        ledger.commit(lease, {"outputs": ["out.txt"]})
    owners = [JobLedger(root) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda owner: join_outputs(owner, tmp_path), owners))
    assert (tmp_path / "out.txt").read_text() == "".join(parts)
    assert not list(root.glob("joined*"))


def test_items_are_read_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = ["", "é", "two words", "x" * 100, "last without an end"]
    Path("lines").write_bytes("\n".join(text).encode())
    lines = find_items("lines:lines")
    assert [list(lines.read(i, i + 1)) for i in range(5)] == [[(i, text[i])] for i in range(5)]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"a": list(range(10)), "b": [f"r{i}" for i in range(10)]})
    parquet.write_table(table, "t.parquet", row_group_size=3)
    rows = find_items("rows:t.parquet")
    assert len(rows) == 10
    assert list(rows.read(2, 7)) == [(i, {"a": i, "b": f"r{i}"}) for i in range(2, 7)]


def test_a_loop_that_leaves_items_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = set(Path().iterdir())
    with pytest.raises(RondeError, match="the loop left items of its chunk"):
        for chunk in ronde.items("lines:items.txt"):
            with chunk.output("out.txt") as out:
                print(next(iter(chunk)), file=out)
    assert set(Path().iterdir()) == before
    for name in ("../x", "/tmp/x", ".hidden"):
        with pytest.raises(ArgumentError, match="is no name of a file below"):
            for chunk in ronde.items("lines:items.txt"):
                with chunk.output(name):
                    pass


def test_a_script_that_is_killed_while_its_child_goes_on(folder: Path) -> None:
    begins = "import os, signal, time\nif not os.fork():\n    time.sleep(60)\n"  # as a pool's
    dies = """os.path.exists("died") or (open("died", "w"), os.kill(os.getpid(), 9))\n        """
    script = SCRIPT.replace("for chunk", begins + "for chunk").replace(
        "for key, line", dies + "for key, line"
    )
    (folder / "work.py").write_text(script + "os._exit(0)\n")
    words = ("--items", "lines:items.txt", "--workers", "1", "--out", "out", "work.py")
    done = ronde_map(folder, *words)
    assert done.returncode == 0, done.stderr
    assert len((folder / "out" / "out.txt").read_text().splitlines()) == 200


def test_a_plan_that_is_another_commands_or_of_other_items_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "items.txt").write_text("a\nb\nc\n")
    items, plan = find_items("lines:items.txt"), MapPlan(["true"], True, 2, None, None)
    root = tmp_path / "out" / ".map"
    with pytest.raises(ArgumentError, match="holds a map already"):  # both at the same time
        plan_map(root, items, plan, [0, 1, 3], lambda _: plan_map(root, items, plan, [0, 2, 3]))
    assert {path.name for path in (root / "todo").iterdir()} == {
        f"{chunk_key(0, 2)}.0.0",
        f"{chunk_key(2, 3)}.0.0",
    }
    assert [path.name for path in root.parent.iterdir()] == [".map"]
    assert len(load_map(root)[1]) == 3
    (tmp_path / "items.txt").write_text("new\na\nb\nc\n")
    with pytest.raises(ArgumentError, match="planned with 6 bytes; now 10 bytes"):
        load_map(root)
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ArgumentError, match="now no such file in"):
        load_map(root)
    files = find_items("../*.txt")
    plan_map(tmp_path / "files" / ".map", files, plan, [0, 1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="none of the items exists, seen from"):
        app(["map", "--resume", "files"], standalone_mode=False)


def test_links_are_joined_as_they_are(tmp_path: Path) -> None:
    ledger = JobLedger(tmp_path / ".map")
    ledger.add([chunk_key(0, 1)])
    lease = ledger.claim()
    assert lease is not None
    (lease.folder / "link").symlink_to("nowhere")
    ledger.commit(lease, {"outputs": []})
    join_outputs(ledger, tmp_path)
    assert (tmp_path / "link").readlink() == Path("nowhere")


def test_an_item_that_is_done_later_has_failed_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "items.txt").write_text("a\n")
    ledger, items = JobLedger(tmp_path / ".map"), find_items("lines:items.txt")
    ledger.add([chunk_key(0, 1)])
    lease = ledger.claim()
    assert lease is not None
    ledger.set_aside(lease, "why")
    write_failed(ledger, items, tmp_path)
    assert (tmp_path / "failed.jsonl").exists()
    ledger.forget(chunk_key(0, 1))
    write_failed(ledger, items, tmp_path)
    assert not (tmp_path / "failed.jsonl").exists()
