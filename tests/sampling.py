"""Which of many cases run: a part of them, so that all tests together stay below ten
minutes on two cores; ``RONDE_TEST_ALL=1`` runs all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

ALL = os.environ.get("RONDE_TEST_ALL") == "1"

# For a test that takes long, and of whose kind there is a shorter one.
long = pytest.mark.skipif(not ALL, reason="RONDE_TEST_ALL=1 runs it")


def some(cases: Sequence[Any], every: int) -> list[Any]:
    """Every so-manieth of them, the first included."""
    return list(cases)[:: 1 if ALL else every]
