"""Units of memory sizes, in bytes."""

GIB = 2**30
