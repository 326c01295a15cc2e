"""The training loop that all methods share: losses, evaluation, checkpoints, callbacks, auto batch size."""
