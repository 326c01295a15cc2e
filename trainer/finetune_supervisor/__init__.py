"""Supervisor of a training pod: runs as PID 1, starts and monitors the ranks, uses only the standard library."""
