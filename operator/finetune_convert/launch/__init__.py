"""Derives nodes, ranks, devices and environment from a command and its launcher."""
