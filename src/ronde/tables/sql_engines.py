"""DuckDB in this process, and Spark for what outgrows it: scans, types, and dialects of SQL."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ronde.world import ArgumentError, RondeError, usable_cores
from ronde.world.paths import files_of, is_remote, need, need_java
from ronde.world.whole_file import whole_file

_SUFFIXES = (".parquet", ".pq", ".csv")
_CSV = (".csv", ".csv.gz", ".csv.zst")

NAIVE, ZONED = "naive", "zoned"  # times without and with a time zone

_CASE = "two columns have the same name, or differ only in its case. Rename one."

_DUCKDB_KINDS = {
    "TIMESTAMP": NAIVE,
    "TIMESTAMP_S": NAIVE,
    "TIMESTAMP_MS": NAIVE,
    "TIMESTAMP_NS": NAIVE,
    "TIMESTAMP WITH TIME ZONE": ZONED,
    "TIMESTAMPTZ_NS": ZONED,
    "DATE": "date",
    "VARCHAR": "text",
    "BOOLEAN": "bool",
    "FLOAT": "float",
    "DOUBLE": "float",
    **dict.fromkeys(("TINYINT", "SMALLINT", "INTEGER", "BIGINT"), "int"),
    **dict.fromkeys(("UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT"), "int"),
}
_SPARK_KINDS = {
    "timestamp_ntz": NAIVE,
    "timestamp": ZONED,
    "date": "date",
    "string": "text",
    "boolean": "bool",
    "float": "float",
    "double": "float",
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "int"),
}


_SPARK_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


def quoted(name: str) -> str:
    """A column's name in the SQL of DuckDB and SQLite."""
    return '"' + name.replace('"', '""') + '"'


def _files(path: str, owner: str) -> list[str]:
    return [path] if is_remote(path) else [str(file) for file in files_of(path, owner, _SUFFIXES)]


class DuckDBSql:
    """DuckDB in this process.

    Args:
        memory: how much it may hold before it spills to a temporary folder, as ``1.5GB``.
        threads: all usable cores by default.

    Attributes:
        folder: the temporary folder.
    """

    asof = True
    numbered = "row_number() OVER () - 1"
    text = "VARCHAR"

    def __init__(self, memory: str = "", threads: int | None = None) -> None:
        need("duckdb", "tables", "A query of tables")
        import duckdb

        self._error = duckdb.Error
        self._spill = tempfile.TemporaryDirectory(prefix="ronde-duckdb-")
        self.folder, self.threads = Path(self._spill.name), threads or usable_cores()
        self.connection = duckdb.connect(
            config={"threads": self.threads, "temp_directory": self._spill.name}
        )
        self.run("SET TimeZone = 'UTC'", "time zone")
        if memory:
            self.run(f"SET memory_limit = {self.literal(memory)}", f"--memory {memory}")

    def close(self) -> None:
        """Free memory and temporary files."""
        self.connection.close()
        self._spill.cleanup()

    def scan(self, name: str, source: Any, owner: str) -> dict[str, str]:
        """Make a view of files or of a frame; returns column -> type, in the engine's words."""
        if isinstance(source, str | os.PathLike):
            files = _files(os.fspath(source), owner)
            listed = self.view(name, files, owner)
            sql = f"SELECT DISTINCT name FROM parquet_schema([{listed}])"
            is_csv = files[0].lower().endswith(_CSV)
            names = None if is_csv else [row[0] for row in self.rows(sql, owner)]
        else:
            try:
                self.connection.register(f"{name}_given", source)
            except self._error:
                raise ArgumentError(
                    f"{owner}: {type(source).__name__} is no table. Expected a path, or an "
                    "Arrow, pandas, or Polars table."
                ) from None
            self.run(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {name}_given", owner)
            names = getattr(source, "column_names", getattr(source, "columns", None))
        given = {row[0]: row[1] for row in self.rows(f"DESCRIBE {name}", owner)}
        # DuckDB renames the second of two columns that it cannot tell apart.
        if names is not None and not given.keys() <= set(map(str, names)):
            raise ArgumentError(f"{owner}: {_CASE}")
        return given

    def view(self, name: str, files: Sequence[str], owner: str) -> str:
        """Make a view of files of one kind; returns them as SQL."""
        if not is_remote(files[0]):  # a bracket in a file's name is no pattern
            files = [re.sub(r"[\[*?]", r"[\g<0>]", file) for file in files]
        listed = ", ".join(self.literal(file) for file in files)
        reader = "read_csv" if files[0].lower().endswith(_CSV) else "read_parquet"
        # A folder called month=01 must not override the column month of its files.
        options = "union_by_name = true, hive_partitioning = false"
        self.run(
            f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM {reader}([{listed}], {options})", owner
        )
        return listed

    def run(self, sql: str, owner: str) -> Any:
        """Run a statement; an error names ``owner``."""
        try:
            return self.connection.execute(sql)
        except self._error as error:
            raise RondeError(f"{owner}: DuckDB: {str(error).splitlines()[0]}") from None

    def rows(self, sql: str, owner: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return list(self.run(sql, owner).fetchall())

    def stream(self, sql: str, owner: str) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, without holding them."""
        cursor = self.run(sql, owner)
        while rows := cursor.fetchmany(10_000):
            yield from rows

    def keep(self, name: str, sql: str, owner: str) -> None:
        """Compute a query once."""
        self.run(f"CREATE OR REPLACE TEMP TABLE {name} AS {sql}", owner)

    def table(self, sql: str, owner: str) -> Any:
        """An Arrow table of a query."""
        return self.run(sql, owner).to_arrow_table()

    def write(self, sql: str, out: Path, owner: str) -> None:
        """Write a query to a Parquet file that is there whole, or not at all."""
        with whole_file(out) as part:
            self.run(f"COPY ({sql}) TO {self.literal(str(part))} (FORMAT PARQUET)", owner)

    @staticmethod
    def kind(given: str) -> str:
        """int, float, text, bool, date, naive, zoned, or other."""
        if given.startswith("DECIMAL"):
            return "float"
        return "text" if given.startswith("ENUM") else _DUCKDB_KINDS.get(given, "other")

    quote = staticmethod(quoted)

    @staticmethod
    def micros(column: str, given: str, up: bool) -> str:
        """Microseconds since 1970; nanoseconds are rounded up or down."""
        if given.endswith("_NS"):
            ns = f"(epoch_ns({column}) + {999 if up else 0})"
            return f"(({ns} - ({ns} % 1000 + 1000) % 1000) // 1000)"
        return f"epoch_us({column}{'::TIMESTAMP' if given == 'DATE' else ''})"

    @staticmethod
    def hash(columns: Sequence[str]) -> str:
        """One number that differs where values differ."""
        return f"hash({', '.join(columns)})"

    @staticmethod
    def literal(text: str) -> str:
        """A text in SQL."""
        return "'" + text.replace("'", "''") + "'"

    @staticmethod
    def is_finite(number: str) -> str:
        """Whether a double is neither missing nor NaN nor infinite."""
        # DuckDB 2.0.1 folds isnan and comparisons by Parquet's statistics, which leave NaN out.
        return f"isfinite({number})"

    @staticmethod
    def days(column: str) -> str:
        """Days since 1970 of a date."""
        return f"date_diff('day', DATE '1970-01-01', {column})"


def session(master: str | None) -> Any:
    """A session of Spark.

    Args:
        master: as Spark writes it, ``local[4]`` or ``yarn``; None is that of its configuration.

    Raises:
        ArgumentError: Spark or Java is not installed.
    """
    need("pyspark", "spark", "--engine spark")
    need_java("--engine spark")
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # it must have Ronde on executors too
    builder = SparkSession.builder.appName("ronde prepare")
    for name, value in _SPARK_SETTINGS.items():
        builder = builder.config(name, value)
    if master and master.startswith("local"):  # Spark makes an empty folder in the current one
        builder = builder.config("spark.sql.warehouse.dir", tempfile.gettempdir())
    return (builder.master(master) if master else builder).getOrCreate()


class SparkSql:
    """A Spark cluster, or ``local[…]``.

    Args:
        master: as Spark writes it; empty: that of Spark's configuration.
    """

    asof = False
    text = "STRING"
    numbered = "monotonically_increasing_id()"

    def __init__(self, master: str = "") -> None:
        started = session(master or None)
        from pyspark.errors import PySparkException

        self._error = PySparkException
        self._kept: dict[str, Any] = {}
        # of its own: views and settings of the user's session stay as they are
        self._session = started.newSession()
        self._session.conf.set("spark.sql.session.timeZone", "UTC")
        # else a sum that overflows wraps around, and a cast that fails gives null
        self._session.conf.set("spark.sql.ansi.enabled", "true")
        self._tag = uuid.uuid4().hex[:8]

    def close(self) -> None:
        """Free what was computed once; the session stays, as Spark's do."""
        for frame in self._kept.values():
            frame.unpersist()

    def scan(self, name: str, source: Any, owner: str) -> dict[str, str]:
        """As for DuckDB; a frame is one of this session."""
        if isinstance(source, str | os.PathLike):
            files = _files(os.fspath(source), owner)
            if not is_remote(files[0]):
                files = [re.sub(r"[\[\]{}*?\\]", r"\\\g<0>", file) for file in files]
            reader = self._session.read.option("mergeSchema", "true")
            with self._in_a_sentence(owner):
                if files[0].lower().endswith(".csv"):
                    source = reader.csv(files, header=True, inferSchema=True)
                else:
                    source = reader.parquet(*files)
        elif not hasattr(source, "createOrReplaceTempView"):
            source = self._session.createDataFrame(source)
        # A frame of another session of the same application would make its view there.
        with self._in_a_sentence(owner):
            source.createOrReplaceGlobalTempView(f"{name}_{self._tag}")
            seen = self._session.table(f"global_temp.{name}_{self._tag}")
            seen.createOrReplaceTempView(name)
        if len({column.lower() for column in source.columns}) < len(source.columns):
            raise ArgumentError(f"{owner}: {_CASE}")
        return dict(source.dtypes)

    @contextlib.contextmanager
    def _in_a_sentence(self, owner: str) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise RondeError(f"{owner}: Spark: {str(error).splitlines()[0]}") from None

    def run(self, sql: str, owner: str) -> Any:
        """A frame of a query."""
        with self._in_a_sentence(owner):
            return self._session.sql(sql)

    def rows(self, sql: str, owner: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self._in_a_sentence(owner):
            return [tuple(row) for row in self._session.sql(sql).collect()]

    def stream(self, sql: str, owner: str) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, a partition at a time."""
        with self._in_a_sentence(owner):
            yield from (tuple(row) for row in self._session.sql(sql).toLocalIterator())

    def keep(self, name: str, sql: str, owner: str) -> None:
        """Compute a query once."""
        with self._in_a_sentence(owner):
            frame = self._session.sql(sql).persist()
            frame.createOrReplaceTempView(name)
        if name in self._kept:
            self._kept[name].unpersist()
        self._kept[name] = frame

    def table(self, sql: str, owner: str) -> Any:
        """An Arrow table of a query."""
        with self._in_a_sentence(owner):
            return self._session.sql(sql).toArrow()

    def write(self, sql: str, out: Path, owner: str) -> None:
        """Write a query to a folder of Parquet files, which must be new."""
        with self._in_a_sentence(owner):
            self._session.sql(sql).write.parquet(str(out))

    @staticmethod
    def kind(given: str) -> str:
        """As for DuckDB."""
        return "float" if given.startswith("decimal") else _SPARK_KINDS.get(given, "other")

    @staticmethod
    def quote(name: str) -> str:
        """A column's name in SQL."""
        return "`" + name.replace("`", "``") + "`"

    @staticmethod
    def micros(column: str, given: str, up: bool) -> str:
        """Microseconds since 1970."""
        return f"unix_micros(CAST({column} AS TIMESTAMP))"

    @staticmethod
    def hash(columns: Sequence[str]) -> str:
        """One number that differs where values differ."""
        # xxhash64 skips nulls: without the flags (null, 1) would equal (1, null).
        flags = (f"isnull({column})" for column in columns)
        return f"xxhash64({', '.join([*columns, *flags])})"

    @staticmethod
    def literal(text: str) -> str:
        """A text in SQL."""
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    @staticmethod
    def is_finite(number: str) -> str:
        """As for DuckDB; NaN is greater than infinity here."""
        return f"abs({number}) < CAST('Infinity' AS DOUBLE)"

    @staticmethod
    def days(column: str) -> str:
        """Days since 1970 of a date."""
        return f"unix_date({column})"


SqlEngine = DuckDBSql | SparkSql
Dialect = type[DuckDBSql] | type[SparkSql]
"""What needs no connection: how names, texts, and times are written."""


def open_engine(name: str, master: str = "", memory: str = "") -> SqlEngine:
    """The engine of a name.

    Raises:
        ArgumentError: there is none, it is not installed, or an option is not for it.
    """
    if name == "duckdb":
        if master:
            raise ArgumentError("--master is for --engine spark.")
        return DuckDBSql(memory)
    if name == "spark":
        return SparkSql(master)
    raise ArgumentError(f"--engine {name}: expected duckdb or spark.")
