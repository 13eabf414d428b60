"""``ronde run --spark``: errors. The same training: ``test_every_engine.py``."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from processes import ronde_run

ABSENT = "" if importlib.util.find_spec("pyspark") else "Spark is absent: pip install '.[spark]'"
ABSENT = ABSENT or ("" if shutil.which("java") else "Spark needs Java: java was not found")

pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)


def test_errors_before_spark_starts(place):
    words = ["run", "--spark", "local[2]", "train.py", "x.st", "1"]
    done = ronde_run(words, place)
    assert done.returncode == 2 and "--spark needs --workers N" in done.stderr
    words[3:3] = ["--workers", "2"]
    for variables, told in (
        ({"JAVA_HOME": str(place)}, f"JAVA_HOME={place} has no bin/java"),
        ({"JAVA_HOME": None, "PATH": "/nowhere"}, "java is not on PATH"),
    ):
        done = ronde_run(words, place, env=variables)
        assert done.returncode == 2 and told in done.stderr and "default-jre" in done.stderr
