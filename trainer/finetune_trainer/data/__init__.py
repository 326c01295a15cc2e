"""From rows to batches: chat templates, loss masks, token cache, packing, sample order and collators."""
