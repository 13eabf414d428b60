"""Fit recipes of generated tables on Spark: ``spark_recipes_worker.py MASTER PARTITIONS SEED…``.

Prints a line ``SEED DIGEST-OF-STATE ROWS-EQUAL`` for each; ROWS-EQUAL says whether the prepared
rows are those of PyArrow.
"""

import os
import sys
import warnings

warnings.filterwarnings("ignore")
master, partitions, seeds = sys.argv[1], int(sys.argv[2]), map(int, sys.argv[3:])
os.environ["PYSPARK_SUBMIT_ARGS"] = (
    "--conf spark.sql.shuffle.partitions=3 --conf spark.driver.host=127.0.0.1 "
    "--conf spark.driver.bindAddress=127.0.0.1 --conf spark.sql.codegen.factoryMode=NO_CODEGEN "
    "--conf spark.sql.codegen.wholeStage=false pyspark-shell"
)

from generated import generated  # noqa: E402

from ronde.tables import Recipe  # noqa: E402
from ronde.tables.spark import session  # noqa: E402

spark = session(master)
try:
    for seed in seeds:
        table, given = generated(seed)
        recipe = Recipe.of(given)
        frame = spark.createDataFrame(table).repartition(partitions)
        fitted = recipe.fit(frame)
        rows = {}
        if master.startswith("local["):
            made = fitted.apply(frame, out_of_fold=True).toArrow()
            wanted = fitted.apply(table, out_of_fold=True)
            order = [(name, "ascending") for name in wanted.schema.names[:2]]
            rows = made.sort_by(order).to_pydict(), wanted.sort_by(order).to_pydict()
        same = not rows or all(
            str(rows[0][name]) == str(rows[1][name]) for name in wanted.schema.names
        )
        print(seed, fitted.digest, same, flush=True)
finally:
    spark.stop()
