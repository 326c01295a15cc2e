"""Saves, validates and prunes checkpoints, and manages ownership of the output folder."""
