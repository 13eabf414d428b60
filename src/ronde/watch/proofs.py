"""Proofs of ``ronde prove``, kept beside the runs: a run of the same script says what was proved.

A proof holds for a script's files as they were, its arguments, the versions of Python and its
libraries, and a kind of plan. A changed file drops it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ronde.plan import Plan
from ronde.watch.run_dir import script_stem
from ronde.world import VERSION
from ronde.world.paths import file_digest
from ronde.world.whole_file import write_answer

__all__ = ["Proof", "digests_of", "keep_proofs", "kept_proofs", "plan_kind", "smallest_like"]

_FOLDER = ".proofs"  # no run's name begins with a dot


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was equal, and when.

    Attributes:
        workers: the numbers of workers that were compared with one process.
        steps: optimizer steps.
        time: seconds since 1970.
        aside: what was made the same for the comparison, and is not in a training; may be empty.
        plan: as it was run.
        script_plan: it is the plan that the script itself asks for.
    """

    workers: tuple[int, ...]
    steps: int
    time: float
    aside: str = ""
    plan: str = ""
    script_plan: bool = False

    def sentence(self, kind: str) -> str:
        """The proof in a few words.

        Example:
            >>> Proof((2, 3), 6, 0.0).sentence("replicate")
            'proved equal on 2 and 3 workers under replicate (6 steps, float64, 1 Jan 1970)'
        """
        numbers = " and ".join(map(str, self.workers))
        day = time.gmtime(self.time)
        date = f"{day.tm_mday} {time.strftime('%b %Y', day)}"
        aside = f", {self.aside} aside" if self.aside else ""
        return (
            f"proved equal on {numbers} workers under {kind}{aside} ({self.steps} steps, float64, "
            f"{date})"
        )


def smallest_like(plan: Plan) -> Plan:
    """The plan of the same kind on the fewest workers: each division is in two.

    Example:
        >>> smallest_like(Plan.parse("pipeline=8,shard=optimizer")).spec
        'pipeline=2,shard=optimizer'
    """
    pipeline, tensor = min(plan.pipeline, 2), min(plan.tensor, 2)
    divided = pipeline * tensor
    replicated = plan.replicas > 1 or divided == 1
    return dataclasses.replace(
        plan,
        workers=divided * (2 if replicated else 1),
        pipeline=pipeline,
        tensor=tensor,
        micro_batch=None,
        shard_within=None,
        split_at=(),
    )


def plan_kind(plan: Plan) -> str:
    """The kind of plan that a proof holds for: how the work is split, without sizes.

    Example:
        >>> plan_kind(Plan.parse("pipeline=4")), plan_kind(dataclasses.replace(Plan(), workers=8))
        ('pipeline=2', 'replicate')
    """
    if plan.replicas == 1:  # nothing is sharded
        plan = dataclasses.replace(plan, shard="none")
    small = smallest_like(plan)
    both = small.replicas > 1 and small.shard == "none" and small.spec != "replicate"
    return small.spec + (",replicate" if both and "replicate" not in small.spec else "")


def digests_of(files: Sequence[str]) -> dict[str, str]:
    """Path -> SHA-256 of each file that can be read."""
    digests = {}
    for file in files:
        with contextlib.suppress(OSError):
            path = Path(file).resolve()
            digests[str(path)] = file_digest(path)
    return digests


def _key(command: Sequence[str]) -> dict[str, object]:
    """What a proof holds for, except the files."""
    installed = {"python": platform.python_version(), "ronde": VERSION}
    for name in ("torch", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    what = command[0] if command[0] == "-m" else str(Path(command[0]).resolve())
    # a module is looked for from here
    place = str(Path.cwd()) if what == "-m" else ""
    return {"command": [what, *command[1:]], "place": place, "versions": installed}


def _file(runs: Path, command: Sequence[str]) -> Path:
    key = json.dumps(_key(command), sort_keys=True)
    stem = script_stem(command[1] if command[0] == "-m" else command[0])
    return runs / _FOLDER / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def keep_proofs(
    runs: Path,
    command: Sequence[str],
    files: Mapping[str, str],
    proofs: Mapping[str, Proof | None],
) -> Path:
    """Keep a script's proofs by kind of plan; None takes an earlier one back.

    Args:
        runs: the folder of runs.
        command: the script and its arguments, or ``-m``, module, and arguments.
        files: the script's files, see :func:`digests_of`.
        proofs: kind of plan -> proof.

    Raises:
        RondeError: they cannot be written.
    """
    file = _file(runs, command)
    before = _read(file)
    # Proofs of files as they were before hold no more.
    kept = before["proofs"] if before.get("files") == dict(files) else {}
    for kind, proof in proofs.items():
        if proof is not None:
            kept[kind] = dataclasses.asdict(proof)
        else:
            kept.pop(kind, None)
    with contextlib.suppress(OSError):  # write_answer says what is wrong
        file.parent.mkdir(parents=True, exist_ok=True)
    values = {**_key(command), "files": dict(files), "proofs": kept}
    write_answer(file, json.dumps(values, indent=1) + "\n")
    return file


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
        return values if isinstance(values, dict) and "proofs" in values else {}
    except (OSError, ValueError):
        return {}


def kept_proofs(runs: Path, command: Sequence[str]) -> dict[str, Proof]:
    """The proofs that hold for a script as it is now, by kind of plan. Others are removed."""
    file = _file(runs, command)
    kept = _read(file)
    try:
        if not kept or digests_of(list(kept["files"])) == kept["files"]:
            return {
                kind: Proof(**{**values, "workers": tuple(values["workers"])})
                for kind, values in kept.get("proofs", {}).items()
            }
    except (TypeError, KeyError, AttributeError):
        return {}  # another version's
    with contextlib.suppress(OSError):
        file.unlink()
    return {}
