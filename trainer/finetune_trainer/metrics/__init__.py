"""Measure throughput, MFU and memory of a run, and report them in the log, in trackers and in report.html."""
