"""Is it still the same training? N workers against one, step by step, in float64.

Offers :func:`prove` and its :class:`Verdict`: equal, or the first difference and its cause.
"""

from ronde.prove.plan_verdict import Verdict
from ronde.prove.proof import prove

__all__ = ["Verdict", "prove"]
