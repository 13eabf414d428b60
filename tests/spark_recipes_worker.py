"""Fit recipes of generated tables on Spark: ``spark_recipes_worker.py MASTER PARTITIONS SEED…``.

Prints a line ``SEED DIGEST-OF-STATE ROWS-EQUAL`` for each; ROWS-EQUAL says whether the prepared
rows are those of PyArrow.
"""

import os
import sys
import warnings

from generated import generated

from ronde.tables import Recipe
from ronde.tables.sql_engines import session

# Compiling the long queries, and planning them anew, takes longer than these few rows.
SUBMIT_ARGUMENTS = (
    "--conf spark.sql.shuffle.partitions=3 --conf spark.driver.host=127.0.0.1 "
    "--conf spark.driver.bindAddress=127.0.0.1 --conf spark.sql.codegen.factoryMode=NO_CODEGEN "
    "--conf spark.sql.codegen.wholeStage=false --conf spark.sql.adaptive.enabled=false "
    "--driver-java-options '-XX:TieredStopAtLevel=1 -XX:+UseSerialGC' pyspark-shell"
)


def start(master):
    """A session of Spark for small tables."""
    warnings.filterwarnings("ignore")
    os.environ["PYSPARK_SUBMIT_ARGS"] = SUBMIT_ARGUMENTS
    return session(master)


def fit(spark, partitions, seed, is_applied):
    """The digest of a recipe that Spark fitted, and whether its rows are those of PyArrow."""
    table, given = generated(seed)
    frame = spark.createDataFrame(table).repartition(partitions)
    fitted = Recipe.of(given).fit(frame)
    if not is_applied:
        return fitted.digest, True
    made = fitted.apply(frame, out_of_fold=True).toArrow()
    wanted = fitted.apply(table, out_of_fold=True)
    order = [(name, "ascending") for name in wanted.schema.names[:2]]
    rows = made.sort_by(order).to_pydict(), wanted.sort_by(order).to_pydict()
    return fitted.digest, all(str(rows[0][n]) == str(rows[1][n]) for n in wanted.schema.names)


if __name__ == "__main__":
    master, partitions, *seeds = sys.argv[1:]
    spark = start(master)
    try:
        for seed in map(int, seeds):
            print(seed, *fit(spark, int(partitions), seed, master.startswith("local[")), flush=True)
    finally:
        spark.stop()
