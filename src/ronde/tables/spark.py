"""Preparation on Spark, for tables that one machine does not hold."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

from ronde.tables.prepared import RECIPE_FILE
from ronde.tables.reading import SUFFIXES
from ronde.tables.recipe import Recipe
from ronde.world import ArgumentError, RondeError
from ronde.world.paths import files_of, is_remote


def is_out_of_fold(recipe: Recipe, paths: Sequence[str]) -> bool:
    """Whether target means of these files leave out the rows of their own fold.

    Raises:
        ArgumentError: some files are those of the fit and others are not, or nobody can tell.
    """
    if not recipe.needs_folds:
        return False
    if remote := next(filter(is_remote, paths), None):
        raise ArgumentError(
            f"--engine spark cannot tell whether {remote} holds the rows of the fit, which "
            "target_mean must leave out. Call recipe.apply(frame, out_of_fold=…) in a Spark script."
        )
    files = files_of(list(paths), "ronde prepare", SUFFIXES)
    fitted_on = {recipe.was_fitted_on(file): file for file in files}
    if len(fitted_on) == 2:
        raise ArgumentError(
            f"{recipe.where} was fitted on {fitted_on[True]} and not on {fitted_on[False]}: "
            "--engine spark prepares the files of the fit and others in two runs."
        )
    return True in fitted_on


def write_on_spark(
    recipe: Recipe, paths: Sequence[str], out: str, spark: Any, out_of_fold: bool
) -> int:
    """Prepare Parquet files on a cluster; returns the number of rows.

    Args:
        out: a folder that all executors can write to; it appears when all parts are there.
        out_of_fold: as for :meth:`Recipe.apply`.
    """
    frame = spark.read.parquet(*paths)
    # Hadoop's own file systems: the folder may be one that only the cluster sees
    path = spark.sparkContext._jvm.org.apache.hadoop.fs.Path
    whole = path(out)
    part = path(whole.getParent() or path("."), f".{whole.getName()}.{uuid.uuid4().hex}.writing")
    files = whole.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
    if files.exists(whole):
        raise ArgumentError(f"--out {out} exists. Delete it, or give a new folder.")
    try:
        recipe.apply(frame, out_of_fold=out_of_fold).write.parquet(part.toString())
        stream = files.create(path(part, RECIPE_FILE))
        stream.write(bytearray(json.dumps(recipe.to_dict(), indent=1).encode()))
        stream.close()
        if files.exists(whole) or not files.rename(part, whole):
            raise RondeError(f"--out {out}: {part.toString()} cannot be renamed to it.")
    finally:
        with contextlib.suppress(Exception):  # a dead JVM must not hide why it died
            files.delete(part, True)
    return int(spark.read.parquet(out).count())


def check_paths(paths: Sequence[str]) -> None:
    """Refuse what Spark does not read as the other engines do.

    Raises:
        ArgumentError: a file is no Parquet.
    """
    for path in paths:
        if path.lower().endswith((".csv", ".arrow", ".feather", ".ipc")):
            raise ArgumentError(
                f"--engine spark reads Parquet, and {path} is none. Read it into a Spark frame of "
                "the types you want, and call recipe.fit(frame)."
            )
