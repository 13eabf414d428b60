"""Many tasks that share nothing, in parallel or in sequence, on a ledger in a folder.

Offers :func:`items` and :func:`weights` to scripts, :class:`Flow`, and what ``ronde map``, ``tune``
and ``flow`` stand on.
"""

from ronde.jobs.flow import Flow
from ronde.jobs.handed import Chunk, items, weights

__all__ = ["Chunk", "Flow", "items", "weights"]
