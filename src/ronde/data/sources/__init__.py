"""Sample sources: random access by batches of ids, locally or through fsspec.

One file a source: folder, tar, parquet, tokens, arrays and map_dataset. Each offers a function
that returns a ``Source`` that is also a map-style Dataset, opens its files lazily
in each process, and can be sent to loading processes.
"""
