"""Training loop that all training methods share."""
