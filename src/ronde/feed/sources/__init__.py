"""Where samples come from: random access by batch of ids, locally or through fsspec.

Offers :func:`folder`, :func:`tar`, :func:`parquet`, :func:`tokens`, :func:`arrays` and :func:`dataset`. Each gives a ``Source`` that is also a
map-style Dataset, opens its files lazily in each process, and can be copied into loading processes.
"""

from ronde.feed.sources.arrays import ArraySource, arrays
from ronde.feed.sources.base import BaseSource, Batch, Names, Row, Sample, digest
from ronde.feed.sources.dataset import DatasetSource, dataset
from ronde.feed.sources.folder import FolderSource, folder
from ronde.feed.sources.parquet import ParquetSource, parquet, parquet_files
from ronde.feed.sources.storage import BytesCache, Place, Store
from ronde.feed.sources.tar import TarSource, is_pack, tar
from ronde.feed.sources.tokens import TokenSource, tokens

__all__ = [
    "ArraySource",
    "BaseSource",
    "Batch",
    "BytesCache",
    "DatasetSource",
    "FolderSource",
    "Names",
    "ParquetSource",
    "Place",
    "Row",
    "Sample",
    "Store",
    "TarSource",
    "TokenSource",
    "arrays",
    "dataset",
    "digest",
    "folder",
    "is_pack",
    "parquet",
    "parquet_files",
    "tar",
    "tokens",
]
