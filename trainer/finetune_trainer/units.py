"""Units of memory sizes, in bytes, and the format of durations."""

GIB = 2**30


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units, such as `2 h 5 min` or `45 s`."""
    total = round(max(seconds, 0.0))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"
