"""Run by every rank: trains the cases given as JSON and writes what rank 0 ends with. Also checks
that all ranks end alike.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

import ronde
from equality_cases import Case, ronde_loop

cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
for i, values in enumerate(cases):
    own = values.pop("own_loop", False)
    result, run = ronde_loop(Case(**values), own)
    for name, tensor in result.items():
        if ronde.world().size > 1 and not name.startswith("bn"):
            mine = tensor.clone()
            dist.broadcast(mine, 0)
            assert mine.equal(tensor), (
                f"{name} differs between rank 0 and rank {run.rank} in case {i}"
            )
    if run.is_main:
        save_file({k: v.contiguous().clone() for k, v in result.items()}, out / f"{i}.safetensors")
