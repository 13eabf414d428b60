"""Which checkpoints stay: the newest, one of every so many steps, and the best one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ronde.world import ArgumentError

__all__ = ["KeepPolicy"]


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints stay.

    Attributes:
        last: how many of the newest.
        every: of each that many optimizer steps, the first checkpoint stays for good.
        best: the metric whose best checkpoint stays; None for none.
    """

    last: int = 3
    every: tuple[int, ...] = ()
    best: str | None = None

    @classmethod
    def parse(cls, keep: Any, name: str = "keep") -> KeepPolicy:
        """Parse ``keep`` of ``distribute``.

        Args:
            keep: a number of checkpoints, or a text such as ``"last=3,every=1000,best=accuracy"``.
            name: what it is called, for errors.

        Raises:
            ArgumentError: it is neither.

        Example:
            >>> KeepPolicy.parse(2)
            KeepPolicy(last=2, every=(), best=None)
            >>> KeepPolicy.parse("every=1000,best=min:val/loss")
            KeepPolicy(last=3, every=(1000,), best='min:val/loss')
        """
        if isinstance(keep, int) and not isinstance(keep, bool) and keep > 0:
            return cls(keep)
        if isinstance(keep, str) and keep.isascii() and keep.isdigit() and int(keep):
            return cls(int(keep))
        values: dict[str, Any] = {}
        parts = keep.split(",") if isinstance(keep, str) else [""]
        for part in parts:
            key, _, value = (text.strip() for text in part.partition("="))
            number = int(value) if value.isascii() and value.isdigit() else 0
            known = (key in ("last", "every") and number > 0) or (key == "best" and value)
            if not known or key in values:
                raise ArgumentError(
                    f"{name}={keep!r}: expected a number of checkpoints, 1 or more, or a policy "
                    "such as 'last=3,every=1000,best=accuracy': the newest three, the first of "
                    "each thousand steps, and the best by that metric."
                )
            values[key] = {"last": number, "every": (number,), "best": value}[key]
        return cls(**values)

    @classmethod
    def merge(cls, policies: Iterable[KeepPolicy]) -> KeepPolicy:
        """The policy that keeps what any of them keeps."""
        each = list(policies)
        every = sorted({n for policy in each for n in policy.every})
        best = next((policy.best for policy in each if policy.best), None)
        return cls(max(policy.last for policy in each), tuple(every), best)

    def doomed(self, steps: Sequence[int], protected: Collection[int] = ()) -> list[int]:
        """The steps whose checkpoints go.

        Args:
            steps: of all checkpoints.
            protected: steps that stay in any case, such as the best one.

        Example:
            >>> KeepPolicy(last=1, every=(100,)).doomed([30, 90, 120, 150, 200, 240, 270])
            [30, 90, 150, 240]
        """
        ordered = sorted(steps)
        stay = {*ordered[-self.last :], *protected}
        for n in self.every:
            first: dict[int, int] = {}
            # The first of each interval: so the answer is the same however often it was asked.
            for step in ordered:
                first.setdefault(step // n, step)
            # before the first n steps nothing is due
            stay.update(step for count, step in first.items() if count)
        return [step for step in ordered if step not in stay]
