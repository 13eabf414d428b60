"""A folder of prepared Parquet files and their recipe, which is whole or is not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ronde.tables.recipe import Recipe
from ronde.world import ArgumentError, RondeError
from ronde.world.paths import is_disk_full
from ronde.world.whole_file import whole_folder

RECIPE_FILE = "_recipe.json"  # readers of Parquet folders skip names with an underscore


def check_out(out: Path) -> None:
    """Refuse a folder that exists, or that nothing can be written beside.

    Raises:
        ArgumentError: which of the two.
    """
    if out.exists():
        raise ArgumentError(f"--out {out} exists. Delete it, or give a new folder.")
    if not os.access(out.absolute().parent, os.W_OK):
        raise ArgumentError(f"--out {out}: the folder {out.absolute().parent} is not writable.")


def write_prepared(
    recipe: Recipe, files: Sequence[Path], out: Path, part_done: Callable[[int], None]
) -> int:
    """Write a part for each file, and the recipe, then give the folder its name.

    Args:
        part_done: called with the number of rows written so far.

    Returns:
        The number of rows.

    Raises:
        RondeError: the disk is full; the text says what was kept.
    """
    check_out(out)
    rows, done = 0, 0
    try:
        with whole_folder(out) as folder:
            for number, file in enumerate(files):
                rows += _write_part(recipe, file, folder / f"part-{number:05d}.parquet")
                done += 1
                part_done(rows)
            recipe.write(folder / RECIPE_FILE)
    except BaseException as error:
        if not is_disk_full(error):
            raise
        full = f"--out {out}: the disk is full after {done} of {len(files)} parts."
        raise RondeError(f"{full} {_kept(recipe, out)}") from error
    return rows


def _write_part(recipe: Recipe, file: Path, part: Path) -> int:
    """Prepare a file; returns its rows."""
    import pyarrow.parquet as pq

    batches = recipe.batches(file)
    first = next(batches)  # there is one, of no rows perhaps
    with pq.ParquetWriter(part, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
    return int(pq.read_metadata(part).num_rows)


def _kept(recipe: Recipe, out: Path) -> str:
    """Keep the recipe at least: a fit may have taken an hour."""
    file = out.with_name(f"{out.name}{RECIPE_FILE}")
    with contextlib.suppress(OSError):
        recipe.write(file)
        return (
            f"Kept: {file}, the fitted recipe. Make room, and run: ronde prepare {file} FILES "
            f"--out {out}"
        )
    with contextlib.suppress(OSError):
        file.unlink()
    return "Nothing was kept. Make room, and run again."
