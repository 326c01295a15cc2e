"""A file that exists but cannot be read, as on a failed file system."""

from pathlib import Path

UNREADABLE = Path("/proc/self/mem")  # reading its beginning fails with an input/output error
