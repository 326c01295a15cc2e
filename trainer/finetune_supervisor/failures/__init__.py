"""Describes how a node failed: exit codes, tracebacks, full volumes and the termination message."""
