"""Turns dataset rows into batches: chat templates, loss masks, token cache, packing, sample order and collators."""
