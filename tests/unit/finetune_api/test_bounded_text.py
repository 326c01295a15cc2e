"""Tests of truncating texts by their size in JSON."""

import json

from hypothesis import given
from hypothesis import strategies as st

from finetune_api.bounded_text import measure_json_bytes, truncate_text, truncate_text_start


@given(text=st.text(), limit=st.integers(0, 200))
def test_truncated_text_fits_and_is_the_longest_prefix(text: str, limit: int) -> None:
    prefix = truncate_text(text, limit)

    assert text.startswith(prefix)
    assert measure_json_bytes(prefix) <= limit
    assert prefix == text or measure_json_bytes(text[: len(prefix) + 1]) > limit


@given(text=st.text(max_size=50))
def test_size_is_at_least_that_of_the_encoded_json(text: str) -> None:
    assert measure_json_bytes(text) >= len(json.dumps(text, ensure_ascii=False).encode()) - 2


def test_characters_that_the_api_server_escapes_count_six_bytes() -> None:
    assert [measure_json_bytes(character) for character in "a<&\u2028é训😀"] == [1, 6, 6, 6, 2, 3, 4]


def test_start_of_a_log_is_truncated() -> None:
    assert truncate_text_start("训练 failed", 10) == "练 failed"
