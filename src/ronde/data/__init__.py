"""The data library: where samples come from, their order, and what is done to each.

Offers the sources (:mod:`ronde.data.sources`), :class:`~ronde.data.pipeline.Pipeline`,
:class:`~ronde.data.order.Order`, keyed randomness, transforms, images, tables and packing.
Users reach all of it as ``ronde.feed``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ronde.world import lazily

if TYPE_CHECKING:
    from ronde.data.contract import Bad, Source, Step
    from ronde.data.image_decoders import DECODERS, available
    from ronde.data.images import decoder_of, with_decoder
    from ronde.data.named_stages import current_keys, sample_key, sample_keys, stage
    from ronde.data.order import Order, key_of
    from ronde.data.pack import verify_pack
    from ronde.data.pipeline import Pipeline
    from ronde.data.serialize import CannotEncode, decode_sample, encode_sample
    from ronde.data.sources.arrays import ArraySource
    from ronde.data.sources.base import BaseSource
    from ronde.data.sources.map_dataset import DatasetSource, check_map_style

if not TYPE_CHECKING:  # a checker that sees __getattr__ takes any name
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ronde.data.contract": "Bad Source Step",
            "ronde.data.image_decoders": "DECODERS available",
            "ronde.data.images": "decoder_of with_decoder",
            "ronde.data.named_stages": "current_keys sample_key sample_keys stage",
            "ronde.data.order": "Order key_of",
            "ronde.data.pack": "verify_pack",
            "ronde.data.pipeline": "Pipeline",
            "ronde.data.serialize": "CannotEncode decode_sample encode_sample",
            "ronde.data.sources.arrays": "ArraySource",
            "ronde.data.sources.base": "BaseSource",
            "ronde.data.sources.map_dataset": "DatasetSource check_map_style",
        },
    )
