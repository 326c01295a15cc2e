"""Measurements of a run (throughput, MFU, memory) and where they are reported: log, trackers, report.html."""
