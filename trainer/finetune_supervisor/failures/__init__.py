"""Failure reports of a node: exit codes, tracebacks, full volumes and the termination message."""
