"""Writes, prunes and reads checkpoints, saves random states, and manages ownership of the output folder."""
