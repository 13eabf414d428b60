"""Why are my devices idle? Compares synthetic with real speed, splits the gap by stage, and
prescribes.

Offers :func:`~ronde.doctor.doctor.load_doctor`, which reads the answer, and the names of the
cures. The verdict is arithmetic over measured rates; prescriptions are settings that can be applied
and verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.doctor.doctor import load_doctor
    from ronde.doctor.prescribe import NAMES

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__, {"ronde.doctor.doctor": "load_doctor", "ronde.doctor.prescribe": "NAMES"}
    )
