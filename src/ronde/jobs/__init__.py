"""Many tasks that share nothing, in parallel or in sequence, on a ledger in a folder.

Offers :func:`items` to scripts, and what ``ronde map`` stands on.
"""

from ronde.jobs.handed import Chunk, items

__all__ = ["Chunk", "items"]
