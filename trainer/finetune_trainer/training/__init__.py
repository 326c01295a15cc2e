"""The training loop that all methods share: base trainer, callbacks, preflight, early stopping, auto batch size."""
