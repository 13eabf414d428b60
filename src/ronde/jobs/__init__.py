"""Many tasks in parallel or in sequence, on a ledger in a folder."""
