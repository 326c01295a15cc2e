"""Reads rows from files and the Hub, and parses their column formats."""
