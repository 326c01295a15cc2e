"""Reads shell text as words and variables, without executing any of it."""
