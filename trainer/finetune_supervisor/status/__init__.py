"""Serves the status of a node over HTTP and receives progress reports of user commands."""
