"""Sizes, rates, and times as people write them, and back."""

from __future__ import annotations

import re

__all__ = [
    "clock",
    "count_of",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "parse_bytes",
    "parse_duration",
    "parse_rate",
]

_BYTES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BYTES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_SHOWN = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def parse_bytes(written: str) -> float | None:
    """Parse a size with or without a unit; None if it is not one.

    Example:
        >>> parse_bytes("1.5 GiB"), parse_bytes("80G"), parse_bytes("fast")
        (1610612736.0, 80000000000.0, None)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", written.lower())
    return None if match is None else float(match[1]) * _BYTES[match[2] or ""]


def parse_rate(written: str) -> float | None:
    """Parse a link's speed into bytes per second; None if it is not one. ``b`` and ``bit`` are
    bits, ``B`` bytes.

    Example:
        >>> parse_rate("100Gbit"), parse_rate("25 GB/s"), parse_rate("400Gb/s"), parse_rate("100G")
        (12500000000.0, 25000000000.0, 50000000000.0, None)
    """
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?)(bit|bit/s|bits/s|bps|b/s|B/s|Bps)\s*", written
    )
    if match is None:
        return None
    return float(match[1]) * _BYTES[match[2].lower()] / (1 if "B" in match[3] else 8)


def parse_duration(written: str) -> float | None:
    """Parse a time into seconds; None if it is not one, or nothing.

    Example:
        >>> parse_duration("1h30m"), parse_duration("30d"), parse_duration("soon")
        (5400.0, 2592000.0, None)
    """
    if not re.fullmatch(r"(\d+(\.\d+)?[wdhms])+", written):
        return None
    parts = re.findall(r"([\d.]+)([wdhms])", written)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts) or None


def format_bytes(count: float) -> str:
    """Format bytes with three digits and a suitable unit.

    Example:
        >>> [format_bytes(n) for n in (232, 1020 * 1024, 1010 * 1024, 1.5 * 2**30)]
        ['232 B', '0.996 MiB', '1010 KiB', '1.5 GiB']
    """
    # from 1019 KiB on, three digits need the next unit
    unit, scale = next((shown for shown in _SHOWN if count >= 0.995 * shown[1]), ("B", 1))
    digits = ".3g" if scale > 1 and count < 999 * scale else ".0f"
    return f"{count / scale:{digits}} {unit}"


def format_seconds(value: float) -> str:
    """Format a time with three digits and a suitable unit.

    Example:
        >>> format_seconds(0.00025), format_seconds(0.0123), format_seconds(90), format_seconds(300)
        ('250 µs', '12.3 ms', '90 s', '5:00 min')
    """
    if value >= 100:
        return f"{clock(value)} {'h' if value >= 3600 else 'min'}"
    if value == 0 or abs(value) >= 0.9995:  # what rounds to 1000 ms is 1 s
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def format_rate(value: float) -> str:
    """Format samples per second with three digits or more.

    Example:
        >>> format_rate(1234.5), format_rate(7.25)
        ('1,234', '7.25')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def count_of(n: int, word: str) -> str:
    """A number of things.

    Example:
        >>> count_of(1, "worker"), count_of(1200, "step")
        ('1 worker', '1,200 steps')
    """
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def clock(seconds: float) -> str:
    """A time as clocks show it.

    Example:
        >>> clock(75), clock(3600)
        ('1:15', '1:00:00')
    """
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
