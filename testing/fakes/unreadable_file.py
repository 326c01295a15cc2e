"""A file that is there and cannot be read, as on a file system that failed."""

from pathlib import Path

UNREADABLE = Path("/proc/self/mem")  # whoever reads its beginning gets an input/output error
