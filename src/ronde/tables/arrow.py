"""Arrow columns as the numbers, levels, times, and texts that a recipe works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ronde.world import ArgumentError, SampleError

READ_BY = {
    "number": ("number", "bool"),
    "level": ("number", "bool", "text"),
    "time": ("time",),
    "text": ("text",),
    "key": ("number",),
}
WHOLE_KEY = "a key is a whole number in each row."
MISSING_KEY = f"is missing, or 2^63 or more, in a row: {WHOLE_KEY}"


def family(kind: Any, place: str) -> str:
    """``number``, ``bool``, ``text``, or ``time``.

    Raises:
        ArgumentError: it is none of them, such as a list; the text begins with ``place``.
    """
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    # engines divide wider decimals in different ways
    if types.is_decimal(kind) and kind.precision > 15:
        raise ArgumentError(
            f"{place} is {kind}, of more digits than a double holds. Cast it to double first."
        )
    numbers = (types.is_integer, types.is_floating, types.is_decimal, types.is_null)
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    times = (types.is_timestamp, types.is_date)
    groups = (("number", numbers), ("bool", (types.is_boolean,)), ("text", texts), ("time", times))
    for name, tests in groups:
        if any(test(kind) for test in tests):
            return name
    raise ArgumentError(f"{place} is {kind}: expected numbers, texts, or dates.")


def is_whole_type(kind: Any) -> bool:
    """Whether a type holds whole numbers, or nothing at all."""
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_integer(kind) or types.is_null(kind))


def arrow_of_spark(kind: Any) -> Any:
    """The Arrow type of a column of Spark; a list for whatever a recipe does not read."""
    import pyarrow as pa

    if kind.typeName() == "decimal":
        return pa.decimal128(kind.precision, kind.scale)
    known = {
        "byte": pa.int8(),
        "short": pa.int16(),
        "integer": pa.int32(),
        "long": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "string": pa.string(),
        "date": pa.date32(),
        "void": pa.null(),
        "timestamp": pa.timestamp("us", "UTC"),
        "timestamp_ntz": pa.timestamp("us"),
    }
    return known.get(kind.typeName(), pa.list_(pa.null()))


def one_table(parts: Sequence[tuple[Any, Any]], where: str) -> Any:
    """Tables as one; a column may be int32 in one, and int64 in another.

    Args:
        parts: tables, and what each is called in an error.
        where: what the error begins with.

    Raises:
        ArgumentError: no type holds a column of two of them.
    """
    import pyarrow as pa

    known: dict[str, tuple[Any, Any]] = {}
    for table, place in parts:
        for field in table.schema:
            one, first = known.setdefault(field.name, (field, place))
            try:
                pair = [pa.schema([one]), pa.schema([field])]
                both = pa.unify_schemas(pair, promote_options="permissive")
            except pa.ArrowException:
                raise ArgumentError(
                    f"{where}: the column {field.name!r} is {one.type} in {first}, and "
                    f"{field.type} in {place}. Cast one to the other."
                ) from None
            known[field.name] = both.field(0), first
    return pa.concat_tables([table for table, _ in parts], promote_options="permissive")


def _decoded(column: Any) -> Any:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def as_number(column: Any, place: str) -> Any:
    """A column as float64, null where it is not finite.

    Raises:
        ArgumentError: it holds no numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as compute

    column = _decoded(column)
    if family(column.type, place) not in READ_BY["number"]:
        raise ArgumentError(f"{place} is {column.type}, not a number.")
    try:
        column = column.cast(pa.float64(), safe=False)
    except pa.ArrowException as error:
        raise ArgumentError(f"{place}: {error}") from None
    if column.null_count == len(column):
        return column
    finite = compute.is_finite(column)
    if compute.all(finite, skip_nulls=True).as_py():
        return column
    return compute.if_else(finite, column, pa.scalar(None, pa.float64()))


def as_level(column: Any, place: str) -> Any:
    """A column as text: whole numbers without ``.0``, booleans in lower case, NaN as null."""
    import pyarrow as pa
    import pyarrow.compute as compute

    column = _decoded(column)
    if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        column = as_number(column, place)
        column = compute.if_else(compute.equal(column, 0.0), pa.scalar(0.0), column)
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        raise ArgumentError(
            f"{place} is {column.type}, whose values cannot be compared as text. Leave it out."
        ) from None


def as_time(column: Any, place: str) -> Any:
    """A column as naive timestamps of microseconds, in UTC where it has a time zone.

    Raises:
        ArgumentError: it holds no times.
        SampleError: a text is no ISO 8601 time.
    """
    import pyarrow as pa

    column = _decoded(column)
    if pa.types.is_string(column.type):
        for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
            try:
                column = column.cast(kind)
                break
            except pa.ArrowInvalid as error:
                reason = str(error)
        else:
            raise SampleError(f"{place}: {reason}")
    if not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        raise ArgumentError(f"{place} is {column.type}, not a date or time.")
    # Values of a zoned column are stored in UTC, so that dropping the zone keeps the UTC time.
    zone = getattr(column.type, "tz", None)
    return column.cast(pa.timestamp("us", zone), safe=False).cast(pa.timestamp("us"))


def as_kind(column: Any, kind: str, place: str) -> Any:
    """A column as a recipe reads it: ``number``, ``level``, ``time``, ``text``, or ``key``."""
    import pyarrow as pa

    if kind == "key":
        column = _decoded(column)
        if not is_whole_type(column.type):
            raise ArgumentError(f"{place} is {column.type}: {WHOLE_KEY}")
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid:
            raise ArgumentError(f"{place} {MISSING_KEY}") from None
        if column.null_count:
            raise ArgumentError(f"{place} {MISSING_KEY}")
        return column
    return {"number": as_number, "level": as_level, "time": as_time, "text": as_level}[kind](
        column, place
    )
