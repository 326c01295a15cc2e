"""Measure throughput, MFU and memory of a run, and report them in the log and in trackers."""
