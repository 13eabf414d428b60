"""Is it still the same training? N workers against one, step by step, in float64.

Offers :func:`prove` and its :class:`Verdict`: equal, or the first thing that differs, with its
likely cause.
"""

from ronde.prove.proof import Verdict, prove

__all__ = ["Verdict", "prove"]
