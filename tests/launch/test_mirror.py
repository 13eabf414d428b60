"""A mirrored run directory: the launcher's copy takes lines of its own between those of rank 0."""

from __future__ import annotations

import shutil
import threading

from ronde.launch import mirror
from ronde.launch.messages import File, Settled
from ronde.launch.mirror import Mirror, Mirrored


def test_lines_arrive_whole_once_and_health_before_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_EVERY_SECONDS", 1e-4)
    monkeypatch.setattr(mirror, "_PART_BYTES", 64)  # a line of health is longer
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    mirrored, told, looked = Mirrored(here), [], threading.Event()

    def take(message: object) -> None:
        mirrored.take(message)
        with (here / "record.jsonl").open("ab") as file:  # as the launcher does, at any time
            file.write(b"launcher\n")
        if isinstance(message, Settled):
            steps = [
                x for x in (here / "record.jsonl").read_bytes().split(b"\n") if x[:4] == b"step"
            ]
            path = here / "health.jsonl"
            health = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
            told.append((len(steps), len(health)))
            looked.set()

    sent = Mirror(there, take)
    with (
        (there / "health.jsonl").open("wb", buffering=0) as health,
        (there / "record.jsonl").open("wb", buffering=0) as record,
    ):
        for step in range(600):
            if step % 60 == 0:
                looked.clear()
                assert looked.wait(30)
            health.write(b"health %d %s\n" % (step, b"x" * 80))
            record.write(b"step %d, and" % step)  # torn, for a moment
            record.write(b" so on\n")
        record.write(b"torn")
    sent.close()
    expected = [b"step %d, and so on" % step for step in range(600)]
    lines = (here / "record.jsonl").read_bytes().splitlines()
    assert [line for line in lines if line != b"launcher"] == expected
    assert (here / "health.jsonl").read_bytes() == (there / "health.jsonl").read_bytes()
    assert all(steps <= health for steps, health in told)


def test_the_new_checkpoint_is_there_before_the_old_one_goes(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    for name in ("step-000000001", "step-000000002"):
        (there / "checkpoints" / name).mkdir(parents=True)
    old = there / "checkpoints/step-000000001/manifest.json"
    old.write_text("old")
    mirrored, seen = Mirrored(here), []

    def take(message: object) -> None:
        mirrored.take(message)
        seen.append(sorted(p.parent.name for p in here.glob("checkpoints/step-*/*")))

    sent = Mirror(there, take)
    shutil.copytree(there, here)
    (there / "checkpoints/step-000000002/manifest.json").write_text("new")
    old.unlink()
    sent.close()
    assert [] not in seen and seen[-1] == ["step-000000002"]


def test_a_checkpoint_appears_or_changes_when_all_of_it_is_there(tmp_path):
    place = tmp_path / "checkpoints/step-000000001"
    mirrored, files = Mirrored(tmp_path), ("manifest.json", "model.safetensors")
    for text, before in ((b"1", []), (b"2", ["1", "1"])):
        for name in files:
            mirrored.take(File(f"checkpoints/step-000000001/{name}", True, text))
            assert place.exists() == bool(before)
            assert [path.read_text() for path in place.glob("*")] == before
        mirrored.take(Settled())
    assert [path.read_text() for path in tmp_path.glob("checkpoints/*/*")] == ["2", "2"]
