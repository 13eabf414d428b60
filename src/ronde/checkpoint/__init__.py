"""Save, verify and load checkpoints: safetensors plus a JSON manifest of sizes and digests; atomic,
never a pickle.

Offers :func:`write`, :func:`verify`, :func:`find_valid` (files), the state of models, optimizers
and generators as named tensors, and the same where every worker holds pieces only:
:func:`prepare_pieces`, :func:`pull`, :func:`export_pieces`. :class:`Saver` writes in the
background; :func:`wait_for_saves` waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.checkpoint.background import Saver, Written, wait_for_saves
    from ronde.checkpoint.exact_values import decode_exact, encode, encode_exact
    from ronde.checkpoint.files import (
        Checkpoint,
        export,
        find_valid,
        list_checkpoints,
        remove,
        trust,
        verify,
        write,
    )
    from ronde.checkpoint.pieces import (
        Box,
        Piece,
        PieceSource,
        Want,
        box_of,
        piece_of,
        pull,
        shard_like,
    )
    from ronde.checkpoint.remote import RemoteCheckpoints, Uploads
    from ronde.checkpoint.retention import KeepPolicy
    from ronde.checkpoint.sharded import (
        export_pieces,
        gather_whole,
        prepare_pieces,
    )
    from ronde.checkpoint.state import (
        join_optimizer,
        model_pieces,
        model_state,
        model_wants,
        optimizer_pieces,
        optimizer_state,
        optimizer_wants,
        random_state,
        restore_random,
    )
    from ronde.checkpoint.tensor_file import group_names, tied_names

__all__ = [
    "Box",
    "Checkpoint",
    "KeepPolicy",
    "Piece",
    "PieceSource",
    "RemoteCheckpoints",
    "Saver",
    "Uploads",
    "Want",
    "Written",
    "box_of",
    "decode_exact",
    "encode",
    "encode_exact",
    "export",
    "export_pieces",
    "find_valid",
    "gather_whole",
    "group_names",
    "join_optimizer",
    "shard_like",
    "list_checkpoints",
    "model_pieces",
    "model_state",
    "model_wants",
    "optimizer_pieces",
    "optimizer_state",
    "optimizer_wants",
    "piece_of",
    "prepare_pieces",
    "pull",
    "random_state",
    "remove",
    "restore_random",
    "tied_names",
    "trust",
    "verify",
    "wait_for_saves",
    "write",
]

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.checkpoint.background": "Saver Written wait_for_saves",
            "ronde.checkpoint.exact_values": "decode_exact encode encode_exact",
            "ronde.checkpoint.files": "Checkpoint export find_valid list_checkpoints remove "
            "trust verify write",
            "ronde.checkpoint.pieces": "Box Piece PieceSource Want box_of piece_of pull shard_like",
            "ronde.checkpoint.remote": "RemoteCheckpoints Uploads",
            "ronde.checkpoint.retention": "KeepPolicy",
            "ronde.checkpoint.sharded": "export_pieces gather_whole prepare_pieces",
            "ronde.checkpoint.tensor_file": "group_names tied_names",
            "ronde.checkpoint.state": "join_optimizer model_pieces model_state model_wants "
            "optimizer_pieces optimizer_state optimizer_wants random_state restore_random",
        },
    )
