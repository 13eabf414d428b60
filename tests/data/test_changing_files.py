"""Links below a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde import feed
from ronde.world import ArgumentError


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_links_to_folders_above_and_to_themselves(tmp_path):
    here = write(
        tmp_path / "files",
        {"a/1.txt": b"1", "a/deep/3.txt": b"3", "b/2.txt": b"2", "c/4.txt": b"4"},
    )
    (here / "a/up").symlink_to("..")
    (here / "a/deep/a").symlink_to("../../a")
    (here / "b/else").symlink_to("../c")  # leads to no folder above: its files are taken
    source = feed.folder(here)
    assert list(source.names) == ["a/1.txt", "a/deep/3.txt", "b/2.txt", "b/else/4.txt", "c/4.txt"]
    assert [s.label for s in source.read(range(5))] == [0, 0, 1, 1, 2]
    (here / "b/self").symlink_to("self")
    with pytest.raises(
        ArgumentError, match=r"the link .*/files/b/self cannot be followed: Too many levels"
    ):
        feed.folder(here)
