"""From files to batches: rows, examples, tokens with loss masks, the order of samples."""
