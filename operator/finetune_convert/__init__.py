"""Converts commands and configs of other training tools to a FineTuneJob, without I/O and without running them."""
