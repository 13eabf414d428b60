"""Sizes, rates, and times as people write them."""

from __future__ import annotations

import pytest

from ronde.world import units


@pytest.mark.parametrize(
    ("parse", "written", "value"),
    [
        *((units.parse_bytes, t, v) for t, v in (("4096", 4096), ("1.5 GiB", 1.5 * 2**30))),
        *((units.parse_bytes, t, v) for t, v in (("80G", 8e10), ("0", 0), ("5kb", 5000))),
        *((units.parse_bytes, t, None) for t in ("fast", "-1", "1 PiB", "1e3", "")),
        *((units.parse_rate, t, v) for t, v in (("100Gbit", 12.5e9), ("25 GB/s", 25e9))),
        *((units.parse_rate, t, None) for t in ("100G", "fast", "10 bit")),
        *(
            (units.parse_duration, t, v)
            for t, v in (("1d12h", 129600), ("1.5m", 90), ("1w", 604800))
        ),
        *((units.parse_duration, t, None) for t in ("0s", "90", "1h x", "-1h", "")),
    ],
)
def test_what_is_read(parse, written, value):
    assert parse(written) == value


def test_what_is_shown():
    sizes = (0, 29, 1018, 1000 * 1024, 1018 * 1024, 1023 * 1024, 1.5 * 2**30)
    assert [units.format_bytes(n) for n in sizes] == (
        ["0 B", "29 B", "1018 B", "1000 KiB", "1018 KiB", "0.999 MiB", "1.5 GiB"]
    )
    times = (0, 25e-6, 0.0123, 1.2345, 99, 100, 3700, 0.9996, 0.9996e-3)
    assert [units.format_seconds(t) for t in times] == (
        ["0 s", "25 µs", "12.3 ms", "1.23 s", "99 s", "1:40 min", "1:01:40 h", "1 s", "1 ms"]
    )
    assert [units.format_rate(r) for r in (0.125, 12.34, 1234.5)] == ["0.125", "12.3", "1,234"]
