"""Distributed training: rank context, devices, process group, collectives, hardware check and heartbeats."""
