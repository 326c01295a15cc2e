"""What a rank does not import."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.start import hide_what_is_not_needed


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # so that it is put back as it was
    del sys.modules["bitsandbytes"]


@pytest.mark.parametrize(
    ("spec", "needed"),
    [
        ({"lora": {"quantization": "nf4"}}, True),
        ({"lora": {"quantization": None}}, False),
        ({"lora": {}}, False),
        ({"lora": None}, False),
        ({}, False),
    ],
)
def test_bitsandbytes_is_there_for_4_bit_weights_alone(tmp_path: Path, spec: dict[str, Any], needed: bool) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    hide_what_is_not_needed(tmp_path / "spec.json")

    assert (importlib.util.find_spec("bitsandbytes") is not None) == needed


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_spec_that_cannot_be_read_is_left_to_the_trainer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "spec.json").write_text(content)

    hide_what_is_not_needed(tmp_path / "spec.json")
