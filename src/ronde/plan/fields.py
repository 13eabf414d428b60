"""Check values that people write into files; errors name the file, field, and value."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ronde.world import ArgumentError

Reader = Callable[[str, Any], Any]
"""Where a value stands, in words, and the value -> what it means; or an ArgumentError."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(written: str) -> float | None:
    """Parse a size with a unit; None if it is not one.

    Example:
        >>> parse_bytes("1.5 GiB"), parse_bytes("80G"), parse_bytes("fast")
        (1610612736.0, 80000000000.0, None)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", written.lower())
    unit = found.group(2) if found else ""
    unit += "b" if unit and not unit.endswith("b") else ""
    return float(found.group(1)) * _UNITS[unit] if found is not None and unit in _UNITS else None


def parse_rate(written: str) -> float | None:
    """Parse a link's speed into bytes per second; None if it is not one. ``b`` and ``bit`` are
    bits, ``B`` bytes.

    Example:
        >>> parse_rate("100Gbit"), parse_rate("25 GB/s"), parse_rate("400Gb/s"), parse_rate("100G")
        (12500000000.0, 25000000000.0, 50000000000.0, None)
    """
    found = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?)(bit|bit/s|bits/s|bps|b/s|B/s|Bps)\s*", written
    )
    if found is None:
        return None
    scale = _UNITS[f"{found.group(2).lower()}b"]
    return float(found.group(1)) * scale / (1 if "B" in found.group(3) else 8)


def _number(value: Any) -> float | None:
    """Parse a number; YAML 1.1 reads ``1e9``, without point and sign, as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def read_number(
    expected: str, least: float = 0.0, most: float = math.inf, above: bool = False
) -> Reader:
    """Read a number from ``least`` (excluded by ``above``) to ``most``."""

    def read(where: str, value: Any) -> float:
        found = _number(value)
        if found is None or not least <= found <= most or (above and found == least):
            raise ArgumentError(f"{where}={value!r} must be {expected}.")
        return found

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
    found = parse_bytes(value) if isinstance(value, str) else None
    found = _number(value) if found is None else found
    if found is None or found < 0:
        raise ArgumentError(
            f"{where}={value!r} must be a number of bytes, 0 or more, or a size as 32GiB, "
            "80GB or 512MiB."
        )
    return found


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
            near = difflib.get_close_matches(str(name).lower().replace("-", "_"), allowed, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ArgumentError(
                f"{where}: {what} {str(name)!r} is not known.{hint} Expected {', '.join(allowed)}."
            )


def read_mapping(where: str, value: Any, expected: str) -> Mapping[Any, Any]:
    """Read a mapping from names to values."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{where}={value!r} must be {expected}.")
    return value
