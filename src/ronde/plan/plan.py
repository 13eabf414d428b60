"""A Plan says what is done with a model and a batch, never how; it reads from and writes to YAML."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ronde.world import ArgumentError

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        strategy: ``"data"``: every worker holds the whole model and a share of each batch.
        workers: world size.
        batch_size: global samples per optimizer step, as trained (after ``batch="grow"`` has multiplied it).
        batch: the contract, ``"keep"`` or ``"grow"``.
        micro_batch: most samples a worker holds at once, None for its whole share.
        accumulation: micro-batches per step and worker.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (``"fp32"`` leaves the script's own types alone).
        clip_norm: largest norm of all gradients together, or None.
        seed: key of the order of samples and of augmentation.
        drop_last: whether a last, shorter batch is left out.
        sync_batchnorm: whether batch normalisation sees the whole global batch.
        lr_rule: how the learning rate follows a grown batch.
        lr_factor: what it was multiplied by.
        warmup_steps: optimizer steps over which it gets there.

    Example:
        >>> plan = Plan(workers=2, batch_size=64)
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
    """

    strategy: str = "data"
    workers: int = 1
    batch_size: int = 1
    batch: Literal["keep", "grow"] = "keep"
    micro_batch: int | None = None
    accumulation: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip_norm: float | None = None
    seed: int = 0
    drop_last: bool = False
    sync_batchnorm: bool = False
    lr_rule: str = "none"
    lr_factor: float = 1.0
    warmup_steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """The plan of plain values; unknown names are refused."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ArgumentError(f"a plan has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read YAML."""
        values = yaml.safe_load(Path(path).read_text())
        if not isinstance(values, dict):
            raise ArgumentError(f"{path} holds no plan: expected YAML with names and values")
        return cls.from_dict(values)

    def sentence(self) -> str:
        """The batch contract in one line."""
        per_worker = -(-self.batch_size // self.workers)
        text = f"global batch {self.batch_size}"
        if self.workers > 1:
            approx = "" if self.batch_size % self.workers == 0 else "at most "
            text += f" = {self.workers} workers × {approx}{per_worker}"
        if self.accumulation > 1:
            text += f", in {self.accumulation} micro-batches of at most {self.micro_batch}"
        if self.batch == "grow" and self.workers > 1:
            text += f"; grown with the workers, learning rate × {self.lr_factor:g} ({self.lr_rule}, warm-up {self.warmup_steps} steps)"
        else:
            text += "; the same training whatever the number of workers"
        return text
