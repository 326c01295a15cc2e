"""Training loop shared by all methods: losses, evaluation, checkpoints, callbacks, auto batch size."""
