"""File that exists but cannot be read, as on a failed file system."""

from pathlib import Path

UNREADABLE_FILE = Path("/proc/self/mem")  # reading at offset 0 fails with an input/output error
