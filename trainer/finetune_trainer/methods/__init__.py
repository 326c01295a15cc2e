"""Training methods and their losses, one module per method."""
