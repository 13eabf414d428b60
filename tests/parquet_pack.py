"""A pack in Parquet as earlier versions of ``ronde pack`` wrote it: Ronde only reads those now."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def parquet_pack(source: Any, out: Path, shards: int = 1) -> Path:
    """Write the files of a ``feed.folder`` as shards with columns ``data``, ``label``, ``name``,
    ``crc32``, and the manifest.
    """
    out.mkdir(parents=True)
    entries = []
    for number, ids in enumerate(np.array_split(np.arange(len(source)), shards)):
        samples = source.read(ids.tolist())
        columns = {"data": pa.array([s.data for s in samples], pa.binary())}
        if source.labels is not None:
            columns["label"] = pa.array([s.label for s in samples])
        columns["name"] = pa.array([s.name for s in samples], pa.string())
        columns["crc32"] = pa.array([zlib.crc32(s.data) for s in samples], pa.uint32())
        path = out / f"shard-{number:06d}.parquet"
        pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)
        raw = path.read_bytes()
        entries.append(
            {
                "name": path.name,
                "samples": len(ids),
                "bytes": len(raw),
                "sha256": hashlib.sha256(raw).hexdigest(),
            }
        )
    manifest = {
        "format": "ronde pack",
        "version": 1,
        "kind": "parquet",
        "samples": len(source),
        "classes": source.classes,
        "labels": source.labels is not None,
        "shard_bytes": 1 << 28,
        "pixels_changed": None,
        "fingerprint": source.fingerprint,
        "shards": entries,
    }
    (out / "ronde-pack.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return out
