"""Tests of parsing and formatting Kubernetes quantities."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune_api.v1alpha1.pod_types import ResourceRequirements
from finetune_api.v1alpha1.quantity import format_bytes, parse_quantity

DECIMAL_FACTORS = {"n": "1e-9", "u": "1e-6", "m": "1e-3", "": "1", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12"}
BINARY_POWERS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
AMOUNTS = st.decimals(min_value=0, max_value=100_000, places=3)


@pytest.mark.parametrize(
    ("quantity", "number"),
    [
        pytest.param("500m", 0.5, id="half a core"),
        pytest.param("2Gi", 2147483648.0, id="binary"),
        pytest.param("2G", 2e9, id="decimal"),
        pytest.param("1.5Ki", 1536.0, id="fraction"),
        pytest.param(".5", 0.5, id="no digit before the point"),
        pytest.param("4.", 4.0, id="no digit after the point"),
        pytest.param("12e3", 12000.0, id="small exponent"),
        pytest.param("1E3", 1000.0, id="large exponent"),
        pytest.param("1E", 1e18, id="exa, not an exponent"),
        pytest.param(8, 8.0, id="YAML integer"),
        pytest.param(0.5, 0.5, id="YAML float"),
        pytest.param("0", 0.0, id="zero"),
    ],
)
def test_quantity_is_parsed_as_a_number(quantity: str | float, number: float) -> None:
    assert parse_quantity(quantity) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    "quantity", ["", "Gi", "four", "4GB", "4gi", "1 2", "-1", "-1Gi", "nan", "inf", "1e999", "0x10"]
)
def test_error_for_an_invalid_quantity_contains_examples(quantity: str) -> None:
    with pytest.raises(ValueError, match=r"is not a quantity; write a number with a suffix such as 500m, 4 or 16Gi"):
        parse_quantity(quantity)


@given(amount=AMOUNTS, suffix=st.sampled_from(sorted(DECIMAL_FACTORS)))
def test_decimal_suffixes_are_powers_of_ten(amount: Decimal, suffix: str) -> None:
    assert parse_quantity(f"{amount}{suffix}") == pytest.approx(
        float(amount * Decimal(DECIMAL_FACTORS[suffix])), rel=1e-12
    )


@given(amount=AMOUNTS, suffix=st.sampled_from(sorted(BINARY_POWERS)))
def test_binary_suffixes_are_powers_of_two(amount: Decimal, suffix: str) -> None:
    assert parse_quantity(f"{amount}{suffix}") == pytest.approx(float(amount * 2 ** BINARY_POWERS[suffix]), rel=1e-12)


@given(
    st.from_regex(
        r"([0-9]{1,6}(\.[0-9]{0,3})?|\.[0-9]{1,3})([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?", fullmatch=True
    )
)
def test_every_valid_quantity_of_a_job_can_be_parsed(quantity: str) -> None:
    ResourceRequirements(limits={"cpu": quantity})
    assert parse_quantity(quantity) >= 0


@pytest.mark.parametrize("quantity", ["1e400", "٤", "1_000", "1 Gi", "1e3k"])
def test_quantity_that_cannot_be_parsed_is_rejected_in_a_job(quantity: str) -> None:
    with pytest.raises(ValidationError, match="must be a quantity such as 4, 500m or 64Gi"):
        ResourceRequirements(limits={"cpu": quantity})


@pytest.mark.parametrize(
    ("byte_count", "quantity"),
    [(2**31, "2Gi"), (3 * 2**29, "1536Mi"), (10**9, "1G"), (5, "5"), (0, "0"), (2**40, "1Ti"), (12 * 10**6, "12M")],
)
def test_bytes_are_formatted_exactly(byte_count: int, quantity: str) -> None:
    assert format_bytes(byte_count) == quantity
    assert parse_quantity(quantity) == byte_count
