"""Checks whether ranks make progress: heartbeats, hang detection and stack dumps."""
