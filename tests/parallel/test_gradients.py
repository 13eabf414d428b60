"""Gradients that are unusual (sparse, complex, changed by hooks) are averaged exactly, or refused."""

from __future__ import annotations

import os

import zygote
from processes import PATHS, TESTS, forked


def test_gradients_on_two_workers(tmp_path):
    done = zygote.run(
        forked(TESTS / "gradients_worker.py", 2),
        env={**os.environ, "PYTHONPATH": PATHS},
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
