"""Tests of the encoding of request bodies."""

from finetune_operator.kube.api_client import encode_json


def test_texts_are_encoded_in_utf_8() -> None:
    assert encode_json({"message": "训练"}) == '{"message":"训练"}'.encode()


def test_lone_surrogates_are_replaced() -> None:
    assert encode_json({"message": "\ud800"}) == b'{"message":"?"}'
