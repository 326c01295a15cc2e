"""Checks GPUs, clocks and network before training, and describes what slows a job down."""
