"""Liveness checks of ranks: heartbeats, hang detection and stack dumps."""
