"""Converts between Kubernetes resource quantities and numbers."""

import math

_FACTORS = {
    **{suffix: 1024.0**power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    **{suffix: 1000.0**power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    "m": 0.001,
    "u": 1e-6,
    "n": 1e-9,
}


def parse_quantity(quantity: str | int | float) -> float:
    """Parse a quantity: `500m` is 0.5, `2Gi` is 2147483648.0. Raises ValueError."""
    text = str(quantity).strip()
    for suffix in sorted(_FACTORS, key=len, reverse=True):
        if text.endswith(suffix):
            return _parse_number(text.removesuffix(suffix), quantity) * _FACTORS[suffix]
    return _parse_number(text, quantity)


def format_bytes(byte_count: int) -> str:
    """Format a number of bytes as the shortest exact quantity: 2147483648 is `2Gi`, 1000000000 is `1G`."""
    for suffix in ("Ti", "Gi", "Mi", "Ki", "G", "M"):
        if byte_count and byte_count % int(_FACTORS[suffix]) == 0:
            return f"{byte_count // int(_FACTORS[suffix])}{suffix}"
    return str(byte_count)


def _parse_number(text: str, quantity: str | int | float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{quantity!r} is not a quantity; write a number with a suffix such as 500m, 4 or 16Gi")
    return number
