"""Sample sources: random access by batches of ids, locally or through fsspec.

Offers :func:`folder`, :func:`tar`, :func:`parquet`, :func:`tokens`, :func:`arrays` and
:func:`dataset`. Each returns a ``Source`` that is also a map-style Dataset, opens its files lazily
in each process, and can be sent to loading processes.
"""

from ronde.data.sources.arrays import ArraySource, arrays
from ronde.data.sources.base import BaseSource, Batch, Names, Row, Sample, digest_values
from ronde.data.sources.byte_ranges import ByteRange, BytesCache, Store
from ronde.data.sources.folder import FolderSource, folder
from ronde.data.sources.map_dataset import DatasetSource, dataset
from ronde.data.sources.parquet import ParquetSource, parquet, parquet_files
from ronde.data.sources.tar import TarSource, is_pack, tar
from ronde.data.sources.tokens import TokenSource, tokens

__all__ = [
    "ArraySource",
    "BaseSource",
    "Batch",
    "BytesCache",
    "DatasetSource",
    "FolderSource",
    "Names",
    "ParquetSource",
    "ByteRange",
    "Row",
    "Sample",
    "Store",
    "TarSource",
    "TokenSource",
    "arrays",
    "dataset",
    "digest_values",
    "folder",
    "is_pack",
    "parquet",
    "parquet_files",
    "tar",
    "tokens",
]
