"""Models that nobody here wrote, cut by themselves, trained on real processes: the same weights as
a plain loop's. ``test_tensor_parallel.py`` and ``test_choose_cut.py`` have a sample of such models.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zygote
from processes import PATHS, TESTS, forked
from sampling import ALL

if not ALL:
    pytest.skip("RONDE_TEST_ALL=1 runs it", allow_module_level=True)

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

import foreign_models as foreign
from foreign_worker import plain
from pipeline_cases import largest_difference

KINDS = ("TRANSFORMERS", "DIFFUSERS")
LOADED = [f"foreign_models:load_{name.lower()}" for name in KINDS]
for kind in KINDS:
    getattr(foreign, f"load_{kind.lower()}")()


def chosen() -> list[tuple[str, str]]:
    """Those that draw random numbers draw others on several workers."""
    return [
        (k, n)
        for k in KINDS
        for n in getattr(foreign, k)
        if not foreign.build(getattr(foreign, k), n).random
    ]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stages", [2, 4])
def test_models_nobody_here_wrote(stages, tmp_path):
    cases = chosen()
    listing, out = tmp_path / "cases.json", tmp_path / "out"
    out.mkdir()
    listing.write_text(json.dumps(cases))
    done = zygote.run(
        forked(
            TESTS / "foreign_worker.py",
            stages,
            listing,
            out,
            imports=["torch.distributed.pipelining", *LOADED],
        ),
        env={**os.environ, "PYTHONPATH": PATHS},
        cwd=tmp_path,
        timeout=2900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    failures = []
    for kind, name in cases:
        expected, aside = plain(kind, name)
        refused = out / f"{kind}-{name}-0.error"
        if refused.exists():
            failures.append(f"{name}: {refused.read_text()}")
            continue
        held = [load_file(out / f"{kind}-{name}-{r}.safetensors") for r in range(stages)]
        missing = expected.keys() - set().union(*held)
        assert len(aside) < len(expected) / 3, f"{name}: {sorted(aside)} have no gradient"
        worst, where = max(
            largest_difference({k: v for k, v in h.items() if k not in aside}, expected)
            for h in held
        )
        with safe_open(out / f"{kind}-{name}-0.safetensors", "pt") as file:
            about = file.metadata()
        print(
            f"{stages} stages {kind.lower()} {name}: {worst:.1e} {where}, micro-batches of "
            f"{about['micro']}, {about['table']}; aside {sorted(aside)}"
        )
        if missing or not worst <= 1e-10:
            failures.append(
                f"{name}: {where} differs by {worst:.1e}; nobody holds {sorted(missing)[:3]}"
            )
    assert not failures, "\n".join(failures)
    assert torch.get_default_dtype() == torch.float32
