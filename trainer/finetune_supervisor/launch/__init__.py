"""Starts the processes of a node: launcher, rendezvous, DNS wait and user commands."""
