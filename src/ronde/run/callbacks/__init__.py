"""What a run does beside training, one file each; their order is in :mod:`.callback_order`."""
