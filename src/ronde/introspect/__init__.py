"""Look at a user's objects from outside: what they are made of, whose code they run, what they hold
open.

Knows nothing about training. Offers :func:`~ronde.introspect.fingerprint.describe` (cache keys),
:mod:`~ronde.introspect.object_graph` (one walker), :mod:`~ronde.introspect.code_owner`,
:mod:`~ronde.introspect.open_handles` and :mod:`~ronde.introspect.random_state`.
"""
