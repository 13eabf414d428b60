"""Inspect a user's objects from outside: their parts, their code's owner, their open files.

Knows nothing about training. Offers :mod:`~ronde.introspect.object_graph` (one walker),
:mod:`~ronde.introspect.code_owner`, :mod:`~ronde.introspect.open_handles` and
:mod:`~ronde.introspect.random_state`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.introspect.code_owner import (
        LIBRARY_FOLDERS,
        is_ronde,
        is_user_file,
        is_user_module,
        user_modules,
    )
    from ronde.introspect.object_graph import attributes, nested_datasets, walk
    from ronde.introspect.open_handles import (
        describe_open,
        detached_copy,
        preserve_state,
        reopen_files,
        shares_within,
    )
    from ronde.introspect.random_state import Marks, restore_states, seed_all, states
    from ronde.introspect.saved_state import NO_TENSORS, SavedState, without_hooks

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.introspect.code_owner": "LIBRARY_FOLDERS is_ronde is_user_file is_user_module "
            "user_modules",
            "ronde.introspect.object_graph": "attributes nested_datasets walk",
            "ronde.introspect.open_handles": (
                "detached_copy describe_open reopen_files preserve_state shares_within"
            ),
            "ronde.introspect.random_state": "Marks restore_states seed_all states",
            "ronde.introspect.saved_state": "NO_TENSORS SavedState without_hooks",
        },
    )
