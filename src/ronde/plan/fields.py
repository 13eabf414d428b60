"""Check values that people write into files; errors name the file, field, and value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ronde.world import ArgumentError
from ronde.world.errors import did_you_mean
from ronde.world.units import parse_bytes

Reader = Callable[[str, Any], Any]
"""Where a value stands, in words, and the value -> what it means; or an ArgumentError."""


def _number(value: Any) -> float | None:
    """Parse a number; YAML 1.1 reads ``1e9``, without point and sign, as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def read_number(
    expected: str, least: float = 0.0, most: float = math.inf, above: bool = False
) -> Reader:
    """Read a number from ``least`` (excluded by ``above``) to ``most``."""

    def read(where: str, value: Any) -> float:
        number = _number(value)
        if number is None or not least <= number <= most or (above and number == least):
            raise ArgumentError(f"{where}={value!r} must be {expected}.")
        return number

    return read


def read_whole(least: int = 1) -> Reader:
    """Read an integer of at least some value."""

    def read(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ArgumentError(f"{where}={value!r} must be a whole number, {least} or more.")
        return value

    return read


def read_bytes(where: str, value: Any) -> float:
    """Read bytes: a number, or a size with a unit."""
    count = parse_bytes(value) if isinstance(value, str) else None
    count = _number(value) if count is None else count
    if count is None or count < 0:
        raise ArgumentError(
            f"{where}={value!r} must be a number of bytes, 0 or more, or a size as 32GiB, "
            "80GB or 512MiB."
        )
    return count


def read_flag(where: str, value: Any) -> bool:
    """Read a boolean."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{where}={value!r} must be true or false.")
    return value


def read_text(where: str, value: Any) -> str:
    """Read text; a name that is a number is accepted."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ArgumentError(f"{where}={value!r} must be a text.")
    return str(value)


def choose(where: str, what: str, names: Iterable[Any], allowed: Iterable[str]) -> None:
    """Refuse unknown names and suggest a close one."""
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            hint = did_you_mean(str(name).lower().replace("-", "_"), allowed)
            raise ArgumentError(
                f"{where}: {what} {str(name)!r} is not known.{hint} Expected {', '.join(allowed)}."
            )


def read_mapping(where: str, value: Any, expected: str) -> Mapping[Any, Any]:
    """Read a mapping from names to values."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{where}={value!r} must be {expected}.")
    return value


def read_file(path: str | Path, what: str, writer: str) -> dict[str, Any]:
    """Read the names and values of a YAML or JSON file.

    Args:
        what: the file holds, and ``writer``: what writes such files, for errors.

    Raises:
        ArgumentError: it cannot be read, or holds something else.
    """
    import yaml  # most runs read no such file

    try:
        text = Path(path).read_text()
        try:
            values = json.loads(text)  # an answer is long, and YAML's reader slow
        except ValueError:
            values = yaml.safe_load(text)
    except OSError as error:
        raise ArgumentError(f"{what}'s file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} holds no {what}: it is not YAML: {error}") from None
    if not isinstance(values, dict) or not values:
        raise ArgumentError(
            f"{path} holds no {what}: expected YAML with names and values, as {writer} writes"
        )
    return values
