"""Tests of the budgets of lines and modules."""

from check_budgets import find_excesses

BUDGETS = {
    "lines": {"product": {"folders": ["operator"], "limit": 30}, "tests": {"folders": ["tests"], "limit": 5}},
    "modules": {"limit": 2, "exceptions": {"operator/large": 3}},
}


def test_budgets_that_are_exceeded_are_reported() -> None:
    large, small = (
        [f"operator/{folder}/{name}.py" for name in ("__init__", "a", "b", "c")] for folder in ("large", "x")
    )
    lines = {**dict.fromkeys((*large, *small), 4), "tests/test_a.py": 5, "unlimited/a.py": 1000}

    assert list(find_excesses(BUDGETS, lines)) == [
        "product has 32 lines of Python, and 30 are allowed",
        "operator/x has 3 modules, and 2 are allowed",
    ]
