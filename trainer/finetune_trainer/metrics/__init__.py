"""What a run measures of itself, and where it tells it."""
