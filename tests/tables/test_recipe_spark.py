"""Spark finds the bits that PyArrow finds, over any number of partitions and executors."""

import sys
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("narwhals")

from generated import generated  # noqa: E402

from engines import absent  # noqa: E402
from processes import PATHS, TESTS, child  # noqa: E402
from ronde.tables import Recipe  # noqa: E402
from sampling import ALL  # noqa: E402

CASES = [("local[2]", 4), ("local[2]", 7), ("local-cluster[2,1,1024]", 4)]
SEEDS = [str(seed) for seed in (range(200) if ALL else (3,))]
HERE = Path(__file__).parent


@pytest.mark.timeout(36000 if ALL else 900)
@pytest.mark.parametrize(("master", "partitions"), CASES if ALL else CASES[1:2])
def test_spark_finds_the_same_bits(tmp_path, master, partitions):
    if why := absent("spark"):
        pytest.skip(why)
    script = [sys.executable, str(TESTS / "spark_recipes_worker.py"), master, str(partitions)]
    paths = {"PYTHONPATH": f"{PATHS}:{HERE}", "SPARK_LOCAL_IP": "127.0.0.1"}
    with child([*script, *SEEDS], tmp_path, paths) as started:
        done = started.done(36000 if ALL else 850)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [seed for seed, _, _ in lines] == SEEDS
    for seed, digest, rows_equal in lines:
        table, given = generated(int(seed))
        assert digest == Recipe.of(given).fit(table).digest, seed
        assert rows_equal == "True", seed
