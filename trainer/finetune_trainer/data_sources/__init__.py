"""Reads rows from files and from the Hub, and parses their column formats."""
