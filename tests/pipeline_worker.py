"""Run by every rank: trains the cases given as JSON under their plans, and writes what this rank
holds at the end of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

import ronde
from pipeline_cases import by_ronde

cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
rank = ronde.world().rank
for i, case in enumerate(cases):
    try:
        held, run = by_ronde(case)
    except (ronde.ArgumentError, ronde.PlanError) as error:
        (out / f"{i}-{rank}.error").write_text(str(error))
        continue
    table = run.port.strategy.table() if hasattr(run.port.strategy, "table") else []
    save_file(
        {k: v.contiguous() for k, v in held.items()},
        out / f"{i}-{rank}.safetensors",
        {"table": json.dumps(table)},
    )
