"""The loading engine: batches made ahead by threads or processes, in the order that the positions
ask for.

Offers :class:`~ronde.loader.loader.Feed` (runs the loading),
:func:`~ronde.loader.from_dataloader.take_over` (reads a user's Dataset or DataLoader) and
:class:`~ronde.loader.synthetic.Synthetic` (batches that cost nothing).
"""
