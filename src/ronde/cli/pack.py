"""``ronde pack``: pack many small files into a few large ones, which load many times faster."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ronde.cli.answer_screen import Doing, tell
from ronde.cli.options import JsonFlag, app, argument, parsed, setting, verb
from ronde.watch import plain_console
from ronde.world import ArgumentError
from ronde.world.units import count_of, format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``ronde pack``, as the user gave them."""

    folder: Path = argument("FOLDER", "Folder to pack; with --verify, the pack.")
    out: Path | None = argument("OUT", "A new or empty folder.", default=None)
    shard_size: str = setting("256MiB", "--shard-size", "Largest size of a shard.", "SIZE")
    labels: str = setting(
        "folder",
        "--labels",
        "folders (their names), none, or a CSV of a header, then file and label.",
        "folder|none|FILE.csv",
    )
    suffixes: str | None = setting(None, "--suffixes", "Suffixes to pack. Default: all.", "jpg,png")
    pattern: str | None = setting(
        None, "--pattern", "What the path below FOLDER must match, as `*/a*.jpg`.", "GLOB"
    )
    verify: bool = setting(False, "--verify", "Check a pack instead: every shard and sample.")
    as_json: JsonFlag = False


@verb(app, "pack")
def _pack(options: Options) -> None:
    """Pack a folder of small files into shards with an index.

    OUT then holds tar shards and a manifest. feed.tar("OUT") and feed.images("OUT") give the
    same samples, labels, classes and order as FOLDER, so a training can go on from either.
    The same FOLDER always gives the same bytes. If packing is interrupted, run the command
    again: it starts anew.

    Examples:

    ```sh
    ronde pack photos/train packed/train               labels are the folder names
    ronde pack --labels labels.csv --suffixes jpg,png photos packed
    ronde pack --shard-size 1GiB photos/train packed/train
    ronde pack --verify packed/train                   compare every byte with its checksum
    ```
    """
    from ronde.data import verify_pack
    from ronde.data.pack import pack as write

    began = time.monotonic()
    folder, out, as_json = options.folder, options.out, options.as_json
    if options.verify:
        if out is not None:
            raise ArgumentError(f"--verify takes one folder, the pack: leave {out} out.")
        with (
            _progress("checking", as_json) as progress,
            _stoppable(folder, "nothing was changed"),
        ):
            checked = verify_pack(folder, progress)
        _say_verified(checked, as_json)
        raise typer.Exit(1 if checked.problems else 0)
    if out is None:
        raise ArgumentError("OUT is missing: ronde pack FOLDER OUT, or ronde pack --verify OUT.")
    suffixes = options.suffixes
    endings = None if suffixes is None else [s.strip() for s in suffixes.split(",") if s.strip()]
    size = int(parsed("--shard-size", options.shard_size, parse_bytes, "a size as 256MiB or 1GB"))
    # Packing writes beside OUT and renames: Ctrl-C leaves nothing behind.
    with (
        _progress("packing", as_json) as progress,
        _stoppable(out, "nothing was packed"),
    ):
        result = write(
            folder,
            out,
            shard_bytes=size,
            labels=options.labels,
            suffixes=endings,
            pattern=options.pattern,
            progress=progress,
        )
    if as_json:
        print(
            json.dumps(
                {**result.to_dict(), "seconds": round(time.monotonic() - began, 3)}, indent=1
            )
        )
        return
    what = f"{result.samples:,} samples" + (
        f" of {len(result.classes):,} classes" if result.classes else ""
    )
    shards = count_of(result.shards, "shard")
    done = f"{what}, {format_bytes(result.bytes)} in {shards}"
    if result.already:
        line = f"{out} is packed already: {done}"
    else:
        line = f"packed {done}, in {time.monotonic() - began:.1f} s: {out}"
    tell(line)


@contextlib.contextmanager
def _progress(what: str, as_json: bool) -> Iterator[Any]:
    """A status line, on a terminal only; yields a callback (samples done, samples in total)."""
    console = plain_console()
    if as_json or not console.is_terminal:
        yield None
        return
    with Doing(console) as say:
        yield lambda done, total: say(f"{what} {done:,} of {total:,} samples")


@contextlib.contextmanager
def _stoppable(place: Path, then: str) -> Iterator[None]:
    """Turn Ctrl-C into one line and exit status 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped by SIGINT; {then}: {place}", err=True)
        raise typer.Exit(130) from None


def _say_verified(checked: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(checked.to_dict(), indent=1))
        return

    for problem in checked.problems:
        tell(("damaged: ", "bold red"), problem)
    if not checked.problems:
        tell(
            f"{checked.path}: {checked.samples:,} samples in {checked.shards:,} shards, "
            f"{format_bytes(checked.bytes)}, all as they were packed"
        )
